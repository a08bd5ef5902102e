// SPDX-License-Identifier: Apache-2.0
// The tensors of a job in a safetensors file: found by name, and checked against each other before anything is read but
// the short lists.
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
  TensorSource k;  // [k tokens, kv_heads, head_dim]; of a cache the tokens of all pages, a page an entry of the batch
  TensorSource v;  // [k tokens, kv_heads, head_dim_v]
  RowGrid q_grid;
  RowGrid k_grid;
  RowGrid v_grid;
  Dtype dtype = Dtype::kBf16;
  // From cu_seqlens (those of the queries serve as many keys too), or one for each entry of the batch; offsets from
  // q_offset, or aligned to the end of the keys.
  SequenceList sequences;
  std::shared_ptr<const PageTable> pages;         // of a cache: where the sequences' keys lie in k and v; else null
  std::vector<float> sinks;                       // [heads]; empty: the file has none
  std::shared_ptr<const KeyPositions> positions;  // of k's tokens (position_tensors.hpp); null: the file has none
  std::vector<TensorSource> used;                 // all of them: q, k, v, and the lists that there are

  // Where out goes: the queries' order with the values' dim.
  RowGrid out_grid() const;
};

// Finds q, k and v. Throws kFile, naming the tensor, its shape and what it disagrees with.
InputTensors find_input(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order);

// Common to all ops. The sequences of packed or batched rows, whose tokens q_grid and k_grid count: from cu_seqlens and
// q_offset, or one for each batch entry. Adds the names of these tensors to `used`. Throws kFile.
SequenceList read_sequences(const SafetensorsFile& file, const InputNames& names, InputTensors& input);

// A logit for each of q's heads, where the file has them. Throws kFile.
void read_sinks(const SafetensorsFile& file, const InputNames& names, InputTensors& input);

}  // namespace ringattn
