// SPDX-License-Identifier: Apache-2.0
#include "ops/jobs/settings.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace ringattn {

Mask mask_of(const Settings& settings) {
  Mask mask{settings.window_left, settings.window_right};
  if (settings.mask != MaskKind::kCausal) return mask;
  if (settings.window_right > 0) {
    fail(ErrorCode::kUsage, {setting("window"), " contradicts the causal mask"},
         fmt::format("R is {}, and causal sets R = 0", settings.window_right),
         {"Use ", setting("mask", "full"), ", or R = 0."});
  }
  mask.right = 0;
  return mask;
}

Numerics numerics_of(const Settings& settings) {
  return {mask_of(settings),
          settings.softmax_scale,
          settings.softcap,
          settings.query_offset,
          settings.block_mask,
          settings.form,
          static_cast<std::size_t>(settings.memory)};
}

FileInput file_input(const Settings& settings) {
  return {settings.input, settings.tensors, settings.order, settings.page_order, settings.latent_dim.value_or(0)};
}

SyntheticInput synthetic_input(const Settings& settings, Op op, std::int64_t tokens) {
  SyntheticInput input;
  input.op = op;
  input.seed = settings.synthetic;
  input.tokens = tokens;
  input.q_len = settings.q_len;
  input.page_size = settings.page_size;
  input.prefix = settings.prefix;
  input.batch = settings.batch;
  input.heads = settings.heads;
  input.kv_heads = settings.kv_heads;
  input.head_dim = settings.head_dim;
  input.head_dim_v = settings.head_dim_v;
  input.rope_dim = settings.rope_dim;
  input.latent_dim = settings.latent_dim.value_or(kDefaultLatentDim);
  input.dtype = settings.dtype;
  input.order = settings.order;
  input.cache_format = settings.cache_format;
  input.sinks = settings.sinks;
  return input;
}

}  // namespace ringattn
