// SPDX-License-Identifier: Apache-2.0
// SIMD targets of the CPU kernels, forced one by one.
#pragma once

#include <hwy/targets.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/common/cpu/amx.hpp"
#include "kernels/common/simd_target.hpp"

namespace ringattn::testing {

// The SIMD target, for as long as it lives.
class ForcedTarget {
 public:
  explicit ForcedTarget(const SimdTarget& target) { cpu::use_simd_target(target); }
  explicit ForcedTarget(std::int64_t highway) : ForcedTarget(SimdTarget{highway, false}) {}
  ~ForcedTarget() { cpu::use_simd_target(std::nullopt); }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;
};

inline std::vector<std::int64_t> targets_here() {
  std::vector<std::int64_t> targets;
  for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) targets.push_back(rest & -rest);
  return targets;
}

// Those of attention: Highway's, and its best one with AMX tiles if this machine has them.
inline std::vector<SimdTarget> attention_targets_here() {
  std::vector<SimdTarget> targets;
  for (const std::int64_t target : targets_here()) targets.push_back({target, false});
  if (cpu::processor_has_amx_bf16()) {
    const std::int64_t compiled = hwy::SupportedTargets() & HWY_TARGETS;
    targets.push_back({compiled & -compiled, true});  // lower bits are better targets
  }
  return targets;
}

}  // namespace ringattn::testing
