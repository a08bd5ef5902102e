// SPDX-License-Identifier: Apache-2.0
// Worlds of tcp between processes for the conformance suite.
#include <functional>
#include <utility>

#include "comm/paced.hpp"
#include "tests/comm/store_control.hpp"
#include "tests/comm/world_cases.hpp"

namespace ringattn::testing {

namespace {

WorldCase tcp_case(std::string name, Route route, double pace) {
  const auto run = [=](const std::function<int(Transport&)>& rank_main) {
    std::unique_ptr<Transport> world;
    return sync_after(world, [&] {
      TcpOptions options;
      options.route = route;
      world = make_tcp_transport(store_control(), options);
      if (pace > 0.0) world = make_paced_transport(std::move(world), pace);
      return rank_main(*world);
    });
  };
  return {std::move(name), run};
}

}  // namespace

std::vector<WorldCase> world_cases() {
  return {tcp_case("tcp", Route::kChain, 0.0), tcp_case("direct", Route::kDirect, 0.0),
          tcp_case("paced", Route::kChain, 1e9)};
}

}  // namespace ringattn::testing
