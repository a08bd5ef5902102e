// SPDX-License-Identifier: Apache-2.0
// What a CUDA graph can't hold is refused while it is captured, with the reason, and leaves the capture and the object
// whole: the same call does its work outside of it.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/gpu.hpp"
#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"
#include "ops/conv1d/causal_conv1d.hpp"
#include "ops/mla/mla.hpp"
#include "ops/reshard/reshard.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gpu_job.hpp"
#include "tests/support/ring_job.hpp"
#include "tests/support/ssm_rank.hpp"
#include "tests/support/two_ranks.hpp"

namespace ringattn::testing {
namespace {

constexpr int kHeads = kGpuHeads, kKvHeads = kGpuKvHeads, kDim = kGpuDim;
constexpr std::int64_t kManyBlocks = 8192, kSmallBlock = 128;  // tokens

// `enqueue` is refused in a capture, and works outside of it; `wait` waits for that.
void expect_refusal(Stream stream, const std::function<void()>& enqueue, const std::function<void()>& wait,
                    std::string_view what, std::string_view why) {
  Error refused(ErrorCode::kInternal, "");
  const Graph graph(stream, [&] { refused = error_of(enqueue); });
  const std::string text = refused.what();
  EXPECT_EQ(refused.code(), ErrorCode::kUnsupported) << text;
  EXPECT_EQ(text.find(what), 0U) << text;
  EXPECT_NE(text.find(why), std::string::npos) << text;
  EXPECT_NE(text.find("nqueue it outside of the capture."), std::string::npos) << text;
  enqueue();
  wait();
}

class GpuCapture : public ::testing::Test {
 protected:
  void SetUp() override {
    if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  }
};

// bf16 rows whose contents don't matter.
class Rows {
 public:
  Rows(Backend& backend, std::int64_t tokens, int heads, int dim)
      : array_(backend, static_cast<std::size_t>(std::max<std::int64_t>(1, tokens) * heads * dim * 2)),
        tokens_(tokens),
        heads_(heads),
        dim_(dim) {}

  const void* data() const { return array_.data(); }
  TensorView view() const { return dense_view(data(), Dtype::kBf16, tokens_, heads_, dim_); }
  MutableTensorView target() const {
    return dense_view(static_cast<void*>(array_.data()), Dtype::kBf16, tokens_, heads_, dim_);
  }
  // As consecutive pages of a cache.
  CacheView pages(std::int64_t page_size) const {
    return {data(),        Dtype::kBf16, tokens_ / page_size, page_size, heads_, dim_, page_size * heads_ * dim_,
            heads_ * dim_, dim_};
  }

 private:
  DeviceArray array_;
  std::int64_t tokens_;
  int heads_, dim_;
};

// One rank's memory for attention.
struct AttentionRows {
  explicit AttentionRows(Attention& attention)
      : q(attention.backend(), attention.q_rows(), kHeads, kDim),
        k(attention.backend(), attention.k_rows(), kKvHeads, kDim),
        v(attention.backend(), attention.k_rows(), kKvHeads, kDim),
        out(attention.backend(), attention.q_rows(), kHeads, kDim),
        workspace(attention.backend().allocate(attention.workspace_bytes())) {}

  std::span<std::byte> space() const { return {workspace.data(), workspace.bytes()}; }

  Rows q, k, v, out;
  Buffer workspace;
};

void expect_attention_refuses(Attention& attention, const AttentionRows& rows, const Inputs& inputs,
                              std::string_view why) {
  const Stream stream = attention.backend().stream();
  const Outputs outputs{rows.out.target(), {}, {}};
  expect_refusal(
      stream, [&] { attention.enqueue(inputs, outputs, rows.space(), stream); }, [&] { attention.wait(); },
      "a graph can't hold this run", why);
}

TEST_F(GpuCapture, OfPagesIsRefused) {
  constexpr std::int64_t kTokens = 1024, kPage = 64;
  const auto self = make_self_transport(MemoryKind::kDevice);
  Job job = gpu_job(kTokens);
  job.page_size = kPage;
  Attention attention(job, *self, on_gpu());
  const AttentionRows rows(attention);
  std::vector<std::int32_t> table;
  for (std::int32_t page = 0; page < kTokens / kPage; ++page) table.push_back(page);
  Inputs inputs;
  inputs.q = rows.q.view();
  inputs.pages = {rows.k.pages(kPage), rows.v.pages(kPage), table, kTokens / kPage};
  expect_attention_refuses(attention, rows, inputs,
                           "its block table lies in host memory, where a replay does not read it");
}

TEST_F(GpuCapture, OfARunThatIsWaitedForIsRefused) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  Attention attention(gpu_job(500), *self, on_gpu());
  const AttentionRows rows(attention);
  const Inputs inputs{rows.q.view(), rows.k.view(), rows.v.view()};
  const Outputs outputs{rows.out.target(), {}, {}};
  const Stream stream = attention.backend().stream();
  Error refused(ErrorCode::kInternal, "");
  const Graph graph(stream, [&] { refused = error_of([&] { attention.run(inputs, outputs, rows.space(), stream); }); });
  EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
  EXPECT_STREQ(
      refused.what(),
      "a graph can't hold a run that waits for its end (captured work has not started). Use enqueue(), or run it "
      "outside of the capture.");
  attention.run(inputs, outputs, rows.space(), stream);
}

TEST_F(GpuCapture, OfManyBlocksIsRefused) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  Attention attention(gpu_job(kManyBlocks), *self, on_gpu(kSmallBlock));
  const AttentionRows rows(attention);
  expect_attention_refuses(attention, rows, {rows.q.view(), rows.k.view(), rows.v.view()},
                           "its 64 blocks share memory for their tables");
}

// Absorbed, with queries and O in the latent: no matrices.
void expect_mla_refuses(Transport& world, std::int64_t tokens, std::int64_t block, std::string_view why) {
  MlaSpec spec;
  spec.dtype = Dtype::kBf16;
  spec.heads = kHeads;
  spec.head_dim = spec.head_dim_v = 128;
  spec.rope_dim = 64;
  spec.latent_dim = 512;
  spec.softmax_scale = default_softmax_scale(spec);
  MlaOptions options;
  options.ring = on_gpu(block);
  Mla latent({spec, uniform_batch(1, tokens, tokens), MlaForm::kAbsorbed}, world, options);
  Backend& backend = latent.backend();
  const Rows q(backend, latent.q_rows(), spec.heads, spec.latent_dim + spec.rope_dim);
  const Rows rows(backend, latent.k_rows(), 1, spec.latent_dim);
  const Rows k_rope(backend, latent.k_rows(), 1, spec.rope_dim);
  const Rows out(backend, latent.q_rows(), spec.heads, spec.latent_dim);
  const Buffer workspace = backend.allocate(latent.workspace_bytes());
  const MlaInputs inputs{q.view(), rows.view(), k_rope.view(), {}, {}};
  const Stream stream = backend.stream();
  expect_refusal(
      stream,
      [&] {
        latent.enqueue(inputs, {out.target(), {}}, {workspace.data(), workspace.bytes()}, stream);
      },
      [&] { latent.wait(); }, "a graph can't hold this run", why);
  world.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

TEST_F(GpuCapture, OfManyBlocksOfMlaIsRefused) {
  expect_mla_refuses(*make_self_transport(MemoryKind::kDevice), kManyBlocks, kSmallBlock,
                     "its 64 blocks share memory for their tables");
}

TEST_F(GpuCapture, OfMlaOfTwoRanksIsRefused) {
  in_two_ranks("p2p", [](Transport& world) {
    expect_mla_refuses(world, 1500, 0, "exchanges blocks with 1 other ranks, which a replay would not do");
  });
}

TEST_F(GpuCapture, OfAnSsmOfTwoRanksIsRefused) {
  const SsmCase given = make_ssm_case(small_ssm(2, false), {2 * kSuperSegmentTokens, 100}, true, 2, "cuda");
  in_two_ranks("p2p", [&](Transport& world) {
    SsmOptions options;
    options.kernel.backend = "cuda";
    Ssm scan(job_of(given), world, options);
    SsmRank rank(scan, world.rank(), given);
    const Stream stream = scan.backend().stream();
    expect_refusal(
        stream, [&] { scan.enqueue(rank.inputs(), rank.outputs(), stream); }, [&] { scan.wait(); },
        "a graph can't hold this scan", "sends states to other ranks, which a replay would not do");
    EXPECT_EQ(rank.differences(), 0);
    world.barrier(Deadline::after(60.0));
  });
}

TEST_F(GpuCapture, OfAConv1dOfTwoRanksIsRefused) {
  in_two_ranks("p2p", [](Transport& world) {
    CausalConv1dJob job;
    job.spec.channels = 64;
    job.lengths = {2 * kSuperSegmentTokens, 100};
    CausalConv1dOptions options;
    options.kernel.backend = "cuda";
    CausalConv1d convolution(job, world, options);
    Backend& backend = convolution.backend();
    const std::int64_t tokens = convolution.layout().tokens(world.rank());
    const Rows x(backend, tokens, 1, job.spec.channels), y(backend, tokens, 1, job.spec.channels);
    const DeviceArray weight(backend, static_cast<std::size_t>(job.spec.channels * job.spec.width) * sizeof(float));
    CausalConv1dInputs inputs;
    inputs.x = x.view();
    inputs.weight = weight.floats();
    const Stream stream = backend.stream();
    expect_refusal(
        stream, [&] { convolution.enqueue(inputs, {y.target()}, stream); }, [&] { convolution.wait(); },
        "a graph can't hold this convolution", "receives halos from other ranks, which a replay would not do");
    world.barrier(Deadline::after(60.0));
  });
}

TEST_F(GpuCapture, OfRowsOnTheirWayToAnotherRankIsRefused) {
  in_two_ranks("p2p", [](Transport& world) {
    constexpr std::int64_t kTokens = 256;
    const std::vector<std::int64_t> lengths{kTokens};
    const auto halves = [&](std::int64_t middle) {
      return Layout(lengths, {{{0, 0, middle}}, {{0, middle, kTokens}}});
    };
    const Layout from = halves(100), to = halves(150);
    const AttentionChoice choice = choose_kernel(gpu_job(1).spec, KernelRequest{"cuda", "auto"});
    const auto backend = choice.row->make_backend({1, world.device()});
    Reshard reshard(from, to, kDim * 2, world, *backend);
    const Rows rows(*backend, from.tokens(world.rank()), 1, kDim);
    const DeviceArray target(*backend, static_cast<std::size_t>(to.tokens(world.rank()) * kDim * 2));
    const Stream stream = backend->stream();
    expect_refusal(
        stream, [&] { reshard.enqueue(rows.data(), target.data(), stream); }, [&] { reshard.wait(); },
        "a graph can't hold this reshard", "moves them to other ranks, which a replay would not do");
    world.barrier(Deadline::after(60.0));
  });
}

}  // namespace
}  // namespace ringattn::testing
