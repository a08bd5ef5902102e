// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mla_backward_job.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "comm/self.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

// One rank's part, on the host or on a GPU.
void run_mla_backward_rank(const MlaJob& job, const MlaOptions& options, const MlaBackwardData& data,
                           Transport& transport, MlaGradients& gradients) {
  MlaBackward backward(job, transport, options);
  const MlaSpec& spec = job.spec;
  Backend& backend = backward.backend();
  const Stream stream = backend.stream();
  const int rank = transport.rank();
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    const auto size = static_cast<std::int64_t>(bytes);
    if (bytes > 0) backend.copy_rows(to, size, from, size, size, 1, stream);
    backend.synchronize(stream, Deadline::after(60.0), {});
  };
  std::vector<Buffer> memory;
  const auto upload = [&](const void* bytes, std::size_t count) {
    memory.push_back(backend.allocate(std::max<std::size_t>(count, 1)));
    copy(memory.back().data(), bytes, count);
    return memory.back().data();
  };
  const auto poisoned = [&](std::int64_t bytes) {
    const std::vector<std::byte> poison(static_cast<std::size_t>(bytes), std::byte{0xff});
    return upload(poison.data(), poison.size());
  };
  const Layout& queries = backward.layout().queries;
  const Layout& keys = backward.layout().keys;
  const auto shard = [&](const Layout& layout, const void* packed, std::int64_t token_bytes) {
    std::vector<std::byte> rows(static_cast<std::size_t>(layout.tokens(rank) * token_bytes));
    layout.shard(rank, static_cast<const std::byte*>(packed), rows.data(), token_bytes);
    return upload(rows.data(), rows.size());
  };
  const std::int64_t q_rows = backward.q_rows();
  const std::int64_t k_rows = backward.k_rows();
  const std::int64_t q_dim = spec.head_dim + spec.rope_dim;
  const std::int64_t q_bytes = spec.heads * q_dim * element;
  const std::int64_t out_bytes = std::int64_t{spec.heads} * spec.head_dim_v * element;
  const std::int64_t c_bytes = spec.latent_dim * element;
  const std::int64_t r_bytes = spec.rope_dim * element;
  const auto lse_bytes = static_cast<std::int64_t>(spec.heads * sizeof(float));
  const auto view = [&](void* at, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
    return dense_view(at, spec.dtype, rows, heads, dim);
  };
  MlaBackwardInputs inputs;
  inputs.q = view(shard(queries, data.forward.q.data(), q_bytes), q_rows, spec.heads, q_dim);
  inputs.latent = view(shard(keys, data.forward.latent.data(), c_bytes), k_rows, 1, spec.latent_dim);
  inputs.k_rope = view(shard(keys, data.forward.k_rope.data(), r_bytes), k_rows, 1, spec.rope_dim);
  inputs.w_uk = matrices_of(data.forward.w_uk, spec, spec.head_dim);
  inputs.w_uv = matrices_of(data.forward.w_uv, spec, spec.head_dim_v);
  inputs.w_uk.data = upload(data.forward.w_uk.data(), data.forward.w_uk.size());
  inputs.w_uv.data = upload(data.forward.w_uv.data(), data.forward.w_uv.size());
  inputs.out = view(shard(queries, data.result.out.data(), out_bytes), q_rows, spec.heads, spec.head_dim_v);
  inputs.dout = view(shard(queries, data.dout.data(), out_bytes), q_rows, spec.heads, spec.head_dim_v);
  inputs.lse = {reinterpret_cast<float*>(shard(queries, data.result.lse.data(), lse_bytes)), spec.heads, 1};
  inputs.dlse = {reinterpret_cast<float*>(shard(queries, data.dlse.data(), lse_bytes)), spec.heads, 1};
  if (spec.sinks) {
    inputs.sinks =
        reinterpret_cast<const float*>(upload(data.forward.sinks.data(), data.forward.sinks.size() * sizeof(float)));
  }
  const std::int64_t uk = std::int64_t{spec.heads} * spec.head_dim * spec.latent_dim;
  const std::int64_t uv = std::int64_t{spec.heads} * spec.head_dim_v * spec.latent_dim;
  const auto of_rank = static_cast<std::size_t>(rank);
  MlaBackwardOutputs outputs;
  outputs.dq = view(poisoned(q_rows * q_bytes), q_rows, spec.heads, q_dim);
  outputs.dlatent = view(poisoned(k_rows * c_bytes), k_rows, 1, spec.latent_dim);
  outputs.dk_rope = view(poisoned(k_rows * r_bytes), k_rows, 1, spec.rope_dim);
  outputs.dw_uk = reinterpret_cast<float*>(poisoned(uk * 4));
  outputs.dw_uv = reinterpret_cast<float*>(poisoned(uv * 4));
  const std::int64_t sinks = spec.sinks ? spec.heads : 0;
  if (spec.sinks) outputs.dsinks = reinterpret_cast<float*>(poisoned(sinks * 4));
  const auto workspace_bytes = static_cast<std::int64_t>(backward.workspace_bytes());
  std::byte* const workspace = poisoned(workspace_bytes);
  for (int repeat = 0; repeat < 2; ++repeat) {  // a run leaves nothing behind that the next one reads
    backward.run(inputs, outputs, {workspace, static_cast<std::size_t>(workspace_bytes)}, stream);
  }
  const auto download = [&](const void* from, void* to, std::int64_t bytes) {
    copy(to, from, static_cast<std::size_t>(bytes));
  };
  const auto unshard = [&](const Layout& layout, const MutableTensorView& rows, std::int64_t token_bytes,
                           std::vector<std::byte>& packed) {
    std::vector<std::byte> host(static_cast<std::size_t>(rows.tokens * token_bytes));
    download(rows.data, host.data(), rows.tokens * token_bytes);
    layout.unshard(rank, host.data(), packed.data(), token_bytes);
  };
  unshard(queries, outputs.dq, q_bytes, gradients.dq);
  unshard(keys, outputs.dlatent, c_bytes, gradients.dlatent);
  unshard(keys, outputs.dk_rope, r_bytes, gradients.dk_rope);
  gradients.dw_uk[of_rank].resize(static_cast<std::size_t>(uk));
  gradients.dw_uv[of_rank].resize(static_cast<std::size_t>(uv));
  gradients.dsinks[of_rank].resize(static_cast<std::size_t>(sinks));
  download(outputs.dw_uk, gradients.dw_uk[of_rank].data(), uk * 4);
  download(outputs.dw_uv, gradients.dw_uv[of_rank].data(), uv * 4);
  download(outputs.dsinks, gradients.dsinks[of_rank].data(), sinks * 4);
  transport.barrier(Deadline::after(60.0));
}

MlaGradients poisoned(const MlaJob& job, int world) {
  const MlaSpec& spec = job.spec;
  const auto bytes = [&](std::int64_t elements) {
    return std::vector<std::byte>(static_cast<std::size_t>(elements) * size_of(spec.dtype), std::byte{0xff});
  };
  MlaGradients gradients;
  gradients.dq = bytes(job.batch.q_tokens() * spec.heads * (spec.head_dim + spec.rope_dim));
  gradients.dlatent = bytes(job.batch.k_tokens() * spec.latent_dim);
  gradients.dk_rope = bytes(job.batch.k_tokens() * spec.rope_dim);
  for (auto* sums : {&gradients.dw_uk, &gradients.dw_uv, &gradients.dsinks}) {
    sums->resize(static_cast<std::size_t>(world));
  }
  return gradients;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

MlaBackwardData random_mla_backward_data(const MlaJob& job, std::uint64_t seed) {
  MlaBackwardData data{random_mla_tensors(job, seed), {}, {}, {}};
  data.result = run_mla_job(job, on_the_cpu(), data.forward, 1);
  std::mt19937_64 generator(seed + 1);
  const std::int64_t rows = job.batch.q_tokens() * job.spec.heads;
  data.dout = random_elements(rows * job.spec.head_dim_v, job.spec.dtype, generator, Normal());
  Normal normal;
  for (std::int64_t i = 0; i < rows; ++i) data.dlse.push_back(normal(generator));
  return data;
}

MlaGradients differentiate_mla(const MlaJob& job, const MlaOptions& options, const MlaBackwardData& data, int world) {
  MlaGradients gradients = poisoned(job, world);
  if (world == 1) {
    const auto self = make_self_transport();
    run_mla_backward_rank(job, options, data, *self, gradients);
  } else {
    run_threads_world(world, {},
                      [&](Transport& transport) { run_mla_backward_rank(job, options, data, transport, gradients); });
  }
  return gradients;
}

MlaGradients differentiate_mla_on_gpus(const MlaJob& job, const MlaOptions& options, const MlaBackwardData& data,
                                       int world) {
  MlaGradients gradients = poisoned(job, world);
  run_gpu_world(world, [&](Transport& transport) { run_mla_backward_rank(job, options, data, transport, gradients); });
  return gradients;
}

void expect_same_gradients(const MlaGradients& made, const MlaGradients& expected, const std::string& what) {
  EXPECT_TRUE(made.dq == expected.dq) << what << ": dq";
  EXPECT_TRUE(made.dlatent == expected.dlatent) << what << ": dlatent";
  EXPECT_TRUE(made.dk_rope == expected.dk_rope) << what << ": dk_rope";
  for (std::size_t rank = 0; rank < made.dw_uk.size(); ++rank) {
    EXPECT_TRUE(same(made.dw_uk[rank], expected.dw_uk[0])) << what << ": dw_uk of rank " << rank;
    EXPECT_TRUE(same(made.dw_uv[rank], expected.dw_uv[0])) << what << ": dw_uv of rank " << rank;
    EXPECT_TRUE(same(made.dsinks[rank], expected.dsinks[0])) << what << ": dsinks of rank " << rank;
  }
}

}  // namespace ringattn::testing
