// SPDX-License-Identifier: Apache-2.0
// A job of latent attention (kernels/mla.hpp): what is computed, over which batch, and in which of its two forms.
// Plain data, the same on every rank.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "attention/tokens/batch.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/mla.hpp"
#include "kernels/row_format.hpp"

namespace ringattn {

enum class MlaForm { kExpanded, kAbsorbed };
std::string_view form_name(MlaForm form);  // "expanded", "absorbed"

struct MlaJob {
  MlaSpec spec;
  Batch batch;
  std::optional<MlaForm> form;  // absent: choose_form()
  // How latents and rotary keys lie and travel: plain, or latent_format() of spec.rope_dim (kernels/latent_rows.hpp).
  // Rows of 8 bits are those that they are unpacked to: no bit depends on where that happens.
  RowFormat format = {};
};

struct MlaFormChoice {
  MlaForm form = MlaForm::kExpanded;
  std::string reason;  // e.g. "16 queries a sequence at most: absorbed up to 170"
};

// The form that the job names, else the absorbed one where queries or O are in the latent, else the one that costs less
// by the shape alone. Expanding a key to a head costs
// 2 · latent_dim · (head_dim + head_dim_v) operations; the absorbed form pays 2 · (2 · latent_dim + rope_dim − head_dim
// − rope_dim − head_dim_v) more for each query that sees the key. So up to as many queries as the first holds the
// second it is cheaper: 170 at DeepSeek's dims. The longest q_len of the batch is compared with that, whatever the mask
// is and however many ranks there are: a pure function of the job, which a caller can foresee.
MlaFormChoice choose_form(const MlaJob& job);

// What folds in a form: `heads` of the job's heads at a time, expanded; absorbed always all.
AttentionSpec form_spec(const MlaSpec& spec, MlaForm form, int heads);

// The products around what folds: expanded of latents to keys and to values, absorbed of queries and of O. None where
// they are the caller's.
std::optional<BatchedGemmSpec> key_gemm(const MlaSpec& spec, MlaForm form);
std::optional<BatchedGemmSpec> value_gemm(const MlaSpec& spec);

// "bf16, 128 heads, head_dim 128+64/128, latent 512, causal, scale 0.0721"; "latent 512, queries and O in it" where
// they are
std::string describe(const MlaSpec& spec);
// The same with the batch: "…; 3 sequences, 1000 queries, 4096 keys"
std::string describe(const MlaJob& job);

// Throws kUsage unless `what`, "latents" or those of a cache, may be stored so: plain, or as latent_format() in a job
// of bf16 whose latent_dim is a multiple of 128 and whose rope_dim is one of 4.
void check_latent_format(std::string_view what, const RowFormat& format, const MlaSpec& spec);

// Throws kUsage when the job contradicts itself: heads, dims, form, scale, soft-cap, window, batch, format.
void check_mla_job(const MlaJob& job);

}  // namespace ringattn
