// SPDX-License-Identifier: Apache-2.0
// One small job of the consumer's own data, in any world: each rank prints nothing and returns its part of a sum over
// all bits of O, which is the same for any number of ranks.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "ops/attention/attention.hpp"

struct Sum {
  std::uint64_t low = 0, high = 0;
};

inline float value(std::int64_t token, std::int64_t index) {
  return static_cast<float>((token * 37 + index * 11) % 101 - 50) / 64.0F;
}

inline Sum run_job(ringattn::Transport& transport) {
  using namespace ringattn;
  constexpr std::int64_t kTokens = 700, kHeads = 2, kDim = 32;
  Job job;
  job.spec.dtype = Dtype::kF32;
  job.spec.heads = kHeads;
  job.spec.kv_heads = 1;
  job.spec.head_dim = job.spec.head_dim_v = kDim;
  job.spec.softmax_scale = 0.25F;
  job.batch = uniform_batch(1, kTokens, kTokens);
  Options options;
  options.threads = 1;
  options.kernel.backend = "cpu";
  Attention attention(job, transport, options);

  const std::vector<std::int64_t> places = attention.layout().queries.positions(transport.rank());
  const auto rows = static_cast<std::int64_t>(places.size());
  std::vector<float> q, k, v;
  for (const std::int64_t token : places) {
    for (std::int64_t i = 0; i < kHeads * kDim; ++i) q.push_back(value(token, i));
    for (std::int64_t i = 0; i < kDim; ++i) {
      k.push_back(value(token + 1, i));
      v.push_back(value(token + 2, i));
    }
  }
  std::vector<float> out(q.size()), lse(static_cast<std::size_t>(rows * kHeads));
  std::vector<std::byte> workspace(attention.workspace_bytes());
  const auto view = [rows](const std::vector<float>& x, std::int64_t heads) {
    return dense_view(static_cast<const void*>(x.data()), Dtype::kF32, rows, heads, kDim);
  };
  attention.run(
      {view(q, kHeads), view(k, 1), view(v, 1)},
      {dense_view(static_cast<void*>(out.data()), Dtype::kF32, rows, kHeads, kDim), {lse.data(), kHeads, 1}, {}},
      workspace);

  Sum sum;
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &out[i], sizeof bits);
    const auto token = static_cast<std::uint64_t>(places[i / (kHeads * kDim)]);
    sum.low += bits * (token * kHeads * kDim + i % (kHeads * kDim) + 1);
    sum.high += (bits ^ 0x9e3779b9U) * (token + 1);
  }
  return sum;
}
