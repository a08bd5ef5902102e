// SPDX-License-Identifier: Apache-2.0
// For tests under mpirun: each rank has the rows that it computed, in arrays of full size, and compares them with those
// of a single rank.
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

// Every row of `result` is that of `reference` or, as in `poison`, was not written; and over all ranks every token is
// computed by exactly one. Collective.
inline void expect_rows_of_all_ranks(std::int64_t tokens, const JobResult& result, const JobResult& reference,
                                     const JobResult& poison, const std::string& what) {
  const std::size_t out_bytes = reference.out.size() / static_cast<std::size_t>(tokens);
  const std::size_t heads = reference.lse.size() / static_cast<std::size_t>(tokens);
  long long mine = 0;
  long long untouched = 0;
  for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
    const auto equals = [&](const JobResult& other) {
      return std::memcmp(result.out.data() + t * out_bytes, other.out.data() + t * out_bytes, out_bytes) == 0 &&
             std::memcmp(result.lse.data() + t * heads, other.lse.data() + t * heads, heads * sizeof(float)) == 0;
    };
    mine += equals(reference) ? 1 : 0;
    untouched += equals(poison) ? 1 : 0;
  }
  EXPECT_EQ(mine + untouched, tokens) << what << ": a row of this rank differs";
  long long equal = 0;
  MPI_Allreduce(&mine, &equal, 1, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
  EXPECT_EQ(equal, tokens) << what << ": every token is computed by exactly one rank";
}

}  // namespace ringattn::testing
