// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ring_job.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "comm/self.hpp"

namespace ringattn::testing {

namespace {

std::vector<std::byte> random_bytes_of(std::int64_t elements, Dtype dtype, std::mt19937_64& generator) {
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(static_cast<std::size_t>(elements) * size_of(dtype));
  for (std::size_t at = 0; at < bytes.size(); at += size_of(dtype)) {
    store_element(bytes.data() + at, dtype, normal(generator));
  }
  return bytes;
}

std::size_t out_token_bytes(const Job& job) {
  return static_cast<std::size_t>(job.spec.heads) * static_cast<std::size_t>(job.spec.head_dim_v) *
         size_of(job.spec.dtype);
}

}  // namespace

JobTensors random_tensors(const Job& job, std::uint64_t seed) {
  const FoldSpec& spec = job.spec;
  std::mt19937_64 generator(seed);
  JobTensors tensors;
  tensors.q = random_bytes_of(job.q_tokens() * spec.heads * spec.head_dim, spec.dtype, generator);
  tensors.k = random_bytes_of(job.k_tokens() * spec.kv_heads * spec.head_dim, spec.dtype, generator);
  tensors.v = random_bytes_of(job.k_tokens() * spec.kv_heads * spec.head_dim_v, spec.dtype, generator);
  std::normal_distribution<float> normal;
  for (int head = 0; head < spec.heads && spec.sinks; ++head) tensors.sinks.push_back(normal(generator));
  return tensors;
}

bool JobResult::same_bits(const JobResult& other) const {
  return out == other.out && lse.size() == other.lse.size() &&
         (lse.empty() || std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0);
}

JobResult poisoned_result(const Job& job, int world) {
  JobResult result;
  result.out.assign(static_cast<std::size_t>(job.q_tokens()) * out_token_bytes(job), std::byte{0xff});
  result.lse.assign(static_cast<std::size_t>(job.q_tokens() * job.spec.heads), std::numeric_limits<float>::quiet_NaN());
  result.stats.resize(static_cast<std::size_t>(world));
  return result;
}

void run_rank(const Job& job, const Options& options, const JobTensors& tensors, Transport& transport,
              JobResult& result) {
  const FoldSpec& spec = job.spec;
  Attention attention(job, transport, options);
  const int rank = transport.rank();
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  const auto shard_of = [rank](const Layout& layout, const std::vector<std::byte>& packed, std::int64_t token_bytes) {
    std::vector<std::byte> rows(static_cast<std::size_t>(layout.tokens(rank) * token_bytes));
    layout.shard(rank, packed.data(), rows.data(), token_bytes);
    return rows;
  };
  const Layout& queries = attention.layout().queries;
  const Layout& keys = attention.layout().keys;
  const auto q = shard_of(queries, tensors.q, spec.heads * spec.head_dim * element);
  const auto k = shard_of(keys, tensors.k, spec.kv_heads * spec.head_dim * element);
  const auto v = shard_of(keys, tensors.v, spec.kv_heads * spec.head_dim_v * element);

  const std::int64_t q_rows = attention.q_rows();
  const std::int64_t k_rows = attention.k_rows();
  std::vector<std::byte> out(static_cast<std::size_t>(q_rows) * out_token_bytes(job), std::byte{0xff});
  std::vector<float> lse(static_cast<std::size_t>(q_rows * spec.heads), std::numeric_limits<float>::quiet_NaN());
  std::vector<std::byte> workspace(attention.workspace_bytes(), std::byte{0xff});

  const Inputs inputs{
      dense_view(static_cast<const void*>(q.data()), spec.dtype, q_rows, spec.heads, spec.head_dim),
      dense_view(static_cast<const void*>(k.data()), spec.dtype, k_rows, spec.kv_heads, spec.head_dim),
      dense_view(static_cast<const void*>(v.data()), spec.dtype, k_rows, spec.kv_heads, spec.head_dim_v),
      spec.sinks ? tensors.sinks.data() : nullptr};
  const Outputs outputs{dense_view(static_cast<void*>(out.data()), spec.dtype, q_rows, spec.heads, spec.head_dim_v),
                        {lse.data(), spec.heads, 1},
                        std::nullopt};
  result.stats[static_cast<std::size_t>(rank)] = attention.run(inputs, outputs, workspace);

  queries.unshard(rank, out.data(), result.out.data(), static_cast<std::int64_t>(out_token_bytes(job)));
  queries.unshard(rank, reinterpret_cast<const std::byte*>(lse.data()), reinterpret_cast<std::byte*>(result.lse.data()),
                  spec.heads * static_cast<std::int64_t>(sizeof(float)));
}

JobResult run_job(const Job& job, const Options& options, const JobTensors& tensors, int world,
                  const ThreadsDelivery& delivery) {
  JobResult result = poisoned_result(job, world);
  if (world == 1) {
    const auto transport = make_self_transport();
    run_rank(job, options, tensors, *transport, result);
    return result;
  }
  run_threads_world(world, delivery, [&](Transport& transport) { run_rank(job, options, tensors, transport, result); });
  return result;
}

}  // namespace ringattn::testing
