// SPDX-License-Identifier: Apache-2.0
// The row of attention in the table of ops.
#include "ops/attention/shared_entry.hpp"
#include "ops/attention_backward/backward_input.hpp"
#include "ops/attention_jobs/compressed_tensors.hpp"
#include "ops/decode/cache_tensors.hpp"
#include "ops/gated_delta/gated_delta_input.hpp"
#include "ops/mla/mla_tensors.hpp"
#include "ops/ssm/ssm_tensors.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"q", "[tokens, heads, head_dim]"},
                                 {"k", "[tokens, kv_heads, head_dim]"},
                                 {"v", "[tokens, kv_heads, head_dim_v]"},
                                 {"cu_seqlens_q", "[sequences + 1]", true},
                                 {"cu_seqlens_k", "[sequences + 1]", true},
                                 {"q_offset", "[sequences]", true},
                                 {"sinks", "[heads]", true}};

constexpr std::string_view kSettings[] = {
    "page-order",   "q-len",   "kv-heads",   "head-dim",      "head-dim-v", "cache-format", "mask",
    "query-offset", "window",  "block-mask", "softmax-scale", "softcap",    "layout",       "stripe",
    "block",        "overlap", "trace",      "checksum",      "decode",     "compute-only", "sinks"};

// Keys and values in rows, in pages or compressed.
bool recognizes_attention(const TensorFile& opened) {
  const SafetensorsFile& file = opened.file;
  const InputNames& names = opened.request.names;
  if (holds_log_decays(opened) || holds_ssm(file, names) || holds_latents(file, names) || holds_gradient(opened) ||
      holds_gated_delta(file, names)) {
    return false;
  }
  const auto has = [&](std::string_view tensor) { return file.contains(name_in(names, tensor)); };
  return (has("q") && has("k") && has("v")) || holds_cache(file, names) || holds_compressed(file);
}

}  // namespace

extern const OpEntry kAttentionOp;
const OpEntry kAttentionOp{.name = "attention",
                           .help = "exact attention of all queries (prefill)",
                           .file = "a file with keys and values",
                           .tensors = kTensors,
                           .settings = kSettings,
                           .layers = layer_bit(LayerKind::kAttention),
                           .fill = fill_attention,
                           .steps = "decode",
                           .backward = "attention_backward",
                           .recognizes = recognizes_attention,
                           .make = make_attention_job<Op::kAttention>};

}  // namespace ringattn
