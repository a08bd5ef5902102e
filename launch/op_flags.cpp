// SPDX-License-Identifier: Apache-2.0
#include "launch/op_flags.hpp"

#include <fmt/format.h>

#include <bit>
#include <vector>

#include "base/error.hpp"
#include "base/size.hpp"
#include "launch/values.hpp"

namespace ringattn {

namespace {

constexpr OpRow kTable[] = {
    {Op::kAttention,
     "exact attention of all queries (prefill)",
     {"q, k, v; optional: cu_seqlens_q, cu_seqlens_k, q_offset, sinks"}},
    {Op::kDecode,
     "decode step: the last queries of each sequence over a KV cache",
     {"q, k_pages, v_pages, block_table, lengths_k; optional: q_offset, sinks", "or a dense cache: q, k, v"}},
    {Op::kMla,
     "multi-head latent attention (DeepSeek)",
     {"q, latent, k_rope, w_uk, w_uv",
      "kv_b_proj replaces w_uk and w_uv; latent_fp8 or latent_pages replace latent, k_rope",
      "without w_uk, q is already absorbed; without w_uv, out stays in the latent space"}},
    {Op::kSsd,
     "Mamba-2's state-space model",
     {"x, dt, A, B, C; optional: D, z, dt_bias, initial_states, cu_seqlens, conv1d_weight, conv1d_bias, conv_state",
      "with state instead of initial_states, it is a decode step"}},
    {Op::kSelectiveScan,
     "Mamba-1's state-space model",
     {"u, delta, A, B, C; optional: D, z, delta_bias, initial_states, cu_seqlens, conv1d_weight, conv1d_bias, "
      "conv_state",
      "with state instead of initial_states, it is a decode step"}},
    {Op::kConv1d,
     "causal depthwise conv1d, as before an SSM layer",
     {"x, conv1d_weight; optional: conv1d_bias, conv_state, cu_seqlens"}},
};

// "--op ssd, selective_scan and conv1d"
std::string op_list(unsigned ops) {
  std::vector<std::string_view> names;
  for (const OpRow& row : kTable) {
    if ((ops >> static_cast<unsigned>(row.op) & 1U) != 0) names.push_back(op_name(row.op));
  }
  std::string text = "--op ";
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

// Whether the value is a default that --print-config wrote into the config file, perhaps for another op than this one.
bool is_printed_default(const ConfigValue& value) {
  if (value.source != Source::kFile) return false;
  if (value.row->kind == FlagKind::kSize) return parse_size(value.text) == parse_size(value.row->fallback);
  if (value.row->kind == FlagKind::kSwitch) return (value.text == "true") == (value.row->fallback == "on");
  return value.text == value.row->fallback;
}

// The first flag that the user gave and that prefill takes, but not a decode step. Null if there is none.
const FlagRow* first_prefill_flag(const Config& config) {
  for (const ConfigValue& value : config.values) {
    const FlagRow& row = *value.row;
    if (belongs_to(row, Op::kAttention) && !belongs_to(row, Op::kDecode) && chosen(config, row.name)) return &row;
  }
  return nullptr;
}

}  // namespace

std::span<const OpRow> op_table() { return kTable; }

const OpRow& op_row(Op op) { return kTable[static_cast<std::size_t>(op)]; }

Op parse_op(std::string_view text) {
  if (text == "convolution") text = op_name(Op::kConv1d);  // the name before 0.4
  std::vector<std::string_view> names;
  for (const OpRow& row : kTable) names.push_back(op_name(row.op));
  return kTable[parse_choice(text, names)].op;
}

bool chosen(const Config& config, std::string_view flag) {
  return config.given(flag) && !is_printed_default(config.value(flag));
}

void check_mla_decode(const Config& config) {
  const FlagRow* const row = first_prefill_flag(config);
  if (row == nullptr) return;
  fail(ErrorCode::kUsage, fmt::format("{} contradicts an MLA decode step", config.origin(row->name)),
       "a decode step sends no K/V blocks around the ring", "Leave it out, or add --form expanded.");
}

std::string why_mla_not_decoded(const Config& config) {
  const FlagRow* const row = first_prefill_flag(config);
  return row == nullptr ? "" : fmt::format("a decode step takes no {}", config.origin(row->name));
}

const FlagRow* first_unknown(const Config& config, Op op, std::string_view but_for) {
  for (const ConfigValue& value : config.values) {
    const FlagRow& row = *value.row;
    if (belongs_to(row, op) || row.name == but_for || !chosen(config, row.name)) continue;
    if (row.name == "page-size" && config.options.page_size == 0) continue;
    if (row.name == "prefix" && config.options.prefix == 0) continue;
    return &row;
  }
  return nullptr;
}

void check_op(const Config& config, Op op, std::string_view but_for) {
  const FlagRow* const row = first_unknown(config, op, but_for);
  if (row == nullptr) return;
  constexpr std::string_view kFiles[] = {"keys and values", "a cache",         "latents",
                                         "Mamba-2 tensors", "Mamba-1 tensors", "a convolution's tensors"};
  const bool file = config.given("input");
  const std::string other = file ? fmt::format("a file with {}", kFiles[static_cast<std::size_t>(op)])
                                 : fmt::format("--op {}{}", op_name(op),
                                               config.value("op").source != Source::kDefault ? "" : ", the default");
  const std::string_view first = op_name(kTable[std::countr_zero(row->ops)].op);
  fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(row->name), other),
       fmt::format("it belongs to {}", op_list(row->ops)),
       file ? "Leave it out." : fmt::format("Leave it out, or use --op {}.", first));
}

}  // namespace ringattn
