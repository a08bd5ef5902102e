// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssd_backward/ssd_backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/error.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why) { fail(ErrorCode::kInternal, what, why); }

void check_view(std::string_view name, const TensorView& view, Dtype dtype, std::int64_t rows, std::int64_t heads,
                std::int64_t dim) {
  if (view.dtype == dtype && view.tokens == rows && view.heads == heads && view.dim == dim) return;
  refuse(fmt::format("{} of an SSD backward task is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens,
                     view.heads, view.dim),
         fmt::format("{} [{}, {}, {}] was expected", dtype_name(dtype), rows, heads, dim));
}

void check_array(std::string_view name, const void* data, bool wanted) {
  if ((data != nullptr) == wanted) return;
  refuse(fmt::format("an SSD backward task has {}{}", wanted ? "no " : "", name),
         fmt::format("the kernel was made {} it", wanted ? "with" : "without"));
}

}  // namespace

std::string describe(const SsdBackwardSpec& spec) {
  std::string text = fmt::format("backward of {}", describe(spec.forward));
  if (spec.gradients != spec.forward.dtype) text += fmt::format(", gradients in {}", dtype_name(spec.gradients));
  return text;
}

std::vector<std::string> missing_in_ssd_backward(const SsdBackwardSpec& spec) {
  std::vector<std::string> missing;
  if (spec.forward.decay != SsmDecay::kDt) missing.emplace_back("linear attention (supported: SSD)");
  if (spec.forward.state_decays) missing.emplace_back("a decay for each state (supported: a decay per head)");
  if (spec.gradients != spec.forward.dtype && spec.gradients != Dtype::kF32) {
    missing.push_back(fmt::format("gradients in {} (supported: {}{})", dtype_name(spec.gradients),
                                  dtype_name(spec.forward.dtype), spec.forward.dtype == Dtype::kF32 ? "" : ", fp32"));
  }
  return missing;
}

SsdBackwardLimits limits_of(std::span<const SsdBackwardRun> runs, std::int64_t rows) {
  SsdBackwardLimits limits{{}, rows};
  for (const SsdBackwardRun& run : runs) {
    const SsmRun forward{run.begin, run.tokens, run.row};
    const SsmLimits own = limits_of({&forward, 1});
    ++limits.runs.runs;
    limits.runs.segments += own.segments;
    limits.runs.super_segments += own.super_segments;
  }
  return limits;
}

std::vector<HeadRange> head_sets(const SsmSpec& spec, int heads_together) {
  const int group_heads = spec.heads / spec.groups;
  std::vector<HeadRange> sets;
  for (int group = 0; group < spec.groups; ++group) {
    for (int head = 0; head < group_heads; head += heads_together) {
      sets.push_back({group * group_heads + head, std::min(heads_together, group_heads - head)});
    }
  }
  return sets;
}

void check_ssd_backward_task(const SsdBackwardSpec& spec, const SsdBackwardLimits& limits,
                             const SsdBackwardTask& task) {
  const SsmSpec& forward = spec.forward;
  const std::int64_t rows = task.x.tokens;
  const auto check_rows = [&](std::string_view name, const TensorView& view, const TensorView& gradient, int heads,
                              int dim) {
    check_view(name, view, forward.dtype, rows, heads, dim);
    check_view(fmt::format("d{}", name), gradient, spec.gradients, rows, heads, dim);
  };
  check_rows("x", task.x, task.dx, forward.heads, forward.head_dim);
  check_rows("dt", task.dt, task.ddt, forward.heads, 1);
  check_rows("B", task.b, task.db, forward.groups, forward.state_dim);
  check_rows("C", task.c, task.dc, forward.groups, forward.state_dim);
  if (forward.gate) check_rows("z", task.z, task.dz, forward.heads, forward.head_dim);
  check_view("dy", task.dy, forward.dtype, rows, forward.heads, forward.head_dim);
  check_array("A", task.a, true);
  check_array("D", task.d, forward.skip);
  check_array("dt bias", task.dt_bias, forward.dt_bias);
  check_array("terms", task.terms, !task.runs.empty());
  const SsdBackwardLimits needed = limits_of(task.runs, rows);
  if (needed.runs.runs > limits.runs.runs || needed.runs.segments > limits.runs.segments ||
      needed.runs.super_segments > limits.runs.super_segments || rows > limits.rows) {
    refuse(
        fmt::format("an SSD backward task of {} runs, {} segments and {} rows", needed.runs.runs, needed.runs.segments,
                    rows),
        fmt::format("the kernel was reserved for {}, {} and {}", limits.runs.runs, limits.runs.segments, limits.rows));
  }
  for (const SsdBackwardRun& run : task.runs) {
    if (run.begin % kSuperSegmentTokens == 0 && run.begin >= 0 && run.tokens > 0 && run.row >= 0 &&
        run.row + run.tokens <= rows) {
      continue;
    }
    refuse(fmt::format("an SSD backward task of tokens [{}, {}) in rows from {} on", run.begin, run.begin + run.tokens,
                       run.row),
           fmt::format("runs begin at multiples of {} and lie in {} rows", kSuperSegmentTokens, rows));
  }
}

}  // namespace ringattn
