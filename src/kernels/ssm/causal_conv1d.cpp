// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/causal_conv1d.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/error.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why) { fail(ErrorCode::kInternal, what, why); }

void check_view(std::string_view name, const TensorView& view, const CausalConv1dSpec& spec, std::int64_t rows) {
  if (view.dtype == spec.dtype && view.tokens == rows && view.heads == 1 && view.dim == spec.channels) return;
  refuse(
      fmt::format("{} of a conv1d is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads, view.dim),
      fmt::format("{} [{}, 1, {}] was expected", dtype_name(spec.dtype), rows, spec.channels));
}

void check_arrays(const CausalConv1dSpec& spec, const float* weight, const float* bias) {
  if (weight == nullptr) refuse("a conv1d has no weight", "every channel has one for each of its tokens");
  if ((bias != nullptr) != spec.bias) {
    refuse(fmt::format("a conv1d has {}bias", spec.bias ? "no " : "a "),
           fmt::format("the kernel was made {} one", spec.bias ? "with" : "without"));
  }
}

}  // namespace

std::vector<std::string> vectorized_conv1d_missing(const CausalConv1dSpec& spec) {
  std::vector<std::string> missing;
  if (spec.channels < 8 || spec.channels % 8 != 0) {
    missing.push_back(fmt::format("{} channels (supported: multiples of 8)", spec.channels));
  }
  if (spec.width < 2 || spec.width > kMaxConv1dWidth) {
    missing.push_back(fmt::format("width {} (supported: 2 to {})", spec.width, kMaxConv1dWidth));
  }
  return missing;
}

std::string describe(const CausalConv1dSpec& spec) {
  return fmt::format("conv1d, {}, {} channels, width {}{}{}", dtype_name(spec.dtype), spec.channels, spec.width,
                     spec.bias ? ", bias" : "", spec.silu ? ", silu" : "");
}

void check_causal_conv1d(const CausalConv1dSpec& spec) {
  if (spec.channels < 1) {
    fail(ErrorCode::kUsage, fmt::format("a conv1d of {} channels", spec.channels), "there is at least one",
         "Check the channels.");
  }
  if (spec.width < 2 || spec.width > kMaxConv1dWidth) {
    fail(ErrorCode::kUsage, fmt::format("a conv1d of width {}", spec.width), "widths are 2, 3 and 4",
         "Check the width, which is the last axis of the weight.");
  }
}

void check_causal_conv1d_task(const CausalConv1dSpec& spec, const CausalConv1dTask& task) {
  check_view("x", task.x, spec, task.x.tokens);
  check_view("y", task.y, spec, task.x.tokens);
  check_arrays(spec, task.weight, task.bias);
  for (const CausalConv1dRun& run : task.runs) {
    if (run.row >= 0 && run.tokens > 0 && run.row + run.tokens <= task.x.tokens) continue;
    refuse(fmt::format("a conv1d of {} tokens in rows from {} on", run.tokens, run.row),
           fmt::format("there are {} rows", task.x.tokens));
  }
}

void check_causal_conv1d_gradient(const CausalConv1dSpec& spec, const CausalConv1dGradientTask& task) {
  check_view("x", task.x, spec, task.x.tokens);
  check_view("dy", task.dy, spec, task.x.tokens);
  check_view("dx", task.dx, spec, task.x.tokens);
  check_arrays(spec, task.weight, task.bias);
  for (const CausalConv1dGradientRun& run : task.runs) {
    if (run.row >= 0 && run.tokens > 0 && run.row + run.tokens <= task.x.tokens && run.next_tokens >= 0 &&
        run.next_tokens <= spec.halo_tokens()) {
      continue;
    }
    refuse(
        fmt::format("gradients of {} tokens, with {} more, in rows from {} on", run.tokens, run.next_tokens, run.row),
        fmt::format("there are {} rows, and at most {} more tokens are read", task.x.tokens, spec.halo_tokens()));
  }
}

void check_causal_conv1d_update(const CausalConv1dSpec& spec, const CausalConv1dUpdate& update) {
  check_view("x", update.x, spec, update.x.tokens);
  check_view("y", update.y, spec, update.x.tokens);
  check_arrays(spec, update.weight, update.bias);
  if (update.halos == nullptr && update.x.tokens > 0) {
    refuse("an update of a conv1d has no halos", "each sequence goes on from its last tokens");
  }
}

}  // namespace ringattn
