// SPDX-License-Identifier: Apache-2.0
#include "comm/numa_binding.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include "base/host.hpp"
#include "base/numa.hpp"

namespace ringattn {

std::string bind_rank_to_numa_node(const Collective& collective) {
  const CpuList allowed = usable_cpus();
  const std::string mine = host_name() + ' ' + cpu_list_text(allowed);
  const std::vector<std::string> all = collective.gather(mine);
  const auto self = all.begin() + collective.rank();
  const auto ranks = static_cast<int>(std::count(all.begin(), all.end(), mine));
  const auto index = static_cast<std::size_t>(std::count(all.begin(), self, mine));
  if (const std::string_view variable = openmp_binding(); !variable.empty()) {
    return fmt::format("not bound ({} is set)", variable);
  }
  const NumaPlacement placement = place_on_numa_nodes(read_numa_topology(), allowed, ranks);
  if (placement.cpus.empty()) return fmt::format("not bound ({})", placement.reason);
  if (const std::string why = bind_thread(placement.cpus[index]); !why.empty()) {
    return fmt::format("not bound ({})", why);
  }
  return fmt::format("bound to processors {}", cpu_list_text(placement.cpus[index]));
}

}  // namespace ringattn
