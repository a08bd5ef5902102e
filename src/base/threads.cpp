// SPDX-License-Identifier: Apache-2.0
#include "base/threads.hpp"

#include <fmt/format.h>

#include <latch>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.hpp"

namespace ringattn {

void check_threads(std::int64_t threads) {
  if (threads >= 0 && threads <= kMaxThreads) return;
  fail(ErrorCode::kUsage, fmt::format("{} threads are not possible", threads),
       fmt::format("1 to {} are allowed, and 0 means one per processor", kMaxThreads),
       {"Choose such a number for ", setting("threads"), "."});
}

void try_threads(int count, const MessageTemplate& suggestion) {
  std::vector<std::thread> threads;
  std::latch all_started(1);
  std::optional<std::error_code> refusal;
  try {
    for (int i = 0; i < count; ++i) threads.emplace_back([&all_started] { all_started.wait(); });
  } catch (const std::system_error& error) {
    refusal = error.code();
  }
  all_started.count_down();
  for (std::thread& thread : threads) thread.join();
  if (!refusal) return;
  fail(ErrorCode::kUnsupported, fmt::format("can't start {} threads", count), refusal->message(), suggestion);
}

void try_thread_pool(int threads) {
  try_threads(threads - 1,
              {"Use fewer with ", setting("threads"), ", or raise the limit on this user's processes (ulimit -u)."});
}

}  // namespace ringattn
