// SPDX-License-Identifier: Apache-2.0
#include "launch/op_flags.hpp"

#include <fmt/format.h>

#include <functional>
#include <vector>

#include "base/error.hpp"
#include "kernels/decode/decode.hpp"
#include "ops/common/values.hpp"

namespace ringattn {

namespace {

// The first flag that the user chose and for which `takes` is false, or null.
const FlagRow* first_unknown(const Config& config, const std::function<bool(std::string_view)>& takes) {
  for (const ConfigValue& value : config.values) {
    const FlagRow& row = *value.row;
    if (row.of_all_ops || takes(row.name) || !config.chosen(row.name)) continue;
    if (row.off.empty() || value.text != row.off) return &row;
  }
  return nullptr;
}

void refuse_unknown(const Config& config, const FlagRow* row, const OpEntry& op) {
  if (row == nullptr) return;
  const bool file = config.given("input");
  const std::string other =
      file ? std::string(op.file)
           : fmt::format("--op {}{}", op.name, config.value("op").source != Source::kDefault ? "" : ", the default");
  const std::string ops = ops_with(row->name);
  fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(row->name), other),
       fmt::format("it belongs to --op {}", ops),
       file ? "Leave it out." : fmt::format("Leave it out, or use --op {}.", ops.substr(0, ops.find_first_of(", "))));
}

}  // namespace

std::string parse_op(std::string_view text) {
  if (const OpEntry* const op = find_op(text)) return std::string(op->name);
  std::vector<std::string_view> names;
  for (const OpEntry* op : op_table()) names.push_back(op->name);
  return std::string(names[parse_choice(text, names)]);
}

void fill_backward_op(Config& config) {
  if (!config.options.backward || config.given("input")) return;
  const OpEntry& op = op_entry(config.options.op);
  if (op.backward.empty()) {
    const std::string own = fmt::format("{}_backward", op.name);  // an op of its own
    std::string ops;
    for (const OpEntry* entry : op_table()) {
      const bool chosen_by_flag = !entry->backward.empty() && entry->backward != entry->name;
      if (!chosen_by_flag && entry->name != own) continue;
      ops += fmt::format("{} --op {}", ops.empty() ? "" : " or", entry->name);
    }
    fail(ErrorCode::kUsage,
         fmt::format("{} contradicts {} {}", config.origin("backward"), config.origin("op"), op.name),
         "the flag is not for this op", fmt::format("Leave it out, or use{}.", ops));
  }
  if (op.backward == op.name) return;
  fill_value(config, "op", std::string(op.backward), config.value("backward").source, "op");
}

void fill_bench_op(Config& config) {
  const JobOptions& options = config.options;
  const OpEntry& op = op_entry(options.op);
  if (config.given("input") || config.given("op") || op.steps.empty()) return;
  if (!options.q_len || *options.q_len < 1 || *options.q_len > kMaxDecodeRows) return;
  if (options.against == "compute" || options.against == "sgemm") return;
  const OpEntry& steps = op_entry(op.steps);
  if (first_unknown(config, [&](std::string_view flag) { return steps.takes(flag); }) != nullptr) return;
  fill_value(config, "op", std::string(steps.name), Source::kDefault, "op");
}

void check_op(const Config& config) {
  const OpEntry& op = op_entry(config.options.op);
  refuse_unknown(config, first_unknown(config, [&](std::string_view flag) { return op.takes(flag); }), op);
}

void check_op(const Config& config, const OpJob& job) {
  const FlagRow* const row = first_unknown(config, [&](std::string_view flag) { return job.takes(flag); });
  refuse_unknown(config, row, op_entry(job.op()));
}

}  // namespace ringattn
