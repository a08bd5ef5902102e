// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/mla_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/job.hpp"
#include "base/error.hpp"
#include "base/size.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn {

namespace {

// "queries", "O", "queries and O": what is in the latent space; empty: neither.
std::string_view in_latent(const MlaSpec& spec) {
  if (!spec.q_in_latent) return spec.out_in_latent ? "O" : "";
  return spec.out_in_latent ? "queries and O" : "queries";
}

// `dim`: of the tensor that is in the latent space.
void check_in_latent(std::string_view what, std::string_view name, int dim, const MlaSpec& spec) {
  if (dim == spec.latent_dim) return;
  fail(ErrorCode::kUsage, fmt::format("{} in a latent space of {} dims with {} {}", what, spec.latent_dim, name, dim),
       "tensors in the latent space have its number of dims", fmt::format("Set {} to {}.", name, spec.latent_dim));
}

}  // namespace

std::string_view form_name(MlaForm form) { return form == MlaForm::kExpanded ? "expanded" : "absorbed"; }

AttentionSpec form_spec(const MlaSpec& spec, MlaForm form, int heads) {
  return form == MlaForm::kExpanded ? expanded_spec(spec, heads) : absorbed_spec(spec);
}

MlaFormChoice choose_form(const MlaJob& job) {
  if (job.form) return {*job.form, fmt::format("the job names the {} form", form_name(*job.form))};
  const MlaSpec& spec = job.spec;
  if (const std::string_view what = in_latent(spec); !what.empty()) {
    return {MlaForm::kAbsorbed, fmt::format("{} {} in the latent", what, what == "O" ? "stays" : "are")};
  }
  std::int64_t longest = 0;
  for (const Sequence& sequence : job.batch.sequences) longest = std::max(longest, sequence.q_len);
  const double more = pair_flops(absorbed_spec(spec)) - pair_flops(expanded_spec(spec, spec.heads));
  if (more <= 0.0) return {MlaForm::kAbsorbed, "a pair costs no more than expanded at these dims"};
  const auto most = static_cast<std::int64_t>(mla_gemm_flops(spec) / more);
  return {longest <= most ? MlaForm::kAbsorbed : MlaForm::kExpanded,
          fmt::format("{} a sequence at most: absorbed up to {}",
                      longest == 1 ? "1 query" : fmt::format("{} queries", longest), most)};
}

std::optional<BatchedGemmSpec> key_gemm(const MlaSpec& spec, MlaForm form) {
  if (spec.q_in_latent) return std::nullopt;
  return form == MlaForm::kExpanded ? key_expansion(spec) : query_absorption(spec);
}

std::optional<BatchedGemmSpec> value_gemm(const MlaSpec& spec) {
  if (spec.out_in_latent) return std::nullopt;
  return value_expansion(spec);
}

std::string describe(const MlaSpec& spec) {
  const std::string_view what = in_latent(spec);
  std::string text = fmt::format("{}, {} heads, head_dim {}+{}/{}, latent {}{}, {}", dtype_name(spec.dtype), spec.heads,
                                 spec.head_dim, spec.rope_dim, spec.head_dim_v, spec.latent_dim,
                                 what.empty() ? "" : fmt::format(", {} in it", what), describe(spec.mask));
  text += fmt::format(", scale {}", spec.softmax_scale);
  if (spec.softcap > 0.0F) text += fmt::format(", softcap {}", spec.softcap);
  if (spec.sinks) text += ", sinks";
  return text;
}

std::string describe(const MlaJob& job) {
  const std::int64_t queries = job.batch.q_tokens();
  const std::int64_t keys = job.batch.k_tokens();
  return fmt::format(
      "{}; {}, {}", describe(job.spec), counted(job.batch.sequences.size(), "sequence"),
      queries == keys
          ? counted(static_cast<std::uint64_t>(queries), "token")
          : fmt::format("{}, {} keys", queries == 1 ? "1 query" : fmt::format("{} queries", queries), keys));
}

void check_latent_format(std::string_view what, const RowFormat& format, const MlaSpec& spec) {
  if (format.is_plain()) return;
  if (format != latent_format(spec.rope_dim)) {
    fail(ErrorCode::kUsage, fmt::format("{} stored as {}", what, describe(format)),
         fmt::format("with rotary keys of {} they are plain or {}", spec.rope_dim,
                     describe(latent_format(spec.rope_dim))),
         "Choose one of the two.");
  }
  if (spec.dtype != Dtype::kBf16) {
    fail(ErrorCode::kUsage, fmt::format("FP8 {} in a job of {}", what, dtype_name(spec.dtype)),
         "they are dequantized to bf16", "Choose bf16, or latents of 16 bits.");
  }
  check_format(what, format, {spec.dtype, 1, spec.latent_dim + spec.rope_dim});
}

void check_mla_job(const MlaJob& job) {
  const MlaSpec& spec = job.spec;
  constexpr int kMaxDims = 1 << 16;  // so that sums and products of dims fit into int
  const auto possible = [](int dim) { return dim >= 1 && dim <= kMaxDims; };
  if (!possible(spec.head_dim) || !possible(spec.rope_dim) || !possible(spec.head_dim_v) ||
      !possible(spec.latent_dim)) {
    fail(ErrorCode::kUsage,
         fmt::format("head_dim {}, rope_dim {}, head_dim_v {} and latent_dim {}", spec.head_dim, spec.rope_dim,
                     spec.head_dim_v, spec.latent_dim),
         fmt::format("each is 1 to {}", kMaxDims), "DeepSeek's are 128, 64, 128 and 512.");
  }
  if (spec.q_in_latent) check_in_latent("queries", "head_dim", spec.head_dim, spec);
  if (spec.out_in_latent) check_in_latent("O", "head_dim_v", spec.head_dim_v, spec);
  if (const std::string_view what = in_latent(spec); !what.empty() && job.form == MlaForm::kExpanded) {
    fail(ErrorCode::kUsage, fmt::format("the expanded form with {} in the latent", what),
         "it attends to expanded keys and values", {"Use ", setting("form", "absorbed"), ", or give the matrices."});
  }
  check_heads(expanded_spec(spec, spec.heads));
  check_mask(spec.mask);
  check_batch(job.batch);
  check_latent_format("latents", job.format, spec);
}

}  // namespace ringattn
