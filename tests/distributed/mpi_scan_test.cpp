// SPDX-License-Identifier: Apache-2.0
// Scans under mpirun: rows and final states have the bits of the kernel on all tokens. Run at several world sizes.
#include <gtest/gtest.h>
#include <mpi.h>

#include <vector>

#include "tests/distributed/over_mpi.hpp"
#include "tests/support/scan_rank.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kSuper = kSuperSegmentTokens;

class MpiScan : public OverMpi {
 protected:
  void expect_same(const ScanCase& given) {
    ScanOptions options;
    options.kernel.backend = "cpu";
    options.threads = 1;
    Scan scan(job_of(given), transport(), options);
    ScanRank rank(scan, transport().rank(), given);
    scan.run(rank.inputs(), rank.outputs());
    EXPECT_EQ(rank.differences(), 0) << "rank " << transport().rank();
    rank.clear();
    scan.enqueue(rank.inputs(), rank.outputs());
    scan.wait();
    EXPECT_EQ(rank.differences(), 0) << "rank " << transport().rank();
    const long long mine = scan.layout().tokens(transport().rank());
    long long all = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(all, given.inputs.rows());
  }
};

TEST_P(MpiScan, RaggedSequences) {
  expect_same(make_scan_case(small_scan(2, false), {3 * kSuper + 70, 5, kSuper + 1}, true, 1));
}

TEST_P(MpiScan, SelectiveScans) { expect_same(make_scan_case(small_scan(16, true), {2 * kSuper + 9, 80}, false, 2)); }

INSTANTIATE_TEST_SUITE_P(Transports, MpiScan, ::testing::Values("mpi"), transport_name);

}  // namespace
}  // namespace ringattn::testing
