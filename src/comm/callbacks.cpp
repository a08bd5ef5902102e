// SPDX-License-Identifier: Apache-2.0
#include "comm/callbacks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace ringattn {

namespace {

double seconds_left(const Deadline& deadline) { return std::max(0.0, -deadline.overdue()); }

template <typename Call>
auto call(std::string_view what, const Call& function) {
  try {
    return function();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ErrorCode::kPeer, fmt::format("the caller's {} failed", what), error.what(),
         "See whether all ranks are alive.");
  }
}

class CallbackBootstrap final : public Bootstrap {
 public:
  explicit CallbackBootstrap(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  int rank() const override { return callbacks_.rank; }
  int size() const override { return callbacks_.size; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    std::vector<std::string> all =
        call("all-gather", [&] { return callbacks_.all_gather(bytes, seconds_left(deadline)); });
    const auto mine = static_cast<std::size_t>(callbacks_.rank);
    if (all.size() != static_cast<std::size_t>(callbacks_.size) || all[mine] != bytes) {
      fail(ErrorCode::kUsage, "the caller's all-gather returned wrong bytes",
           all.size() != static_cast<std::size_t>(callbacks_.size)
               ? fmt::format("it returned {} texts for {} ranks", all.size(), callbacks_.size)
               : fmt::format("what it returned for rank {} is not what that rank gave", callbacks_.rank),
           "It returns every rank's bytes, in order of rank.");
    }
    return all;
  }

  void barrier(const Deadline& deadline) override {
    if (!callbacks_.barrier) {
      all_gather({}, deadline);
      return;
    }
    call("barrier", [&] { callbacks_.barrier(seconds_left(deadline)); });
  }

 private:
  const Callbacks callbacks_;
};

}  // namespace

std::unique_ptr<Bootstrap> make_callback_bootstrap(Callbacks callbacks) {
  if (callbacks.size < 1 || callbacks.rank < 0 || callbacks.rank >= callbacks.size || !callbacks.all_gather) {
    fail(ErrorCode::kUsage, "can't make a world of the caller's functions",
         callbacks.all_gather ? fmt::format("there is no rank {} of {}", callbacks.rank, callbacks.size)
                              : std::string("there is no all_gather"),
         "Give a rank from 0 to size - 1, and an all_gather.");
  }
  return std::make_unique<CallbackBootstrap>(std::move(callbacks));
}

}  // namespace ringattn
