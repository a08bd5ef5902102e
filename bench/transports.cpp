// SPDX-License-Identifier: Apache-2.0
// Measures only device transports, through the Transport interface, two GPUs at a time: the time of an exchange in
// which both ranks send, from the stream's post to its wait. Prints medians of event times on the slower rank, one JSON
// line per case.
//   transports_bench p2p|nccl [lanes or CTAs, 0: the default] [samples]      (ranks are threads, one a GPU, two at
//   least) mpirun -np 2 transports_bench p2p|nccl 0 [samples]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#if defined(RINGATTN_BENCH_NCCL)
#include "comm/nccl.hpp"
#endif
#include "comm/launcher.hpp"
#include "comm/p2p/p2p.hpp"
#include "comm/threads.hpp"
#include "comm/world.hpp"

namespace ringattn {
namespace {

constexpr double kMaxWait = 60.0;

struct Case {
  std::size_t spans;
  std::size_t bytes;  // of each
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::unique_ptr<Transport> make(const std::string& name, std::unique_ptr<Transport> control, int device, int option) {
#if defined(RINGATTN_BENCH_NCCL)
  if (name == "nccl") {
    NcclOptions options;
    options.max_ctas = option;
    return make_nccl_transport(std::move(control), device, options);
  }
#endif
  if (name != "p2p") fail(ErrorCode::kUsage, fmt::format("unknown transport '{}'", name), {}, "p2p or nccl.");
  P2pOptions options;
  if (option > 0) options.lanes = option;
  return make_p2p_transport(std::move(control), device, options);
}

// What a rank's exchange with its neighbours needs.
class Pair {
 public:
  Pair(Transport& world, cudaStream_t stream)
      : world_(world),
        stream_(stream),
        out_(allocate_device(kMaxBytes, world.device())),
        in_(allocate_device(kMaxBytes, world.device())) {}

  // Every span lies apart from the next, so that none are joined.
  Exchange exchange(const Case& one) const {
    const std::size_t stride = one.spans == 1 ? one.bytes : one.bytes * 5 / 4;
    Exchange all;
    all.sends.push_back({(world_.rank() + 1) % world_.size(), 0, {}});
    all.receives.push_back({(world_.rank() + world_.size() - 1) % world_.size(), 0, {}});
    for (std::size_t i = 0; i < one.spans; ++i) {
      all.sends[0].spans.push_back({out_.data() + i * stride, one.bytes});
      all.receives[0].spans.push_back({in_.data() + i * stride, one.bytes});
    }
    return all;
  }

  void barrier() { world_.barrier(Deadline::after(kMaxWait)); }

  // Mean microseconds of one of `repeats` consecutive exchanges: on the device, and of the host's calls.
  std::pair<double, double> time(const Case& one, int repeats) {
    CudaEvent begin(true), end(true);
    barrier();
    begin.record(stream_);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) {
      world_.wait(world_.post(exchange(one), {stream_}), {stream_}, Deadline::after(kMaxWait));
    }
    const double host = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    end.record(stream_);
    while (!end.passed()) world_.progress();
    float milliseconds = 0.0F;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsedTime");
    return {static_cast<double>(milliseconds) * 1e3 / repeats, host * 1e6 / repeats};
  }

 private:
  static constexpr std::size_t kMaxBytes = (std::size_t{1} << 30) + (std::size_t{1} << 28);

  Transport& world_;
  cudaStream_t stream_;
  Buffer out_;
  Buffer in_;
};

void measure(Transport& world, const std::string& label, int samples) {
  const DeviceGuard guard(world.device());
  const CudaStream stream;
  Pair pair(world, stream.get());
  std::vector<Case> cases;
  cases.push_back({1, 8});
  for (std::size_t bytes = std::size_t{64} << 10; bytes <= std::size_t{1} << 30; bytes *= 4)
    cases.push_back({1, bytes});
  for (const std::size_t spans : {32, 1000}) cases.push_back({spans, std::size_t{256} << 10});
  cases.push_back({8, std::size_t{8} << 20});
  for (const Case& one : cases) {
    const std::size_t total = one.spans * one.bytes;
    const int repeats = total >= std::size_t{256} << 20 ? 4 : 16;
    pair.time(one, 2);  // memory is opened, channels are connected
    std::vector<double> device;
    std::vector<double> host;
    for (int i = 0; i < samples; ++i) {
      const auto [on_device, on_host] = pair.time(one, repeats);
      // The slower of the ranks counts.
      double slowest = 0.0;
      for (const std::string& theirs : world.all_gather(fmt::format("{}", on_device), Deadline::after(kMaxWait))) {
        slowest = std::max(slowest, std::atof(theirs.c_str()));
      }
      device.push_back(slowest);
      host.push_back(on_host);
    }
    if (world.rank() != 0) continue;
    const double us = median(device);
    fmt::print(
        "{{\"what\":\"exchange\",\"transport\":\"{}\",\"ranks\":{},\"spans\":{},\"span_bytes\":{},\"us\":{:.2f},"
        "\"host_us\":{:.2f},\"gb_per_s\":{:.1f}}}\n",
        label, world.size(), one.spans, one.bytes, us, median(host), static_cast<double>(total) / us * 1e-3);
    std::fflush(stdout);
  }
}

int main_of(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "p2p";
  const int option = argc > 2 ? std::atoi(argv[2]) : 0;
  const int samples = argc > 3 ? std::atoi(argv[3]) : 9;
  const auto gpus = static_cast<int>(visible_gpus().size());
  if (gpus < 1) {
    fmt::print(stderr, "transports_bench needs GPUs: {}\n", gpus_unavailable());
    return 4;
  }
  const auto complain = [](const Error& error) { fmt::print(stderr, "{}\n", error.what()); };
  try {
    if (launched_as_rank()) {
      WorldRequest request;
      request.transport = name;
      request.memory = WantedMemory::kDevice;
      const auto rank_main = [&](Transport& world) {
        measure(world, name + ", processes", samples);
        return 0;
      };
      return run_world(request, rank_main, complain);
    }
    const int ranks = std::max(2, gpus);
    const std::string label = fmt::format("{}{}, threads", name, option > 0 ? fmt::format(" {}", option) : "");
    run_threads_world(ranks, {}, [&](Transport& host) {
      const auto world = make(name, host.split_world(ranks, Deadline::after(kMaxWait)), host.rank() % gpus, option);
      measure(*world, label, samples);
    });
  } catch (const Error& error) {
    complain(error);
    return static_cast<int>(error.code());
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) { return ringattn::main_of(argc, argv); }
