// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ring_job.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/error.hpp"
#include "comm/self.hpp"
#include "comm/world.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

std::size_t out_token_bytes(const Job& job) {
  return static_cast<std::size_t>(job.spec.heads) * static_cast<std::size_t>(job.spec.head_dim_v) *
         size_of(job.spec.dtype);
}

}  // namespace

JobTensors random_tensors(const Job& job, std::uint64_t seed) {
  const AttentionSpec& spec = job.spec;
  std::mt19937_64 generator(seed);
  JobTensors tensors;
  tensors.q = random_elements(job.batch.q_tokens() * spec.heads * spec.head_dim, spec.dtype, generator);
  tensors.k = random_elements(job.batch.k_tokens() * spec.kv_heads * spec.head_dim, spec.dtype, generator);
  tensors.v = random_elements(job.batch.k_tokens() * spec.kv_heads * spec.head_dim_v, spec.dtype, generator);
  const Normal normal;
  for (int head = 0; head < spec.heads && spec.sinks; ++head) tensors.sinks.push_back(normal(generator));
  return tensors;
}

bool JobResult::same_bits(const JobResult& other) const {
  return out == other.out && lse.size() == other.lse.size() &&
         (lse.empty() || std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0);
}

JobResult poisoned_result(const Job& job, int world) {
  JobResult result;
  result.out.assign(static_cast<std::size_t>(job.batch.q_tokens()) * out_token_bytes(job), std::byte{0xff});
  result.lse.assign(static_cast<std::size_t>(job.batch.q_tokens() * job.spec.heads),
                    std::numeric_limits<float>::quiet_NaN());
  result.stats.resize(static_cast<std::size_t>(world));
  return result;
}

void run_rank(const Job& job, const Options& options, const JobTensors& tensors, Transport& transport,
              JobResult& result) {
  const AttentionSpec& spec = job.spec;
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
  Backend& backend = attention.backend();
  const Stream stream = backend.stream();
  const auto land = [&] { backend.synchronize(stream, Deadline::after(60.0), {}); };
  // In the kernel's kind of memory.
  const auto upload = [&](const void* source, std::size_t bytes) {
    Buffer buffer = backend.allocate(bytes);
    const auto size = static_cast<std::int64_t>(bytes);
    backend.copy_rows(buffer.data(), size, source, size, size, 1, stream);
    land();
    return buffer;
  };
  const auto upload_bytes = [&](const std::vector<std::byte>& bytes) { return upload(bytes.data(), bytes.size()); };
  const auto poison = [&](std::size_t bytes) { return upload_bytes(std::vector<std::byte>(bytes, std::byte{0xff})); };
  const auto download = [&](const Buffer& buffer, void* target) {
    const auto size = static_cast<std::int64_t>(buffer.bytes());
    backend.copy_rows(target, size, buffer.data(), size, size, 1, stream);
    land();
  };
  const Buffer q_there = upload_bytes(q);
  const Buffer k_there = upload_bytes(k);
  const Buffer v_there = upload_bytes(v);
  const Buffer sinks_there = upload(tensors.sinks.data(), tensors.sinks.size() * sizeof(float));
  const Buffer out_there = poison(static_cast<std::size_t>(q_rows) * out_token_bytes(job));
  const Buffer lse_there = poison(static_cast<std::size_t>(q_rows * spec.heads) * sizeof(float));
  const Buffer workspace = poison(attention.workspace_bytes());

  const auto view = [&spec](const Buffer& buffer, std::int64_t rows, int heads, int dim) {
    return dense_view(static_cast<void*>(buffer.data()), spec.dtype, rows, heads, dim);
  };
  const Inputs inputs{view(q_there, q_rows, spec.heads, spec.head_dim),
                      view(k_there, k_rows, spec.kv_heads, spec.head_dim),
                      view(v_there, k_rows, spec.kv_heads, spec.head_dim_v),
                      spec.sinks ? reinterpret_cast<const float*>(sinks_there.data()) : nullptr};
  const Outputs outputs{view(out_there, q_rows, spec.heads, spec.head_dim_v),
                        {reinterpret_cast<float*>(lse_there.data()), spec.heads, 1},
                        std::nullopt};
  result.stats[static_cast<std::size_t>(rank)] =
      attention.run(inputs, outputs, {workspace.data(), workspace.bytes()}, stream);

  std::vector<std::byte> out(out_there.bytes());
  std::vector<float> lse(lse_there.bytes() / sizeof(float));
  download(out_there, out.data());
  download(lse_there, lse.data());
  queries.unshard(rank, out.data(), result.out.data(), static_cast<std::int64_t>(out_token_bytes(job)));
  queries.unshard(rank, reinterpret_cast<const std::byte*>(lse.data()), reinterpret_cast<std::byte*>(result.lse.data()),
                  spec.heads * static_cast<std::int64_t>(sizeof(float)));
  transport.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
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

void run_gpu_world(int world, const std::function<void(Transport&)>& rank_main, std::string_view transport) {
  WorldRequest request;
  request.transport = transport;
  request.memory = WantedMemory::kDevice;
  request.ranks = world;
  std::string failure;
  const int code = run_world(
      request,
      [&](Transport& rank) {
        rank_main(rank);
        return 0;
      },
      [&](const Error& error) { failure = error.what(); });
  if (code != 0) throw Error(static_cast<ErrorCode>(code), failure);
}

JobResult run_gpu_job(const Job& job, const Options& options, const JobTensors& tensors, int world,
                      std::string_view transport) {
  JobResult result = poisoned_result(job, world);
  run_gpu_world(
      world, [&](Transport& rank) { run_rank(job, options, tensors, rank, result); }, transport);
  return result;
}

}  // namespace ringattn::testing
