// SPDX-License-Identifier: Apache-2.0
// Files of SSM layers of both kinds, with the values of a synthetic layer of the same shape.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.hpp"
#include "tests/support/cache_files.hpp"

namespace ringattn::testing {

struct SsmFile {
  bool selective = false;
  std::vector<std::int64_t> lengths{300};
  int heads = 8;
  int head_dim = 16;  // of SSD
  int groups = 1;
  int state_dim = 16;
  Dtype dtype = Dtype::kBf16;
  std::uint64_t seed = 7;
};

// x, dt, A, B, C, D, z, dt_bias, or u, delta, A, B, C, D, z, delta_bias; cu_seqlens where there are several sequences.
NamedTensors ssm_tensors(const SsmFile& shape);

// fp32 [values], or of another shape.
NamedTensor float_list(const std::vector<float>& values, std::vector<std::int64_t> shape = {});

}  // namespace ringattn::testing
