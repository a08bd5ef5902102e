// SPDX-License-Identifier: Apache-2.0
// The row of decode in the table of ops.
#include "ops/attention/shared_entry.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"q", "[tokens, heads, head_dim]"},
                                 {"k_pages", "[pages, page_size, kv_heads, head_dim]"},
                                 {"v_pages", "[pages, page_size, kv_heads, head_dim_v]"},
                                 {"block_table", "[sequences, pages of the longest]"},
                                 {"lengths_k", "[sequences]"},
                                 {"q_offset", "[sequences]", true},
                                 {"sinks", "[heads]", true}};

constexpr std::string_view kNotes[] = {"or a dense cache: q, k and v, as of attention"};

constexpr std::string_view kSettings[] = {"page-order", "q-len",         "page-size",    "prefix", "kv-heads",
                                          "head-dim",   "head-dim-v",    "cache-format", "mask",   "window",
                                          "block-mask", "softmax-scale", "softcap",      "decode", "sinks"};

}  // namespace

extern const OpEntry kDecodeOp;
const OpEntry kDecodeOp{.name = "decode",
                        .help = "decode step: the last queries of each sequence over a KV cache",
                        .file = "a file with a cache",
                        .tensors = kTensors,
                        .tensor_notes = kNotes,
                        .settings = kSettings,
                        .layers = layer_bit(LayerKind::kAttention),
                        .fill = fill_attention,
                        .make = make_attention_job<Op::kDecode>};

}  // namespace ringattn
