// SPDX-License-Identifier: Apache-2.0
#include "comm/device_world.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "base/error.hpp"
#include "comm/placement.hpp"
#include "comm/timeouts.hpp"
#if defined(RINGATTN_HAVE_CUDA)
#include "comm/p2p/p2p.hpp"
#endif
#if defined(RINGATTN_HAVE_NCCL)
#include "comm/nccl.hpp"
#endif

namespace ringattn {

namespace {

// A device transport that this build supports.
struct Candidate {
  std::string_view name;
  bool across_hosts;
  bool shares_gpus;
  std::unique_ptr<Transport> (*make)(std::unique_ptr<Transport> control, int device, double setup_seconds);
};

#if defined(RINGATTN_HAVE_CUDA)
constexpr Candidate kCandidates[] = {
    {.name = "p2p",
     .across_hosts = false,
     .shares_gpus = true,
     .make =
         [](std::unique_ptr<Transport> control, int device, double setup_seconds) {
           P2pOptions options;
           options.setup_seconds = setup_seconds;
           return make_p2p_transport(std::move(control), device, options);
         }},
#if defined(RINGATTN_HAVE_NCCL)
    {.name = "nccl",
     .across_hosts = true,
     .shares_gpus = false,
     .make =
         [](std::unique_ptr<Transport> control, int device, double setup_seconds) {
           NcclOptions options;
           options.setup_seconds = setup_seconds;
           return make_nccl_transport(std::move(control), device, options);
         }},
#endif
};
std::span<const Candidate> candidates() { return kCandidates; }
#else
std::span<const Candidate> candidates() { return {}; }
#endif

// Why a candidate can't serve a placement; an empty string if it may.
std::string obstacle(const Candidate& candidate, const Placement& placement) {
  if (!placement.obstacle.empty()) return placement.obstacle;
  if (!placement.one_host && !candidate.across_hosts) return "the ranks are on several hosts";
  if (placement.shared && !candidate.shares_gpus) return "two ranks would share a GPU";
  return {};
}

[[noreturn]] void refuse(const MessageTemplate& problem, const MessageTemplate& why,
                         const MessageTemplate& suggestion) {
  throw AgreedError(Error(ErrorCode::kUnsupported, problem, why, suggestion));
}

}  // namespace

DeviceWorld make_device_world(Transport& host, const WorldRequest& request) {
  const bool automatic = request.transport == "auto";
  const bool forced = std::any_of(candidates().begin(), candidates().end(),
                                  [&](const Candidate& candidate) { return request.transport == candidate.name; });
  if (!automatic && !forced) return {nullptr, "forced"};
  const bool host_wanted = request.memory == WantedMemory::kHost || request.pace > 0.0;
  if (automatic && (host_wanted || host.size() == 1)) return {};
  const Deadline deadline = Timeouts(request.timeout).for_peer();
  const Placement placement = place_world(host, deadline);
  MessageTemplate passed_over;
  for (const Candidate& candidate : candidates()) {
    if (forced && request.transport != candidate.name) continue;
    MessageTemplate why = obstacle(candidate, placement);
    if (why.empty()) {
      try {
        const int device = placement.devices[static_cast<std::size_t>(host.rank())];
        return {candidate.make(host.split_world(host.size(), deadline), device, request.timeout),
                forced ? MessageTemplate("forced") : passed_over};
      } catch (const AgreedError& error) {
        why = error.message();
      }
    }
    if (forced) {
      refuse(fmt::format("transport {} can't be used here", candidate.name), why,
             {"Start one rank a GPU, or leave ", setting("transport"), " out."});
    }
    if (!passed_over.empty()) passed_over += "; ";
    passed_over += {candidate.name, ": ", why};
  }
  if (request.memory == WantedMemory::kDevice) {
    refuse("the ranks can't use GPUs", passed_over.empty() ? MessageTemplate("this build has no CUDA") : passed_over,
           {"Start one rank a GPU, or use ", setting("backend", "cpu"), "."});
  }
  return {nullptr, passed_over};
}

std::unique_ptr<Transport> make_device_transport(Transport& host, int device, double setup_seconds) {
  MessageTemplate passed_over;
  for (const Candidate& candidate : candidates()) {
    try {
      const Deadline deadline = Timeouts(setup_seconds).for_peer();
      return candidate.make(host.split_world(host.size(), deadline), device, setup_seconds);
    } catch (const AgreedError& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      if (!passed_over.empty()) passed_over += "; ";
      passed_over += {candidate.name, ": ", error.message()};
    }
  }
  refuse("the ranks can't reach each other's GPUs",
         passed_over.empty() ? MessageTemplate("this build has no CUDA") : passed_over,
         "Give each rank a GPU of its own, or compute on the host.");
}

}  // namespace ringattn
