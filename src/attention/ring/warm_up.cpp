// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/warm_up.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/host.hpp"

namespace ringattn {

int default_host_threads(const Collective& collective) {
  const Processors processors = usable_processors();
  const std::string mine = host_name() + ' ' + processors.set;
  const std::vector<std::string> all = collective.gather(mine);
  const auto sharing = std::count(all.begin(), all.end(), mine);
  return std::max(1, processors.count / static_cast<int>(sharing));
}

MachineModel common_machine(const Collective& collective, const MachineModel& given, MachineModel own) {
  const std::vector<double> rates_given = collective.gather_values(given.flops_per_second);
  const std::vector<double> rates = collective.gather_values(own.flops_per_second);
  const bool same = std::ranges::all_of(rates_given, [&](double rate) { return rate == given.flops_per_second; });
  if (same) own.flops_per_second = *std::ranges::min_element(rates);
  return own;
}

void warm_up_transport(const Collective& collective, Transport& transport, Backend& backend, std::byte* bytes) {
  Exchange exchange;
  exchange.label = "first contact";
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer == transport.rank()) continue;
    exchange.sends.push_back({peer, 0, {{bytes + transport.rank(), 1}}});
    exchange.receives.push_back({peer, 0, {{bytes + peer, 1}}});
  }
  const Stream stream = backend.stream();
  constexpr std::byte kGreeting{1};
  backend.copy_rows(bytes + transport.rank(), 1, &kGreeting, 1, 1, 1, stream);
  transport.wait(transport.post(std::move(exchange), stream), stream, collective.timeouts().for_peer());
  backend.synchronize(stream, collective.timeouts().for_peer(), [&] { transport.progress(); });
}

}  // namespace ringattn
