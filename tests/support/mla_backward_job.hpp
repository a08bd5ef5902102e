// SPDX-License-Identifier: Apache-2.0
// Runs the gradients of expanded MLA through the library and returns them packed, for tests that compare worlds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/mla/mla_backward.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {

// Packed gradients. Those of matrices and sinks of each rank.
struct MlaGradients {
  std::vector<std::byte> dq, dlatent, dk_rope;
  std::vector<std::vector<float>> dw_uk, dw_uv, dsinks;
};

struct MlaBackwardData {
  MlaTensors forward;
  JobResult result;  // O and LSE of the forward
  std::vector<std::byte> dout;
  std::vector<float> dlse;
};

// Random inputs, with O and LSE of the CPU's forward on one rank; the same for the same seed.
MlaBackwardData random_mla_backward_data(const MlaJob& job, std::uint64_t seed);

// In a world of `world` threads (self for 1), or on the GPUs that there are, as run_gpu_world().
MlaGradients differentiate_mla(const MlaJob& job, const MlaOptions& options, const MlaBackwardData& data, int world);
MlaGradients differentiate_mla_on_gpus(const MlaJob& job, const MlaOptions& options, const MlaBackwardData& data,
                                       int world);

// Expects equal bytes, and those of matrices and sinks on every rank.
void expect_same_gradients(const MlaGradients& made, const MlaGradients& expected, const std::string& what);

}  // namespace ringattn::testing
