// SPDX-License-Identifier: Apache-2.0
// Some tokens of a sequence, as the fp64 check of an SSM op needs them (ssm_accuracy.hpp).
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

// A number and the error that a kernel's value of it may have.
struct Rounded {
  double value = 0.0;
  double error = 0.0;
};

// The rows of consecutive tokens of one sequence in fp64, after the convolution if there is one, with the error that a
// kernel's rows may have.
class SsmTokenBlock {
 public:
  // `heads`: the heads of B and C that RoPE rotates. Rows of other heads must not be read.
  SsmTokenBlock(const SsmInput& input, std::int32_t sequence, PackedRun tokens, std::span<const int> heads,
                int threads);

  // Element `dim` of a packed token's row, as given in the input.
  double at(SsmTensorKind which, std::int64_t token, int head, std::int64_t dim) const;
  // The same after the convolution and RoPE, as the SSM uses it.
  Rounded taken(SsmTensorKind which, std::int64_t token, int head, std::int64_t dim) const;

 private:
  void rotate(SsmTensorKind which, std::int64_t first_position, std::span<const int> heads);
  // A channel of a token before the sequence. The oldest of these tokens is 0.
  double in_halo(std::int64_t token, std::int64_t channel) const;

  const SsmJob& job_;
  std::int64_t first_;
  std::int64_t before_ = 0;  // earlier tokens of the sequence that were read for the convolution
  std::int64_t channels_[5] = {-1, -1, -1, -1, -1};  // first channel of each SsmTensorKind; -1: not convolved
  const std::vector<float>& conv_weight_;
  const std::vector<float>& conv_bias_;
  Buffer halo_;
  std::vector<Buffer> buffers_;
  TensorView views_[5];
  std::vector<Rounded> rotated_[5];  // [tokens, heads, dim] of rows that RoPE rotates; otherwise empty
};

}  // namespace ringattn
