// SPDX-License-Identifier: Apache-2.0
#include "launch/job_request.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "launch/op_flags.hpp"

namespace ringattn {

namespace {

// Shape flags that say how a result is computed, but do not change the result.
constexpr std::string_view kWaysAlone[] = {"op", "backward", "page-size", "model-config", "layer"};

}  // namespace

void check_source(const Config& config, bool require_source) {
  const bool file = config.given("input");
  const bool synthetic = config.given("synthetic");
  if (file && synthetic) {
    fail(ErrorCode::kUsage, fmt::format("{} and {} are both given", config.origin("input"), config.origin("synthetic")),
         "a job has one input", "Leave one of them out.");
  }
  if (require_source && !file && !synthetic) {
    fail(ErrorCode::kUsage, "the job has no input", "neither --input nor --synthetic is given",
         "Try --synthetic 7, or --input FILE.");
  }
  if (!file && config.given("tensors")) {
    fail(ErrorCode::kUsage, fmt::format("{} needs --input", config.origin("tensors")),
         "it renames the tensors of a file", "Add --input FILE, or leave it out.");
  }
  if (!file && config.given("page-order")) {
    fail(ErrorCode::kUsage, fmt::format("{} needs --input", config.origin("page-order")),
         "it gives the axis order of a file's pages", "Add --input FILE, or leave it out.");
  }
  if (!file) return check_op(config);
  for (const ConfigValue& value : config.values) {
    const FlagRow& row = *value.row;
    if (row.group != FlagGroup::kShape || row.beside_input || !config.given(row.name)) continue;
    if (row.name == "op") continue;  // compared with the file's op once that is known
    fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(row.name), config.origin("input")),
         row.name == "backward" ? "the file's tensors say what is computed" : "the file's header gives the shape",
         "Leave it out, or use --synthetic.");
  }
}

FileMetadata deciding_values(const Config& config, const OpEntry& op) {
  FileMetadata metadata;
  for (const ConfigValue& value : config.values) {
    const FlagGroup group = value.row->group;
    const bool way = std::find(std::begin(kWaysAlone), std::end(kWaysAlone), value.row->name) != std::end(kWaysAlone);
    if (!config.given(value.row->name) && !belongs_to(*value.row, op)) continue;
    const bool decides = group == FlagGroup::kInput || group == FlagGroup::kNumerics ||
                         (group == FlagGroup::kShape && !config.given("input") && !way);
    if (decides && !value.text.empty()) metadata.emplace_back(fmt::format("config.{}", value.row->name), value.text);
  }
  return metadata;
}

Options library_options(const Config& config) {
  const JobOptions& from = config.options;
  const Mask mask = mask_of(from);
  const bool sliding = !mask.is_full() && !mask.is_causal();
  Options options;
  options.kernel = {from.backend, from.kernel};
  // A sliding window defaults to the contiguous layout, unless a stripe is given, which only the striped layout has.
  const LayoutKind unasked = sliding && from.stripe == 0 ? LayoutKind::kContiguous : LayoutKind::kStriped;
  options.layout = {from.layout.value_or(unasked), from.stripe};
  if (from.stripe != 0 && options.layout.kind != LayoutKind::kStriped) {
    fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin("stripe"), config.origin("layout")),
         fmt::format("{} sets the stripe", layout_name(options.layout.kind)), "Leave one of them out.");
  }
  options.block_tokens = from.block;
  options.memory_budget = static_cast<std::size_t>(from.memory);
  options.overlap = from.overlap;
  options.checksum = from.checksum;
  options.threads = from.threads;
  options.timeout_seconds = from.timeout;
  options.machine = machine_model(config);
  return options;
}

MachineModel machine_model(const Config& config) {
  MachineModel machine;
  if (!config.options.machine.empty()) machine = read_machine_model(config.options.machine);
  const double pace = environment().pace;
  if (pace > 0.0) machine.link_bytes_per_second = std::min(machine.link_bytes_per_second, pace);
  return machine;
}

}  // namespace ringattn
