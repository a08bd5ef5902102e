// SPDX-License-Identifier: Apache-2.0
// Public API of MLA decode: the absorbed form (kernels/mla/mla.hpp) around a Decode (ops/decode/decode.hpp), whose keys
// are the cache rows [c, k_r] and whose values are their first latent_dim columns, in the same memory.
//
//   MlaDecode decode(job, transport, options);   // collective
//   decode.enqueue({.q = q, .cache = cache, .block_table = table, .table_pages = max_pages, .lengths_before = lengths,
//                   .update_lengths = true, .latent = c_new, .k_rope = k_rope_new, .w_uk = w_uk, .w_uv = w_uv},
//                  {out, lse}, stream);
//   decode.wait();
//
// A row's O and LSE have the same bits with any batch, page size, page order and number of ranks. With cpu_attention
// and sm80_attention these are the bits of an absorbed Mla over the whole sequence. The Hopper kernels sm90_mla and
// sm90_mla_split1k each have bits of their own, which agree with those of Mla except for rounding. sm90_mla_split1k is
// used only if named: its KV splits have fewer keys, which is faster for few sequences. Ranks share a cache as with
// Decode. With an FP8 cache (latent_cache() in kernels/quant/latent_rows.hpp) the bits are those over the dequantized
// latents; new tokens are quantized when they are appended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ops/decode/decode.hpp"
#include "ops/mla/mla.hpp"

namespace ringattn {

// The same on every rank. Members are those of DecodeJob.
struct MlaDecodeJob {
  MlaSpec spec;
  DecodeLimits limits;
  std::int64_t page_size = 0;
  std::int64_t pages = 0;
  RowFormat format = {};  // of the cache: plain, or latent_format() of spec.rope_dim (kernels/quant/latent_rows.hpp)
};

// Members that DecodeInputs also has mean the same as there.
struct MlaDecodeInputs {
  // [sequences · rows, heads, head_dim + rope_dim]; without w_uk, queries in the latent space: [sequences · rows,
  // heads, latent_dim + rope_dim]
  TensorView q;
  int rows = 1;
  MutableCacheView cache;         // [pages, page_size, 1, latent_dim + rope_dim]: c, then k_r; this rank's partition
  CompressedCache fp8_rows = {};  // instead of `cache`, exactly if MlaDecodeJob::format is not plain
  BlockTable block_table;
  std::int64_t table_pages = 0;
  const std::int32_t* lengths = nullptr;
  std::int32_t* lengths_before = nullptr;
  bool update_lengths = false;
  const float* sinks = nullptr;
  TensorView latent;  // [sequences · rows, 1, latent_dim], appended; no data: the cache has them already
  TensorView k_rope;  // [sequences · rows, 1, rope_dim], exactly if `latent` is given
  GemmWeights w_uk;   // [heads, head_dim, latent_dim]
  GemmWeights w_uv;   // [heads, head_dim_v, latent_dim]; none: O stays in the latent space
  const std::int32_t* host_lengths = nullptr;
  BlockTable host_table;
};

class MlaDecode {
 public:
  // As the constructor of Decode. Collective.
  MlaDecode(MlaDecodeJob job, Transport& transport, DecodeOptions options);
  ~MlaDecode();
  MlaDecode(MlaDecode&&) noexcept;
  MlaDecode& operator=(MlaDecode&&) = delete;

  const MlaDecodeJob& job() const;
  // The decode in the latent space: its kernel, backend, partition of the keys and owned sequences.
  Decode& in_latent();
  const Decode& in_latent() const;
  // Memory of the rank that needs most: that of in_latent(), the caller's q and out, the matrices, and the scratch of
  // the GEMMs. DecodeOptions::memory_budget must cover it.
  const DecodeMemory& memory() const;

  // As the calls of Decode. out is [own rows, heads, head_dim_v], without w_uv [own rows, heads, latent_dim]. If shapes
  // don't fit the job, all ranks of run() throw kUsage, and the message has both shapes.
  void run(const MlaDecodeInputs& inputs, const MlaOutputs& outputs, Stream stream = {});
  void enqueue(const MlaDecodeInputs& inputs, const MlaOutputs& outputs, Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
