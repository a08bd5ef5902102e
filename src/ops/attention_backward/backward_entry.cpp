// SPDX-License-Identifier: Apache-2.0
// The row of attention's gradients in the table of ops.
#include <memory>
#include <string_view>

#include "ops/attention/shared_entry.hpp"
#include "ops/attention_backward/backward_op_job.hpp"
#include "ops/jobs/gradients_setting.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"q", "[tokens, heads, head_dim]"},
                                 {"k", "[tokens, kv_heads, head_dim]"},
                                 {"v", "[tokens, kv_heads, head_dim_v]"},
                                 {"out", "[tokens, heads, head_dim_v]"},
                                 {"lse", "[heads, tokens]"},
                                 {"dout", "[tokens, heads, head_dim_v]"},
                                 {"dlse", "[heads, tokens]", true},
                                 {"cu_seqlens_q", "[sequences + 1]", true},
                                 {"cu_seqlens_k", "[sequences + 1]", true},
                                 {"q_offset", "[sequences]", true},
                                 {"sinks", "[heads]", true}};

constexpr std::string_view kSettings[] = {"q-len",        "kv-heads",      "head-dim",     "head-dim-v",  "sinks",
                                          "dlse",         "mask",          "window",       "softcap",     "layout",
                                          "query-offset", "softmax-scale", "stripe",       "block",       "overlap",
                                          "trace",        "checksum",      "compute-only", "with-forward"};

constexpr SettingRow kOwn[] = {kGradientsSetting};

}  // namespace

extern const OpEntry kAttentionBackwardOp;
const OpEntry kAttentionBackwardOp{.name = "attention_backward",
                                   .help = "the gradients of attention: dq, dk, dv",
                                   .file = "a file with out and its gradient",
                                   .tensors = kTensors,
                                   .settings = kSettings,
                                   .own_settings = kOwn,
                                   .layers = layer_bit(LayerKind::kAttention),
                                   .fill = fill_attention,
                                   .backward = "attention_backward",
                                   .recognizes = holds_gradient,
                                   .make = [](const OpRequest& request) -> std::unique_ptr<OpJob> {
                                     return std::make_unique<BackwardOpJob>(request);
                                   }};

}  // namespace ringattn
