// SPDX-License-Identifier: Apache-2.0
// The tensors of latent attention (kernels/mla/mla.hpp) in a safetensors file: latents and rotary keys instead of k and
// v, in one of the forms that caches have them in, and the matrices that expand them.
//
//   q                       [tokens, heads, head_dim + rope_dim], in any order of axes; or in the latent already:
//                           [tokens, heads, latent_dim + rope_dim]
//   latent, k_rope          [tokens, latent_dim], [tokens, rope_dim]; [batch, tokens, …] where q has such an axis
//   latent_fp8              instead of both: U8 [tokens, bytes], rows of kernels/quant/latent_rows.hpp
//   latent_pages            instead of both, with block_table and lengths_k: [pages, page_size, latent_dim + rope_dim],
//                           or U8 [pages, page_size, bytes]
//   w_uk, w_uv              [heads, head_dim, latent_dim], [heads, head_dim_v, latent_dim]. Without w_uv O stays in the
//                           latent; with queries in the latent w_uk isn't needed, and gives only head_dim
//   kv_b_proj               instead of both, as Hugging Face has it: [heads · (head_dim + head_dim_v), latent_dim], of
//                           each head first the rows of w_uk, then those of w_uv; also F8_E4M3, with the scales of
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
  // Layout of a token's latent and rotary key: a tensor each, one joined row, or an FP8 row.
  enum class Rows { kSeparate, kJoined, kFp8 };

  int head_dim = 0;  // of keys, without the rotary part; 0: queries are in the latent, and nothing says it
  int rope_dim = 0;
  int head_dim_v = 0;
  int latent_dim = 0;
  bool q_in_latent = false;
  bool out_in_latent = false;
  Rows rows = Rows::kSeparate;
  TensorSource latent;  // the rows, or all that a row has where they are not apart
  RowGrid latent_grid;  // its heads are 1; of FP8 rows, its dim is bytes
  TensorSource k_rope;  // of kSeparate
  RowGrid k_rope_grid;
  TensorSource w_uk;  // kv_b_proj where joined_weights; none where there is no w_uk
  TensorSource w_uv;  // likewise
  bool joined_weights = false;
  std::optional<BlockScales> scales;  // of a kv_b_proj in F8_E4M3
};

// True if the input is MLA: latents are named, or are present while no keys were named. Throws kFile if the file also
// has keys and nothing says which to use.
bool holds_latents(const SafetensorsFile& file, const InputNames& names);

// With what all ops have: q, sequences, pages, sinks. k_grid and v_grid are those of the expanded keys and values, of
// the dims that q and out have. `order` is that of q and out. `latent_dim`: of plain rows in pages where there is no
// matrix, the only other source of it; 0: not known. Throws kFile, naming the tensor, its shape and what it disagrees
// with.
std::pair<InputTensors, MlaTensors> find_latents(const SafetensorsFile& file, const InputNames& names,
                                                 std::optional<AxisOrder> order, int latent_dim = 0);

// The same of a file that may have no queries: then neither q and its grid nor sequences in rows are set, nor head_dim
// and head_dim_v; and no matrices.
std::pair<InputTensors, MlaTensors> find_latent_rows(const SafetensorsFile& file, const InputNames& names,
                                                     std::optional<AxisOrder> order, int latent_dim = 0);

// Fills `rows` with what `tensor` says: kLatent or kKeyRope, [total_tokens(runs), 1, dim], of the tokens of `runs` in
// the tensor's own axis; kWeightKeys or kWeightValues, [heads, dim, latent_dim], of the heads of `runs`. Throws kFile.
void read_latents(const MlaTensors& source, SyntheticTensor tensor, std::span<const PackedRun> runs,
                  const MutableTensorView& rows);

// Rows::kFp8 only: fills `rows` with the rows of these tokens, latent_row_bytes() each, consecutively and as stored.
// Throws kFile.
void read_fp8_latents(const MlaTensors& source, std::span<const PackedRun> runs, std::span<std::byte> rows);

}  // namespace ringattn
