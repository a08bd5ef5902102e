// SPDX-License-Identifier: Apache-2.0
#include "c/status.hpp"

#include <pthread.h>

#include <atomic>
#include <exception>
#include <new>
#include <optional>
#include <string>

#include "base/build.hpp"

namespace ringattn::c {

namespace {

struct Failure {
  ringattn_status status = RINGATTN_OK;
  std::string text, problem, why, suggestion;
};

thread_local Failure last;
// True if there was no memory to store the text of the last failure.
thread_local bool wordless = false;
constexpr const char* kWordless = "there is no memory left to say what failed";

std::atomic<bool> forked{false};

void keep(const Error& error) {
  last.status = static_cast<ringattn_status>(error.code());
  last.text = error.what();
  last.problem = error.problem().text();
  last.why = error.why().text();
  last.suggestion = error.suggestion().text();
}

const char* said(const std::string& words) { return wordless ? kWordless : words.c_str(); }

}  // namespace

bool is_forked() noexcept { return forked.load(std::memory_order_relaxed); }

void check_process() {
  static const int noted = ::pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
  static_cast<void>(noted);
  if (!is_forked()) return;
  fail(ErrorCode::kUnsupported, "this process was forked from one that had used ringattn",
       "fork() does not copy the library's threads",
       "Start processes by spawn instead of fork, or use ringattn only after the fork.");
}

ringattn_status keep_failure() noexcept {
  wordless = false;
  try {
    try {
      throw;
    } catch (const Error& error) {
      keep(error);
    } catch (const std::bad_alloc&) {
      keep(Error(ErrorCode::kMemory, "there is not enough memory", "the host refused an allocation",
                 "Use a smaller job, or more ranks."));
    } catch (const std::exception& error) {
      keep(Error(ErrorCode::kInternal, error.what(), "this is a bug of ringattn", "Please report it."));
    } catch (...) {
      keep(Error(ErrorCode::kInternal, "an unknown exception was thrown", "this is a bug of ringattn",
                 "Please report it."));
    }
    return last.status;
  } catch (...) {
    wordless = true;
    last.status = RINGATTN_MEMORY;
    return RINGATTN_MEMORY;
  }
}

void need(const void* pointer, const char* name) {
  if (pointer != nullptr) return;
  fail(ErrorCode::kUsage, fmt::format("{} is NULL", name), "the call needs it", "Pass a pointer to it.");
}

void check_size(const char* name, std::uint64_t size, std::size_t first, std::size_t now) {
  if (size >= first && size <= now) return;
  if (size > now) {
    fail(
        ErrorCode::kUsage, fmt::format("{} has {} bytes", name, size),
        fmt::format("this library, ringattn {} of interface {}, knows {}: the program was compiled with a newer header",
                    version(), RINGATTN_ABI, now),
        "Load a newer libringattn_c.so, or compile with this one's ringattn.h.");
  }
  fail(ErrorCode::kUsage, fmt::format("{} says that it has {} bytes", name, size),
       fmt::format("it had {} in the first version of the interface", first), "Set its member `size` to its sizeof.");
}

}  // namespace ringattn::c

using ringattn::c::last;

extern "C" {

int32_t ringattn_abi(void) { return RINGATTN_ABI; }
const char* ringattn_version(void) { return RINGATTN_VERSION; }

const char* ringattn_error_text(void) { return ringattn::c::said(last.text); }
const char* ringattn_error_problem(void) { return ringattn::c::said(last.problem); }
const char* ringattn_error_why(void) { return ringattn::c::said(last.why); }
const char* ringattn_error_suggestion(void) { return ringattn::c::said(last.suggestion); }
ringattn_status ringattn_error_status(void) { return last.status; }

void ringattn_set_interrupt(ringattn_poll poll, void* context) { ringattn::set_interrupt({poll, context}); }

}  // extern "C"
