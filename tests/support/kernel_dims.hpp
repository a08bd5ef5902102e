// SPDX-License-Identifier: Apache-2.0
// The dtypes and head dims of a kernel, according to its row of the table. Tests take their shapes from here, so that
// every test has something to compute on every kernel, even if the kernel was compiled for few head dims.
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

// The dims of a fixed list that the kernel supports: bf16 first, then fp16, then fp32. Throws std::logic_error if there
// are none, because then the list lacks the kernel's dims.
std::vector<Dims> all_dims(const AttentionRow& row);

// One for each dtype of the kernel: head_dim 64 if the kernel supports it. head_dim_v is the same.
std::vector<Dims> usual_dims(const AttentionRow& row);
std::optional<Dims> usual_dims(const AttentionRow& row, Dtype dtype);

// One for each dtype, with another head_dim_v. A kernel may have none.
std::vector<Dims> unequal_dims(const AttentionRow& row);

// For each dtype the usual dims and the ones with another head_dim_v, and for one dtype all others.
std::vector<Dims> varied_dims(const AttentionRow& row);

AttentionSpec make_spec(const Dims& dims, int heads, int kv_heads, const Mask& mask);

}  // namespace ringattn::testing
