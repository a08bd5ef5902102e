// SPDX-License-Identifier: Apache-2.0
// The parts of a JobInput that only MLA has: its form, its scale, and whether it is a step.
#include <fmt/format.h>

#include "attention/tokens/decode_rows.hpp"
#include "base/error.hpp"
#include "io/tensor_checks.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/synthetic_storage.hpp"

namespace ringattn {

// Numerics are set later.
void JobInput::take_latents(const MlaSpec& spec) {
  latent_.emplace(MlaJob{spec, {}, {}});
  job_.spec = expanded_spec(spec, spec.heads);
}

std::optional<int> JobInput::nope_dim() const {
  if (!latent_->spec.q_in_latent) return latent_->spec.head_dim;
  const int head_dim = file_->latents->head_dim;
  return head_dim > 0 ? std::optional(head_dim) : std::nullopt;
}

float JobInput::mla_softmax_scale() const {
  MlaSpec spec = latent_->spec;
  if (const std::optional<int> head_dim = nope_dim()) {
    spec.head_dim = *head_dim;
    return default_softmax_scale(spec);
  }
  fail(ErrorCode::kUsage, fmt::format("{}, in the latent, and there is no w_uk", described(file_->tensors.q)),
       fmt::format("scores are scaled by 1 / sqrt(head_dim + {}), and only w_uk's rows say what head_dim is",
                   spec.rope_dim),
       {"Say the scale with ", setting("softmax_scale"), ", for DeepSeek's head_dim 128 and 64 rotary dims ",
        setting("softmax_scale", "0.07216878364870322"), ", or with ", setting("model_config"), "."});
}

// Called after the other numerics are set.
void JobInput::take_form(std::optional<MlaForm> form) {
  MlaSpec& latent = latent_->spec;
  latent.mask = job_.spec.mask;
  latent.softmax_scale = job_.spec.softmax_scale;
  latent.softcap = job_.spec.softcap;
  latent.sinks = job_.spec.sinks;
  latent_->batch = job_.batch;
  const bool codes = fp8_latents_ || (file_ && file_->latents->rows == MlaTensors::Rows::kFp8);
  if (codes) latent_->format = latent_format(latent.rope_dim);
  if (form == MlaForm::kExpanded && latent.q_in_latent) {
    fail(ErrorCode::kUsage, {setting("form", form_name(*form)), " with queries in the latent"},
         described(file_->tensors.q) + ", as the absorbed form uses them",
         "Leave it out, or give queries of the heads.");
  }
  if (form == MlaForm::kExpanded && latent.out_in_latent) {
    fail(ErrorCode::kUsage, {setting("form", form_name(*form)), " without w_uv"},
         file_->request().path + " has no values of the heads, so O stays in the latent space, as in the absorbed form",
         {"Leave it out, put w_uv into the file, or name it with ", setting("tensors"), "."});
  }
  latent_->form = form;
  check_mla_job(*latent_);
  form_ = choose_form(*latent_);
  latent_->form = form_.form;
  // In the expanded form, and if queries are not the last tokens, rows are computed as a prefill.
  decodes_ = form_.form == MlaForm::kAbsorbed && are_decode_steps(latent_->batch.sequences) &&
             queries_end_keys(latent_->batch.sequences);
  in_rows_ = pages() == nullptr;
  if (!makes_cache() || are_equally_long(latent_->batch.sequences)) return;
  dealt_ = pages_of_unequal(job_.batch);
  if (dealt_ != nullptr) return;
  decodes_ = false;
  not_decoded_reason_ = "the block table of sequences of such unlike lengths would have too many entries";
}

void JobInput::read_fp8_latents(std::span<const PackedRun> runs, std::span<std::byte> rows, int threads) const {
  if (fp8_latents_) {
    return make_fp8_latents(*seed_, latent_->spec, made_tokens(SyntheticTensor::kLatent, runs), rows, threads);
  }
  ringattn::read_fp8_latents(*file_->latents, file_keys(runs), rows);
}

}  // namespace ringattn
