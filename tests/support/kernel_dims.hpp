// SPDX-License-Identifier: Apache-2.0
// The dtypes and head dims of a kernel, asked from its own row of the table. Tests take their shapes from here, so that
// each of them has something to compute on every kernel, also on one that is compiled for few head dims.
#pragma once

#include <optional>
#include <vector>

#include "kernels/common/registry.hpp"

namespace ringattn::testing {

struct Dims {
  Dtype dtype;
  int head_dim;
  int head_dim_v;

  bool operator==(const Dims&) const = default;
};

// The dims of a fixed list that the kernel supports: bf16 first, then fp16, then fp32. Throws std::logic_error where
// there are none: the list lacks the kernel's dims.
std::vector<Dims> all_dims(const AttentionRow& row);

// One for each dtype of the kernel: head_dim 64 where the kernel has it. head_dim_v is the same.
std::vector<Dims> usual_dims(const AttentionRow& row);
std::optional<Dims> usual_dims(const AttentionRow& row, Dtype dtype);

// One for each dtype, with another head_dim_v. A kernel may have none.
std::vector<Dims> unequal_dims(const AttentionRow& row);

// The usual and the unequal ones of each dtype, and all others of one dtype.
std::vector<Dims> varied_dims(const AttentionRow& row);

AttentionSpec make_spec(const Dims& dims, int heads, int kv_heads, const Mask& mask);

}  // namespace ringattn::testing
