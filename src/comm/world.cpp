// SPDX-License-Identifier: Apache-2.0
#include "comm/world.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <vector>

#include "base/failpoint.hpp"
#include "base/gpu.hpp"
#include "base/outcome.hpp"
#include "comm/device_world.hpp"
#include "comm/failure.hpp"
#include "comm/launcher.hpp"
#include "comm/mpi_handle.hpp"
#include "comm/paced.hpp"
#include "comm/self.hpp"
#include "comm/store_rank.hpp"
#include "comm/store_world.hpp"
#include "comm/threads.hpp"
#include "comm/timeouts.hpp"
#include "comm/watchdog.hpp"
#if defined(RINGATTN_HAVE_MPI)
#include "comm/mpi_world.hpp"
#endif
#if defined(RINGATTN_HAVE_NCCL)
#include "comm/nccl.hpp"
#endif

namespace ringattn {

namespace {

std::string always_available() { return {}; }

#if defined(RINGATTN_HAVE_MPI)
std::string mpi_unavailable() {
  return launched_by_mpi() ? why_no_mpi() : "this process was not started by mpirun or srun";
}
#endif

std::string tcp_unavailable() { return store_requested() ? "" : "RINGATTN_STORE is not set"; }

#if defined(RINGATTN_HAVE_CUDA)
std::string device_unavailable() { return gpus_unavailable(); }
#endif

#if defined(RINGATTN_HAVE_NCCL)
std::string nccl_unavailable() {
  const std::string why = gpus_unavailable();
  return why.empty() ? why_no_nccl() : why;
}
#endif

constexpr TransportRow kTable[] = {
    {"self", "any", "one rank, nothing moves", Route::kDirect, always_available},
    {"threads", "host", "N ranks are N threads of this process", Route::kDirect, always_available},
#if defined(RINGATTN_HAVE_MPI)
    {"mpi", "host", "non-blocking sends and receives between processes", Route::kChain, mpi_unavailable},
#endif
    {"tcp", "host", "sockets between processes that connect at RINGATTN_STORE; no MPI", Route::kChain, tcp_unavailable},
#if defined(RINGATTN_HAVE_NCCL)
    {"nccl", "device", "NCCL's grouped sends and receives, also across hosts; one rank per GPU", Route::kDirect,
     nccl_unavailable},
#endif
#if defined(RINGATTN_HAVE_CUDA)
    {"p2p", "device", "copy engines write to peers' memory on one host; ranks of one process may share a GPU",
     Route::kDirect, device_unavailable},
#endif
};

const TransportRow& find_row(std::string_view name) {
  std::vector<std::string_view> names;
  std::string known = "auto";
  for (const TransportRow& row : kTable) {
    if (row.name == name) return row;
    names.push_back(row.name);
    known.append(", ").append(row.name);
  }
  const std::string nearest = nearest_name(name, names.data(), names.size());
  fail(ErrorCode::kUsage, fmt::format("there is no transport \"{}\"", name), fmt::format("this build has {}", known),
       nearest.empty() ? MessageTemplate{"Leave it out, or see ", command("info"), "."}
                       : MessageTemplate(fmt::format("Did you mean {}?", nearest)));
}

// choose_transport() for ranks that are processes of one launcher.
std::string_view choose_between_processes(const WorldRequest& request, std::string_view wanted) {
  // RINGATTN_STORE takes precedence, whichever launcher has started the ranks.
  const bool store = store_requested();
  const std::string_view launcher = store ? "RINGATTN_STORE" : "mpirun";
  const std::string_view own = store ? "tcp" : "mpi";
  if (request.ranks) {
    fail(ErrorCode::kUsage, {setting("ranks", *request.ranks), fmt::format(" contradicts {}", launcher)},
         store ? "the world has the processes that connect there" : "under mpirun the world is mpirun's",
         store ? "Start as many processes instead, or unset RINGATTN_STORE."
               : "Give mpirun -np instead, or run without mpirun.");
  }
  const bool one_rank = (store ? store_rank().size : launched_ranks()) == 1;
  const bool other = wanted == (store ? "mpi" : "tcp");
  if (wanted == "threads" || other || (wanted == "self" && !one_rank)) {
    fail(ErrorCode::kUsage, {setting("transport", wanted), fmt::format(" contradicts {}", launcher)},
         !other  ? "its ranks are processes, and that transport does not join them"
         : store ? "its ranks connect without MPI"
                 : "RINGATTN_STORE, the address at which its ranks would connect, is not set",
         store   ? "Unset RINGATTN_STORE, or leave it out."
         : other ? "Set it to HOST:PORT of rank 0's host, or leave the transport out."
                 : "Run without mpirun, or leave it out.");
  }
  if (const std::string why = store || wanted == "self" ? "" : why_no_mpi(); !why.empty()) {
    fail(ErrorCode::kUnsupported, "can't join the ranks that mpirun has started", why,
         {"Set RINGATTN_STORE to HOST:PORT of rank 0's host, build with MPI and install it, or run without mpirun and "
          "with ",
          setting("ranks", "N"), "."});
  }
  return wanted == "self" ? "self" : own;
}

// The name in the table of the transport that a request selects here. Throws the errors that run_world() documents.
std::string_view choose_transport(const WorldRequest& request) {
  const std::string_view wanted =
      request.transport == "auto" ? std::string_view("auto") : find_row(request.transport).name;
  if (request.ranks && *request.ranks < 1) {
    fail(ErrorCode::kUsage, fmt::format("can't run on {} ranks", *request.ranks), "a world has at least one",
         {"Give ", setting("ranks", 1), " or more."});
  }
  const bool device = wanted == "nccl" || wanted == "p2p";
  if (request.pace > 0.0 && device) {
    fail(ErrorCode::kUsage, {"RINGATTN_PACE contradicts ", setting("transport", wanted)},
         "only host transports can be paced", "Leave one of them out.");
  }
  if (request.memory == WantedMemory::kHost && device) {
    fail(ErrorCode::kUsage, {setting("transport", wanted), " contradicts the backend"},
         "it moves device memory, and the kernel works in host memory", "Leave one of them out.");
  }
  if (launched_as_rank()) return choose_between_processes(request, wanted);
  const int ranks = request.ranks.value_or(1);
  if (wanted == "self" && ranks > 1) {
    fail(ErrorCode::kUsage, {setting("transport", "self"), " contradicts ", setting("ranks", ranks)},
         "it is a world of one rank", {"Use ", setting("transport", "threads"), "."});
  }
  if (wanted == "threads" && !request.ranks) {
    fail(ErrorCode::kUsage, {setting("transport", "threads"), " doesn't say how many"},
         {setting("ranks"), " is not given"}, {"Add ", setting("ranks", "N"), "."});
  }
  if (wanted == "auto") return ranks > 1 ? "threads" : "self";
  if (const std::string why = find_row(wanted).unavailable(); !why.empty()) {
    fail(ErrorCode::kUnsupported, fmt::format("transport {} can't be used here", wanted), why,
         wanted == "mpi"   ? MessageTemplate{"Start the program with mpirun, or use ",
                                           setting("transport", ranks > 1 ? "threads" : "self"), "."}
         : wanted == "tcp" ? MessageTemplate{"Set RINGATTN_STORE to HOST:PORT of rank 0's host, and start the ranks."}
                           : MessageTemplate{"Leave ", setting("transport"), " out, or see ", command("info"), "."});
  }
  return device ? "threads" : wanted;
}

int code_of(const Error& error, const std::function<void(const Error&)>& print_error) {
  print_error(error);
  return static_cast<int>(error.code());
}

// A world of one rank. It uses the GPU unless host memory is requested or there is no GPU.
std::unique_ptr<Transport> make_lone_world(const WorldRequest& request) {
  const bool device = request.memory != WantedMemory::kHost && !visible_gpus().empty();
  return make_self_transport(device ? MemoryKind::kDevice : MemoryKind::kHost);
}

// Runs a world whose ranks are all in this process.
int run_local_world(std::string_view transport, const WorldRequest& request,
                    const std::function<int(Transport&)>& rank_main,
                    const std::function<void(const Error&)>& print_error) {
  const int size = request.ranks.value_or(1);
  std::vector<int> codes(static_cast<std::size_t>(size));
  const auto run_rank = [&](Transport& rank) { codes[static_cast<std::size_t>(rank.rank())] = rank_main(rank); };
  const auto report_choice = [&](const Transport& chosen, const MessageTemplate& reason) {
    if (request.chosen) request.chosen(chosen.name(), reason);
  };
  try {
    if (transport == "self") {
      const std::unique_ptr<Transport> world = make_lone_world(request);
      if (request.compare) request.compare(*world);
      report_choice(*world, {});
      run_rank(*world);
    } else {
      std::vector<std::unique_ptr<Transport>> world = make_threads_world(size);
      for (auto& rank : world) {
        if (request.pace > 0.0) rank = make_paced_transport(std::move(rank), request.pace);
      }
      const RanksLimit limit{request.timeout, [&](const Error& error) { end_with(error, print_error); }};
      const auto main = [&](Transport& rank) {
        failpoint("init");
        if (request.compare) request.compare(rank);
        const DeviceWorld device = make_device_world(rank, request);
        Transport& chosen = device.transport ? *device.transport : rank;
        if (rank.rank() == 0) report_choice(chosen, device.reason);
        rank.barrier(Timeouts(request.timeout).for_peer());  // no rank begins before the choice is reported
        try {
          run_rank(chosen);
        } catch (const AgreedError&) {
          throw;
        } catch (...) {
          throw lone_error(rank.rank(), as_error(std::current_exception()));
        }
        failpoint("exit");
      };
      run_ranks(std::move(world), main, &limit);
    }
  } catch (...) {
    return code_of(as_error(std::current_exception()), print_error);
  }
  return *std::max_element(codes.begin(), codes.end());
}

}  // namespace

std::span<const TransportRow> transport_table() { return kTable; }

int run_world(const WorldRequest& request, const std::function<int(Transport&)>& rank_main,
              const std::function<void(const Error&)>& print_error) {
  const std::string_view transport = choose_transport(request);
#if defined(RINGATTN_HAVE_MPI)
  if (transport == "mpi") return run_mpi_world(request, nullptr, rank_main, print_error);
#endif
  if (transport == "tcp") return run_store_world(request, nullptr, rank_main, print_error);
  return run_local_world(transport, request, rank_main, print_error);
}

int end_without_world(const Error& error, const std::function<void(const Error&)>& print_error) {
  const MessageClaim claim;
  const auto no_rank = [](Transport&) { return 0; };
  try {
    if (store_requested()) return run_store_world({}, &error, no_rank, print_error);
#if defined(RINGATTN_HAVE_MPI)
    if (launched_by_mpi() && why_no_mpi().empty()) return run_mpi_world({}, &error, no_rank, print_error);
#endif
  } catch (...) {  // this rank can't even connect to the others
    if (!claim.try_claim()) return static_cast<int>(error.code());
  }
  return code_of(error, print_error);
}

}  // namespace ringattn
