// SPDX-License-Identifier: Apache-2.0
// NUMA nodes of this host, and which of them the ranks of a host run on. A rank that is bound to a node first touches
// its shards there, so its memory is local.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

using CpuList = std::vector<int>;  // numbers of processors, ascending

// The online processors of each node that has any. Empty: the system reports none.
using NumaTopology = std::vector<CpuList>;

// Linux's lists, "0-3,8,10-11". Nothing if `text` is none.
std::optional<CpuList> parse_cpu_list(std::string_view text);
std::string cpu_list_text(const CpuList& cpus);

// `folder`: as /sys/devices/system/node, with a file node<N>/cpulist for each node.
NumaTopology read_numa_topology(const std::string& folder = "/sys/devices/system/node");

struct NumaPlacement {
  std::vector<CpuList> cpus;  // of each rank; empty: ranks are not bound
  std::string reason;         // why they are not
};

// Places `ranks` ranks of one host that may all run on `allowed`, the affinity mask that their launcher or container
// has left them: each gets the processors of one node, or of several where nodes outnumber ranks. Neighbouring ranks
// share a node. Ranks are not bound where this would leave nodes idle, or a rank fewer processors than an equal share.
NumaPlacement place_on_numa_nodes(const NumaTopology& topology, const CpuList& allowed, int ranks);

// The processors that the calling thread may run on.
CpuList usable_cpus();

// Binds the calling thread, and threads that it starts from now on, to processors. Returns why it failed, or nothing.
std::string bind_thread(const CpuList& cpus);

// The environment variable by which the user makes OpenMP place threads; empty if none is set. Threads that OpenMP
// places ignore the rank's processors.
std::string_view openmp_binding();

}  // namespace ringattn
