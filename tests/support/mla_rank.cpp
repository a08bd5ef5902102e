// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mla_rank.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "base/error.hpp"
#include "comm/self.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

std::int64_t out_bytes(const MlaSpec& spec, const MlaShape& shape) {
  return spec.heads * (shape.out_in_latent ? spec.latent_dim : spec.head_dim_v) *
         static_cast<std::int64_t>(size_of(spec.dtype));
}

// Rows of `a` and `b` side by side, each pair followed by `gap` bytes of NaN patterns.
std::vector<std::byte> beside(const std::vector<std::byte>& a, std::int64_t a_bytes, const std::vector<std::byte>& b,
                              std::int64_t b_bytes, std::int64_t rows, std::int64_t gap) {
  std::vector<std::byte> both;
  for (std::int64_t row = 0; row < rows; ++row) {
    both.insert(both.end(), a.begin() + row * a_bytes, a.begin() + (row + 1) * a_bytes);
    both.insert(both.end(), b.begin() + row * b_bytes, b.begin() + (row + 1) * b_bytes);
    both.insert(both.end(), static_cast<std::size_t>(gap), std::byte{0xff});
  }
  return both;
}

// A rank's memory, of its kernel's kind.
class RankMemory {
 public:
  explicit RankMemory(Backend& backend) : backend_(backend), stream_(backend.stream()) {}

  Buffer upload(const void* source, std::size_t bytes) {
    Buffer buffer = backend_.allocate(bytes);
    const auto size = static_cast<std::int64_t>(bytes);
    backend_.copy_rows(buffer.data(), size, source, size, size, 1, stream_);
    land();
    return buffer;
  }
  Buffer upload(const std::vector<std::byte>& bytes) { return upload(bytes.data(), bytes.size()); }
  Buffer poison(std::size_t bytes) { return upload(std::vector<std::byte>(bytes, std::byte{0xff})); }
  std::vector<std::byte> download(const Buffer& buffer) {
    std::vector<std::byte> bytes(buffer.bytes());
    const auto size = static_cast<std::int64_t>(bytes.size());
    backend_.copy_rows(bytes.data(), size, buffer.data(), size, size, 1, stream_);
    land();
    return bytes;
  }
  Stream stream() const { return stream_; }

 private:
  void land() { backend_.synchronize(stream_, Deadline::after(60.0), {}); }

  Backend& backend_;
  Stream stream_;
};

}  // namespace

MlaTensors random_mla_tensors(const MlaJob& job, std::uint64_t seed) {
  const MlaSpec& spec = job.spec;
  std::mt19937_64 generator(seed);
  const auto values = [&](std::int64_t elements, float deviation = 1.0F) {
    return random_elements(elements, spec.dtype, generator, Normal(0.0F, deviation));
  };
  const float weight = 1.0F / std::sqrt(static_cast<float>(spec.latent_dim));
  MlaTensors tensors;
  tensors.q = values(job.batch.q_tokens() * spec.heads * (spec.head_dim + spec.rope_dim));
  tensors.latent = values(job.batch.k_tokens() * spec.latent_dim);
  tensors.k_rope = values(job.batch.k_tokens() * spec.rope_dim);
  tensors.w_uk = values(std::int64_t{spec.heads} * spec.head_dim * spec.latent_dim, weight);
  tensors.w_uv = values(std::int64_t{spec.heads} * spec.head_dim_v * spec.latent_dim, weight);
  const Normal normal;
  for (int head = 0; head < spec.heads && spec.sinks; ++head) tensors.sinks.push_back(normal(generator));
  return tensors;
}

MlaTensors with_fp8_latents(const MlaSpec& spec, MlaTensors tensors) {
  const std::int64_t bytes = latent_row_bytes(spec.latent_dim, spec.rope_dim);
  const auto count = static_cast<std::int64_t>(tensors.latent.size() / size_of(spec.dtype)) / spec.latent_dim;
  const auto rows_of = [&](std::vector<std::byte>& packed, int dim) {
    return dense_view(static_cast<void*>(packed.data()), spec.dtype, count, 1, dim);
  };
  tensors.packed.resize(static_cast<std::size_t>(count * bytes));
  const MutableTensorView latent = rows_of(tensors.latent, spec.latent_dim);
  const MutableTensorView k_rope = rows_of(tensors.k_rope, spec.rope_dim);
  quantize_latent_rows(latent, k_rope, tensors.packed.data(), bytes);
  dequantize_latent_rows(tensors.packed.data(), bytes, latent, k_rope);
  return tensors;
}

MlaOptions on_the_cpu(int threads) {
  MlaOptions options;
  options.ring.kernel.backend = "cpu";
  options.ring.threads = threads;
  return options;
}

GemmWeights matrices_of(const std::vector<std::byte>& packed, const MlaSpec& spec, int dim_n) {
  return {packed.data(),   spec.dtype, spec.heads, dim_n, spec.latent_dim, std::int64_t{dim_n} * spec.latent_dim,
          spec.latent_dim, 1};
}

JobResult poisoned_mla_result(const MlaJob& job, int world, const MlaShape& shape) {
  JobResult result;
  result.out.assign(static_cast<std::size_t>(job.batch.q_tokens() * out_bytes(job.spec, shape)), std::byte{0xff});
  result.lse.assign(static_cast<std::size_t>(job.batch.q_tokens() * job.spec.heads),
                    std::numeric_limits<float>::quiet_NaN());
  result.stats.resize(static_cast<std::size_t>(world));
  return result;
}

void run_mla_rank(const MlaJob& job, const MlaOptions& options, const MlaTensors& tensors, Transport& transport,
                  JobResult& result, const MlaShape& shape) {
  const MlaSpec& spec = job.spec;
  Mla latent(job, transport, options);
  const int rank = transport.rank();
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  const int q_dim = (shape.q_in_latent ? spec.latent_dim : spec.head_dim) + spec.rope_dim;
  const auto shard_of = [rank](const Layout& layout, const std::vector<std::byte>& packed, std::int64_t token_bytes) {
    std::vector<std::byte> rows(static_cast<std::size_t>(layout.tokens(rank) * token_bytes));
    layout.shard(rank, packed.data(), rows.data(), token_bytes);
    return rows;
  };
  const Layout& queries = latent.layout().queries;
  const Layout& keys = latent.layout().keys;
  const std::int64_t c_bytes = spec.latent_dim * element;
  const std::int64_t r_bytes = spec.rope_dim * element;
  const auto q = shard_of(queries, tensors.q, spec.heads * q_dim * element);
  const bool packed = !job.format.is_plain();
  const std::int64_t packed_bytes = packed ? latent_row_bytes(spec.latent_dim, spec.rope_dim) : 0;
  const auto packed_rows = packed ? shard_of(keys, tensors.packed, packed_bytes) : std::vector<std::byte>();
  const auto c = shard_of(keys, tensors.latent, c_bytes);
  const auto r = shard_of(keys, tensors.k_rope, r_bytes);
  const std::int64_t q_rows = latent.q_rows();
  const std::int64_t k_rows = latent.k_rows();

  RankMemory memory(latent.backend());
  const std::int64_t gap = 8 * element;
  const Buffer q_there = memory.upload(q);
  const Buffer c_there = memory.upload(shape.fused ? beside(c, c_bytes, r, r_bytes, k_rows, gap) : c);
  const Buffer r_there = memory.upload(r);
  // Fused, rows begin two bytes after multiples of four.
  constexpr std::int64_t kOff = 2;
  std::vector<std::byte> apart(kOff);
  for (const std::byte byte : beside(packed_rows, packed_bytes, packed_rows, 0, k_rows, kOff)) apart.push_back(byte);
  const Buffer rows_there = memory.upload(shape.fused ? apart : packed_rows);
  const std::int64_t uk_bytes = spec.head_dim * c_bytes;
  const std::int64_t uv_bytes = spec.head_dim_v * c_bytes;
  const Buffer uk_there =
      memory.upload(shape.fused ? beside(tensors.w_uk, uk_bytes, tensors.w_uv, uv_bytes, spec.heads, 0) : tensors.w_uk);
  const Buffer uv_there = memory.upload(tensors.w_uv);
  const Buffer sinks_there = memory.upload(tensors.sinks.data(), tensors.sinks.size() * sizeof(float));
  const Buffer out_there = memory.poison(static_cast<std::size_t>(q_rows * out_bytes(spec, shape)));
  const Buffer lse_there = memory.poison(static_cast<std::size_t>(q_rows * spec.heads) * sizeof(float));
  const Buffer workspace = memory.poison(latent.workspace_bytes(!shape.fused));

  const auto view = [&spec](const void* data, std::int64_t rows, int heads, int dim) {
    return dense_view(data, spec.dtype, rows, heads, dim);
  };
  MlaInputs inputs;
  inputs.q = view(q_there.data(), q_rows, spec.heads, q_dim);
  if (packed) {
    const std::int64_t off = shape.fused ? kOff : 0;
    inputs.fp8_rows = {rows_there.data() + off, packed_bytes + off, 0};
  } else {
    inputs.latent = view(c_there.data(), k_rows, 1, spec.latent_dim);
    inputs.k_rope = view(r_there.data(), k_rows, 1, spec.rope_dim);
  }
  GemmWeights w_uk = matrices_of(tensors.w_uk, spec, spec.head_dim);
  GemmWeights w_uv = matrices_of(tensors.w_uv, spec, spec.head_dim_v);
  w_uk.data = uk_there.data();
  w_uv.data = uv_there.data();
  if (shape.fused) {
    if (!packed) {
      inputs.latent.token_stride = inputs.k_rope.token_stride = spec.latent_dim + spec.rope_dim + gap / element;
      inputs.k_rope.data = c_there.data() + c_bytes;
    }
    w_uk.head_stride = w_uv.head_stride = std::int64_t{spec.head_dim + spec.head_dim_v} * spec.latent_dim;
    w_uv.data = uk_there.data() + uk_bytes;
  }
  if (!shape.q_in_latent) inputs.w_uk = w_uk;
  if (!shape.out_in_latent) inputs.w_uv = w_uv;
  if (spec.sinks) inputs.sinks = reinterpret_cast<const float*>(sinks_there.data());
  const MlaOutputs outputs{dense_view(static_cast<void*>(out_there.data()), spec.dtype, q_rows, spec.heads,
                                      shape.out_in_latent ? spec.latent_dim : spec.head_dim_v),
                           {reinterpret_cast<float*>(lse_there.data()), spec.heads, 1}};
  result.stats[static_cast<std::size_t>(rank)] =
      latent.run(inputs, outputs, {workspace.data(), workspace.bytes()}, memory.stream());

  const std::vector<std::byte> out = memory.download(out_there);
  const std::vector<std::byte> lse = memory.download(lse_there);
  queries.unshard(rank, out.data(), result.out.data(), out_bytes(spec, shape));
  queries.unshard(rank, lse.data(), reinterpret_cast<std::byte*>(result.lse.data()),
                  spec.heads * static_cast<std::int64_t>(sizeof(float)));
  transport.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

JobResult run_mla_job(const MlaJob& job, const MlaOptions& options, const MlaTensors& tensors, int world,
                      const MlaShape& shape, const ThreadsDelivery& delivery) {
  JobResult result = poisoned_mla_result(job, world, shape);
  if (world == 1) {
    const auto transport = make_self_transport();
    run_mla_rank(job, options, tensors, *transport, result, shape);
    return result;
  }
  run_threads_world(world, delivery,
                    [&](Transport& transport) { run_mla_rank(job, options, tensors, transport, result, shape); });
  return result;
}

JobResult run_gpu_mla_job(const MlaJob& job, const MlaOptions& options, const MlaTensors& tensors, int world,
                          const MlaShape& shape) {
  JobResult result = poisoned_mla_result(job, world, shape);
  run_gpu_world(world, [&](Transport& rank) { run_mla_rank(job, options, tensors, rank, result, shape); });
  return result;
}

}  // namespace ringattn::testing
