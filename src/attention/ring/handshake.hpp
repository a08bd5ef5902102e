// SPDX-License-Identifier: Apache-2.0
// Compares the configuration of all ranks. Results have the same bits only if these are equal.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/message_template.hpp"
#include "comm/collective.hpp"

namespace ringattn {

// A named setting that must be equal on all ranks, e.g. {"SIMD target", "AVX2"}.
struct RankConfigEntry {
  std::string what;
  std::string value;
  MessageTemplate suggestion = {};  // shown if ranks differ; empty: the one for all settings
};

// Collective. Throws kUnsupported (as an AgreedError) for the first setting and rank that differ from rank 0. Returns a
// hash of the settings.
std::uint64_t handshake(const Collective& collective, const std::vector<RankConfigEntry>& mine);

// Collective. Calls check(), as Collective::run_collectively(), before a run of a job that handshake() has compared.
// Throws kUsage (as an AgreedError) if the ranks are about to run different jobs. `job`: its description.
void begin_run(const Collective& collective, std::uint64_t hash, const std::string& job,
               const std::function<void()>& check);

}  // namespace ringattn
