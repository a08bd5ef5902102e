// SPDX-License-Identifier: Apache-2.0
// Runs that are enqueued on a GPU's stream, consecutively or captured in a graph, give the bits that they give one by
// one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gpu_job.hpp"
#include "tests/support/ring_job.hpp"
#include "tests/support/stream_brake.hpp"
#include "tests/support/two_ranks.hpp"

namespace ringattn::testing {
namespace {

constexpr int kHeads = kGpuHeads, kKvHeads = kGpuKvHeads, kDim = kGpuDim;
constexpr int kLayers = 32;

// One rank's rows of a layer, on its GPU.
class DeviceLayer {
 public:
  DeviceLayer(Attention& attention, int rank, std::uint64_t seed) : attention_(attention), rank_(rank) {
    const auto place = [&](std::int64_t rows, int heads) {
      return attention.backend().allocate(static_cast<std::size_t>(rows * heads * kDim * 2));
    };
    q_ = place(attention.q_rows(), kHeads);
    k_ = place(attention.k_rows(), kKvHeads);
    v_ = place(attention.k_rows(), kKvHeads);
    out_ = place(attention.q_rows(), kHeads);
    q_rows_ = attention.q_rows();
    k_rows_ = attention.k_rows();
    lse_ = attention.backend().allocate(static_cast<std::size_t>(attention.q_rows() * kHeads) * sizeof(float));
    load(seed);
  }

  // New contents in the same places.
  void load(std::uint64_t seed) {
    const JobTensors tensors = random_tensors(attention_.job(), seed);
    const auto upload = [&](const Buffer& to, const Layout& layout, const std::vector<std::byte>& packed, int heads) {
      std::vector<std::byte> rows(to.bytes());
      layout.shard(rank_, packed.data(), rows.data(), heads * kDim * 2);
      copy(to.data(), rows.data(), rows.size());
    };
    upload(q_, attention_.layout().queries, tensors.q, kHeads);
    upload(k_, attention_.layout().keys, tensors.k, kKvHeads);
    upload(v_, attention_.layout().keys, tensors.v, kKvHeads);
    attention_.backend().fill_bytes(out_.data(), std::byte{0xff}, out_.bytes(), stream());
    attention_.backend().fill_bytes(lse_.data(), std::byte{0xff}, lse_.bytes(), stream());
    land();
  }

  Inputs inputs() const {
    const auto view = [](const Buffer& buffer, std::int64_t rows, int heads) {
      return dense_view(static_cast<const void*>(buffer.data()), Dtype::kBf16, rows, heads, kDim);
    };
    return {view(q_, q_rows_, kHeads), view(k_, k_rows_, kKvHeads), view(v_, k_rows_, kKvHeads)};
  }
  Outputs outputs() const {
    return {dense_view(static_cast<void*>(out_.data()), Dtype::kBf16, q_rows_, kHeads, kDim),
            {reinterpret_cast<float*>(lse_.data()), kHeads, 1},
            {}};
  }
  // O, then LSE.
  std::vector<std::byte> result() const {
    std::vector<std::byte> bytes(out_.bytes() + lse_.bytes());
    copy(bytes.data(), out_.data(), out_.bytes());
    copy(bytes.data() + out_.bytes(), lse_.data(), lse_.bytes());
    land();
    return bytes;
  }

 private:
  Stream stream() const { return attention_.backend().stream(); }
  void copy(void* to, const void* from, std::size_t bytes) const {
    const auto size = static_cast<std::int64_t>(bytes);
    attention_.backend().copy_rows(to, size, from, size, size, 1, stream());
    land();
  }
  void land() const {
    Backend& backend = attention_.backend();
    backend.synchronize(stream(), Deadline::after(60.0), {});
  }

  Attention& attention_;
  int rank_;
  std::int64_t q_rows_ = 0;  // when it was made
  std::int64_t k_rows_ = 0;
  Buffer q_, k_, v_, out_, lse_;
};

std::vector<DeviceLayer> layers_of(Attention& attention, int rank, int count, std::uint64_t seed) {
  std::vector<DeviceLayer> layers;
  for (int i = 0; i < count; ++i) layers.emplace_back(attention, rank, seed + static_cast<std::uint64_t>(i));
  return layers;
}

// In the order of the layers what each gives when it is run by itself.
std::vector<std::vector<std::byte>> results_one_by_one(Attention& attention, std::vector<DeviceLayer>& layers,
                                                       std::span<std::byte> workspace) {
  std::vector<std::vector<std::byte>> results;
  for (DeviceLayer& layer : layers) {
    attention.run(layer.inputs(), layer.outputs(), workspace, attention.backend().stream());
    results.push_back(layer.result());
  }
  return results;
}

class GpuEnqueue : public ::testing::Test {
 protected:
  void SetUp() override {
    if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  }
};

void expect_layers_in_a_row(Transport& world, std::int64_t block_tokens) {
  Attention attention(gpu_job(1500), world, on_gpu(block_tokens));
  const Buffer workspace = attention.backend().allocate(attention.workspace_bytes());
  const std::span<std::byte> space(workspace.data(), workspace.bytes());
  std::vector<DeviceLayer> layers = layers_of(attention, world.rank(), kLayers, 3);
  const auto expected = results_one_by_one(attention, layers, space);
  for (int i = 0; i < kLayers; ++i) layers[static_cast<std::size_t>(i)].load(3 + static_cast<std::uint64_t>(i));
  for (DeviceLayer& layer : layers) {
    attention.enqueue(layer.inputs(), layer.outputs(), space, attention.backend().stream());
  }
  attention.wait();
  for (std::size_t i = 0; i < layers.size(); ++i) EXPECT_EQ(layers[i].result(), expected[i]) << "layer " << i;
  world.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

TEST_F(GpuEnqueue, ThirtyTwoLayersAreThirtyTwoRuns) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  for (const std::int64_t block : {0, 512}) expect_layers_in_a_row(*self, block);
}

TEST_F(GpuEnqueue, ThirtyTwoLayersOfTwoRanks) {
  in_two_ranks("p2p", [](Transport& world) { expect_layers_in_a_row(world, 512); });
}

TEST_F(GpuEnqueue, ThirtyTwoLayersOfTwoRanksByNccl) {
  if (visible_gpus().size() < 2) GTEST_SKIP() << "needs two GPUs: NCCL takes one for each rank";
  in_two_ranks("nccl", [](Transport& world) { expect_layers_in_a_row(world, 512); });
}

// Layers are enqueued after work that doesn't end before all of them are enqueued: no call may wait for the device
// meanwhile.
void expect_no_wait(Transport& world) {
  Attention attention(gpu_job(1500), world, on_gpu(512));
  const Stream stream = attention.backend().stream();
  const Buffer workspace = attention.backend().allocate(attention.workspace_bytes());
  const std::span<std::byte> space(workspace.data(), workspace.bytes());
  std::vector<DeviceLayer> layers = layers_of(attention, world.rank(), 4, 3);
  const auto expected = results_one_by_one(attention, layers, space);
  for (std::size_t i = 0; i < layers.size(); ++i) layers[i].load(3 + i);
  StreamBrake brake;
  brake.hold(cuda_stream(stream));
  for (DeviceLayer& layer : layers) attention.enqueue(layer.inputs(), layer.outputs(), space, stream);
  EXPECT_EQ(cudaStreamQuery(cuda_stream(stream)), cudaErrorNotReady) << "enqueue() has waited for the device";
  brake.release();
  attention.wait();
  for (std::size_t i = 0; i < layers.size(); ++i) EXPECT_EQ(layers[i].result(), expected[i]) << "layer " << i;
  world.barrier(Deadline::after(60.0));
}

TEST_F(GpuEnqueue, WaitsForNothing) { expect_no_wait(*make_self_transport(MemoryKind::kDevice)); }

TEST_F(GpuEnqueue, WaitsForNothingBetweenTwoRanks) {
  if (!streams_have_queues()) GTEST_SKIP() << "needs a hardware queue for each stream";
  in_two_ranks("p2p", expect_no_wait);
}

// Lengths change between runs that have not been waited for.
void expect_lengths_in_a_row(Transport& world, std::int64_t block_tokens) {
  const Job longest{gpu_job(1).spec, {{{1500, 1500, 0}, {700, 3000, 2300}, {1, 900, 899}}}};
  const std::vector<Batch> lengths{{{1499, 1499, 0}, {700, 2500, 1800}, {1, 900, 899}},
                                   {{1, 1, 0}, {1, 1, 0}, {1, 1, 0}},
                                   longest.batch,
                                   {{300, 1000, 700}}};
  Options options = on_gpu(block_tokens);
  options.shorter_lengths = true;
  Attention attention(longest, world, options);
  const Buffer workspace = attention.backend().allocate(attention.workspace_bytes());
  const std::span<std::byte> space(workspace.data(), workspace.bytes());
  std::vector<DeviceLayer> layers;
  std::vector<std::vector<std::byte>> expected;
  for (const Batch& batch : lengths) {
    Attention alone({longest.spec, batch}, world, on_gpu(block_tokens));
    const Buffer own = alone.backend().allocate(alone.workspace_bytes());
    std::vector<DeviceLayer> layer = layers_of(alone, world.rank(), 1, 3);
    expected.push_back(results_one_by_one(alone, layer, {own.data(), own.bytes()}).front());
    world.barrier(Deadline::after(60.0));
    attention.set_lengths(batch);
    layers.emplace_back(attention, world.rank(), 3);
  }
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    attention.set_lengths(lengths[i]);
    attention.enqueue(layers[i].inputs(), layers[i].outputs(), space, attention.backend().stream());
  }
  attention.wait();
  for (std::size_t i = 0; i < lengths.size(); ++i) EXPECT_EQ(layers[i].result(), expected[i]) << "lengths " << i;
  world.barrier(Deadline::after(60.0));
}

TEST_F(GpuEnqueue, LengthsChangeBetweenRuns) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  for (const std::int64_t block : {0, 512}) expect_lengths_in_a_row(*self, block);
  in_two_ranks("p2p", [](Transport& world) { expect_lengths_in_a_row(world, 512); });
}

void expect_jobs_in_turn(Transport& world) {
  Attention longer(gpu_job(2000), world, on_gpu(512));
  Attention shorter(gpu_job(700), world, on_gpu());
  const Stream stream = longer.backend().stream();
  const Buffer workspace = longer.backend().allocate(std::max(longer.workspace_bytes(), shorter.workspace_bytes()));
  const std::span<std::byte> space(workspace.data(), workspace.bytes());
  std::vector<DeviceLayer> long_layers = layers_of(longer, world.rank(), 8, 1);
  std::vector<DeviceLayer> short_layers = layers_of(shorter, world.rank(), 8, 50);
  const auto long_expected = results_one_by_one(longer, long_layers, space);
  const auto short_expected = results_one_by_one(shorter, short_layers, space);
  for (std::size_t i = 0; i < 8; ++i) {
    long_layers[i].load(1 + i);
    short_layers[i].load(50 + i);
  }
  for (std::size_t i = 0; i < 8; ++i) {
    longer.enqueue(long_layers[i].inputs(), long_layers[i].outputs(), space, stream);
    shorter.enqueue(short_layers[i].inputs(), short_layers[i].outputs(), space, stream);
  }
  shorter.wait();
  longer.wait();
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(long_layers[i].result(), long_expected[i]) << i;
    EXPECT_EQ(short_layers[i].result(), short_expected[i]) << i;
  }
  world.barrier(Deadline::after(60.0));
}

TEST_F(GpuEnqueue, TwoJobsShareAStream) { expect_jobs_in_turn(*make_self_transport(MemoryKind::kDevice)); }

TEST_F(GpuEnqueue, TwoJobsOfTwoRanksShareAStream) { in_two_ranks("p2p", expect_jobs_in_turn); }

TEST_F(GpuEnqueue, AGraphIsReplayedOnOtherContents) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  for (const std::int64_t block : {0, 512}) {
    Attention attention(gpu_job(1500), *self, on_gpu(block));
    const Stream stream = attention.backend().stream();
    const Buffer workspace = attention.backend().allocate(attention.workspace_bytes());
    const std::span<std::byte> space(workspace.data(), workspace.bytes());
    std::vector<DeviceLayer> layers = layers_of(attention, 0, 2, 1);
    const Graph graph(stream, [&] {
      for (DeviceLayer& layer : layers) attention.enqueue(layer.inputs(), layer.outputs(), space, stream);
    });
    for (const std::uint64_t seed : {1, 100, 200}) {
      for (std::size_t i = 0; i < layers.size(); ++i) layers[i].load(seed + i);
      const auto expected = results_one_by_one(attention, layers, space);
      for (std::size_t i = 0; i < layers.size(); ++i) layers[i].load(seed + i);
      graph.launch();
      graph.launch();  // at once again: nothing of the first launch is left over
      for (std::size_t i = 0; i < layers.size(); ++i) EXPECT_EQ(layers[i].result(), expected[i]) << "seed " << seed;
    }
  }
}

TEST_F(GpuEnqueue, AGraphOfOtherLengthsIsRefused) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  Options options = on_gpu();
  options.shorter_lengths = true;
  Attention attention(gpu_job(1500), *self, options);
  attention.set_lengths(uniform_batch(1, 700, 700));
  const Stream stream = attention.backend().stream();
  const Buffer workspace = attention.backend().allocate(attention.workspace_bytes());
  const std::span<std::byte> space(workspace.data(), workspace.bytes());
  const DeviceLayer layer(attention, 0, 1);
  Error refused(ErrorCode::kInternal, "");
  const Graph graph(
      stream, [&] { refused = error_of([&] { attention.enqueue(layer.inputs(), layer.outputs(), space, stream); }); });
  EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(refused.what()).find("made for one run"), std::string::npos) << refused.what();
}

TEST_F(GpuEnqueue, AGraphOfSeveralRanksIsRefused) {
  in_two_ranks("p2p", [](Transport& world) {
    Attention attention(gpu_job(1500), world, on_gpu());
    const Stream stream = attention.backend().stream();
    const Buffer workspace = attention.backend().allocate(attention.workspace_bytes());
    const std::span<std::byte> space(workspace.data(), workspace.bytes());
    std::vector<DeviceLayer> layers = layers_of(attention, world.rank(), 1, 1);
    Error refused(ErrorCode::kInternal, "");
    const Graph graph(stream, [&] {
      refused = error_of([&] { attention.enqueue(layers[0].inputs(), layers[0].outputs(), space, stream); });
    });
    EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(refused.what()).find("a replay would not do"), std::string::npos) << refused.what();
    // The capture and the world are still whole.
    attention.run(layers[0].inputs(), layers[0].outputs(), space, stream);
    world.barrier(Deadline::after(60.0));
  });
}

}  // namespace
}  // namespace ringattn::testing
