// SPDX-License-Identifier: Apache-2.0
// Linear layers under mpirun have the bits of the kernel on one rank. Run at several world sizes.
#include <gtest/gtest.h>

#include "tests/distributed/over_mpi.hpp"
#include "tests/support/linear_rank.hpp"

namespace ringattn::testing {
namespace {

class MpiLinear : public OverMpi {};

TEST_P(MpiLinear, HaveTheBitsOfOneRank) {
  const LinearOptions options{{backend(), "auto"}, 1, 60.0};
  for (const LinearParallel parallel : {LinearParallel::kRow, LinearParallel::kColumn}) {
    for (const WeightFormat format : {WeightFormat::kFloat, WeightFormat::kInt8}) {
      const LinearSpec spec{Dtype::kBf16, format, 344, 50, LinearActivation::kSilu, true, true, parallel};
      const LinearCase given = make_linear_case(spec, 13, 51, *choose_kernel(spec, options.kernel).row);
      EXPECT_EQ(linear_differences(transport(), given, options), 0)
          << describe(spec) << ", rank " << transport().rank();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, MpiLinear, ::testing::Values("mpi", "nccl", "p2p"), transport_name);

}  // namespace
}  // namespace ringattn::testing
