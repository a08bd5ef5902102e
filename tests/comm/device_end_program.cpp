// SPDX-License-Identifier: Apache-2.0
// A program whose ranks exchange device memory until one of them fails in a chosen way, run by tests under mpirun
// or as ranks that meet at RINGATTN_STORE: device_end_program TRANSPORT MODE RANK. Every printed error is a line
// "message: …" on stderr.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "comm/world.hpp"

namespace ringattn {
namespace {

constexpr double kTimeout = 2.0;  // of ranks that are stopped; others end much sooner
constexpr int kExchanges = 2000;
constexpr int kFailing = 50;

void print_message(const Error& error) { std::fprintf(stderr, "message: %s\n", error.what()); }

void fail_as(const std::string& mode, int rank) {
  if (mode == "throw") throw Error(ErrorCode::kFile, "rank " + std::to_string(rank) + " was told to fail.");
  if (mode == "kill") std::raise(SIGKILL);
  if (mode == "stop") std::raise(SIGSTOP);
  if (mode == "exit") std::_Exit(0);
}

int run_rank(Transport& world, const std::string& mode, int failing) {
  constexpr std::size_t kBytes = 4 << 20;
  const DeviceGuard guard(world.device());
  const CudaStream stream;
  const Buffer out = allocate_device(kBytes, world.device());
  const Buffer in = allocate_device(kBytes, world.device());
  const int size = world.size();
  CudaEvent passed;
  for (int i = 0; i < kExchanges; ++i) {
    if (i == kFailing && world.rank() == failing) fail_as(mode, world.rank());
    Exchange exchange{"exchange " + std::to_string(i),
                      {{(world.rank() + 1) % size, 0, {{out.data(), kBytes}}}},
                      {{(world.rank() + size - 1) % size, 0, {{in.data(), kBytes}}}}};
    world.wait(world.post(std::move(exchange), {stream.get()}), {stream.get()}, Deadline::after(kTimeout));
    passed.record(stream.get());
    while (!passed.passed()) world.progress();
  }
  return 0;
}

int run_program(const std::string& transport, const std::string& mode, int failing) {
  const char* ranks = std::getenv("WORLD_SIZE");
  if (ranks == nullptr) ranks = std::getenv("OMPI_COMM_WORLD_SIZE");
  if (visible_gpus().size() < static_cast<std::size_t>(ranks == nullptr ? 1 : std::atoi(ranks))) {
    std::printf("skipped: needs a GPU for each rank\n");
    return 0;
  }
  WorldRequest request;
  request.transport = transport;
  request.memory = WantedMemory::kDevice;
  try {
    return run_world(
        request, [&](Transport& world) { return run_rank(world, mode, failing); }, print_message);
  } catch (const Error& error) {
    return end_without_world(error, print_message);
  }
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  return ringattn::run_program(argc > 1 ? argv[1] : "p2p", argc > 2 ? argv[2] : "ok",
                               argc > 3 ? std::atoi(argv[3]) : 0);
}
