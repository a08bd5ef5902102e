// SPDX-License-Identifier: Apache-2.0
// A program whose ranks fail in a chosen way, run by tests under mpirun, or as ranks that meet at RINGATTN_STORE:
// world_program MODE [RANK] [CODE].
// Every printed error is a line "message: …" on stderr.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/rank_liveness.hpp"
#include "comm/collective.hpp"
#include "comm/world.hpp"

namespace ringattn {
namespace {

constexpr double kSilence = 2.0;   // --timeout of the tests of silence
constexpr double kMaxWait = 60.0;  // longer than the tests last: who reaches it hangs

void print_message(const Error& error) { std::fprintf(stderr, "message: %s\n", error.what()); }

int run_rank(Transport& world, const std::string& mode, int rank, int code) {
  const Error failure(static_cast<ErrorCode>(code), "rank " + std::to_string(world.rank()) + " was told to fail.");
  const bool chosen = world.rank() == rank;
  if (mode == "return") return chosen ? code : 0;
  if (mode == "throw-all") throw failure;
  if (mode == "work") {  // for longer than the others wait
    for (const Deadline busy = Deadline::after(chosen ? 4.0 : 0.0); !busy.expired();) heartbeat();
    world.barrier(Deadline::after(kSilence));
    return 0;
  }
  if (mode == "agree") {
    agree(world, chosen ? &failure : nullptr, Deadline::after(kMaxWait));
    return 0;
  }
  if (mode == "stop-in-a-phase" && !chosen) {  // works where all work, and joins the others after it
    Collective(world, Timeouts(kMaxWait)).run_collectively([] {
      for (const Deadline busy = Deadline::after(kMaxWait); !busy.expired();) heartbeat();
    });
  }
  if (chosen) {
    if (mode == "throw" || mode == "throw-while-busy") throw failure;
    if (mode == "kill") std::raise(SIGKILL);
    if (mode.starts_with("stop")) std::raise(SIGSTOP);
    if (mode == "hang") ::pause();
    if (mode == "exit") std::_Exit(0);
  } else if (mode == "stop-while-busy") {
    // Computes, and joins no collective.
    for (const Deadline busy = Deadline::after(kMaxWait); !busy.expired();) world.progress();
  } else if (mode == "throw-while-busy") {
    // Computes: looks at no message until it is ended.
    for (const Deadline busy = Deadline::after(kMaxWait); !busy.expired();) {
    }
  }
  world.barrier(Deadline::after(mode == "stop" ? 1.0 : kMaxWait));
  if (world.rank() == 0) std::printf("%d ranks of %s\n", world.size(), std::string(world.name()).c_str());
  return 0;
}

int run_program(const std::string& mode, int rank, int code) {
  WorldRequest request;
  if (mode == "usage") request.ranks = 2;
  if (mode == "paced") request.pace = 1e9;
  if (mode == "missing") request.timeout = 2.0;
  if (mode == "work" || mode == "hang" || mode.starts_with("stop-")) {
    request.timeout = kSilence;
  }
  try {
    const char* mine = std::getenv("RANK");
    if (mine == nullptr) mine = std::getenv("OMPI_COMM_WORLD_RANK");
    if (mode == "refuse" && mine != nullptr && std::atoi(mine) == rank) {
      throw Error(static_cast<ErrorCode>(code), "rank " + std::to_string(rank) + " can't start.");
    }
    return run_world(
        request, [&](Transport& world) { return run_rank(world, mode, rank, code); }, print_message);
  } catch (const Error& error) {
    return end_without_world(error, print_message);
  }
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  return ringattn::run_program(argc > 1 ? argv[1] : "ok", argc > 2 ? std::atoi(argv[2]) : 0,
                               argc > 3 ? std::atoi(argv[3]) : 0);
}
