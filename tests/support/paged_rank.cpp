// SPDX-License-Identifier: Apache-2.0
#include "tests/support/paged_rank.hpp"

#include <algorithm>

#include "tests/support/rank_bytes.hpp"

namespace ringattn::testing {

namespace {

using Bytes = std::vector<std::byte>;

std::int64_t token_bytes(const AttentionSpec& spec, int heads, int dim) {
  return std::int64_t{heads} * dim * static_cast<std::int64_t>(size_of(spec.dtype));
}

Bytes bytes_of(const std::vector<float>& values) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
  return {bytes, bytes + values.size() * sizeof(float)};
}

// The shapes of the keys that a rank has of each sequence.
AttentionInputs shapes_of(const Attention& attention, int rank) {
  AttentionInputs keys;
  keys.spec = attention.job().spec;
  for (const std::int64_t rows : rows_of_sequences(attention.layout().keys, rank)) keys.sequences.push_back({0, rows});
  return keys;
}

}  // namespace

PagedRank::PagedRank(Attention& attention, int rank, const JobTensors& tensors, const PageLayout& pages)
    : backend_(attention.backend()),
      spec_(attention.job().spec),
      rank_(rank),
      queries_(attention.layout().queries),
      rows_(attention.q_rows()),
      workspace_bytes_(attention.workspace_bytes()),
      keys_(shapes_of(attention, rank)),
      pool_(keys_.sequences, pages),
      table_(pool_.table()),
      q_(placed(backend_, shard_of(queries_, rank, tensors.q, token_bytes(spec_, spec_.heads, spec_.head_dim)))),
      k_(placed(backend_, pool_.fill(keys_,
                                     shard_of(attention.layout().keys, rank, tensors.k,
                                              token_bytes(spec_, spec_.kv_heads, spec_.head_dim)),
                                     spec_.head_dim))),
      v_(placed(backend_, pool_.fill(keys_,
                                     shard_of(attention.layout().keys, rank, tensors.v,
                                              token_bytes(spec_, spec_.kv_heads, spec_.head_dim_v)),
                                     spec_.head_dim_v))),
      sinks_(placed(backend_, bytes_of(tensors.sinks))),
      out_(backend_, std::max(sizeof(float),
                              static_cast<std::size_t>(rows_ * token_bytes(spec_, spec_.heads, spec_.head_dim_v)))),
      lse_(backend_, std::max(sizeof(float), static_cast<std::size_t>(rows_ * spec_.heads) * sizeof(float))),
      workspace_(backend_, std::max(sizeof(float), workspace_bytes_)) {}

Inputs PagedRank::inputs() const {
  Inputs inputs;
  inputs.q = dense_view(static_cast<const void*>(q_.data()), spec_.dtype, rows_, spec_.heads, spec_.head_dim);
  inputs.sinks = spec_.sinks ? sinks_.floats() : nullptr;
  inputs.pages = {pool_.view(k_.data(), spec_, spec_.head_dim), pool_.view(v_.data(), spec_, spec_.head_dim_v), table_,
                  pool_.table_width()};
  return inputs;
}

Outputs PagedRank::outputs() const {
  return {dense_view(static_cast<void*>(out_.data()), spec_.dtype, rows_, spec_.heads, spec_.head_dim_v),
          {lse_.floats(), spec_.heads, 1},
          std::nullopt};
}

void PagedRank::collect(JobResult& result) const {
  const Bytes out = out_.read();
  const Bytes lse = lse_.read();
  queries_.unshard(rank_, out.data(), result.out.data(), token_bytes(spec_, spec_.heads, spec_.head_dim_v));
  queries_.unshard(rank_, lse.data(), reinterpret_cast<std::byte*>(result.lse.data()),
                   spec_.heads * static_cast<std::int64_t>(sizeof(float)));
}

void run_paged_rank(Job job, const Options& options, const JobTensors& tensors, Transport& transport,
                    const PageLayout& pages, JobResult& result) {
  job.page_size = pages.page_size;
  Attention attention(std::move(job), transport, options);
  const PagedRank memory(attention, transport.rank(), tensors, pages);
  attention.run(memory.inputs(), memory.outputs(), memory.workspace(), memory.stream());
  memory.collect(result);
  transport.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

}  // namespace ringattn::testing
