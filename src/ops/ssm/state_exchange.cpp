// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/state_exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/ring/warm_up.hpp"
#include "comm/exchange.hpp"

namespace ringattn {

StateExchange::StateExchange(const StateSize& state, const StateHops& hops, std::span<const HeadRange> ranges,
                             Transport& transport, Backend& backend, std::string_view what)
    : hops_(hops), ranges_(ranges), transport_(transport), head_bytes_(state.head_bytes), what_(what) {
  const int self = transport.rank();
  const std::size_t runs = hops.steps[static_cast<std::size_t>(self)].size();
  memory_ = backend.allocate(std::max(bytes(state, hops, self), static_cast<std::size_t>(transport.size())));
  received_.resize(runs, nullptr);
  sent_.resize(runs, nullptr);
  std::byte* next = memory_.data();
  for (const std::vector<StateHop>& step : hops.hops) {
    for (const StateHop& hop : step) {
      if (hop.to == self) received_[static_cast<std::size_t>(hop.to_run)] = next;
      if (hop.from == self) sent_[static_cast<std::size_t>(hop.from_run)] = next;
      if (hop.to == self || hop.from == self) next += state.bytes();
    }
  }
}

std::size_t StateExchange::bytes(const StateSize& state, const StateHops& hops, int rank) {
  std::size_t states = 0;
  for (const std::vector<StateHop>& step : hops.hops) {
    for (const StateHop& hop : step) states += hop.to == rank || hop.from == rank ? 1 : 0;
  }
  return states * state.bytes();
}

void StateExchange::announce(const Deadline& deadline) {
  std::vector<Exchange> exchanges;
  for (std::size_t range = 0; range < ranges_.size(); ++range) {
    for (int step = 0; step < steps(); ++step) exchanges.push_back(exchange_of(range, step));
  }
  announced_ = transport_.announce(exchanges, deadline);
}

void StateExchange::connect(const Collective& collective, Backend& backend) {
  announce(collective.timeouts().for_peer());
  if (backend.memory() != MemoryKind::kDevice || transport_.size() == 1) return;
  warm_up_transport(collective, transport_, backend, memory_.data());
}

float* StateExchange::received(std::int64_t run) const {
  return reinterpret_cast<float*>(received_[static_cast<std::size_t>(run)]);
}
float* StateExchange::sent(std::int64_t run) const {
  return reinterpret_cast<float*>(sent_[static_cast<std::size_t>(run)]);
}

bool StateExchange::receives(int step) const {
  if (step >= steps()) return false;
  return std::ranges::count(hops_.hops[static_cast<std::size_t>(step)], transport_.rank(), &StateHop::to) > 0;
}

Exchange StateExchange::exchange_of(std::size_t range, int step) const {
  const HeadRange& heads = ranges_[range];
  OneRound states;
  for (const StateHop& hop : hops_.hops[static_cast<std::size_t>(step)]) {
    if (hop.from == transport_.rank()) {
      states.send(hop.to, {sent_[static_cast<std::size_t>(hop.from_run)] + offset_of(heads), size_of(heads)});
    } else if (hop.to == transport_.rank()) {
      states.receive(hop.from, {received_[static_cast<std::size_t>(hop.to_run)] + offset_of(heads), size_of(heads)});
    }
  }
  return std::move(states).exchange(
      fmt::format("{} of heads {} to {}, step {} of {}", what_, heads.first, heads.end() - 1, step + 1, steps()));
}

Ticket StateExchange::post(std::size_t range, int step, Stream stream) {
  Exchange exchange = exchange_of(range, step);
  if (announced_ != kNotAnnounced) exchange.announced = announced_ + static_cast<std::int64_t>(range) * steps() + step;
  return transport_.post(std::move(exchange), stream);
}

}  // namespace ringattn
