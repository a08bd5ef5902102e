// SPDX-License-Identifier: Apache-2.0
// Worlds inside this process for the conformance suite: self, and threads in all ways of delivery.
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "comm/paced.hpp"
#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "tests/comm/world_cases.hpp"

namespace ringattn {

namespace {

constexpr double kNoPace = 0.0;

WorldCase threads_case(std::string name, int size, const ThreadsDelivery& delivery, double pace = kNoPace) {
  const auto run = [=](const std::function<int(Transport&)>& rank_main) {
    auto world = make_threads_world(size, delivery);
    if (pace > 0.0) {
      for (auto& rank : world) rank = make_paced_transport(std::move(rank), pace);
    }
    std::atomic<int> sum{0};
    run_ranks(std::move(world), [&](Transport& rank) { sum += rank_main(rank); });
    return sum.load();
  };
  return {fmt::format("{}_{}", name, size), run};
}

}  // namespace

std::vector<WorldCase> world_cases() {
  std::vector<WorldCase> cases;
  cases.push_back({"self", [](const std::function<int(Transport&)>& rank_main) {
                     const auto world = make_self_transport();
                     return rank_main(*world);
                   }});
  ThreadsDelivery chain;
  chain.route = Route::kChain;
  ThreadsDelivery shuffled;
  shuffled.shuffle_seed = 7;
  ThreadsDelivery delayed = chain;
  delayed.shuffle_seed = 11;
  delayed.max_delay = std::chrono::microseconds(500);
  for (const int size : {1, 2, 3, 4, 5, 8}) cases.push_back(threads_case("threads", size, {}));
  for (const int size : {2, 5}) cases.push_back(threads_case("chain", size, chain));
  for (const int size : {3, 8}) cases.push_back(threads_case("shuffled", size, shuffled));
  for (const int size : {2, 3, 7}) cases.push_back(threads_case("delayed", size, delayed));
  cases.push_back(threads_case("threads", 64, {}));
  cases.push_back(threads_case("paced", 1, {}, 1e9));
  cases.push_back(threads_case("paced", 4, delayed, 1e9));
  return cases;
}

}  // namespace ringattn
