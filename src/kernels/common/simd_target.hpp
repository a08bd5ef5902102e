// SPDX-License-Identifier: Apache-2.0
// The SIMD target of the CPU kernels: the instruction set that they use, out of those that they are compiled for. It is
// the same for the whole process, because Highway dispatches all threads by one mask. By default it is the best one
// that the processor has. Hosts of different kinds compute the same bits if the user sets a target that all of them
// have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

struct SimdTarget {
  std::int64_t highway = 0;  // a bit of Highway's masks; lower bits are better targets
  bool amx = false;          // bf16 uses AMX tiles

  bool operator==(const SimdTarget&) const = default;
};

// As in fingerprints: "AVX2", "AVX3+AMX-BF16".
std::string describe(const SimdTarget& target);

// The names that set_simd_target() knows: "auto", "amx", "avx512", "avx2", …
const std::vector<std::string>& simd_target_names();

// Those that this processor and build can run, best first, without "auto".
std::vector<std::string> simd_target_names_here();

// Restricts the CPU kernels of this process to a target, or removes the restriction ("auto"). Takes precedence over
// RINGATTN_SIMD_TARGET. Throws kUsage for an unknown name and while a CPU backend with another target exists, and
// kUnsupported if the processor lacks the target.
void set_simd_target(std::string_view name);

// The name that is set, by set_simd_target() or by the environment: "auto" by default. Throws like set_simd_target().
std::string simd_target();

namespace cpu {

// Restricts Highway's dispatch and AMX, without any checks. nullopt: the best target of the processor.
void use_simd_target(const std::optional<SimdTarget>& target);

// Applies RINGATTN_SIMD_TARGET if neither it nor another target has been set. Called before kernels are chosen.
void apply_simd_target();

// Whether the target in use includes AMX tiles. The processor need not have them.
bool amx_in_use();

// Counts CPU backends, so that set_simd_target() does not change the target of one.
class SimdTargetUser {
 public:
  SimdTargetUser();
  ~SimdTargetUser();
  SimdTargetUser(const SimdTargetUser&) = delete;
  SimdTargetUser& operator=(const SimdTargetUser&) = delete;
};

}  // namespace cpu

}  // namespace ringattn
