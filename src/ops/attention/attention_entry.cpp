// SPDX-License-Identifier: Apache-2.0
// The row of attention in the table of ops.
#include "ops/common/attention_entry.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"q", "[tokens, heads, head_dim]"},
                                 {"k", "[tokens, kv_heads, head_dim]"},
                                 {"v", "[tokens, kv_heads, head_dim_v]"},
                                 {"cu_seqlens_q", "[sequences + 1]", true},
                                 {"cu_seqlens_k", "[sequences + 1]", true},
                                 {"q_offset", "[sequences]", true},
                                 {"sinks", "[heads]", true}};

constexpr std::string_view kSettings[] = {"page-order",    "q-len",   "kv-heads",     "head-dim", "head-dim-v",
                                          "cache-format",  "mask",    "query-offset", "window",   "block-mask",
                                          "softmax-scale", "softcap", "layout",       "stripe",   "block",
                                          "overlap",       "trace",   "checksum",     "decode",   "compute-only"};

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
                           .make = make_attention_job<Op::kAttention>};

}  // namespace ringattn
