// SPDX-License-Identifier: Apache-2.0
#include "c/world.hpp"

#include <string>
#include <utility>
#include <vector>

#include "base/gpu.hpp"
#include "base/size.hpp"
#include "c/status.hpp"
#include "comm/mpi_handle.hpp"
#include "comm/self.hpp"
#include "comm/threads.hpp"

namespace ringattn::c {

const char* backend_of(const Transport& transport) {
  return transport.memory() == MemoryKind::kDevice ? "cuda" : "cpu";
}

namespace {

// With the size that it had in interface 1.
ringattn_world_options read_options(const ringattn_world_options* options) {
  ringattn_world_options read = read_struct("ringattn_world_options", options, 24);
  if (read.abi < 1 || read.abi > RINGATTN_ABI) {
    fail(ErrorCode::kUsage, fmt::format("the program wants interface {} of ringattn", read.abi),
         fmt::format("this library, ringattn {}, serves 1 to {}", ringattn_version(), RINGATTN_ABI),
         "Load a newer libringattn_c.so, or set the member `abi` to RINGATTN_ABI.");
  }
  if (read.device_type == 0) read.device_type = kDLCPU;
  if (read.device_type != kDLCPU && read.device_type != kDLCUDA) {
    fail(ErrorCode::kUnsupported, fmt::format("device type {} is not known", read.device_type),
         "kernels run on hosts (kDLCPU, 1) and on NVIDIA GPUs (kDLCUDA, 2)", "Choose one of these.");
  }
  return read;
}

void refuse_device(const ringattn_world_options& options, const char* world) {
  if (options.device_type == kDLCPU) return;
  fail(ErrorCode::kUnsupported, fmt::format("{} has no device memory", world), "it moves bytes between hosts' memory",
       "Use device type kDLCPU.");
}

int checked_device(std::int32_t device) {
  const std::string unavailable = gpus_unavailable();
  if (!unavailable.empty()) {
    fail(ErrorCode::kUnsupported, "there is no GPU for this world", unavailable,
         "Use device type kDLCPU, or a library that was built with CUDA, on a host with a driver.");
  }
  const auto gpus = static_cast<std::int64_t>(visible_gpus().size());
  if (device < 0 || device >= gpus) {
    fail(ErrorCode::kUsage, fmt::format("there is no GPU {}", device),
         fmt::format("this process sees {}", counted(gpus, "GPU")), "Count them from 0.");
  }
  return device;
}

}  // namespace

}  // namespace ringattn::c

using namespace ringattn;
using namespace ringattn::c;

extern "C" {

ringattn_status ringattn_world_self(const ringattn_world_options* options, ringattn_world** world) {
  return guarded([&] {
    need(world, "world");
    const ringattn_world_options read = read_options(options);
    *world = new ringattn_world{read.device_type == kDLCPU
                                    ? make_self_transport()
                                    : make_self_transport(MemoryKind::kDevice, checked_device(read.device_id))};
  });
}

ringattn_status ringattn_world_threads(const ringattn_world_options* options, int32_t ranks, ringattn_world** worlds) {
  return guarded([&] {
    need(worlds, "worlds");
    refuse_device(read_options(options), "a world of threads");
    if (ranks < 1 || ranks > 1024) {
      fail(ErrorCode::kUsage, fmt::format("a world of {} ranks is not possible", ranks),
           "a world of threads has 1 to 1024", "Choose a number in between.");
    }
    std::vector<std::unique_ptr<ringattn_world>> made;
    for (std::unique_ptr<Transport>& transport : make_threads_world(ranks)) {
      made.push_back(std::make_unique<ringattn_world>(ringattn_world{std::move(transport)}));
    }
    for (std::size_t rank = 0; rank < made.size(); ++rank) worlds[rank] = made[rank].release();
  });
}

ringattn_status ringattn_world_mpi(const ringattn_world_options* options, const void* communicator,
                                   ringattn_world** world) {
  return guarded([&] {
    need(world, "world");
    need(communicator, "communicator");
    refuse_device(read_options(options), "an MPI world of this interface");
    *world = new ringattn_world{make_mpi_transport_of(communicator)};
  });
}

int32_t ringattn_world_rank(const ringattn_world* world) { return world == nullptr ? -1 : world->transport->rank(); }
int32_t ringattn_world_size(const ringattn_world* world) { return world == nullptr ? -1 : world->transport->size(); }

void ringattn_world_abort(ringattn_world* world, ringattn_status status, const char* text) {
  if (world == nullptr) return;
  guarded([&] {
    const bool known = status >= RINGATTN_WRONG_RESULT && status <= RINGATTN_INTERNAL;
    world->transport->abort(
        Error(known ? static_cast<ErrorCode>(status) : ErrorCode::kPeer, text == nullptr ? "a rank gave up" : text));
  });
}

void ringattn_world_destroy(ringattn_world* world) { delete world; }

}  // extern "C"
