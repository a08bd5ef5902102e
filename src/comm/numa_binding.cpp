// SPDX-License-Identifier: Apache-2.0
#include "comm/numa_binding.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/host.hpp"

namespace ringattn {

std::string bind_rank_to_numa_node(const Collective& collective, const NumaTopology& topology) {
  const CpuList allowed = usable_cpus();
  const std::string mine = host_name() + ' ' + cpu_list_text(allowed);
  const std::vector<std::string> all = collective.gather(mine);
  const auto ranks = static_cast<int>(std::count(all.begin(), all.end(), mine));
  const auto index = static_cast<std::size_t>(std::count(all.begin(), all.begin() + collective.rank(), mine));
  if (!openmp_binding().empty()) return {};
  const NumaPlacement placement = place_on_numa_nodes(topology, allowed, ranks);
  return placement.cpus.empty() ? std::string() : bind_thread(placement.cpus[index]);
}

}  // namespace ringattn
