// SPDX-License-Identifier: Apache-2.0
// Phases of a subcommand in which any rank may fail alone.
#pragma once

#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "comm/failure.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// Runs `phase` on every rank. If it fails on any, all throw the failure of the lowest such rank as an AgreedError.
// Collective.
template <typename Phase>
void together(Bootstrap& world, double timeout, const Phase& phase) {
  std::optional<Error> error;
  try {
    phase();
  } catch (const AgreedError&) {
    throw;  // everyone knows
  } catch (...) {
    error = as_error(std::current_exception());
  }
  agree(world, error ? &*error : nullptr, Deadline::after(timeout));
}

// Every rank's text, of any length. Collective.
std::vector<std::string> gather_texts(Bootstrap& world, std::string_view text, double timeout);

// Every rank's value of a plain struct. Collective.
template <typename Value>
std::vector<Value> gather_values(Bootstrap& world, const Value& value, double timeout) {
  static_assert(std::is_trivially_copyable_v<Value>);
  std::vector<Value> values;
  const std::string_view bytes(reinterpret_cast<const char*>(&value), sizeof value);
  for (const std::string& theirs : world.all_gather(bytes, Deadline::after(timeout))) {
    std::memcpy(&values.emplace_back(), theirs.data(), sizeof value);
  }
  return values;
}

}  // namespace ringattn
