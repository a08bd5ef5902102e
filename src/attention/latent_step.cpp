// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_step.hpp"

#include "attention/fold_step.hpp"
#include "attention/ring/copy_tensor.hpp"

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

// Where a gathered run lies in a block.
LatentRows rows_of(const LatentMemory& memory, const ArrivedBlock& block, const GatheredRun& run) {
  const auto source = run.source == kOwnShard ? std::size_t{0} : static_cast<std::size_t>(1 + block.index % 2);
  const LatentRows& rows = memory.sources[source];
  return {tokens_of(rows.latent, run.row, run.rows), tokens_of(rows.k_rope, run.row, run.rows)};
}

MutableTensorView dense(std::byte* data, Dtype dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return dense_view(static_cast<void*>(data), dtype, rows, heads, dim);
}

FoldOutput heads_of(FoldOutput output, std::int64_t first, std::int64_t count) {
  output.out = heads_of(output.out, first, count);
  if (output.lse.data != nullptr) output.lse.data = &output.lse.at(0, first);
  if (output.sinks != nullptr) output.sinks += first;
  return output;
}

// A product for rows that there may be none of.
void multiply(HeadProductKernel& kernel, const HeadProductTask& task, Stream stream, const Progress& progress) {
  if (task.rows.tokens > 0) kernel.multiply(task, stream, progress);
}

}  // namespace

void ExpandedStep::expand(const ArrivedBlock& block, int first_head, Stream stream, const Progress& progress) {
  const LatentSpec& spec = tools_.spec;
  const GatheredBlock& gathered = tools_.blocks[static_cast<std::size_t>(block.index)];
  const MutableTensorView keys = dense(memory_.keys, spec.dtype, gathered.rows, heads_, spec.head_dim + spec.rope_dim);
  const MutableTensorView values = dense(memory_.values, spec.dtype, gathered.rows, heads_, spec.head_dim_v);
  const HeadMatrices w_uk = memory_.w_uk.slice(first_head, heads_);
  const HeadMatrices w_uv = memory_.w_uv.slice(first_head, heads_);
  for (const GatheredRun& run : gathered.runs) {
    const LatentRows rows = rows_of(memory_, block, run);
    const MutableTensorView k = tokens_of(keys, run.to, run.rows);
    tools_.keys.multiply({rows.latent, w_uk, columns_of(k, 0, spec.head_dim)}, stream, progress);
    copy_tensor(tools_.backend, columns_of(k, spec.head_dim, spec.rope_dim), rows.k_rope, stream);
    tools_.values.multiply({rows.latent, w_uv, tokens_of(values, run.to, run.rows)}, stream, progress);
  }
}

void ExpandedStep::compute(const ArrivedBlock& block, Stream stream, const Progress& progress) {
  const LatentSpec& spec = tools_.spec;
  const auto index = static_cast<std::size_t>(block.index);
  const GatheredBlock& gathered = tools_.blocks[index];
  const KeySource source{dense(memory_.keys, spec.dtype, gathered.rows, heads_, spec.head_dim + spec.rope_dim),
                         dense(memory_.values, spec.dtype, gathered.rows, heads_, spec.head_dim_v)};
  for (int head = 0; head < spec.heads; head += heads_) {
    expand(block, head, stream, progress);
    const FoldOutput output = heads_of(memory_.output, head, heads_);
    FoldTask task = block_task(tools_.plan, block, gathered.tiles, {&source, 1}, output, false);
    task.q = heads_of(memory_.q, head, heads_);
    const auto part = static_cast<std::size_t>(head / heads_);
    if (memory_.state != nullptr) task.state = memory_.state + part * state_stride_;
    task.prepared = tools_.prepared[index];
    tools_.fold.fold(task, stream, progress);
  }
}

AbsorbedStep::AbsorbedStep(const LatentTools& tools, const LatentMemory& memory)
    : tools_(tools), memory_(memory), q_(memory.q), output_(memory.output) {
  const LatentSpec& spec = tools.spec;
  if (memory.w_uk.data != nullptr) {
    q_ = dense(memory.queries, spec.dtype, memory.q.tokens, spec.heads, spec.latent_dim + spec.rope_dim);
  }
  if (memory.w_uv.data != nullptr) {
    output_.out = dense(memory.latents, spec.dtype, memory.q.tokens, spec.heads, spec.latent_dim);
  }
}

void AbsorbedStep::begin(Stream stream, const Progress& progress) {
  if (memory_.w_uk.data == nullptr) return;
  const LatentSpec& spec = tools_.spec;
  const MutableTensorView q =
      dense(memory_.queries, spec.dtype, memory_.q.tokens, spec.heads, spec.latent_dim + spec.rope_dim);
  multiply(tools_.keys,
           {columns_of(memory_.q, 0, spec.head_dim), memory_.w_uk.transposed(), columns_of(q, 0, spec.latent_dim)},
           stream, progress);
  copy_tensor(tools_.backend, columns_of(q, spec.latent_dim, spec.rope_dim),
              columns_of(memory_.q, spec.head_dim, spec.rope_dim), stream);
}

void AbsorbedStep::compute(const ArrivedBlock& block, Stream stream, const Progress& progress) {
  const LatentSpec& spec = tools_.spec;
  const auto index = static_cast<std::size_t>(block.index);
  const GatheredBlock& gathered = tools_.blocks[index];
  const MutableTensorView keys = dense(memory_.keys, spec.dtype, gathered.rows, 1, spec.latent_dim + spec.rope_dim);
  for (const GatheredRun& run : gathered.runs) {
    const LatentRows rows = rows_of(memory_, block, run);
    const MutableTensorView k = tokens_of(keys, run.to, run.rows);
    copy_tensor(tools_.backend, columns_of(k, 0, spec.latent_dim), rows.latent, stream);
    copy_tensor(tools_.backend, columns_of(k, spec.latent_dim, spec.rope_dim), rows.k_rope, stream);
  }
  const KeySource source{keys, columns_of(keys, 0, spec.latent_dim)};
  FoldTask task = block_task(tools_.plan, block, gathered.tiles, {&source, 1}, output_, false);
  task.q = q_;
  task.state = memory_.state;
  task.prepared = tools_.prepared[index];
  tools_.fold.fold(task, stream, progress);
}

bool AbsorbedStep::finish(Stream stream, const Progress& progress) {
  if (memory_.w_uv.data == nullptr) return false;
  multiply(tools_.values, {output_.out, memory_.w_uv, memory_.output.out}, stream, progress);
  return true;
}

}  // namespace ringattn
