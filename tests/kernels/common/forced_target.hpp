// SPDX-License-Identifier: Apache-2.0
// SIMD targets of the CPU kernels, forced one by one.
#pragma once

#include <hwy/targets.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/common/cpu/amx.hpp"

namespace ringattn::testing {

// A target of Highway, and whether attention has AMX tiles beside it.
struct SimdTarget {
  std::int64_t highway = 0;
  bool amx = false;

  // As CpuBackend::identity().
  std::string name() const { return std::string(hwy::TargetName(highway)) + (amx ? "+AMX-BF16" : ""); }
};

// Targets up to `target`, for as long as it lives.
class ForcedTarget {
 public:
  explicit ForcedTarget(const SimdTarget& target) {
    hwy::SetSupportedTargetsForTest(target.highway);
    hwy::GetChosenTarget().Update(target.highway);
    cpu::allow_amx(target.amx);
  }
  explicit ForcedTarget(std::int64_t highway) : ForcedTarget(SimdTarget{highway, false}) {}
  ~ForcedTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    cpu::allow_amx(true);
  }
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
  if (cpu::has_amx_bf16()) {
    const std::int64_t compiled = hwy::SupportedTargets() & HWY_TARGETS;
    targets.push_back({compiled & -compiled, true});  // lower bits are better targets
  }
  return targets;
}

}  // namespace ringattn::testing
