// SPDX-License-Identifier: Apache-2.0
#include "tests/support/compressed_rank.hpp"

#include <algorithm>
#include <vector>

#include "attention/tokens/cost.hpp"
#include "tests/support/device_pool.hpp"
#include "tests/support/rank_bytes.hpp"

namespace ringattn::testing {

namespace {

using Bytes = std::vector<std::byte>;

// A rank's rows of a compressed tensor, in streams with `gap` bytes after each row.
struct Shard {
  std::vector<DeviceArray> memory;
  CompressedRows rows;

  Shard(Backend& backend, const CompressedTensor& tensor, const Layout& keys, int rank, std::int64_t gap) {
    std::size_t at = 0;
    for (const FormatStream& stream : format_streams(tensor.format, tensor.shape)) {
      const std::int64_t bytes = stream.token_bytes(tensor.shape.dtype);
      const Bytes dense = shard_of(keys, rank, tensor.streams[at], bytes);
      Bytes apart(static_cast<std::size_t>(keys.tokens(rank) * (bytes + gap) + 1), std::byte{0xff});
      for (std::int64_t row = 0; row < keys.tokens(rank); ++row) {
        std::copy_n(dense.begin() + row * bytes, bytes, apart.begin() + row * (bytes + gap));
      }
      memory.push_back(placed(backend, apart));
      rows.streams[at] = {memory.back().data(), bytes + gap, bytes / stream.heads};
      ++at;
    }
    for (std::size_t i = 0; i < tensor.tables.size(); ++i) {
      memory.push_back(placed(backend, tensor.tables[i]));
      rows.tables[i] = memory.back().data();
    }
  }
};

// A rank's rows of a compressed tensor, in pages.
DevicePool pool_of(Backend& backend, const CompressedTensor& tensor, const Layout& keys, int rank,
                   const PageOrder& order) {
  CompressedTensor shard = tensor;
  shard.lengths = rows_of_sequences(keys, rank);
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(tensor.format, tensor.shape)) {
    shard.streams[at] = shard_of(keys, rank, tensor.streams[at], stream.token_bytes(tensor.shape.dtype));
    ++at;
  }
  const auto sequences = static_cast<std::int64_t>(tensor.lengths.size());
  CompressedPool pool(tensor.format, tensor.shape, order, sequences, order.page_size == 64);
  pool.fill(shard);
  return DevicePool(backend, pool.view(), sequences);
}

}  // namespace

CompressedJobTensors compressed_job_tensors(const Job& job, std::uint64_t seed) {
  CompressedJobTensors tensors;
  tensors.plain = random_tensors(job, seed);
  const std::vector<std::int64_t> lengths = job.batch.k_lengths();
  const auto make = [&](const RowFormat& format, const RowShape& shape, Bytes& rows) {
    CompressedTensor tensor =
        compress_tensor("k", format, view_of(rows, shape, job.batch.k_tokens()), lengths, {7, 2}, ErrorCode::kUsage);
    rows = decompress_tensor(tensor, 2);
    return tensor;
  };
  tensors.k = make(job.format.k, k_shape(job.spec), tensors.plain.k);
  tensors.v = make(job.format.v, v_shape(job.spec), tensors.plain.v);
  return tensors;
}

void run_compressed_rank(const Job& job, const Options& options, const CompressedJobTensors& tensors,
                         Transport& transport, JobResult& result, std::int64_t gap) {
  const AttentionSpec& spec = job.spec;
  Attention attention(job, transport, options);
  Backend& backend = attention.backend();
  const int rank = transport.rank();
  const Layout& queries = attention.layout().queries;
  const Layout& keys = attention.layout().keys;
  const std::int64_t q_rows = attention.q_rows();
  const std::int64_t k_rows = attention.k_rows();
  const DeviceArray q = placed(backend, shard_of(queries, rank, tensors.plain.q, q_token_bytes(spec)));
  const DeviceArray k = placed(backend, shard_of(keys, rank, tensors.plain.k, k_token_bytes(spec)));
  const DeviceArray v = placed(backend, shard_of(keys, rank, tensors.plain.v, v_token_bytes(spec)));
  const Shard quantized_k(backend, tensors.k, keys, rank, gap);
  const Shard quantized_v(backend, tensors.v, keys, rank, gap);
  const PageOrder order = shuffled_pages(rows_of_sequences(keys, rank), std::max<std::int64_t>(1, job.page_size),
                                         static_cast<std::uint64_t>(rank) + 1);
  const DevicePool pool_k = pool_of(backend, tensors.k, keys, rank, order);
  const DevicePool pool_v = pool_of(backend, tensors.v, keys, rank, order);
  const auto* const sink_bytes = reinterpret_cast<const std::byte*>(tensors.plain.sinks.data());
  const DeviceArray sinks = placed(backend, Bytes(sink_bytes, sink_bytes + tensors.plain.sinks.size() * sizeof(float)));
  Inputs inputs;
  inputs.q = dense_view(static_cast<const void*>(q.data()), spec.dtype, q_rows, spec.heads, spec.head_dim);
  if (job.page_size > 0) {
    inputs.pages.block_table = order.table;
    inputs.pages.max_pages = order.columns;
    const bool plain_k = job.format.k.is_plain(), plain_v = job.format.v.is_plain();
    if (plain_k) inputs.pages.k = pool_k.plain();
    if (!plain_k) inputs.pages.quantized_k = pool_k.view();
    if (plain_v) inputs.pages.v = pool_v.plain();
    if (!plain_v) inputs.pages.quantized_v = pool_v.view();
  }
  if (job.page_size > 0) {
    // They lie there.
  } else if (job.format.k.is_plain()) {
    inputs.k = dense_view(static_cast<const void*>(k.data()), spec.dtype, k_rows, spec.kv_heads, spec.head_dim);
  } else {
    inputs.quantized_k = quantized_k.rows;
  }
  if (job.page_size > 0) {
    // Likewise.
  } else if (job.format.v.is_plain()) {
    inputs.v = dense_view(static_cast<const void*>(v.data()), spec.dtype, k_rows, spec.kv_heads, spec.head_dim_v);
  } else {
    inputs.quantized_v = quantized_v.rows;
  }
  inputs.sinks = spec.sinks ? sinks.floats() : nullptr;
  const DeviceArray out(backend, std::max(sizeof(float), static_cast<std::size_t>(q_rows * out_token_bytes(spec))));
  const DeviceArray lse(backend, std::max(sizeof(float), static_cast<std::size_t>(q_rows * lse_token_bytes(spec))));
  const Outputs outputs{dense_view(static_cast<void*>(out.data()), spec.dtype, q_rows, spec.heads, spec.head_dim_v),
                        {lse.floats(), spec.heads, 1},
                        std::nullopt};
  const std::size_t workspace_bytes = attention.workspace_bytes(gap == 0);
  const DeviceArray workspace(backend, std::max(sizeof(float), workspace_bytes));
  result.stats[static_cast<std::size_t>(rank)] =
      attention.run(inputs, outputs, {workspace.data(), workspace_bytes}, backend.stream());
  queries.unshard(rank, out.read().data(), result.out.data(), out_token_bytes(spec));
  queries.unshard(rank, lse.read().data(), reinterpret_cast<std::byte*>(result.lse.data()), lse_token_bytes(spec));
  transport.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

}  // namespace ringattn::testing
