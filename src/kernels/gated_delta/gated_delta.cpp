// SPDX-License-Identifier: Apache-2.0
#include "kernels/gated_delta/gated_delta.hpp"

#include <fmt/format.h>

#include <cmath>
#include <string_view>

#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse_delta(const std::string& what, const std::string& why) {
  fail(ErrorCode::kInternal, what, why);
}

void check_delta_view(std::string_view name, const TensorView& view, Dtype dtype, std::int64_t rows, std::int64_t heads,
                      std::int64_t dim) {
  if (view.dtype == dtype && view.tokens == rows && view.heads == heads && view.dim == dim) return;
  refuse_delta(fmt::format("{} of a gated delta rule is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens,
                           view.heads, view.dim),
               fmt::format("{} [{}, {}, {}] was expected", dtype_name(dtype), rows, heads, dim));
}

// Checks the tensors of a task or an update.
template <typename Tensors>
void check_delta_tensors(const GatedDeltaSpec& spec, const Tensors& tensors) {
  const std::int64_t rows = tensors.q.tokens;
  check_delta_view("q", tensors.q, spec.dtype, rows, spec.key_heads, spec.key_dim);
  check_delta_view("k", tensors.k, spec.dtype, rows, spec.key_heads, spec.key_dim);
  check_delta_view("v", tensors.v, spec.dtype, rows, spec.value_heads, spec.value_dim);
  check_delta_view("log_decay", tensors.log_decay, Dtype::kF32, rows, spec.value_heads, spec.decay_dim());
  check_delta_view("beta", tensors.beta, Dtype::kF32, rows, spec.value_heads, 1);
  check_delta_view("o", tensors.o, spec.dtype, rows, spec.value_heads, spec.value_dim);
}

}  // namespace

std::string describe(const GatedDeltaSpec& spec) {
  std::string text = fmt::format("{}, {}, {} of {}, {} of {}", spec.key_decays ? "KDA" : "GDN", dtype_name(spec.dtype),
                                 counted(static_cast<std::size_t>(spec.value_heads), "value head"), spec.value_dim,
                                 counted(static_cast<std::size_t>(spec.key_heads), "key head"), spec.key_dim);
  if (spec.qk_l2norm) text += ", qk norm";
  if (spec.scale != 0.0F) text += fmt::format(", scale {}", spec.scale);
  return text;
}

void check_gated_delta(const GatedDeltaSpec& spec) {
  if (spec.key_heads < 1 || spec.value_heads < 1 || spec.key_dim < 1 || spec.value_dim < 1) {
    fail(ErrorCode::kUsage,
         fmt::format("a gated delta rule of {} key heads of {} and {} value heads of {}", spec.key_heads, spec.key_dim,
                     spec.value_heads, spec.value_dim),
         "each must be at least 1", "Check the shapes of q, k and v.");
  }
  if (spec.value_heads % spec.key_heads != 0) {
    fail(ErrorCode::kUsage,
         fmt::format("a gated delta rule of {} value heads and {} key heads", spec.value_heads, spec.key_heads),
         fmt::format("{} is not a multiple of {}", spec.value_heads, spec.key_heads),
         "Each row of q and k serves the same number of value heads.");
  }
  if (!std::isfinite(spec.scale)) {
    fail(ErrorCode::kUsage, fmt::format("a gated delta rule with scale {}", spec.scale), "it is not finite",
         "Leave it at 0 for 1 / sqrt(key_dim).");
  }
}

float scale_of(const GatedDeltaSpec& spec) {
  return spec.scale != 0.0F ? spec.scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.key_dim)));
}

std::int64_t state_floats(const GatedDeltaSpec& spec) {
  return std::int64_t{spec.value_heads} * spec.key_dim * spec.value_dim;
}

GatedDeltaLimits limits_of(std::span<const GatedDeltaRun> runs) {
  GatedDeltaLimits limits;
  limits.runs = static_cast<std::int64_t>(runs.size());
  for (const GatedDeltaRun& run : runs) limits.segments += run.segments();
  return limits;
}

void check_gated_delta_task(const GatedDeltaSpec& spec, const GatedDeltaLimits& limits, const GatedDeltaTask& task) {
  check_delta_tensors(spec, task);
  const std::int64_t rows = task.q.tokens;
  const GatedDeltaLimits needed = limits_of(task.runs);
  if (needed.runs > limits.runs || needed.segments > limits.segments) {
    refuse_delta(fmt::format("a gated delta task of {} runs and {} segments", needed.runs, needed.segments),
                 fmt::format("the kernel was reserved for {} and {}", limits.runs, limits.segments));
  }
  for (const GatedDeltaRun& run : task.runs) {
    if (run.begin % kSegmentTokens == 0 && run.begin >= 0 && run.tokens > 0 && run.row >= 0 &&
        run.row + run.tokens <= rows) {
      continue;
    }
    refuse_delta(fmt::format("a gated delta task of tokens [{}, {}) in rows from {} on", run.begin,
                             run.begin + run.tokens, run.row),
                 fmt::format("runs begin at multiples of {} and lie in {} rows", kSegmentTokens, rows));
  }
}

void check_gated_delta_update(const GatedDeltaSpec& spec, const GatedDeltaUpdate& update) {
  check_delta_tensors(spec, update);
  if (update.states != nullptr || update.q.tokens == 0) return;
  refuse_delta("a gated delta update has no states", "it updates the states of its sequences");
}

}  // namespace ringattn
