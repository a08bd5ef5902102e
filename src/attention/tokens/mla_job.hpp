// SPDX-License-Identifier: Apache-2.0
// An MLA job (kernels/mla/mla.hpp): a spec, a batch and a form. The same on every rank.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "attention/tokens/batch.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

enum class MlaForm { kExpanded, kAbsorbed };
std::string_view form_name(MlaForm form);  // "expanded", "absorbed"

struct MlaJob {
  MlaSpec spec;
  Batch batch;
  std::optional<MlaForm> form;  // absent: choose_form()
  // Format of latents and rotary keys in memory and messages: plain, or latent_format() of spec.rope_dim
  // (kernels/quant/latent_rows.hpp). Results are those of the dequantized FP8 rows, wherever they are dequantized.
  RowFormat format = {};
};

struct MlaFormChoice {
  MlaForm form = MlaForm::kExpanded;
  std::string reason;  // e.g. "16 queries a sequence at most: absorbed up to 170"
};

// The form that the job names; else absorbed if queries or O are in the latent space; else the cheaper form by shape.
// Expanding a key for a head costs 2 · latent_dim · (head_dim + head_dim_v) FLOPs. The absorbed form costs
// 2 · (2 · latent_dim + rope_dim − head_dim − rope_dim − head_dim_v) FLOPs more for each query that sees the key. So it
// is cheaper up to a number of queries that is the ratio of the two: 170 at DeepSeek's dims. The longest q_len of the
// batch is compared with it, for any mask and number of ranks, so a caller can predict the choice.
MlaFormChoice choose_form(const MlaJob& job);

// The attention spec of a form: expanded, `heads` of the job's heads at a time; absorbed, always all heads.
AttentionSpec form_spec(const MlaSpec& spec, MlaForm form, int heads);

// The GEMMs around the attention: expanded, of latents to K and V; absorbed, of queries and O. None if the caller does
// them.
std::optional<BatchedGemmSpec> key_gemm(const MlaSpec& spec, MlaForm form);
std::optional<BatchedGemmSpec> value_gemm(const MlaSpec& spec);

// "bf16, 128 heads, head_dim 128+64/128, latent 512, causal, scale 0.0721"; with queries and O in the latent space
// "latent 512, queries and O in it"
std::string describe(const MlaSpec& spec);
// The same with the batch: "…; 3 sequences, 1000 queries, 4096 keys"
std::string describe(const MlaJob& job);

// Throws kUsage if `what` ("latents", or a cache's name) can't have this format: it must be plain, or latent_format()
// with bf16, a latent_dim that is a multiple of 128, and a rope_dim that is a multiple of 4.
void check_latent_format(std::string_view what, const RowFormat& format, const MlaSpec& spec);

// Throws kUsage if the job contradicts itself: heads, dims, form, scale, softcap, window, batch, format.
void check_mla_job(const MlaJob& job);

}  // namespace ringattn
