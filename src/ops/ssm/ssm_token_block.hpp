// SPDX-License-Identifier: Apache-2.0
// Some tokens of a sequence as the fp64 check of an SSM op takes them (ssm_accuracy.hpp).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

// 2^−p of a dtype.
double rounding_of(Dtype dtype);
// Maximum error of rounding `value` to a dtype: half of the spacing there. The smallest fp16 numbers are 2^−24 apart.
double rounding_error(Dtype dtype, double value);

// A number that a kernel has but for an error.
struct Rounded {
  double value = 0.0;
  double error = 0.0;
};

// The rows of consecutive tokens of one sequence, after the convolution where there is one: in fp64, with the error
// that a kernel's result may have.
class SsmTokenBlock {
 public:
  // `heads`: those of B and C whose rows RoPE rotates; others must not be taken.
  SsmTokenBlock(const SsmInput& input, std::int32_t sequence, PackedRun tokens, std::span<const int> heads,
                int threads);

  // Element `dim` of a packed token's row, as it is given.
  double at(SsmTensorKind which, std::int64_t token, int head, std::int64_t dim) const;
  // The same as the SSM op takes it.
  Rounded taken(SsmTensorKind which, std::int64_t token, int head, std::int64_t dim) const;

 private:
  void rotate(SsmTensorKind which, std::int64_t first_position, std::span<const int> heads);
  // Channel of a token before the sequence, the oldest of which is 0.
  double in_halo(std::int64_t token, std::int64_t channel) const;

  const SsmJob& job_;
  std::int64_t first_;
  std::int64_t before_ = 0;  // tokens of the sequence that were read besides, of what is convolved
  std::int64_t channels_[5] = {-1, -1, -1, -1, -1};  // first ones of SsmTensorKind; -1: it isn't convolved
  const std::vector<float>& conv_weight_;
  const std::vector<float>& conv_bias_;
  Buffer halo_;
  std::vector<Buffer> buffers_;
  TensorView views_[5];
  std::vector<Rounded> rotated_[5];  // [tokens, heads, dim] of rows that RoPE rotates, else empty
};

}  // namespace ringattn
