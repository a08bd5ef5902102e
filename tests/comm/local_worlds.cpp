// SPDX-License-Identifier: Apache-2.0
// Worlds inside this process for the conformance suite: self, threads in all ways of delivery, and tcp between threads
// that come together in each of the ways there are.
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "comm/callbacks.hpp"
#include "comm/paced.hpp"
#include "comm/self.hpp"
#include "comm/tcp/store.hpp"
#include "comm/tcp/tcp.hpp"
#include "comm/threads.hpp"
#include "tests/comm/world_cases.hpp"
#include "tests/support/free_port.hpp"

namespace ringattn::testing {

namespace {

constexpr double kNoPace = 0.0;

WorldCase threads_case(std::string name, int size, const ThreadsDelivery& delivery, double pace = kNoPace) {
  const auto run = [=](const std::function<int(Transport&)>& rank_main) {
    auto world = make_threads_world(size, delivery);
    if (pace > 0.0) {
      for (auto& rank : world) rank = make_paced_transport(std::move(rank), pace);
    }
    std::atomic<int> sum{0};
    run_ranks(std::move(world), [&](Transport& rank) { sum += rank_main(rank); });
    return sum.load();
  };
  return {fmt::format("{}_{}", name, size), run};
}

// How the ranks of a tcp world come together: `bootstrap` is a world of this process's threads, `port` free.
using Gate = std::unique_ptr<Bootstrap> (*)(Transport& bootstrap, int port);

std::unique_ptr<Bootstrap> by_callbacks(Transport& bootstrap, int) {
  Callbacks callbacks;
  callbacks.rank = bootstrap.rank();
  callbacks.size = bootstrap.size();
  callbacks.all_gather = [&bootstrap](std::string_view bytes, double seconds) {
    return bootstrap.all_gather(bytes, Deadline::after(seconds));
  };
  return make_callback_bootstrap(std::move(callbacks));
}

std::unique_ptr<Bootstrap> by_store(Transport& bootstrap, int port) {
  return make_store({{"127.0.0.1", port}, bootstrap.rank(), bootstrap.size(), "conformance", 20.0});
}

WorldCase tcp_case(std::string name, int size, Gate gate, Route route, double pace = kNoPace) {
  const auto run = [=](const std::function<int(Transport&)>& rank_main) {
    std::atomic<int> sum{0};
    const int port = free_port();
    run_threads_world(size, {}, [&](Transport& bootstrap) {
      TcpOptions options;
      options.route = route;
      std::unique_ptr<Transport> world = make_tcp_transport(*gate(bootstrap, port), options);
      if (pace > 0.0) world = make_paced_transport(std::move(world), pace);
      sum += rank_main(*world);
    });
    return sum.load();
  };
  return {fmt::format("{}_{}", name, size), run};
}

}  // namespace

std::vector<WorldCase> world_cases() {
  std::vector<WorldCase> cases;
  cases.push_back({"self", [](const std::function<int(Transport&)>& rank_main) {
                     const auto world = make_self_transport();
                     return rank_main(*world);
                   }});
  ThreadsDelivery chain;
  chain.route = Route::kChain;
  ThreadsDelivery shuffled;
  shuffled.shuffle_seed = 7;
  ThreadsDelivery delayed = chain;
  delayed.shuffle_seed = 11;
  delayed.max_delay = std::chrono::microseconds(500);
  for (const int size : {1, 2, 3, 4, 5, 8}) cases.push_back(threads_case("threads", size, {}));
  for (const int size : {2, 5}) cases.push_back(threads_case("chain", size, chain));
  for (const int size : {3, 8}) cases.push_back(threads_case("shuffled", size, shuffled));
  for (const int size : {2, 3, 7}) cases.push_back(threads_case("delayed", size, delayed));
  cases.push_back(threads_case("threads", 64, {}));
  cases.push_back(threads_case("paced", 1, {}, 1e9));
  cases.push_back(threads_case("paced", 4, delayed, 1e9));
  for (const int size : {1, 2, 3, 7}) cases.push_back(tcp_case("tcp", size, by_store, Route::kChain));
  cases.push_back(tcp_case("tcp_by_callbacks", 4, by_callbacks, Route::kDirect));
  cases.push_back(tcp_case("paced_tcp", 3, by_callbacks, Route::kChain, 1e9));
  return cases;
}

}  // namespace ringattn::testing
