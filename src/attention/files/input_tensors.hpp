// SPDX-License-Identifier: Apache-2.0
// The tensors of an attention job in a safetensors file: found by name, and checked against each other before anything
// is read but the short lists.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/files/safetensors_rows.hpp"
#include "attention/tokens/job.hpp"

namespace ringattn {

// What to look for. A name that isn't set is the role's own ("q", "cu_seqlens_k") and, for the last four, optional; a
// name that is set must be there.
struct InputNames {
  std::optional<std::string> q, k, v, cu_seqlens_q, cu_seqlens_k, q_offset, sinks;

  bool operator==(const InputNames&) const = default;
};

struct InputTensors {
  TensorSource q;  // [q tokens, heads, head_dim], in the order of q_grid
  TensorSource k;  // [k tokens, kv_heads, head_dim]
  TensorSource v;  // [k tokens, kv_heads, head_dim_v]
  RowGrid q_grid;
  RowGrid k_grid;
  RowGrid v_grid;
  Dtype dtype = Dtype::kBf16;
  // From cu_seqlens (those of the queries serve as many keys too), or one for each entry of the batch; offsets from
  // q_offset, or aligned to the end of the keys.
  SequenceList sequences;
  std::vector<float> sinks;        // [heads]; empty: the file has none
  std::vector<TensorSource> used;  // all of them: q, k, v, and the short lists that there are

  // Where out goes: the queries' order with the values' dim.
  RowGrid out_grid() const;
};

// Throws kFile, naming the tensor, its shape and what it disagrees with.
InputTensors find_input(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order);

}  // namespace ringattn
