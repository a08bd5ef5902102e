// SPDX-License-Identifier: Apache-2.0
// The tensors of a job in a safetensors file. They are found by name and checked against each other; only the short
// lists are read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/tokens/job.hpp"
#include "attention/tokens/page_table.hpp"
#include "io/safetensors_rows.hpp"
#include "io/tensor_roles.hpp"

namespace ringattn {

struct InputTensors {
  TensorSource q;  // [q tokens, heads, head_dim], in the order of q_grid
  TensorSource k;  // [k tokens, kv_heads, head_dim]; for a cache the tokens of all pages, each page as a batch entry
  TensorSource v;  // [k tokens, kv_heads, head_dim_v]
  RowGrid q_grid;
  RowGrid k_grid;
  RowGrid v_grid;
  Dtype dtype = Dtype::kBf16;
  // From cu_seqlens (cu_seqlens_q is used for the keys, too, if there are as many), or one sequence per batch entry.
  // Offsets from q_offset, or aligned to the end of the keys.
  SequenceList sequences;
  std::shared_ptr<const PageTable> pages;         // block table of a cache, whose pages are k and v; otherwise null
  std::vector<float> sinks;                       // [heads]; empty: the file has none
  std::shared_ptr<const KeyPositions> positions;  // of k's tokens (position_tensors.hpp); null: the file has none
  std::vector<TensorSource> used;                 // all tensors that are used: q, k, v, and lists

  // The layout of out: the queries' axis order with the values' dim.
  RowGrid out_grid() const;
};

// Finds q, k and v. Throws kFile, naming the tensor, its shape and what contradicts it.
InputTensors find_input(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order);

// For all ops. The sequences of packed or batched rows, from cu_seqlens and q_offset, or one per batch entry. Adds
// these tensors to `used`. Throws kFile.
SequenceList read_sequences(const SafetensorsFile& file, const InputNames& names, InputTensors& input);

// Reads a logit for each of q's heads, if the file has them. Throws kFile.
void read_sinks(const SafetensorsFile& file, const InputNames& names, InputTensors& input);

}  // namespace ringattn
