// SPDX-License-Identifier: Apache-2.0
// Scans under mpirun: rows and final states have the bits of the kernel on all tokens. Run at several world sizes.
#include <gtest/gtest.h>
#include <mpi.h>

#include <vector>

#include "attention/reshard.hpp"
#include "attention/tokens/scan_deal.hpp"
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

TEST_P(MpiScan, RowsComeFromAnotherLayoutAndGoBack) {
  // Tokens in turn, ten at a time, where a scan has whole super-segments.
  const std::vector<std::int64_t> lengths{kSuper + 70, 555};
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(transport().size()));
  std::size_t next = 0;
  for (std::int32_t s = 0; s < 2; ++s) {
    const std::int64_t length = lengths[static_cast<std::size_t>(s)];
    for (std::int64_t begin = 0; begin < length; begin += 10) {
      runs[next++ % runs.size()].push_back({s, begin, std::min(length, begin + 10)});
    }
  }
  const Layout turns(lengths, std::move(runs));
  const Layout dealt = scan_layout(lengths, {}, transport().size());
  const ScanChoice choice = choose_kernel(ScanSpec{}, {"cpu", "auto"});
  const auto backend = choice.row->make_backend({1, kNoDevice});
  Reshard there(turns, dealt, sizeof(std::int64_t), transport(), *backend);
  Reshard back(dealt, turns, sizeof(std::int64_t), transport(), *backend);
  const std::vector<std::int64_t> rows = turns.packed_tokens(transport().rank());
  std::vector<std::int64_t> moved(static_cast<std::size_t>(dealt.tokens(transport().rank())), -1);
  std::vector<std::int64_t> returned(rows.size(), -1);
  there.enqueue(rows.data(), moved.data());
  back.enqueue(moved.data(), returned.data());
  there.wait();
  back.wait();
  EXPECT_EQ(moved, dealt.packed_tokens(transport().rank()));
  EXPECT_EQ(returned, rows);
}

INSTANTIATE_TEST_SUITE_P(Transports, MpiScan, ::testing::Values("mpi"), transport_name);

}  // namespace
}  // namespace ringattn::testing
