// SPDX-License-Identifier: Apache-2.0
// Scans and gated delta rules under mpirun: rows and final states have the bits of the kernel on all tokens. Run at
// several world sizes.
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "attention/tokens/ssm_layout.hpp"
#include "kernels/common/simd_target.hpp"
#include "ops/reshard/reshard.hpp"
#include "tests/distributed/over_mpi.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gated_delta_rank.hpp"
#include "tests/support/ssm_rank.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kSuper = kSuperSegmentTokens;

// Rows of one number each, in the memory of the backend.
class NumberedRows {
 public:
  NumberedRows(Backend& backend, const std::vector<std::int64_t>& numbers)
      : count_(numbers.size()), memory_(backend, sizeof(std::int64_t) * std::max<std::size_t>(1, count_)) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(numbers.data());
    if (count_ > 0) memory_.write({bytes, bytes + sizeof(std::int64_t) * count_});
  }

  std::byte* data() const { return memory_.data(); }
  std::vector<std::int64_t> read() const {
    const std::vector<std::byte> bytes = memory_.read();
    std::vector<std::int64_t> numbers(count_);
    if (count_ > 0) std::memcpy(numbers.data(), bytes.data(), sizeof(std::int64_t) * count_);
    return numbers;
  }

 private:
  std::size_t count_;
  DeviceArray memory_;
};

class MpiSsm : public OverMpi {
 protected:
  void expect_same(const SsmSpec& spec, const std::vector<std::int64_t>& lengths, bool initial, std::uint64_t seed) {
    const SsmCase given = make_ssm_case(spec, lengths, initial, seed, backend());
    SsmOptions options;
    options.kernel.backend = backend();
    options.threads = 1;
    Ssm scan(job_of(given), transport(), options);
    SsmRank rank(scan, transport().rank(), given);
    scan.run(rank.inputs(), rank.outputs());
    EXPECT_EQ(rank.differences(), 0) << "rank " << transport().rank();
    rank.clear();
    scan.enqueue(rank.inputs(), rank.outputs());
    scan.wait();
    EXPECT_EQ(rank.differences(), 0) << "rank " << transport().rank();
    expect_tokens(scan.layout(), given.inputs.rows());
  }
  void expect_same_rule(GatedDeltaSpec spec, const std::vector<std::int64_t>& lengths, std::uint64_t seed) {
    if (backend() == "cuda") spec.key_dim = spec.value_dim = 128;  // the only dims of sm90_gated_delta
    std::optional<DeltaCase> given;
    try {
      given = make_delta_case(spec, lengths, true, seed, backend());
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      GTEST_SKIP() << error.what();
    }
    SsmOptions options;
    options.kernel.backend = backend();
    options.threads = 1;
    GatedDelta rule(job_of(*given), transport(), options);
    DeltaRank rank(rule, transport().rank(), *given);
    rule.run(rank.inputs(), rank.outputs());
    EXPECT_EQ(rank.differences(), 0) << "rank " << transport().rank();
    rank.clear();
    rule.enqueue(rank.inputs(), rank.outputs());
    rule.wait();
    EXPECT_EQ(rank.differences(), 0) << "rank " << transport().rank();
    expect_tokens(rule.layout(), given->data.rows());
    MPI_Barrier(MPI_COMM_WORLD);  // device memory may be freed only once no rank has work in flight
  }

 private:
  void expect_tokens(const Layout& layout, std::int64_t tokens) {
    const long long mine = layout.tokens(transport().rank());
    long long all = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(all, tokens);
  }
};

// The last rank's host has no AMX, as far as its kernels know.
TEST_P(MpiSsm, HostsOfDifferentKindsRunWhatHasTheSameBits) {
  if (backend() != "cpu") GTEST_SKIP() << "needs: CPU kernels";
  if (simd_target_names_here().front() != "amx") GTEST_SKIP() << "needs: a processor with AMX";
  const int last = transport().size() - 1;
  set_simd_target(transport().rank() == last ? "avx512" : "amx");
  SsmSpec spec = small_ssm(2, false);
  spec.dtype = Dtype::kF32;
  expect_same(spec, {70}, false, 61);
  spec.dtype = Dtype::kBf16;
  spec.head_dim = spec.state_dim = 32;
  SsmOptions options;
  options.kernel.backend = "cpu";
  if (last > 0) {
    const Error error = error_of([&] { Ssm(SsmJob{spec, {70}}, transport(), options); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(
        std::string(error.what()),
        "rank " + std::to_string(last) +
            " and rank 0 differ in kernel (cpu_ssd against cpu_ssd_amx). Start on the same model of machine, force "
            "one kernel, or on CPUs set RINGATTN_SIMD_TARGET on all ranks to a target that every host has; "
            "ringattn's info lists them.");
  }
  set_simd_target("auto");
}

TEST_P(MpiSsm, RaggedSequences) { expect_same(small_ssm(2, false), {3 * kSuper + 70, 5, kSuper + 1}, true, 1); }

TEST_P(MpiSsm, SelectiveScans) { expect_same(small_ssm(16, true), {2 * kSuper + 9, 80}, false, 2); }

// GDN and KDA: a sequence of several ranks, fewer segments than some worlds have ranks, and an empty sequence.
TEST_P(MpiSsm, GatedDeltaRules) {
  GatedDeltaSpec spec;
  spec.key_heads = 1;
  spec.value_heads = 2;
  spec.key_dim = 16;
  spec.value_dim = 8;
  expect_same_rule(spec, {3 * kSegmentTokens + 70, 0, 5, kSegmentTokens + 1}, 3);
  spec.key_decays = true;
  expect_same_rule(spec, {2 * kSegmentTokens + 9, 80}, 4);
}

TEST_P(MpiSsm, RowsComeFromAnotherLayoutAndGoBack) {
  // Tokens in turn, ten at a time, where SSM has whole super-segments.
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
  const Layout dealt = ssm_layout(lengths, {}, transport().size());
  const SsmChoice choice = choose_kernel(small_ssm(2, false), {backend(), "auto"});
  const auto backend = choice.row->make_backend({1, transport().device()});
  Reshard there(turns, dealt, sizeof(std::int64_t), transport(), *backend);
  Reshard back(dealt, turns, sizeof(std::int64_t), transport(), *backend);
  const int rank = transport().rank();
  const NumberedRows rows(*backend, turns.packed_tokens(rank));
  const NumberedRows moved(*backend, std::vector<std::int64_t>(static_cast<std::size_t>(dealt.tokens(rank)), -1));
  const NumberedRows returned(*backend, std::vector<std::int64_t>(static_cast<std::size_t>(turns.tokens(rank)), -1));
  there.enqueue(rows.data(), moved.data(), backend->stream());
  back.enqueue(moved.data(), returned.data(), backend->stream());
  there.wait();
  back.wait();
  EXPECT_EQ(moved.read(), dealt.packed_tokens(rank));
  EXPECT_EQ(returned.read(), turns.packed_tokens(rank));
  MPI_Barrier(MPI_COMM_WORLD);  // device memory may be freed only once no rank has work in flight
}

INSTANTIATE_TEST_SUITE_P(Transports, MpiSsm, ::testing::Values("mpi", "p2p", "nccl"), transport_name);

}  // namespace
}  // namespace ringattn::testing
