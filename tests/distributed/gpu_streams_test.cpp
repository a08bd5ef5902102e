// SPDX-License-Identifier: Apache-2.0
// A caller's stream: work enqueued on it before run() is seen by the job, also on the legacy default stream; what run()
// wrote is there for work enqueued after it.
#include <gtest/gtest.h>

#include <vector>

#include "base/gpu.hpp"
#include "comm/self.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kTokens = 4096;
constexpr int kHeads = 8;
constexpr int kKvHeads = 2;
constexpr int kDim = 128;

Job stream_job() {
  Job job;
  job.spec.heads = kHeads;
  job.spec.kv_heads = kKvHeads;
  job.spec.head_dim = job.spec.head_dim_v = kDim;
  job.spec.softmax_scale = 0.088F;
  job.batch = uniform_batch(1, kTokens, kTokens);
  return job;
}

// Uploads late: q, k and v are copied from pinned memory on the very stream that run() gets, after copies that keep it
// busy, with no wait between. The result is copied off on the same stream.
JobResult run_on(Attention& attention, const JobTensors& tensors, Stream stream) {
  const Job& job = attention.job();
  Backend& backend = attention.backend();
  const auto copy = [&](void* target, const void* source, std::size_t bytes) {
    const auto size = static_cast<std::int64_t>(bytes);
    backend.copy_rows(target, size, source, size, size, 1, stream);
  };
  std::vector<Buffer> kept;
  const auto upload = [&](const std::vector<std::byte>& bytes, int heads) {
    Buffer& pinned = kept.emplace_back(allocate_pinned(bytes.size()));
    std::copy(bytes.begin(), bytes.end(), pinned.data());
    const std::byte* source = pinned.data();
    std::byte* target = kept.emplace_back(backend.allocate(bytes.size())).data();
    constexpr std::size_t kBusyBytes = std::size_t{64} << 20;
    std::byte* busy = kept.emplace_back(backend.allocate(2 * kBusyBytes)).data();
    for (int i = 0; i < 50; ++i) copy(busy + kBusyBytes, busy, kBusyBytes);
    copy(target, source, bytes.size());
    return dense_view(static_cast<const void*>(target), job.spec.dtype, kTokens, heads, kDim);
  };
  const Inputs inputs{upload(tensors.q, kHeads), upload(tensors.k, kKvHeads), upload(tensors.v, kKvHeads), nullptr};
  JobResult result = poisoned_result(job, 1);
  const Buffer out = backend.allocate(result.out.size());
  const Buffer lse = backend.allocate(result.lse.size() * sizeof(float));
  const Buffer workspace = backend.allocate(attention.workspace_bytes());
  const Outputs outputs{dense_view(static_cast<void*>(out.data()), job.spec.dtype, kTokens, kHeads, kDim),
                        {reinterpret_cast<float*>(lse.data()), kHeads, 1},
                        std::nullopt};
  attention.run(inputs, outputs, {workspace.data(), workspace.bytes()}, stream);
  copy(result.out.data(), out.data(), out.bytes());
  copy(result.lse.data(), lse.data(), lse.bytes());
  backend.synchronize(stream, Deadline::after(60.0), {});
  return result;
}

TEST(GpuStreams, CallersAndTheLegacyDefaultStreamAreOrdered) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  const Job job = stream_job();
  const JobTensors tensors = random_tensors(job, 4);
  Options options;
  options.kernel.backend = "cuda";
  const JobResult reference = run_gpu_job(job, options, tensors, 1);
  const auto transport = make_self_transport(MemoryKind::kDevice);
  for (const std::int64_t block : {0, 1024}) {
    options.block_tokens = block;
    Attention attention(job, *transport, options);
    EXPECT_TRUE(run_on(attention, tensors, attention.backend().stream()).same_bits(reference)) << "a stream";
    EXPECT_TRUE(run_on(attention, tensors, Stream{}).same_bits(reference)) << "the legacy default stream";
  }
}

TEST(GpuStreams, TimesAreThoseOfTheDevice) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  const Job job = stream_job();
  Options options;
  options.kernel.backend = "cuda";
  options.block_tokens = 512;
  const JobResult result = run_gpu_job(job, options, random_tensors(job, 4), 2);
  for (const RunStats& stats : result.stats) {
    ASSERT_GT(stats.blocks.size(), 1U);
    double before = 0.0;
    for (const BlockTimes& block : stats.blocks) {
      EXPECT_LE(before, block.compute_begin);
      EXPECT_LE(block.wait_begin, block.compute_begin);
      EXPECT_LT(block.compute_begin, block.compute_end);
      before = block.compute_end;
    }
    EXPECT_GE(stats.seconds, before);
    EXPECT_LE(stats.exposed_comm_seconds, stats.seconds);
  }
}

}  // namespace
}  // namespace ringattn::testing
