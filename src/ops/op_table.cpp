// SPDX-License-Identifier: Apache-2.0
#include "ops/op_table.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <vector>

namespace ringattn {

namespace {

class Fill {
 public:
  explicit Fill(const FillSetting& fill) : fill_(fill) {}
  template <typename Value>
  const Fill& operator()(std::string_view setting, const Value& value) const {
    fill_(setting, fmt::format("{}", value));
    return *this;
  }

 private:
  const FillSetting& fill_;
};

void fill_attention(const ModelLayer& layer, const FillSetting& fill) {
  Fill{fill}("heads", layer.heads)("head-dim", layer.head_dim)("kv-heads", layer.kv_heads);
  if (layer.head_dim_v != layer.head_dim) Fill{fill}("head-dim-v", layer.head_dim_v);
}

void fill_mla(const ModelLayer& layer, const FillSetting& fill) {
  Fill{fill}("heads", layer.heads)("head-dim", layer.head_dim)("rope-dim", layer.rope_dim);
  Fill{fill}("latent-dim", layer.latent_dim)("head-dim-v", layer.head_dim_v);
}

// Heads of a selective scan are channels, which have no dim.
void fill_selective_scan(const ModelLayer& layer, const FillSetting& fill) {
  Fill{fill}("heads", layer.heads)("state-dim", layer.state_dim)("groups", layer.groups);
  Fill{fill}("conv-width", layer.conv_width);
}

void fill_ssd(const ModelLayer& layer, const FillSetting& fill) {
  Fill{fill}("head-dim", layer.head_dim);
  fill_selective_scan(layer, fill);
}

void fill_conv1d(const ModelLayer& layer, const FillSetting& fill) {
  Fill{fill}("heads", layer.conv_channels)("conv-width", layer.conv_width);
}

constexpr OpEntry kTable[] = {
    {Op::kAttention,
     "exact attention of all queries (prefill)",
     {"q, k, v; optional: cu_seqlens_q, cu_seqlens_k, q_offset, sinks"},
     "a file with keys and values",
     {},
     fill_attention},
    {Op::kDecode,
     "decode step: the last queries of each sequence over a KV cache",
     {"q, k_pages, v_pages, block_table, lengths_k; optional: q_offset, sinks", "or a dense cache: q, k, v"},
     "a file with a cache",
     {},
     fill_attention},
    {Op::kMla,
     "multi-head latent attention (DeepSeek)",
     {"q, latent, k_rope, w_uk, w_uv",
      "kv_b_proj replaces w_uk and w_uv; latent_fp8 or latent_pages replace latent, k_rope",
      "without w_uk, q is already absorbed; without w_uv, out stays in the latent space"},
     "a file with latents",
     {{{"heads", "16"}}},
     fill_mla},
    {Op::kSsd,
     "Mamba-2's state-space model",
     {"x, dt, A, B, C; optional: D, z, dt_bias, initial_states, cu_seqlens, conv1d_weight, conv1d_bias, conv_state",
      "with state instead of initial_states, it is a decode step"},
     "a file with Mamba-2 tensors",
     {{{"head-dim", "64"}}},
     fill_ssd},
    {Op::kSelectiveScan,
     "Mamba-1's state-space model",
     {"u, delta, A, B, C; optional: D, z, delta_bias, initial_states, cu_seqlens, conv1d_weight, conv1d_bias, "
      "conv_state",
      "with state instead of initial_states, it is a decode step"},
     "a file with Mamba-1 tensors",
     {{{"heads", "256"}, {"state-dim", "16"}}},
     fill_selective_scan},
    {Op::kConv1d,
     "causal depthwise conv1d, as before an SSM layer",
     {"x, conv1d_weight; optional: conv1d_bias, conv_state, cu_seqlens"},
     "a file with a convolution's tensors",
     {{{"heads", "256"}, {"conv-width", "4"}}},
     fill_conv1d},
};

}  // namespace

std::span<const OpEntry> op_table() { return kTable; }

const OpEntry& op_entry(Op op) { return kTable[static_cast<std::size_t>(op)]; }

std::string op_names(unsigned ops) {
  std::vector<std::string_view> names;
  for (const OpEntry& entry : kTable) {
    if ((ops >> static_cast<unsigned>(entry.op) & 1U) != 0) names.push_back(op_name(entry.op));
  }
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

}  // namespace ringattn
