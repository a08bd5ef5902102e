// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/ssm.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <string_view>

#include "base/error.hpp"
#include "base/size.hpp"
#include "kernels/rope/rope.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why) { fail(ErrorCode::kInternal, what, why); }

void check_view(std::string_view name, const TensorView& view, Dtype dtype, std::int64_t rows, std::int64_t heads,
                std::int64_t dim) {
  if (view.dtype == dtype && view.tokens == rows && view.heads == heads && view.dim == dim) return;
  refuse(fmt::format("{} of an SSM layer is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads,
                     view.dim),
         fmt::format("{} [{}, {}, {}] was expected", dtype_name(dtype), rows, heads, dim));
}

void check_array(std::string_view name, const float* data, bool wanted) {
  if ((data != nullptr) == wanted) return;
  refuse(fmt::format("an SSM layer has {}{}", wanted ? "no " : "", name),
         fmt::format("the kernel was made {} it", wanted ? "with" : "without"));
}

// Checks the tensors of a task or an update.
template <typename Tensors>
void check_tensors(const SsmSpec& spec, const Tensors& tensors, bool rotates_rows) {
  const std::int64_t rows = tensors.x.tokens;
  check_view("x", tensors.x, spec.dtype, rows, spec.heads, spec.head_dim);
  if (const SsmDtRows dt = dt_rows(spec); dt.dim > 0) {
    check_view(spec.decay == SsmDecay::kDt ? "dt" : "log-decays", tensors.dt, dt.dtype, rows, spec.heads, dt.dim);
  }
  check_view("B", tensors.b, spec.dtype, rows, spec.groups, spec.state_dim);
  check_view("C", tensors.c, spec.dtype, rows, spec.groups, spec.state_dim);
  if (spec.gate) check_view("z", tensors.z, spec.dtype, rows, spec.heads, spec.head_dim);
  check_view("y", tensors.y, spec.dtype, rows, spec.heads, spec.head_dim);
  check_array("A", tensors.a, spec.decay == SsmDecay::kDt || spec.decay == SsmDecay::kHead);
  check_array("D", tensors.d, spec.skip);
  check_array("dt bias", tensors.dt_bias, spec.dt_bias);
  const auto& [rope, angles] = tensors.rotation;
  if (rope == nullptr) return;
  if (!rotates_rows || spec.decay == SsmDecay::kDt || rope->dtype != spec.dtype || rope->head_dim != spec.state_dim) {
    refuse(
        fmt::format("an SSM layer with RoPE ({})", describe(*rope)),
        fmt::format("its kernel {}, and it is {}", rotates_rows ? "rotates rows" : "rotates no rows", describe(spec)));
  }
  if (rows > 0) check_array("angles", angles, true);
}

std::int64_t ceil_div(std::int64_t tokens, std::int64_t each) { return (tokens + each - 1) / each; }

}  // namespace

SsmDtRows dt_rows(const SsmSpec& spec) {
  switch (spec.decay) {
    case SsmDecay::kDt:
      return {spec.dtype, 1};
    case SsmDecay::kHead:
      return {Dtype::kF32, 0};
    case SsmDecay::kToken:
      return {Dtype::kF32, 1};
    case SsmDecay::kDim:
      break;
  }
  return {Dtype::kF32, spec.state_dim};
}

std::string describe(const SsmSpec& spec) {
  if (spec.decay != SsmDecay::kDt) {
    constexpr std::string_view kDecays[] = {"", "a decay per head", "a decay per token", "a decay per key dim"};
    std::string text =
        fmt::format("linear attention, {}, {} heads of {}", dtype_name(spec.dtype), spec.heads, spec.state_dim);
    if (spec.head_dim != spec.state_dim) text += fmt::format(", values of {}", spec.head_dim);
    if (spec.groups != spec.heads) text += fmt::format(", {} key heads", spec.groups);
    return text + fmt::format(", {}, scale {:.4g}", kDecays[static_cast<std::size_t>(spec.decay)], spec.scale);
  }
  std::string text = spec.state_decays
                         ? fmt::format("selective scan, {}, {} channels", dtype_name(spec.dtype), spec.heads)
                         : fmt::format("SSD, {}, {} heads of {}", dtype_name(spec.dtype), spec.heads, spec.head_dim);
  text += fmt::format(", state {}, {}", spec.state_dim, counted(static_cast<std::size_t>(spec.groups), "group"));
  if (spec.skip) text += ", D";
  if (spec.gate) text += ", z";
  if (spec.dt_bias) text += ", dt bias";
  if (spec.dt_softplus) text += ", dt softplus";
  if (std::isfinite(spec.dt_min) || std::isfinite(spec.dt_max)) {
    text += fmt::format(", dt from {} to {}", spec.dt_min, spec.dt_max);
  }
  return text;
}

void check_ssm(const SsmSpec& spec) {
  if (spec.heads < 1 || spec.head_dim < 1 || spec.state_dim < 1) {
    if (spec.decay != SsmDecay::kDt) {
      fail(ErrorCode::kUsage,
           fmt::format("linear attention of {} heads of {}, with v of {}", spec.heads, spec.state_dim, spec.head_dim),
           "each must be at least 1", "Check heads, dim and dim_v.");
    }
    fail(ErrorCode::kUsage,
         fmt::format("an SSM layer of {} heads of {}, with states of {}", spec.heads, spec.head_dim, spec.state_dim),
         "each must be at least 1", "Check heads, head_dim and state_dim.");
  }
  if (spec.groups < 1 || spec.heads % spec.groups != 0) {
    fail(ErrorCode::kUsage, fmt::format("an SSM layer of {} heads in {} groups", spec.heads, spec.groups),
         fmt::format("{} is not a multiple of {}", spec.heads, spec.groups),
         "Each row of B and C serves the same number of heads.");
  }
  if (spec.state_decays && spec.head_dim != 1) {
    fail(ErrorCode::kUsage, fmt::format("a selective scan with head_dim {}", spec.head_dim),
         "its heads are channels of one number each", "Give channels as heads, and head_dim 1.");
  }
  if (spec.decay != SsmDecay::kDt && (spec.state_decays || spec.skip || spec.gate || spec.dt_bias || spec.dt_softplus ||
                                      std::isfinite(spec.dt_min) || std::isfinite(spec.dt_max))) {
    fail(ErrorCode::kUsage, "linear attention with a dt, D, a gate or a decay of each state of a channel",
         "these belong to SSMs", "Leave them out.");
  }
  if (!(std::abs(spec.scale) <= std::numeric_limits<float>::max()) ||
      (spec.decay == SsmDecay::kDt && spec.scale != 1.0F)) {
    fail(ErrorCode::kUsage, fmt::format("a scale of {}", spec.scale),
         spec.decay == SsmDecay::kDt ? "y of an SSM has none" : "it must be finite",
         "Linear attention usually has 1 / sqrt(dim).");
  }
  if (!(spec.dt_min <= spec.dt_max)) {
    fail(ErrorCode::kUsage, fmt::format("dt from {} to {}", spec.dt_min, spec.dt_max), "no number lies between them",
         "mamba_ssm's dt_limit is 0 to infinity.");
  }
}

SsmLimits limits_of(std::span<const SsmRun> runs) {
  SsmLimits limits;
  limits.runs = static_cast<std::int64_t>(runs.size());
  for (const SsmRun& run : runs) {
    limits.segments += ceil_div(run.tokens, kSegmentTokens);
    limits.super_segments += ceil_div(run.tokens, kSuperSegmentTokens);
  }
  return limits;
}

void check_ssm_task(const SsmSpec& spec, const SsmLimits& limits, const SsmTask& task, bool rotates_rows) {
  const std::int64_t rows = task.x.tokens;
  check_tensors(spec, task, rotates_rows);
  const SsmLimits needed = limits_of(task.runs);
  if (needed.runs > limits.runs || needed.segments > limits.segments || needed.super_segments > limits.super_segments) {
    refuse(fmt::format("an SSM task of {} runs and {} segments", needed.runs, needed.segments),
           fmt::format("the kernel was reserved for {} and {}", limits.runs, limits.segments));
  }
  for (const SsmRun& run : task.runs) {
    if (run.begin % kSuperSegmentTokens == 0 && run.begin >= 0 && run.tokens > 0 && run.row >= 0 &&
        run.row + run.tokens <= rows) {
      continue;
    }
    refuse(fmt::format("an SSM task of tokens [{}, {}) in rows from {} on", run.begin, run.begin + run.tokens, run.row),
           fmt::format("runs begin at multiples of {} and lie in {} rows", kSuperSegmentTokens, rows));
  }
}

void check_ssm_update(const SsmSpec& spec, const SsmUpdate& update, bool rotates_rows) {
  check_tensors(spec, update, rotates_rows);
  check_array("states", update.states, update.x.tokens > 0);
}

}  // namespace ringattn
