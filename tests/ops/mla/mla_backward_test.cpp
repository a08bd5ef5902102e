// SPDX-License-Identifier: Apache-2.0
// Gradients of expanded MLA: against finite differences of the fp64 oracle, and with the same bits for any number of
// ranks, layout, heads at a time and, for rows, batch.
#include "ops/mla/mla_backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "kernels/mla/mla_oracle.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mla_rank.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {
namespace {

// Packed gradients. Those of matrices and sinks of each rank.
struct Gradients {
  std::vector<std::byte> dq, dlatent, dk_rope;
  std::vector<std::vector<float>> dw_uk, dw_uv, dsinks;
};

struct BackwardData {
  MlaTensors forward;
  JobResult result;  // O and LSE of the forward
  std::vector<std::byte> dout;
  std::vector<float> dlse;
};

MlaSpec small_spec(Dtype dtype, const Mask& mask) {
  MlaSpec spec;
  spec.dtype = dtype;
  spec.heads = 4;
  spec.head_dim = 16;
  spec.rope_dim = 8;
  spec.head_dim_v = 24;
  spec.latent_dim = 40;
  spec.mask = mask;
  spec.softmax_scale = default_softmax_scale(spec);
  return spec;
}

BackwardData random_data(const MlaJob& job, std::uint64_t seed) {
  BackwardData data{random_mla_tensors(job, seed), {}, {}, {}};
  data.result = run_mla_job(job, on_the_cpu(), data.forward, 1);
  std::mt19937_64 generator(seed + 1);
  const std::int64_t rows = job.batch.q_tokens() * job.spec.heads;
  data.dout = random_elements(rows * job.spec.head_dim_v, job.spec.dtype, generator, Normal());
  Normal normal;
  for (std::int64_t i = 0; i < rows; ++i) data.dlse.push_back(normal(generator));
  return data;
}

// One rank's part, on the host or on a GPU.
void run_rank(const MlaJob& job, const MlaOptions& options, const BackwardData& data, Transport& transport,
              Gradients& gradients) {
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
  gradients.dsinks[of_rank].resize(spec.sinks ? static_cast<std::size_t>(spec.heads) : 0);
  if (spec.sinks) outputs.dsinks = gradients.dsinks[of_rank].data();
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
  download(outputs.dw_uk, gradients.dw_uk[of_rank].data(), uk * 4);
  download(outputs.dw_uv, gradients.dw_uv[of_rank].data(), uv * 4);
  transport.barrier(Deadline::after(60.0));
}

Gradients differentiate(const MlaJob& job, const MlaOptions& options, const BackwardData& data, int world,
                        const ThreadsDelivery& delivery = {}) {
  const MlaSpec& spec = job.spec;
  const auto bytes = [&](std::int64_t elements) {
    return std::vector<std::byte>(static_cast<std::size_t>(elements) * size_of(spec.dtype), std::byte{0xff});
  };
  Gradients gradients;
  gradients.dq = bytes(job.batch.q_tokens() * spec.heads * (spec.head_dim + spec.rope_dim));
  gradients.dlatent = bytes(job.batch.k_tokens() * spec.latent_dim);
  gradients.dk_rope = bytes(job.batch.k_tokens() * spec.rope_dim);
  for (auto* sums : {&gradients.dw_uk, &gradients.dw_uv, &gradients.dsinks}) {
    sums->resize(static_cast<std::size_t>(world));
  }
  if (world == 1) {
    const auto self = make_self_transport();
    run_rank(job, options, data, *self, gradients);
  } else {
    run_threads_world(world, delivery,
                      [&](Transport& transport) { run_rank(job, options, data, transport, gradients); });
  }
  return gradients;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_same(const Gradients& made, const Gradients& expected, const std::string& what) {
  EXPECT_TRUE(made.dq == expected.dq) << what << ": dq";
  EXPECT_TRUE(made.dlatent == expected.dlatent) << what << ": dlatent";
  EXPECT_TRUE(made.dk_rope == expected.dk_rope) << what << ": dk_rope";
  for (std::size_t rank = 0; rank < made.dw_uk.size(); ++rank) {
    EXPECT_TRUE(same(made.dw_uk[rank], expected.dw_uk[0])) << what << ": dw_uk of rank " << rank;
    EXPECT_TRUE(same(made.dw_uv[rank], expected.dw_uv[0])) << what << ": dw_uv of rank " << rank;
    EXPECT_TRUE(same(made.dsinks[rank], expected.dsinks[0])) << what << ": dsinks of rank " << rank;
  }
}

// Σ dO ∘ O + Σ dLSE ∘ LSE over the batch, in fp64.
double loss_of(const MlaJob& job, const BackwardData& data, const MlaTensors& tensors) {
  const MlaSpec& spec = job.spec;
  double loss = 0.0;
  std::int64_t q = 0;
  std::int64_t k = 0;
  for (const Sequence& s : job.batch.sequences) {
    const auto rows = [&](const std::vector<std::byte>& packed, std::int64_t first, std::int64_t count,
                          std::int64_t heads, std::int64_t dim) {
      const std::size_t offset = static_cast<std::size_t>(first * heads * dim) * size_of(spec.dtype);
      return dense_view(static_cast<const void*>(packed.data() + offset), spec.dtype, count, heads, dim);
    };
    std::vector<double> out;
    std::vector<double> lse;
    oracle_mla_attention(
        spec, matrices_of(tensors.w_uk, spec, spec.head_dim), matrices_of(tensors.w_uv, spec, spec.head_dim_v),
        rows(tensors.q, q, s.q_len, spec.heads, spec.head_dim + spec.rope_dim),
        rows(tensors.latent, k, s.k_len, 1, spec.latent_dim), rows(tensors.k_rope, k, s.k_len, 1, spec.rope_dim),
        s.q_offset, spec.sinks ? tensors.sinks.data() : nullptr, out, lse);
    const TensorView dout = rows(data.dout, q, s.q_len, spec.heads, spec.head_dim_v);
    for (std::size_t i = 0; i < out.size(); ++i) {
      loss += out[i] * static_cast<double>(load_element(dout.at(0, 0) + i * size_of(spec.dtype), spec.dtype));
    }
    for (std::size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(lse[i])) continue;  // a row without keys
      loss += lse[i] * static_cast<double>(data.dlse[static_cast<std::size_t>(q * spec.heads) + i]);
    }
    q += s.q_len;
    k += s.k_len;
  }
  return loss;
}

// Checks sampled elements of a gradient by central differences of two steps, whose errors of second order cancel.
void expect_derivatives(const char* name, std::size_t size, const std::function<double(std::size_t, double)>& loss_at,
                        const std::function<double(std::size_t)>& gradient) {
  double most = 0.0;
  for (std::size_t i = 0; i < size; ++i) most = std::max(most, std::abs(gradient(i)));
  EXPECT_GT(most, 0.0) << name;
  std::mt19937_64 generator(11);
  for (int sample = 0; sample < 12; ++sample) {
    const std::size_t at = generator() % size;
    constexpr double kStep = 0x1p-6;
    const double coarse = (loss_at(at, 2 * kStep) - loss_at(at, -2 * kStep)) / (4 * kStep);
    const double fine = (loss_at(at, kStep) - loss_at(at, -kStep)) / (2 * kStep);
    EXPECT_NEAR(gradient(at), (4.0 * fine - coarse) / 3.0, 2e-5 * most) << name << ", element " << at;
  }
}

TEST(MlaBackward, IsTheDerivativeOfTheOracle) {
  MlaJob job{small_spec(Dtype::kF32, {-1, 0}),
             {{13, 13, 0}, {0, 0, 0}, {1, 1, 0}, {5, 17, 12}, {7, 4, -2}},
             MlaForm::kExpanded};
  job.spec.softcap = 4.0F;
  job.spec.sinks = true;
  BackwardData data = random_data(job, 3);
  // Multiples of 2⁻¹², so that steps are exact.
  const auto rounded = [](std::vector<std::byte>& elements) {
    for (std::size_t at = 0; at < elements.size(); at += sizeof(float)) {
      const float value = load_element(elements.data() + at, Dtype::kF32);
      store_element(elements.data() + at, Dtype::kF32, std::round(value * 0x1p12F) * 0x1p-12F);
    }
  };
  for (auto* elements :
       {&data.forward.q, &data.forward.latent, &data.forward.k_rope, &data.forward.w_uk, &data.forward.w_uv}) {
    rounded(*elements);
  }
  data.result = run_mla_job(job, on_the_cpu(), data.forward, 1);
  const Gradients gradients = differentiate(job, on_the_cpu(), data, 2);
  const auto check = [&](const char* name, std::vector<std::byte> MlaTensors::*tensor, const void* gradient) {
    const std::size_t size = (data.forward.*tensor).size() / sizeof(float);
    expect_derivatives(
        name, size,
        [&](std::size_t i, double step) {
          MlaTensors moved = data.forward;
          std::byte* const at = (moved.*tensor).data() + i * sizeof(float);
          store_element(at, Dtype::kF32, load_element(at, Dtype::kF32) + static_cast<float>(step));
          return loss_of(job, data, moved);
        },
        [&](std::size_t i) { return static_cast<double>(static_cast<const float*>(gradient)[i]); });
  };
  check("dq", &MlaTensors::q, gradients.dq.data());
  check("dlatent", &MlaTensors::latent, gradients.dlatent.data());
  check("dk_rope", &MlaTensors::k_rope, gradients.dk_rope.data());
  check("dw_uk", &MlaTensors::w_uk, gradients.dw_uk[0].data());
  check("dw_uv", &MlaTensors::w_uv, gradients.dw_uv[1].data());
  expect_derivatives(
      "dsinks", data.forward.sinks.size(),
      [&](std::size_t i, double step) {
        MlaTensors moved = data.forward;
        moved.sinks[i] += static_cast<float>(step);
        return loss_of(job, data, moved);
      },
      [&](std::size_t i) { return static_cast<double>(gradients.dsinks[0][i]); });
}

// bf16 rounds K, V, P, dS, dK and dV; fp32 of the same inputs is right by the test above.
TEST(MlaBackward, RoundsAsOftenAsItSays) {
  MlaJob job{small_spec(Dtype::kBf16, {-1, 0}), uniform_batch(1, 300, 300), MlaForm::kExpanded};
  const BackwardData data = random_data(job, 5);
  const Gradients rounded = differentiate(job, on_the_cpu(), data, 1);
  MlaJob wide = job;
  wide.spec.dtype = Dtype::kF32;
  const auto widened = [](const std::vector<std::byte>& elements) {
    std::vector<std::byte> floats(2 * elements.size());
    for (std::size_t i = 0; i < elements.size() / 2; ++i) {
      store_element(floats.data() + 4 * i, Dtype::kF32, load_element(elements.data() + 2 * i, Dtype::kBf16));
    }
    return floats;
  };
  BackwardData wide_data = data;
  wide_data.forward = {widened(data.forward.q),
                       widened(data.forward.latent),
                       widened(data.forward.k_rope),
                       widened(data.forward.w_uk),
                       widened(data.forward.w_uv),
                       {},
                       {}};
  wide_data.result = run_mla_job(wide, on_the_cpu(), wide_data.forward, 1);
  wide_data.dout = widened(data.dout);
  const Gradients exact = differentiate(wide, on_the_cpu(), wide_data, 1);
  const auto expect_near = [](const char* name, const std::vector<std::byte>& made, Dtype dtype,
                              const std::vector<std::byte>& expected) {
    double error = 0.0;
    double size = 0.0;
    for (std::size_t i = 0; i < expected.size() / 4; ++i) {
      const double right = load_element(expected.data() + 4 * i, Dtype::kF32);
      const double is = load_element(made.data() + size_of(dtype) * i, dtype);
      error += (is - right) * (is - right);
      size += right * right;
    }
    EXPECT_LT(std::sqrt(error / size), 0x1p-7) << name;
    EXPECT_GT(error, 0.0) << name;
  };
  const auto bytes_of = [](const std::vector<float>& values) {
    const auto* const begin = reinterpret_cast<const std::byte*>(values.data());
    return std::vector<std::byte>(begin, begin + values.size() * sizeof(float));
  };
  expect_near("dq", rounded.dq, Dtype::kBf16, exact.dq);
  expect_near("dlatent", rounded.dlatent, Dtype::kBf16, exact.dlatent);
  expect_near("dk_rope", rounded.dk_rope, Dtype::kBf16, exact.dk_rope);
  expect_near("dw_uk", bytes_of(rounded.dw_uk[0]), Dtype::kF32, bytes_of(exact.dw_uk[0]));
  expect_near("dw_uv", bytes_of(rounded.dw_uv[0]), Dtype::kF32, bytes_of(exact.dw_uv[0]));
}

TEST(MlaBackward, WorldsLayoutsAndHeadsAtATime) {
  const Batch ragged = {{1, 1, 0}, {300, 300, 0}, {0, 0, 0}, {129, 129, 0}, {5, 700, 695}, {64, 0, 0}, {17, 40, -9}};
  MlaJob jobs[] = {{small_spec(Dtype::kBf16, {-1, 0}), ragged, MlaForm::kExpanded},
                   {small_spec(Dtype::kF32, {100, 30}), uniform_batch(2, 333, 333), MlaForm::kExpanded},
                   // Units of tokens that ranks share, and a sequence of more than one.
                   {small_spec(Dtype::kBf16, {-1, 0}), {{40, 2500, 2460}, {3, 2048, 2045}}, MlaForm::kExpanded}};
  jobs[0].spec.sinks = true;
  for (const MlaJob& job : jobs) {
    const BackwardData data = random_data(job, 7);
    const Gradients reference = differentiate(job, on_the_cpu(), data, 1);
    for (const int world : {1, 2, 3, 5}) {
      for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kContiguous}) {
        MlaOptions options = on_the_cpu(world == 2 ? 2 : 1);
        options.ring.layout.kind = kind;
        if (world == 3) options.ring.layout.stripe = 37;
        options.heads_at_a_time = world == 5 ? 3 : 4 - world;
        expect_same(differentiate(job, options, data, world), reference,
                    std::string(layout_name(kind)) + ", world " + std::to_string(world));
      }
    }
  }
}

// The first sequence alone, and with another one: its rows have the same bits.
TEST(MlaBackward, RowsDependOnTheirSequenceAlone) {
  const MlaJob both{small_spec(Dtype::kBf16, {-1, 0}), {{130, 200, 70}, {90, 90, 0}}, MlaForm::kExpanded};
  const BackwardData data = random_data(both, 9);
  MlaJob first = both;
  first.batch = {{130, 200, 70}};
  const Gradients all = differentiate(both, on_the_cpu(), data, 2);
  const Gradients alone = differentiate(first, on_the_cpu(), data, 1);
  const auto begins = [](const std::vector<std::byte>& packed, const std::vector<std::byte>& part) {
    return std::equal(part.begin(), part.end(), packed.begin());
  };
  EXPECT_TRUE(begins(all.dq, alone.dq));
  EXPECT_TRUE(begins(all.dlatent, alone.dlatent));
  EXPECT_TRUE(begins(all.dk_rope, alone.dk_rope));
}

TEST(MlaBackward, RefusesByName) {
  const auto self = make_self_transport();
  const auto refused = [&](const MlaJob& job, const MlaOptions& options, const char* part) {
    const Error error = error_of([&] { MlaBackward(job, *self, options); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  };
  MlaJob job{small_spec(Dtype::kBf16, {-1, 0}), uniform_batch(1, 40, 40), MlaForm::kAbsorbed};
  refused(job, on_the_cpu(), "no gradients for the absorbed form");
  job.form.reset();  // 40 queries: the absorbed form is chosen
  refused(job, on_the_cpu(), "no gradients for the absorbed form");
  MlaJob fp8 = job;
  fp8.form = MlaForm::kExpanded;
  fp8.spec.latent_dim = 128;
  fp8.format = latent_format(fp8.spec.rope_dim);
  refused(fp8, on_the_cpu(), "no gradients for FP8 latents");
  MlaOptions budget = on_the_cpu();
  budget.ring.memory_budget = std::size_t{1} << 30;
  job.form = MlaForm::kExpanded;
  refused(job, budget, "no gradients for MLA within a memory budget");
}

}  // namespace
}  // namespace ringattn::testing
