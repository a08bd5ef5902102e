// SPDX-License-Identifier: Apache-2.0
// Collective phases that any rank may fail, and gathers of small values. run_collectively() makes all ranks throw the
// same error. Timeouts says what each call waits for, and how long.
#pragma once

#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.hpp"
#include "comm/failure.hpp"
#include "comm/timeouts.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// Reads a trivially copyable struct from a rank's bytes. Throws kPeer if there are too few.
template <typename Value>
Value gathered_value(std::string_view bytes, std::size_t at = 0) {
  static_assert(std::is_trivially_copyable_v<Value>);
  if (bytes.size() < sizeof(Value) || at > bytes.size() - sizeof(Value)) {
    fail(ErrorCode::kPeer, "a rank sent too few bytes", "its text ends early",
         "See whether all ranks run the same build and make the same calls in the same order.");
  }
  Value value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

class Collective {
 public:
  // `world` outlives the object.
  Collective(Bootstrap& world, Timeouts timeouts) : world_(&world), timeouts_(timeouts) {}

  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  Bootstrap& world() const { return *world_; }
  const Timeouts& timeouts() const { return timeouts_; }

  // Runs `phase` on every rank. If it throws any exception on some ranks, all ranks throw the failure of the lowest
  // such rank as an AgreedError, so no rank is left waiting. An AgreedError of `phase` passes unchanged, because the
  // other ranks throw it too. The ranks wait for each other as for work of `estimated` seconds.
  template <typename Phase>
  void run_collectively(const Phase& phase, double estimated = 0.0) const {
    std::optional<Error> error;
    try {
      phase();
    } catch (const AgreedError&) {
      throw;
    } catch (...) {
      error = as_error(std::current_exception());
    }
    agree(*world_, error ? &*error : nullptr, timeouts_.for_work(estimated));
  }

  // Every rank's text, of any length, in rank order.
  std::vector<std::string> gather(std::string_view text) const;

  // Every rank's value of a trivially copyable struct, in rank order.
  template <typename Value>
  std::vector<Value> gather_values(const Value& value) const {
    static_assert(std::is_trivially_copyable_v<Value>);
    std::vector<Value> values;
    const std::string_view bytes(reinterpret_cast<const char*>(&value), sizeof value);
    for (const std::string& theirs : world_->all_gather(bytes, timeouts_.for_peer())) {
      values.push_back(gathered_value<Value>(theirs));
    }
    return values;
  }

  // Waits for the others as for work of `estimated` seconds.
  void barrier(double estimated = 0.0) const { world_->barrier(timeouts_.for_work(estimated)); }

 private:
  Bootstrap* world_;
  Timeouts timeouts_;
};

}  // namespace ringattn
