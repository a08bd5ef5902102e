// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_ring_steps.hpp"

#include "attention/ring/copy_tensor.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "ops/attention/attention_ring_step.hpp"

namespace ringattn {

namespace {

// Tokens [first, first + count).
template <class View>
View tokens_of(View view, std::int64_t first, std::int64_t count) {
  if (view.data != nullptr) view.data = view.at(first, 0);
  view.tokens = count;
  return view;
}

template <class View>
View heads_of(View view, std::int64_t first, std::int64_t count) {
  if (view.data != nullptr) view.data = view.at(0, first);
  view.heads = count;
  return view;
}

// Index in MlaMemory::sources of a gathered run.
std::size_t source_of(const ArrivedBlock& block, const GatheredRun& run) {
  return run.source == kOwnShard ? std::size_t{0} : static_cast<std::size_t>(1 + block.index % 2);
}

// Contiguous source rows, and the first of the gathered rows that they become.
struct LatentRun {
  LatentRows rows;
  std::int64_t to = 0;
};

// The source rows of a block.
std::vector<LatentRun> latent_runs_of(const MlaTools& tools, const MlaMemory& memory, const ArrivedBlock& block) {
  std::vector<LatentRun> latent_runs;
  for (const GatheredRun& run : tools.blocks[static_cast<std::size_t>(block.index)].runs) {
    const LatentRows& rows = memory.sources[source_of(block, run)];
    latent_runs.push_back(
        {{tokens_of(rows.latent, run.row, run.rows), tokens_of(rows.k_rope, run.row, run.rows)}, run.to});
  }
  return latent_runs;
}

MutableTensorView dense(std::byte* data, Dtype dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return dense_view(static_cast<void*>(data), dtype, rows, heads, dim);
}

AttentionOutput heads_of(AttentionOutput output, std::int64_t first, std::int64_t count) {
  output.out = heads_of(output.out, first, count);
  if (output.lse.data != nullptr) output.lse.data = &output.lse.at(0, first);
  if (output.sinks != nullptr) output.sinks += first;
  return output;
}

// Runs a GEMM, unless it has no rows.
void multiply(BatchedGemmKernel& kernel, const BatchedGemmTask& task, Stream stream, const Progress& progress) {
  if (task.rows.tokens > 0) kernel.multiply(task, stream, progress);
}

// Dequantizes the FP8 rows of a block into `both`, [rows, 1, latent_dim + rope_dim], in gathered order.
void dequantize(const MlaTools& tools, const MlaMemory& memory, const ArrivedBlock& block,
                const MutableTensorView& both, Stream stream) {
  const MlaSpec& spec = tools.spec;
  std::array<std::vector<CompressedRun>, 3> runs;  // per source; each token is dequantized on its own
  for (const GatheredRun& run : tools.blocks[static_cast<std::size_t>(block.index)].runs) {
    runs[source_of(block, run)].push_back({0, 0, run.rows, run.row, run.rows, run.to});
  }
  for (std::size_t source = 0; source < runs.size(); ++source) {
    if (runs[source].empty()) continue;
    const StreamView& rows = memory.fp8_rows[source];
    tools.backend.decompress({tools.format,
                              {spec.dtype, 1, spec.latent_dim + spec.rope_dim},
                              latent_rows_at(rows.data, rows.token_stride, spec.latent_dim, spec.rope_dim),
                              runs[source],
                              both,
                              nullptr},
                             stream);
  }
}

}  // namespace

void ExpandedRingStep::compute(const ArrivedBlock& block, Stream stream, const Progress& progress) {
  const MlaSpec& spec = tools_.spec;
  const auto index = static_cast<std::size_t>(block.index);
  const GatheredBlock& gathered = tools_.blocks[index];
  const MutableTensorView keys = dense(memory_.keys, spec.dtype, gathered.rows, heads_, spec.head_dim + spec.rope_dim);
  const MutableTensorView values = dense(memory_.values, spec.dtype, gathered.rows, heads_, spec.head_dim_v);
  std::vector<LatentRun> latent_runs;
  if (tools_.format.is_plain()) {
    latent_runs = latent_runs_of(tools_, memory_, block);
  } else if (gathered.rows > 0) {
    const MutableTensorView both =
        dense(memory_.dequantized, spec.dtype, gathered.rows, 1, spec.latent_dim + spec.rope_dim);
    dequantize(tools_, memory_, block, both, stream);
    latent_runs.push_back(
        {{columns_of(both, 0, spec.latent_dim), columns_of(both, spec.latent_dim, spec.rope_dim)}, 0});
  }
  const KeySource source{keys, values};
  for (int head = 0; head < spec.heads; head += heads_) {
    const GemmWeights w_uk = memory_.w_uk.slice(head, heads_);
    const GemmWeights w_uv = memory_.w_uv.slice(head, heads_);
    for (const auto& [rows, to] : latent_runs) {
      const MutableTensorView k = tokens_of(keys, to, rows.latent.tokens);
      tools_.keys->multiply({rows.latent, w_uk, columns_of(k, 0, spec.head_dim)}, stream, progress);
      copy_tensor(tools_.backend, columns_of(k, spec.head_dim, spec.rope_dim), rows.k_rope, stream);
      tools_.values->multiply({rows.latent, w_uv, tokens_of(values, to, rows.latent.tokens)}, stream, progress);
    }
    const AttentionOutput output = heads_of(memory_.output, head, heads_);
    AttentionTask task = block_task(tools_.plan, block, gathered.tiles, {&source, 1}, output, false);
    task.q = heads_of(memory_.q, head, heads_);
    const auto part = static_cast<std::size_t>(head / heads_);
    if (memory_.state != nullptr) task.state = memory_.state + part * state_stride_;
    task.prepared = tools_.prepared[index];
    tools_.attention.attend(task, stream, progress);
  }
}

AbsorbedRingStep::AbsorbedRingStep(const MlaTools& tools, const MlaMemory& memory)
    : tools_(tools), memory_(memory), q_(memory.q), output_(memory.output) {
  const MlaSpec& spec = tools.spec;
  if (memory.w_uk.data != nullptr) {
    q_ = dense(memory.queries, spec.dtype, memory.q.tokens, spec.heads, spec.latent_dim + spec.rope_dim);
  }
  if (memory.w_uv.data != nullptr) {
    output_.out = dense(memory.latents, spec.dtype, memory.q.tokens, spec.heads, spec.latent_dim);
  }
}

void AbsorbedRingStep::begin(Stream stream, const Progress& progress) {
  if (memory_.w_uk.data == nullptr) return;
  const MlaSpec& spec = tools_.spec;
  const MutableTensorView q =
      dense(memory_.queries, spec.dtype, memory_.q.tokens, spec.heads, spec.latent_dim + spec.rope_dim);
  multiply(*tools_.keys,
           {columns_of(memory_.q, 0, spec.head_dim), memory_.w_uk.transposed(), columns_of(q, 0, spec.latent_dim)},
           stream, progress);
  copy_tensor(tools_.backend, columns_of(q, spec.latent_dim, spec.rope_dim),
              columns_of(memory_.q, spec.head_dim, spec.rope_dim), stream);
}

void AbsorbedRingStep::compute(const ArrivedBlock& block, Stream stream, const Progress& progress) {
  const MlaSpec& spec = tools_.spec;
  const auto index = static_cast<std::size_t>(block.index);
  const GatheredBlock& gathered = tools_.blocks[index];
  const MutableTensorView keys = dense(memory_.keys, spec.dtype, gathered.rows, 1, spec.latent_dim + spec.rope_dim);
  if (tools_.format.is_plain()) {
    for (const auto& [rows, to] : latent_runs_of(tools_, memory_, block)) {
      const MutableTensorView k = tokens_of(keys, to, rows.latent.tokens);
      copy_tensor(tools_.backend, columns_of(k, 0, spec.latent_dim), rows.latent, stream);
      copy_tensor(tools_.backend, columns_of(k, spec.latent_dim, spec.rope_dim), rows.k_rope, stream);
    }
  } else {
    dequantize(tools_, memory_, block, keys, stream);
  }
  const KeySource source{keys, columns_of(keys, 0, spec.latent_dim)};
  AttentionTask task = block_task(tools_.plan, block, gathered.tiles, {&source, 1}, output_, false);
  task.q = q_;
  task.state = memory_.state;
  task.prepared = tools_.prepared[index];
  tools_.attention.attend(task, stream, progress);
}

bool AbsorbedRingStep::finish(Stream stream, const Progress& progress) {
  if (memory_.w_uv.data == nullptr) return false;
  multiply(*tools_.values, {output_.out, memory_.w_uv, memory_.output.out}, stream, progress);
  return true;
}

}  // namespace ringattn
