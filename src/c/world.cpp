// SPDX-License-Identifier: Apache-2.0
#include "c/world.hpp"

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/gpu.hpp"
#include "base/size.hpp"
#include "c/status.hpp"
#include "comm/callbacks.hpp"
#include "comm/device_world.hpp"
#include "comm/mpi_handle.hpp"
#include "comm/self.hpp"
#include "comm/store_rank.hpp"
#include "comm/tcp/store.hpp"
#include "comm/tcp/tcp.hpp"
#include "comm/threads.hpp"
#include "comm/timeouts.hpp"

namespace ringattn::c {

const char* backend_of(const Transport& transport) {
  return transport.memory() == MemoryKind::kDevice ? "cuda" : "cpu";
}

namespace {

// Earlier interfaces had other names of functions and structs, and were never released.
constexpr std::int64_t kFirstAbi = 6;

// Reads options of any header, with their size in interface 1 as the minimum.
ringattn_world_options read_options(const ringattn_world_options* options) {
  ringattn_world_options read = read_struct("ringattn_world_options", options, 24);
  if (read.abi < kFirstAbi || read.abi > RINGATTN_ABI) {
    fail(ErrorCode::kUsage, fmt::format("the program wants interface {} of ringattn", read.abi),
         fmt::format("this library, ringattn {}, serves {} to {}", ringattn_version(), kFirstAbi, RINGATTN_ABI),
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
         fmt::format("this process sees {}", counted(static_cast<std::uint64_t>(gpus), "GPU")), "Count them from 0.");
  }
  return device;
}

// Destroys the device transport before the host transport that it was made with.
struct Pair {
  std::unique_ptr<Transport> host, device;
};

// Connects the ranks of `bootstrap`, in the memory of the device that the options name.
std::shared_ptr<Transport> connect(Bootstrap& bootstrap, const ringattn_world_options& options, double seconds) {
  TcpOptions tcp;
  tcp.setup_seconds = seconds;
  if (options.device_type == kDLCPU) return make_tcp_transport(bootstrap, tcp);
  const auto pair = std::make_shared<Pair>();
  pair->host = make_tcp_transport(bootstrap, tcp);
  pair->device = make_device_transport(*pair->host, checked_device(options.device_id), seconds);
  return {pair, pair->device.get()};
}

double checked_seconds(double seconds) { return Timeouts(seconds == 0.0 ? 60.0 : seconds).seconds(); }

StoreOptions read_store(const char* address, std::int32_t rank, std::int32_t ranks, const char* job) {
  if (address == nullptr) {
    const StoreRank here = store_rank();
    return {here.address, here.rank, here.size, here.job};
  }
  const auto place = parse_store_address(address);
  if (!place) {
    fail(ErrorCode::kUsage, fmt::format("{} is not an address", address), "a store's is host:port",
         "Pass one such as 10.0.0.7:29555.");
  }
  return {*place, rank, ranks, job == nullptr ? "" : job};
}

}  // namespace

ExclusiveUse::ExclusiveUse(const std::shared_ptr<std::atomic<bool>>& busy) : busy_(*busy) {
  if (!busy_.exchange(true, std::memory_order_acquire)) return;
  fail(ErrorCode::kUsage, "this world is at work in another thread", "calls on a world and its objects take turns",
       "Give each thread a world of its own, or guard a shared one with a lock.");
}

}  // namespace ringattn::c

struct ringattn_gathered {
  std::vector<std::string> parts;
};

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

void ringattn_gathered_add(ringattn_gathered* gathered, const void* data, uint64_t bytes) {
  if (gathered == nullptr) return;
  guarded([&] { gathered->parts.emplace_back(static_cast<const char*>(data), bytes); });
}

ringattn_status ringattn_world_callbacks(const ringattn_world_options* options, int32_t rank, int32_t ranks,
                                         const ringattn_callbacks* callbacks, double seconds, ringattn_world** world) {
  return guarded([&] {
    need(world, "world");
    const ringattn_world_options read = read_options(options);
    const auto callers = read_struct("ringattn_callbacks", callbacks, 24);
    Callbacks made;
    made.rank = rank;
    made.size = ranks;
    if (callers.all_gather != nullptr) {
      made.all_gather = [&callers](std::string_view bytes, double limit) {
        ringattn_gathered gathered;
        if (callers.all_gather(callers.context, bytes.data(), bytes.size(), limit, &gathered) != 0) {
          fail(ErrorCode::kPeer, "the caller's all-gather failed", "it returned nonzero", "Check its own error.");
        }
        return gathered.parts;
      };
    }
    const double limit = checked_seconds(seconds);
    const std::unique_ptr<Bootstrap> bootstrap = make_callback_bootstrap(std::move(made));
    *world = new ringattn_world{connect(*bootstrap, read, limit)};
  });
}

ringattn_status ringattn_world_store(const ringattn_world_options* options, const char* address, int32_t rank,
                                     int32_t ranks, const char* job, double seconds, ringattn_world** world) {
  return guarded([&] {
    need(world, "world");
    const ringattn_world_options read = read_options(options);
    StoreOptions store = read_store(address, rank, ranks, job);
    store.seconds = checked_seconds(seconds);
    const std::unique_ptr<Store> bootstrap = make_store(store);
    *world = new ringattn_world{connect(*bootstrap, read, store.seconds)};
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

void ringattn_world_destroy(ringattn_world* world) { destroy(world); }

}  // extern "C"
