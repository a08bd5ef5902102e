// SPDX-License-Identifier: Apache-2.0
// Block masks of the best blocks, chosen by ranks that share the tokens of a job and by one rank that has all tokens,
// for tests that compare the two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/top_k_selection.hpp"
#include "kernels/common/platform.hpp"
#include "kernels/common/registry.hpp"
#include "ops/attention/top_k_block_mask.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

using Runs = std::vector<std::vector<TokenRun>>;  // [ranks]

// Distributes whole blocks at random. Blocks are counted from `positions`, the position of each sequence's first token.
inline Layout deal_blocks(const std::vector<std::int64_t>& lengths, const std::vector<std::int64_t>& positions,
                          int block, int world, std::mt19937& random) {
  Runs runs(static_cast<std::size_t>(world));
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    for (std::int64_t begin = 0; begin < lengths[s];) {
      const std::int64_t end =
          std::min(lengths[s], (query_block_of(positions[s] + begin, block) + 1) * block - positions[s]);
      runs[random() % runs.size()].push_back({static_cast<std::int32_t>(s), begin, end});
      begin = end;
    }
  }
  return {lengths, std::move(runs)};
}

struct Dealt {
  Layout queries, keys;
};
inline Dealt deal(const Job& job, const BlockMaskShape& shape, int world, std::uint32_t seed) {
  std::vector<std::int64_t> q, k, offsets;
  for (const Sequence& of : job.batch.sequences) {
    q.push_back(of.q_len);
    k.push_back(of.k_len);
    offsets.push_back(of.q_offset);
  }
  std::mt19937 random(seed);
  Layout queries = deal_blocks(q, offsets, shape.query_block, world, random);
  return {std::move(queries), deal_blocks(k, std::vector<std::int64_t>(k.size(), 0), shape.key_block, world, random)};
}

// All rows of q or of k.
inline TensorView view_of(const std::vector<std::byte>& rows, const AttentionSpec& spec, int heads) {
  const std::int64_t token = std::int64_t{heads} * spec.head_dim * static_cast<std::int64_t>(size_of(spec.dtype));
  return dense_view(static_cast<const void*>(rows.data()), spec.dtype, static_cast<std::int64_t>(rows.size()) / token,
                    heads, spec.head_dim);
}

// A rank's own call, with its rows in the memory of a backend's kernel.
inline std::shared_ptr<const BlockMask> block_mask_of_rank(const Job& job, const BlockMaskShape& shape, int count,
                                                           const Dealt& dealt, const JobTensors& tensors,
                                                           Transport& transport, const std::string& backend = "cpu") {
  Options options;
  options.kernel.backend = backend;
  options.threads = 1;
  const auto there = choose_kernel(job.spec, options.kernel).row->make_backend({1, transport.device()});
  const auto shard_of = [&](const Layout& layout, const std::vector<std::byte>& packed, int heads) {
    const std::int64_t token =
        std::int64_t{heads} * job.spec.head_dim * static_cast<std::int64_t>(size_of(job.spec.dtype));
    std::vector<std::byte> rows(static_cast<std::size_t>(layout.tokens(transport.rank()) * token));
    layout.shard(transport.rank(), packed.data(), rows.data(), token);
    DeviceArray array(*there, std::max<std::size_t>(1, rows.size()));
    array.write(rows);
    return array;
  };
  const DeviceArray q = shard_of(dealt.queries, tensors.q, job.spec.heads);
  const DeviceArray k = shard_of(dealt.keys, tensors.k, job.spec.kv_heads);
  const auto view = [&](const DeviceArray& array, const Layout& layout, int heads) {
    return dense_view(static_cast<const void*>(array.data()), job.spec.dtype, layout.tokens(transport.rank()), heads,
                      job.spec.head_dim);
  };
  return top_k_block_mask(
      job, shape, count,
      {dealt.queries, dealt.keys, view(q, dealt.queries, job.spec.heads), view(k, dealt.keys, job.spec.kv_heads)},
      transport, options);
}

// By the host, of all rows.
inline BlockMask block_mask_of_all(const Job& job, const BlockMaskShape& shape, int count, const JobTensors& tensors) {
  AttentionSpec spec = job.spec;
  spec.block_mask = shape;
  const std::vector<MaskedSequence> sequences = masked_sequences(job.batch);
  return top_k_selection(
      spec, sequences, count,
      packed_rows(sequences, view_of(tensors.q, spec, spec.heads), view_of(tensors.k, spec, spec.kv_heads)),
      *cpu::make_cpu_backend({1, 0}), {});
}

}  // namespace ringattn::testing
