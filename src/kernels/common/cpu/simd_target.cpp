// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/simd_target.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <iterator>
#include <mutex>
#include <utility>

// The same as in tile_ops.cpp, so that HWY_TARGETS are the targets that kernels are compiled for.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include <hwy/targets.h>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "kernels/common/cpu/amx.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kAuto = "auto";
constexpr std::string_view kWords[] = {kAuto, "amx", "avx512", "avx2", "sse4", "neon"};  // known on every architecture
constexpr std::string_view kVariable = "RINGATTN_SIMD_TARGET";

std::mutex simd_mutex;
std::string simd_setting;  // empty: neither a call nor the environment has been read yet
std::atomic<bool> simd_applied{false};
std::atomic<bool> simd_amx{true};
std::atomic<int> simd_users{0};

// Targets of this build that the processor has, as a mask of Highway. The first call precedes every restriction, which
// SupportedTargets() would follow.
std::int64_t targets_of_processor() {
  static const std::int64_t mask = hwy::SupportedTargets() & HWY_TARGETS;
  return mask;
}

std::string target_name(const SimdTarget& target) {
  if (target.amx) return "amx";
  if (target.highway == HWY_AVX3) return "avx512";
  std::string name = hwy::TargetName(target.highway);
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name;
}

// Targets of a mask, best first.
std::vector<SimdTarget> targets_in(std::int64_t mask, bool amx) {
  std::vector<SimdTarget> targets;
  if (amx && (mask & HWY_AVX3) != 0) targets.push_back({HWY_AVX3, true});
  for (std::int64_t rest = mask; rest != 0; rest &= rest - 1) targets.push_back({rest & -rest, false});
  return targets;
}

const std::vector<SimdTarget>& targets_here() {
  static const std::vector<SimdTarget> targets = targets_in(targets_of_processor(), cpu::processor_has_amx_bf16());
  return targets;
}

std::vector<std::string> names_of(const std::vector<SimdTarget>& targets) {
  std::vector<std::string> names;
  for (const SimdTarget& target : targets) names.push_back(target_name(target));
  return names;
}

// The target with this name; nullopt for "auto".
std::optional<SimdTarget> parse_target(std::string_view name) {
  const std::vector<std::string>& known = simd_target_names();
  if (std::ranges::find(known, name) == known.end()) {
    const std::vector<std::string_view> names(known.begin(), known.end());
    const std::string nearest = nearest_name(name, names.data(), names.size());
    fail(ErrorCode::kUsage, fmt::format("there is no SIMD target \"{}\"", name),
         fmt::format("known: {}", fmt::join(known, ", ")),
         nearest.empty() ? MessageTemplate{"Use auto, or see ", command("info"), "."}
                         : MessageTemplate(fmt::format("Did you mean {}?", nearest)));
  }
  if (name == kAuto) return std::nullopt;
  for (const SimdTarget& target : targets_here()) {
    if (target_name(target) == name) return target;
  }
  const std::vector<std::string> here = simd_target_names_here();
  fail(ErrorCode::kUnsupported, fmt::format("SIMD target {} can't be used here", name),
       fmt::format("processor and build have {}", fmt::join(here, ", ")), "Choose one of these that all hosts have.");
}

// With simd_mutex held.
void read_environment_target() {
  if (!simd_setting.empty()) return;
  const std::string value = environment_value(kVariable).value_or(std::string(kAuto));
  const std::optional<SimdTarget> target = parse_target(value);
  if (target) cpu::use_simd_target(target);
  simd_setting = value;
}

}  // namespace

std::string describe(const SimdTarget& target) {
  return std::string(hwy::TargetName(target.highway)) + (target.amx ? "+AMX-BF16" : "");
}

const std::vector<std::string>& simd_target_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all(std::begin(kWords), std::end(kWords));
    for (std::string& name : names_of(targets_in(HWY_TARGETS, false))) {
      if (std::ranges::find(all, name) == all.end()) all.push_back(std::move(name));
    }
    return all;
  }();
  return names;
}

std::vector<std::string> simd_target_names_here() { return names_of(targets_here()); }

void set_simd_target(std::string_view name) {
  const std::optional<SimdTarget> target = parse_target(name);
  const std::lock_guard lock(simd_mutex);
  if (simd_setting == name) return;
  if (simd_users > 0) {
    fail(ErrorCode::kUsage, fmt::format("the SIMD target can't become {}", name),
         fmt::format("ops with {} exist, and the target is one for the process", simd_setting),
         fmt::format("Set it before the first op, or by {}.", kVariable));
  }
  cpu::use_simd_target(target);
  simd_setting = name;
}

std::string simd_target() {
  const std::lock_guard lock(simd_mutex);
  read_environment_target();
  return simd_setting;
}

namespace cpu {

void use_simd_target(const std::optional<SimdTarget>& target) {
  static_cast<void>(targets_of_processor());
  hwy::DisableTargets(target ? target->highway - 1 : 0);  // lower bits are better targets
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  simd_amx = !target || target->amx;
  simd_applied = true;
}

void apply_simd_target() {
  if (simd_applied.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(simd_mutex);
  read_environment_target();
  simd_applied.store(true, std::memory_order_release);
}

bool amx_in_use() {
  apply_simd_target();
  return simd_amx.load(std::memory_order_relaxed);
}

SimdTargetUser::SimdTargetUser() {
  apply_simd_target();
  const std::lock_guard lock(simd_mutex);  // not between the check and the switch of set_simd_target()
  ++simd_users;
}
SimdTargetUser::~SimdTargetUser() { --simd_users; }

}  // namespace cpu

}  // namespace ringattn
