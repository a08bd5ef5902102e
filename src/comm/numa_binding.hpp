// SPDX-License-Identifier: Apache-2.0
// Binds the ranks of each host to its NUMA nodes (base/numa.hpp).
#pragma once

#include <string>

#include "base/numa.hpp"
#include "comm/collective.hpp"

namespace ringattn {

// Collective. Binds the calling thread, a rank that has not started threads yet, where several ranks of this host may
// run on the same processors of several nodes. Ranks that their launcher has bound have processors of their own, and
// stay where they are, and so do all ranks while OpenMP places threads. Returns why the system refused, or nothing.
std::string bind_rank_to_numa_node(const Collective& collective, const NumaTopology& topology = read_numa_topology());

}  // namespace ringattn
