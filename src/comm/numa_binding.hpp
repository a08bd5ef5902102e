// SPDX-License-Identifier: Apache-2.0
// Binds the ranks of each host to its NUMA nodes (base/numa.hpp).
#pragma once

#include <string>

#include "base/numa.hpp"
#include "comm/collective.hpp"

namespace ringattn {

// Collective. Binds the calling thread to a NUMA node if several ranks of this host may run on the same processors of
// several nodes. The rank must not have started threads yet. Ranks that their launcher has bound to processors of their
// own stay there, and so do all ranks if OpenMP places threads. Returns why the system refused; empty if it did not.
std::string bind_rank_to_numa_node(const Collective& collective, const NumaTopology& topology = read_numa_topology());

}  // namespace ringattn
