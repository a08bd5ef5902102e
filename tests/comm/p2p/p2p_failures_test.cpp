// SPDX-License-Identifier: Apache-2.0
// What transport p2p must do where devices, not hosts, are late or ended, and with what it can't use. Two ranks that
// are threads of this process, on one GPU or two.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "comm/p2p/p2p.hpp"
#include "comm/threads.hpp"
#include "tests/comm/exchanges.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/stream_brake.hpp"

namespace ringattn::testing {
namespace {

constexpr std::size_t kBytes = 100'000;

class P2p : public ::testing::Test {
 protected:
  void SetUp() override {
    if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  }
};

void run_p2p(int size, const std::function<void(Transport&, cudaStream_t)>& rank_main) {
  run_threads_world(size, {}, [&](Transport& host) {
    const int device = host.rank() % static_cast<int>(visible_gpus().size());
    const DeviceGuard guard(device);
    const CudaStream stream;
    rank_stream() = Stream{stream.get()};
    const std::unique_ptr<Transport> world = make_p2p_transport(host.split_world(size, test_deadline()), device);
    rank_main(*world, stream.get());
  });
}

// Polls as an engine does; returns what progress() throws.
Error error_of_progress(Transport& world) {
  return error_of([&] {
    for (const Deadline deadline = test_deadline(); !deadline.expired(); std::this_thread::yield()) world.progress();
  });
}

void expect_drains(cudaStream_t stream) {
  const Deadline deadline = test_deadline();
  while (cudaStreamQuery(stream) == cudaErrorNotReady && !deadline.expired()) std::this_thread::yield();
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
}

Exchange swap(const Transport& world, const Memory& out, const Memory& in, std::size_t bytes = kBytes) {
  const int peer = 1 - world.rank();
  return {"block 2 of 9", {{peer, 0, {{out.data(), bytes}}}}, {{peer, 0, {{in.data(), bytes}}}}};
}

TEST_F(P2p, NamesThePeerWhoseStreamDoesNotCome) {
  if (!streams_have_queues()) GTEST_SKIP() << "needs a hardware queue for each stream";
  StreamBrake brake;
  std::atomic<bool> blamed{false};
  EXPECT_THROW(run_p2p(2,
                       [&](Transport& world, cudaStream_t stream) {
                         const Memory out(world, Bytes(kBytes));
                         const Memory in(world, Bytes(kBytes));
                         world.barrier(test_deadline());
                         if (world.rank() == 1) brake.hold(stream);
                         const Ticket ticket = world.post(swap(world, out, in), rank_stream());
                         world.wait(ticket, rank_stream(), world.rank() == 0 ? Deadline::after(0.1) : test_deadline());
                         if (world.rank() == 1) {
                           const Error error = error_of_progress(world);
                           EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
                           world.abandon();
                           brake.release();
                           expect_drains(stream);
                           return;
                         }
                         const Error error = error_of_progress(world);
                         EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
                         EXPECT_NE(std::string(error.what()).find("block 2 of 9"), std::string::npos) << error.what();
                         EXPECT_NE(std::string(error.what()).find("waits for rank 1"), std::string::npos)
                             << error.what();
                         blamed = true;
                         world.abandon();
                         expect_drains(stream);
                         throw error;
                       }),
               Error);
  EXPECT_TRUE(blamed);
}

// A graph would replay the flags of one exchange. The world goes on.
TEST_F(P2p, RefusesToPostOnAStreamThatIsBeingCaptured) {
  run_p2p(2, [](Transport& world, cudaStream_t) {
    const Bytes content(kBytes, std::byte{7});
    const Memory out(world, content);
    const Memory in(world, Bytes(kBytes));
    Error refused(ErrorCode::kInternal, "");
    const Graph graph(rank_stream(),
                      [&] { refused = error_of([&] { world.post(swap(world, out, in), rank_stream()); }); });
    EXPECT_EQ(refused.code(), ErrorCode::kUsage);
    EXPECT_EQ(std::string(refused.what()).find("can't post on a stream that is being captured"), 0U) << refused.what();
    world.wait(world.post(swap(world, out, in), rank_stream()), rank_stream(), test_deadline());
    EXPECT_EQ(in.read(), content);
    world.barrier(test_deadline());
  });
}

TEST_F(P2p, AnAbortReachesARankWhoseStreamWaits) {
  if (!streams_have_queues()) GTEST_SKIP() << "needs a hardware queue for each stream";
  StreamBrake brake;
  std::atomic<int> heard{0};
  run_p2p(2, [&](Transport& world, cudaStream_t stream) {
    const Memory out(world, Bytes(kBytes));
    const Memory in(world, Bytes(kBytes));
    world.barrier(test_deadline());
    if (world.rank() == 1) brake.hold(stream);
    world.wait(world.post(swap(world, out, in), rank_stream()), rank_stream(), test_deadline());
    if (world.rank() == 1) {
      world.barrier(test_deadline());
      EXPECT_TRUE(world.abort(Error(ErrorCode::kFile, "the disk is on fire.")));
      brake.release();
    } else {
      const Error error = error_of([&] {
        world.barrier(test_deadline());  // may be late enough to hear of the abort itself
        throw error_of_progress(world);
      });
      EXPECT_EQ(error.code(), ErrorCode::kFile) << error.what();
      ++heard;
      world.abandon();
    }
    expect_drains(stream);
  });
  EXPECT_EQ(heard, 1);
}

// The caller finishes before the device does: the transport ends in order after it.
TEST_F(P2p, EndsWhileStreamsAreStillBehind) {
  for (int i = 0; i < 20; ++i) {
    run_p2p(2, [&](Transport& world, cudaStream_t stream) {
      constexpr std::size_t kLarge = 16 << 20;
      const Buffer source = allocate_device(kLarge, world.device());
      const Buffer target = allocate_device(kLarge, world.device());
      check_cuda(cudaMemsetAsync(source.data(), 17 + world.rank(), kLarge, stream), "cudaMemsetAsync");
      const int peer = 1 - world.rank();
      const std::unique_ptr<Transport> part = world.split_world(2, test_deadline());
      Exchange exchange{"", {{peer, 0, {{source.data(), kLarge}}}}, {{peer, 0, {{target.data(), kLarge}}}}};
      part->wait(part->post(std::move(exchange), rank_stream()), rank_stream(), test_deadline());
      Bytes found(kLarge);
      check_cuda(cudaMemcpyAsync(found.data(), target.data(), kLarge, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
      check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      EXPECT_EQ(std::count(found.begin(), found.end(), std::byte(17 + peer)), static_cast<std::ptrdiff_t>(kLarge));
    });
  }
}

TEST_F(P2p, EndsWithExchangesInFlight) {
  for (const bool waited : {false, true}) {
    run_p2p(2, [&](Transport& world, cudaStream_t stream) {
      const Memory out(world, Bytes(kBytes));
      const Memory in(world, Bytes(kBytes));
      {
        const std::unique_ptr<Transport> part = world.split_world(2, test_deadline());
        const Ticket ticket = part->post(swap(world, out, in), rank_stream());
        if (waited) part->wait(ticket, rank_stream(), test_deadline());
      }
      expect_drains(stream);
      world.barrier(test_deadline());
    });
  }
}

TEST_F(P2p, StreamsOfTheCallerMayDiffer) {
  run_p2p(2, [&](Transport& world, cudaStream_t) {
    const CudaStream streams[3];
    for (std::uint32_t i = 0; i < 30; ++i) {
      const Memory out(world, payload_of(i, world.rank(), kBytes));
      const Memory in(world, Bytes(kBytes));
      const Stream posted{streams[i % 3].get()};
      const Stream waited{i % 2 == 0 ? streams[i % 3].get() : streams[(i + 1) % 3].get()};
      world.wait(world.post(swap(world, out, in), posted), waited, test_deadline());
      check_cuda(cudaStreamSynchronize(cuda_stream(waited)), "cudaStreamSynchronize");
      EXPECT_TRUE(in.read() == payload_of(i, 1 - world.rank(), kBytes)) << i;
    }
  });
}

TEST_F(P2p, RefusesMemoryThatPeersCannotMap) {
  run_p2p(2, [&](Transport& world, cudaStream_t) {
    Bytes host(8);
    const Memory device(world, Bytes(8));
    const int peer = 1 - world.rank();
    for (std::byte* wrong : {host.data(), device.data() + 1}) {
      const Error error = error_of([&] { world.post({"block 1 of 2", {}, {{peer, 0, {{wrong, 8}}}}}, rank_stream()); });
      EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
      EXPECT_NE(std::string(error.what()).find("allocate_device"), std::string::npos) << error.what();
    }
    expect_ring(world, 3, 100);  // nothing of it was posted
  });
}

TEST_F(P2p, RefusesStreamsThatAreCaptured) {
  run_p2p(2, [&](Transport& world, cudaStream_t stream) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    const Error error = error_of([&] { world.post({}, rank_stream()); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    cudaGraphDestroy(graph);
    expect_ring(world, 1, 100);
  });
}

// Other users of the GPU change what is free, too, so this is tried several times: memory that leaks never comes back.
TEST_F(P2p, FreedMemoryGoesBackAtTheNextAllGather) {
  constexpr std::size_t kLarge = std::size_t{1} << 30;
  constexpr int kTries = 10;
  std::atomic<int> came_back{0};
  run_p2p(2, [&](Transport& world, cudaStream_t stream) {
    expect_ring(world, 2, 100);
    for (int i = 0; i < kTries; ++i) {
      world.barrier(test_deadline());
      const std::size_t before = gpu_memory(world.device()).free;
      world.barrier(test_deadline());
      {
        const Memory out(world, Bytes(8));
        const Buffer in = allocate_device(kLarge, world.device());
        const int peer = 1 - world.rank();
        Exchange exchange{"", {{peer, 0, {{out.data(), 8}}}}, {{peer, 0, {{in.data() + kLarge - 8, 8}}}}};
        world.wait(world.post(std::move(exchange), rank_stream()), rank_stream(), test_deadline());
        check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      }
      world.all_gather("", test_deadline());
      world.barrier(test_deadline());
      if (world.rank() == 0 && gpu_memory(world.device()).free + kLarge / 2 > before) ++came_back;
    }
    world.barrier(test_deadline());
  });
  EXPECT_GT(came_back, 0);
}

TEST_F(P2p, RefusesARankWithoutAGpu) {
  run_threads_world(2, {}, [&](Transport& host) {
    const int none = static_cast<int>(visible_gpus().size());
    const Error error =
        error_of([&] { make_p2p_transport(host.split_world(2, test_deadline()), host.rank() == 0 ? 0 : none); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    EXPECT_NE(std::string(error.what()).find("rank 1 has no GPU"), std::string::npos) << error.what();
    host.barrier(test_deadline());  // the world lives on
  });
}

}  // namespace
}  // namespace ringattn::testing
