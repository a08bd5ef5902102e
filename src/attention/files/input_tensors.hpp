// SPDX-License-Identifier: Apache-2.0
// The tensors of a job in a safetensors file: found by name, and checked against each other before anything is read but
// the short lists.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/files/safetensors_rows.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/page_table.hpp"

namespace ringattn {

// What to look for. A name that isn't set is the role's own ("q", "cu_seqlens_k") and, for those of the fifth row,
// optional; a name that is set must be there. The second row is that of a paged cache, instead of k and v; the third
// and fourth are those of latent attention (latent_tensors.hpp), the last two those of scans (scan_tensors.hpp), which
// have nothing of the others.
struct InputNames {
  std::optional<std::string> q, k, v;
  std::optional<std::string> k_pages, v_pages, block_table, lengths_k;
  std::optional<std::string> latent, k_rope, latent_fp8, latent_pages;
  std::optional<std::string> w_uk, w_uv, kv_b_proj;
  std::optional<std::string> cu_seqlens_q, cu_seqlens_k, q_offset, sinks;
  std::optional<std::string> x, dt, a, b, c, d, z, dt_bias;
  std::optional<std::string> u, delta, delta_bias, initial_states, cu_seqlens;

  bool operator==(const InputNames&) const = default;
};

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
  std::optional<PageTable> pages;  // of a cache: where the sequences' keys lie in k and v
  std::vector<float> sinks;        // [heads]; empty: the file has none
  std::vector<TensorSource> used;  // all of them: q, k, v, and the lists that there are

  // Where out goes: the queries' order with the values' dim.
  RowGrid out_grid() const;
};

// Of q, k and v. Throws kFile, naming the tensor, its shape and what it disagrees with.
InputTensors find_input(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order);

// What ops share. The sequences of packed or batched rows, whose tokens q_grid and k_grid count: from cu_seqlens and
// q_offset, or one for each entry of the batch. The lists that there are join `used`. Throws kFile.
SequenceList read_sequences(const SafetensorsFile& file, const InputNames& names, InputTensors& input);

// A logit for each of q's heads, where the file has them. Throws kFile.
void read_sinks(const SafetensorsFile& file, const InputNames& names, InputTensors& input);

}  // namespace ringattn
