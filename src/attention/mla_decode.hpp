// SPDX-License-Identifier: Apache-2.0
// The library's front door for decoding over a cache of latents: the absorbed form of latent attention
// (kernels/mla.hpp) around a Decode (attention/decode.hpp), whose keys are the rows [c, k_r] of the cache and whose
// values are their first latent_dim numbers, in the same memory.
//
//   MlaDecode decode(job, transport, options);   // collective
//   decode.enqueue({.q = q, .cache = cache, .block_table = table, .table_pages = most_pages, .lengths_before = lengths,
//                   .update_lengths = true, .latent = c_new, .k_rope = k_rope_new, .w_uk = w_uk, .w_uv = w_uv},
//                  {out, lse}, stream);
//   decode.wait();
//
// A row's O and LSE have the same bits with any batch, page size, order of pages and number of ranks. With
// cpu_attention and sm80_attention they are those that the row has in an absorbed Mla over the whole sequence; sm90_mla
// and, where it is named, sm90_mla_split1k, which decode on Hopper, are no kernels that a Mla folds by: the bits of
// each are its own, and agree with a Mla's but for rounding. The latter has groups of fewer keys, which is faster for
// few sequences. Ranks share a cache as those of a Decode do. Over a cache of 8 bits (latent_cache() in
// kernels/latent_rows.hpp) the bits are those over the latents that its rows are unpacked to; new rows are packed as
// they join it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "attention/decode.hpp"
#include "attention/mla.hpp"

namespace ringattn {

// The same on every rank. Members as of DecodeJob.
struct MlaDecodeJob {
  MlaSpec spec;
  DecodeLimits limits;
  std::int64_t page_size = 0;
  std::int64_t pages = 0;
  RowFormat format = {};  // of the cache: plain, or latent_format() of spec.rope_dim (kernels/latent_rows.hpp)
};

// Members that DecodeInputs has, too, are as there.
struct MlaDecodeInputs {
  // [sequences · rows, heads, head_dim + rope_dim]; without w_uk in the latent: [sequences · rows, heads, latent_dim +
  // rope_dim]
  TensorView q;
  int rows = 1;
  MutableCacheView cache;         // [pages, page_size, 1, latent_dim + rope_dim]: c, then k_r; this rank's share
  CompressedCache fp8_rows = {};  // instead of it, exactly where MlaDecodeJob::format is not plain
  BlockTable block_table;
  std::int64_t table_pages = 0;
  const std::int32_t* lengths = nullptr;
  std::int32_t* lengths_before = nullptr;
  bool update_lengths = false;
  const float* sinks = nullptr;
  TensorView latent;  // [sequences · rows, 1, latent_dim], new rows; no data: the cache holds them already
  TensorView k_rope;  // [sequences · rows, 1, rope_dim], exactly where `latent` is
  GemmWeights w_uk;   // [heads, head_dim, latent_dim]
  GemmWeights w_uv;   // [heads, head_dim_v, latent_dim]; none: O stays in the latent
  const std::int32_t* host_lengths = nullptr;
  BlockTable host_table;
};

class MlaDecode {
 public:
  // As Decode's. Collective.
  MlaDecode(MlaDecodeJob job, Transport& transport, DecodeOptions options);
  ~MlaDecode();
  MlaDecode(MlaDecode&&) noexcept;
  MlaDecode& operator=(MlaDecode&&) = delete;

  const MlaDecodeJob& job() const;
  // What folds, in the latent: its kernel, backend, share of the keys and owned sequences.
  Decode& in_latent();
  const Decode& in_latent() const;
  // Of the rank that needs most: what in_latent() takes, q and out as the caller has them, matrices, and the products'
  // scratch. This is what DecodeOptions::memory_budget has to hold.
  const DecodeMemory& memory() const;

  // As Decode's calls of the same names. out is [own rows, heads, head_dim_v], without w_uv [own rows, heads,
  // latent_dim]. Where shapes don't fit the job, all ranks of run() throw kUsage with both shapes.
  void run(const MlaDecodeInputs& inputs, const MlaOutputs& outputs, Stream stream = {});
  void enqueue(const MlaDecodeInputs& inputs, const MlaOutputs& outputs, Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
