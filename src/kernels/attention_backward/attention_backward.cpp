// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/attention_backward.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/error.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

void check_view(std::string_view name, const TensorView& view, Dtype dtype, std::int64_t heads, std::int64_t dim) {
  if (view.dtype == dtype && view.heads == heads && view.dim == dim) return;
  fail(ErrorCode::kInternal,
       fmt::format("{} of a backward task is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads,
                   view.dim),
       fmt::format("the kernel was made for {} [tokens, {}, {}]", dtype_name(dtype), heads, dim));
}

void require_stats(const float* stats, std::int64_t rows) {
  if (stats != nullptr || rows == 0) return;
  fail(ErrorCode::kInternal, "a backward task has no row stats", "its queries need LSE and delta");
}

// `rows_held` rows are in the task's tensors. A sequence of n tokens has tiles [0, tiles_of(sequence)).
template <typename Tiles>
void check_runs(const BackwardTask& task, std::int64_t rows_held, std::size_t sources, Tiles tiles_of) {
  if (task.state == nullptr && rows_held > 0 && (task.resume || task.save)) {
    fail(ErrorCode::kInternal, "a backward task has no state", "it resumes or saves one");
  }
  const auto sequences = static_cast<std::int64_t>(task.sequences.size());
  for (const QueryRun& run : task.rows) {
    if (run.sequence >= 0 && run.sequence < sequences && run.row >= 0 && run.rows >= 0 &&
        run.row + run.rows <= rows_held) {
      continue;
    }
    fail(ErrorCode::kInternal,
         fmt::format("a backward task has rows [{}, {}) of sequence {}", run.row, run.row + run.rows, run.sequence),
         fmt::format("its tensors have {} rows, and there are {} sequences", rows_held, sequences));
  }
  const auto table = static_cast<std::int64_t>(task.tiles.size());
  for (const KeyRun& run : task.runs) {
    if (run.sequence < 0 || run.sequence >= sequences || run.first_tile < 0 || run.tiles < 0 ||
        run.first_tile + run.tiles > tiles_of(task.sequences[static_cast<std::size_t>(run.sequence)]) ||
        run.table < 0 || run.table + run.tiles > table) {
      fail(ErrorCode::kInternal,
           fmt::format("a backward task has tiles [{}, {}) of sequence {}", run.first_tile, run.first_tile + run.tiles,
                       run.sequence),
           fmt::format("they are not in the sequence, or not in its table of {}", table));
    }
    for (std::int64_t i = run.table; i < run.table + run.tiles; ++i) {
      const std::int32_t source = task.tiles[static_cast<std::size_t>(i)].source;
      if (source >= 0 && static_cast<std::size_t>(source) < sources) continue;
      fail(ErrorCode::kInternal, fmt::format("a tile of a backward task is in source {}", source),
           fmt::format("there are {}", sources));
    }
  }
}

}  // namespace

std::string describe(const AttentionBackwardSpec& spec) {
  std::string text = fmt::format("backward of {}", describe(spec.forward));
  if (spec.gradients != spec.forward.dtype) text += fmt::format(", gradients in {}", dtype_name(spec.gradients));
  return text;
}

std::vector<std::string> missing_in_backward(const AttentionBackwardSpec& spec) {
  std::vector<std::string> missing;
  if (spec.forward.block_mask.any()) missing.emplace_back("block masks");
  if (spec.forward.positions > 0) missing.emplace_back("key positions");
  if (spec.gradients != spec.forward.dtype && spec.gradients != Dtype::kF32) {
    missing.push_back(fmt::format("gradients in {} (supported: {}{})", dtype_name(spec.gradients),
                                  dtype_name(spec.forward.dtype), spec.forward.dtype == Dtype::kF32 ? "" : ", fp32"));
  }
  return missing;
}

void check_backward_task(const AttentionBackwardSpec& spec, int key_tile, const DqTask& task) {
  const AttentionSpec& forward = spec.forward;
  check_view("q", task.q, forward.dtype, forward.heads, forward.head_dim);
  check_view("dout", task.dout, forward.dtype, forward.heads, forward.head_dim_v);
  require_stats(task.stats, task.q.tokens);
  for (const BackwardKeySource& source : task.sources) {
    check_view("k", source.k, forward.dtype, forward.kv_heads, forward.head_dim);
    check_view("v", source.v, forward.dtype, forward.kv_heads, forward.head_dim_v);
  }
  check_runs(task, task.q.tokens, task.sources.size(),
             [key_tile](const BackwardSequence& sequence) { return (sequence.k_len + key_tile - 1) / key_tile; });
  if (task.dq != nullptr) check_view("dq", *task.dq, spec.gradients, forward.heads, forward.head_dim);
}

void check_backward_task(const AttentionBackwardSpec& spec, const DkvTask& task) {
  const AttentionSpec& forward = spec.forward;
  check_view("k", task.k, forward.dtype, forward.kv_heads, forward.head_dim);
  check_view("v", task.v, forward.dtype, forward.kv_heads, forward.head_dim_v);
  for (const BackwardQuerySource& source : task.sources) {
    check_view("q", source.q, forward.dtype, forward.heads, forward.head_dim);
    check_view("dout", source.dout, forward.dtype, forward.heads, forward.head_dim_v);
    require_stats(source.stats, source.q.tokens);
  }
  check_runs(task, task.k.tokens, task.sources.size(), [](const BackwardSequence& sequence) {
    const std::int64_t length = sequence.q_offset + sequence.q_len - first_query_tile(sequence);
    return (length + kBackwardTile - 1) / kBackwardTile;
  });
  if ((task.dk == nullptr) != (task.dv == nullptr)) {
    fail(ErrorCode::kInternal, "a backward task writes one of dk and dv", "it writes both or neither");
  }
  if (task.dk == nullptr) return;
  check_view("dk", *task.dk, spec.gradients, forward.kv_heads, forward.head_dim);
  check_view("dv", *task.dv, spec.gradients, forward.kv_heads, forward.head_dim_v);
}

}  // namespace ringattn
