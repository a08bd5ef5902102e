// SPDX-License-Identifier: Apache-2.0
// The tensors of MLA (kernels/mla/mla.hpp) in a safetensors file: latents and rotary keys instead of k and v, in one of
// the forms of caches, and the matrices that expand them.
//
//   q                       [tokens, heads, head_dim + rope_dim], in any order of axes; or already in the latent space:
//                           [tokens, heads, latent_dim + rope_dim]
//   latent, k_rope          [tokens, latent_dim], [tokens, rope_dim]; [batch, tokens, …] if q has a batch axis
//   latent_fp8              instead of both: U8 [tokens, bytes], rows of kernels/quant/latent_rows.hpp
//   latent_pages            instead of both, with block_table and lengths_k: [pages, page_size, latent_dim + rope_dim],
//                           or U8 [pages, page_size, bytes]
//   w_uk, w_uv              [heads, head_dim, latent_dim], [heads, head_dim_v, latent_dim]. Without w_uv O stays in the
//                           latent space. With queries in the latent space w_uk isn't needed, and gives only head_dim
//   kv_b_proj               instead of both, as in Hugging Face: [heads · (head_dim + head_dim_v), latent_dim], for
//   each
//                           head first the rows of w_uk, then those of w_uv; also F8_E4M3, with the scales of
//                           block_scales.hpp
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <utility>

#include "base/tensor.hpp"
#include "io/block_scales.hpp"
#include "kernels/common/synthetic.hpp"
#include "ops/common/input_tensors.hpp"

namespace ringattn {

struct MlaTensors {
  // How a token's latent and rotary key are stored: in separate tensors, in one joined row, or in an FP8 row.
  enum class Rows { kSeparate, kJoined, kFp8 };

  int head_dim = 0;  // of keys, without the rotary part; 0: queries are in the latent space, and it is unknown
  int rope_dim = 0;
  int head_dim_v = 0;
  int latent_dim = 0;
  bool q_in_latent = false;
  bool out_in_latent = false;
  Rows rows = Rows::kSeparate;
  TensorSource latent;  // the latents, or the whole rows if these are joined
  RowGrid latent_grid;  // with one head; for FP8 rows, its dim counts bytes
  TensorSource k_rope;  // only with kSeparate
  RowGrid k_rope_grid;
  TensorSource w_uk;  // kv_b_proj if joined_weights; none if there is no w_uk
  TensorSource w_uv;  // the same for w_uv
  bool joined_weights = false;
  std::optional<BlockScales> scales;  // of a kv_b_proj in F8_E4M3
};

// True if the input is MLA: latents are named, or are in the file while no keys are named. Throws kFile if the file
// also has keys and the names do not select one of them.
bool holds_latents(const SafetensorsFile& file, const InputNames& names);

// Finds the tensors of MLA, and those that all ops have: q, sequences, pages, sinks. k_grid and v_grid are those of the
// expanded keys and values, with the dims of q and out. `order`: axis order of q and out. `latent_dim`: of plain rows
// in pages if there is no matrix to determine it; 0: unknown. Throws kFile, naming the tensor, its shape and what
// contradicts it.
std::pair<InputTensors, MlaTensors> find_latents(const SafetensorsFile& file, const InputNames& names,
                                                 std::optional<AxisOrder> order, int latent_dim = 0);

// The same for a file that may have no queries. Then q and its grid, sequences in rows, head_dim, head_dim_v and
// matrices are not set.
std::pair<InputTensors, MlaTensors> find_latent_rows(const SafetensorsFile& file, const InputNames& names,
                                                     std::optional<AxisOrder> order, int latent_dim = 0);

// Fills `rows` with a tensor: kLatent or kKeyRope, [total_tokens(runs), 1, dim], of the tokens of `runs` on the
// tensor's own axis; kWeightKeys or kWeightValues, [heads, dim, latent_dim], of the heads of `runs`. Throws kFile.
void read_latents(const MlaTensors& source, SyntheticTensor tensor, std::span<const PackedRun> runs,
                  const MutableTensorView& rows);

// Rows::kFp8 only: fills `rows` with the rows of these tokens, latent_row_bytes() each, consecutively and as stored.
// Throws kFile.
void read_fp8_latents(const MlaTensors& source, std::span<const PackedRun> runs, std::span<std::byte> rows);

}  // namespace ringattn
