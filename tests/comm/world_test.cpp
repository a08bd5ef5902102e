// SPDX-License-Identifier: Apache-2.0
// The table of transports and run_world() without mpirun; under mpirun it is tested by world_program.cpp.
#include "comm/world.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <set>
#include <stdexcept>

#include "base/gpu.hpp"
#include "base/host.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scoped_environment.hpp"

namespace ringattn {
namespace {

Deadline test_deadline() { return Deadline::after(20.0); }

struct Outcome {
  int code = 0;
  int ranks = 0;
  std::string transport;
  std::vector<std::string> printed;
};

Outcome run(const WorldRequest& request, const std::function<int(Transport&)>& rank_main) {
  Outcome outcome;
  std::atomic<int> ranks{0};
  outcome.code = run_world(
      request,
      [&](Transport& world) {
        ++ranks;
        if (world.rank() == 0) outcome.transport = world.name();
        return rank_main(world);
      },
      [&](const Error& error) { outcome.printed.emplace_back(error.what()); });
  outcome.ranks = ranks;
  return outcome;
}

// Requests host memory, so that the choice is the same on hosts with GPUs.
WorldRequest request_of(std::string transport, std::optional<int> ranks = std::nullopt) {
  WorldRequest request;
  request.transport = std::move(transport);
  request.memory = WantedMemory::kHost;
  request.ranks = ranks;
  return request;
}

// The environment of a launcher, for the length of a test.
class Launched {
 public:
  explicit Launched(const char* size) {
    setenv("OMPI_COMM_WORLD_SIZE", size, 1);
    setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  }
  ~Launched() {
    unsetenv("OMPI_COMM_WORLD_SIZE");
    unsetenv("OMPI_COMM_WORLD_RANK");
  }
};

int nothing(Transport&) { return 0; }

TEST(TransportTable, HasUniqueRowsThatSayWhyNot) {
  std::set<std::string_view> names;
  for (const TransportRow& row : transport_table()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_FALSE(row.description.empty());
    EXPECT_TRUE(row.memory == "any" || row.memory == "host" || row.memory == "device") << row.memory;
    const bool no_gpu = row.memory == "device" && visible_gpus().empty();
    const bool needs_launcher = row.name == "mpi" || row.name == "tcp";
    EXPECT_EQ(!row.unavailable().empty(), needs_launcher || no_gpu) << row.name;
    const testing::ScopedEnvironment store("RINGATTN_STORE", "node1:29555");
    const Launched launched("4");
    EXPECT_EQ(!row.unavailable().empty(), no_gpu) << row.name;
  }
  EXPECT_TRUE(names.count("self") == 1 && names.count("threads") == 1);
}

TEST(RunWorld, ChoosesByWhatIsAskedFor) {
  EXPECT_EQ(run(request_of("auto"), nothing).transport, "self");
  EXPECT_EQ(run(request_of("auto", 1), nothing).transport, "self");
  EXPECT_EQ(run(request_of("self", 1), nothing).transport, "self");
  EXPECT_EQ(run(request_of("threads", 1), nothing).transport, "threads");
  const Outcome five = run(request_of("auto", 5), [](Transport& world) {
    world.barrier(test_deadline());
    return 0;
  });
  EXPECT_EQ(five.transport, "threads");
  EXPECT_EQ(five.ranks, 5);
  EXPECT_EQ(five.code, 0);
}

TEST(RunWorld, PacesEveryRank) {
  WorldRequest request = request_of("threads", 3);
  request.pace = 1e9;
  EXPECT_EQ(run(request, nothing).transport, "paced threads");
}

TEST(RunWorld, RanksCompareBeforeTheWorldIsChosen) {
  for (const auto& [transport, size] : {std::pair("self", 1), std::pair("threads", 3)}) {
    WorldRequest request = request_of(transport, size);
    std::atomic<int> compared{0};
    std::atomic<bool> chosen{false};
    request.compare = [&, size = size](Bootstrap& world) {
      EXPECT_EQ(world.size(), size);
      EXPECT_FALSE(chosen);
      world.barrier(test_deadline());  // all ranks are here
      ++compared;
      world.barrier(test_deadline());
      throw AgreedError(Error(ErrorCode::kUsage, "the ranks differ"));
    };
    request.chosen = [&](std::string_view, const MessageTemplate&) { chosen = true; };
    const Outcome refused = run(request, nothing);
    EXPECT_EQ(compared, size);
    EXPECT_FALSE(chosen);
    EXPECT_EQ(refused.ranks, 0);
    EXPECT_EQ(refused.code, static_cast<int>(ErrorCode::kUsage));
    ASSERT_EQ(refused.printed.size(), 1U);
    EXPECT_EQ(refused.printed[0], "the ranks differ.");
  }
}

TEST(RunWorld, RefusesContradictions) {
  struct Case {
    WorldRequest request;
    const char* launched;  // ranks of mpirun, or nullptr
    ErrorCode code;
    std::string text;
  };
  std::vector<Case> cases = {
      {request_of("thread"), nullptr, ErrorCode::kUsage, "Did you mean threads?"},
      {request_of("carrier-pigeon"), nullptr, ErrorCode::kUsage, "there is no transport \"carrier-pigeon\""},
      {request_of("self", 2), nullptr, ErrorCode::kUsage, "ranks = 2"},
      {request_of("threads"), nullptr, ErrorCode::kUsage, "Add ranks = N."},
      {request_of("auto", 0), nullptr, ErrorCode::kUsage, "can't run on 0 ranks"},
      {request_of("auto", -3), nullptr, ErrorCode::kUsage, "can't run on -3 ranks"},
      {request_of("auto", 4), "4", ErrorCode::kUsage, "ranks = 4 contradicts mpirun"},
      {request_of("threads"), "4", ErrorCode::kUsage, "transport = threads contradicts mpirun"},
      {request_of("self"), "4", ErrorCode::kUsage, "transport = self contradicts mpirun"},
      {request_of("tcp"), "4", ErrorCode::kUsage, "transport = tcp contradicts mpirun"},
      {request_of("tcp"), nullptr, ErrorCode::kUnsupported, "Set RINGATTN_STORE"},
  };
  const auto rows = transport_table();
  if (std::any_of(rows.begin(), rows.end(), [](const TransportRow& row) { return row.name == "mpi"; })) {
    cases.push_back({request_of("mpi"), nullptr, ErrorCode::kUnsupported, "not started by mpirun"});
    cases.push_back({request_of("mpi", 2), nullptr, ErrorCode::kUnsupported, "use transport = threads"});
  } else {
    cases.push_back({request_of("mpi"), nullptr, ErrorCode::kUsage, "there is no transport \"mpi\""});
    cases.push_back({request_of("auto"), "4", ErrorCode::kUnsupported, "this build has no MPI"});
  }
  for (const Case& one : cases) {
    const std::string what = fmt::format("{} ranks {} launched {}", one.request.transport,
                                         one.request.ranks.value_or(-1), one.launched == nullptr ? "-" : one.launched);
    std::optional<Launched> launched;
    if (one.launched != nullptr) launched.emplace(one.launched);
    try {
      run(one.request, nothing);
      ADD_FAILURE() << what << ": nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), one.code) << what << ": " << error.what();
      EXPECT_NE(std::string(error.what()).find(one.text), std::string::npos) << what << ": " << error.what();
    }
  }
}

TEST(RunWorld, RefusesWhatContradictsTheStore) {
  const testing::ScopedEnvironment store("RINGATTN_STORE", "127.0.0.1:29555");
  const testing::ScopedEnvironment rank("RANK", "0");
  struct Case {
    const char* size;
    WorldRequest request;
    std::string text;
  };
  std::vector<Case> cases = {
      {"2", request_of("auto", 2), "ranks = 2 contradicts RINGATTN_STORE"},
      {"2", request_of("threads"), "transport = threads contradicts RINGATTN_STORE"},
      {"2", request_of("self"), "transport = self contradicts RINGATTN_STORE"},
      {"two", request_of("auto"), "WORLD_SIZE is \"two\""},
      {"0", request_of("self"), "WORLD_SIZE is \"0\""},
  };
  const auto rows = transport_table();
  if (std::any_of(rows.begin(), rows.end(), [](const TransportRow& row) { return row.name == "mpi"; })) {
    cases.push_back({"2", request_of("mpi"), "transport = mpi contradicts RINGATTN_STORE"});
  }
  for (const Case& one : cases) {
    const testing::ScopedEnvironment size("WORLD_SIZE", one.size);
    const Error error = testing::error_of([&] { run(one.request, nothing); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
    EXPECT_NE(std::string(error.what()).find(one.text), std::string::npos) << error.what();
  }
  const testing::ScopedEnvironment size("WORLD_SIZE", "1");
  EXPECT_EQ(run(request_of("self"), nothing).transport, "self");
}

TEST(RunWorld, RunsSelfUnderMpirunWithOneRank) {
  const Launched launched("1");
  EXPECT_EQ(run(request_of("self"), nothing).transport, "self");
}

TEST(RunWorld, ReturnsTheHighestCode) {
  for (const int ranks : {1, 3}) {
    const Outcome outcome =
        run(request_of("auto", ranks), [](Transport& world) { return world.rank() == world.size() / 2 ? 1 : 0; });
    EXPECT_EQ(outcome.code, 1);
    EXPECT_TRUE(outcome.printed.empty());
  }
}

TEST(RunWorld, PrintsOneErrorAndReturnsItsCode) {
  for (const int ranks : {1, 2, 7}) {
    const Outcome alone = run(request_of("auto", ranks), [](Transport& world) -> int {
      if (world.rank() == world.size() - 1) throw Error(ErrorCode::kMemory, "too small.");
      world.barrier(test_deadline());
      return 0;
    });
    EXPECT_EQ(alone.code, 5);
    const std::string last = fmt::format("rank {} on {}: ", ranks - 1, host_name());
    EXPECT_EQ(alone.printed, std::vector<std::string>{(ranks > 1 ? last : "") + "too small."});

    const Outcome all =
        run(request_of("auto", ranks), [](Transport&) -> int { throw Error(ErrorCode::kFile, "missing."); });
    EXPECT_EQ(all.code, 3);
    ASSERT_EQ(all.printed.size(), 1U);
    EXPECT_TRUE(all.printed[0].ends_with("missing.")) << all.printed[0];  // of whichever rank came first

    const Outcome agreed = run(request_of("auto", ranks), [](Transport& world) {
      const Error mine(ErrorCode::kFile, fmt::format("rank {}.", world.rank()));
      agree(world, &mine, test_deadline());
      return 0;
    });
    EXPECT_EQ(agreed.code, 3);
    const std::string first = fmt::format("rank 0 on {}: ", host_name());
    EXPECT_EQ(agreed.printed, std::vector<std::string>{(ranks > 1 ? first : "") + "rank 0."});
  }
}

TEST(RunWorld, TurnsForeignExceptionsIntoCodes) {
  EXPECT_EQ(run(request_of("auto", 2), [](Transport&) -> int { throw std::bad_alloc(); }).code, 5);
  const Outcome bug = run(request_of("auto"), [](Transport&) -> int { throw std::out_of_range("index 7"); });
  EXPECT_EQ(bug.code, 7);
  ASSERT_EQ(bug.printed.size(), 1U);
  EXPECT_NE(bug.printed[0].find("index 7"), std::string::npos);
}

TEST(EndWithoutWorld, PrintsAndReturnsTheCode) {
  int printed = 0;
  EXPECT_EQ(end_without_world(Error(ErrorCode::kUsage, "bad flag."), [&](const Error&) { ++printed; }), 2);
  EXPECT_EQ(printed, 1);
}

}  // namespace
}  // namespace ringattn
