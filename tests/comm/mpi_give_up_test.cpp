// SPDX-License-Identifier: Apache-2.0
// A rank that has given up a wait over MPI doesn't wait once more in a collective: the code that handles the failure
// may want to agree on it.
#include <gtest/gtest.h>

#include "comm/mpi.hpp"
#include "tests/comm/exchanges.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

const double kShort = 0.05;  // a deadline that the tests let pass

// Runs `rank_main` on every rank of a world that rank 0 takes no part in.
template <typename RankMain>
void without_rank_0(const RankMain& rank_main) {
  const std::unique_ptr<Transport> world = make_mpi_transport(MPI_COMM_WORLD);
  if (world->rank() != 0) rank_main(*world);
  MPI_Barrier(MPI_COMM_WORLD);
}

// What `call` throws is what every later call throws at once; only an abort is newer.
template <typename Call>
void expect_last_word(Transport& world, const Call& call) {
  const Error first = error_of(call);
  EXPECT_EQ(first.code(), ErrorCode::kPeer) << first.what();
  const auto start = Deadline::Clock::now();
  EXPECT_STREQ(error_of([&] { world.barrier(test_deadline()); }).what(), first.what());
  EXPECT_STREQ(error_of([&] { agree(world, &first, test_deadline()); }).what(), first.what());
  EXPECT_STREQ(error_of([&] { world.progress(); }).what(), first.what());
  EXPECT_LT(std::chrono::duration<double>(Deadline::Clock::now() - start).count(), test_deadline().seconds() / 2.0);
}

TEST(MpiGivesUp, AWait) {
  without_rank_0([](Transport& world) {
    expect_last_word(world, [&] {
      const Memory byte(world, Bytes(1));
      Exchange exchange{"never", {}, {{0, 0, {{byte.data(), 1}}}}};
      world.wait(world.post(exchange, rank_stream()), rank_stream(), Deadline::after(kShort));
    });
  });
}

TEST(MpiGivesUp, ACollective) {
  without_rank_0(
      [](Transport& world) { expect_last_word(world, [&] { world.all_gather("abc", Deadline::after(kShort)); }); });
}

// Failures that its own call found say nothing about other ranks: the ranks can still agree on them.
TEST(MpiGivesUp, NothingForABugOfTheCaller) {
  const std::unique_ptr<Transport> world = make_mpi_transport(MPI_COMM_WORLD);
  const Error error = error_of([&] { world->wait(17, rank_stream(), test_deadline()); });
  EXPECT_EQ(error.code(), ErrorCode::kInternal) << error.what();
  EXPECT_STREQ(error_of([&] { agree(*world, &error, test_deadline()); }).what(), error.what());
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace ringattn::testing
