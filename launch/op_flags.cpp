// SPDX-License-Identifier: Apache-2.0
#include "launch/op_flags.hpp"

#include <fmt/format.h>

#include <bit>
#include <vector>

#include "base/error.hpp"
#include "base/size.hpp"
#include "launch/values.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

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

Op parse_op(std::string_view text) {
  if (text == "convolution") text = op_name(Op::kConv1d);  // the name before 0.4
  std::vector<std::string_view> names;
  for (const OpEntry& entry : op_table()) names.push_back(op_name(entry.op));
  return op_table()[parse_choice(text, names)].op;
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
  const bool file = config.given("input");
  const std::string other = file ? std::string(op_entry(op).file)
                                 : fmt::format("--op {}{}", op_name(op),
                                               config.value("op").source != Source::kDefault ? "" : ", the default");
  const std::string_view first = op_name(op_table()[static_cast<std::size_t>(std::countr_zero(row->ops))].op);
  fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(row->name), other),
       fmt::format("it belongs to --op {}", op_names(row->ops)),
       file ? "Leave it out." : fmt::format("Leave it out, or use --op {}.", first));
}

}  // namespace ringattn
