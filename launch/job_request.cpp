// SPDX-License-Identifier: Apache-2.0
#include "launch/job_request.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "launch/check_model.hpp"
#include "launch/op_flags.hpp"
#include "ops/common/compatibility.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kShapeFlags[] = {
    "op",         "seq",      "q-len",      "page-size", "prefix", "batch",      "heads", "kv-heads",    "head-dim",
    "head-dim-v", "rope-dim", "latent-dim", "state-dim", "groups", "conv-width", "dtype", "cache-format"};

// A file with latents in pages gives the latent's dims by its matrices, but may lack the matrices.
constexpr std::string_view kOfPages = "latent-dim";

// Shape flags that say how a result is come by, and don't decide it.
constexpr std::string_view kWaysAlone[] = {"op", "page-size", "model-config", "layer"};

Mask mask_of(const Config& config) {
  const JobOptions& options = config.options;
  Mask mask{options.window_left, options.window_right};
  if (options.mask == MaskKind::kCausal) {
    if (options.window_right > 0) {
      fail(ErrorCode::kUsage, fmt::format("{} contradicts the causal mask", config.origin("window")),
           fmt::format("R is {}, and causal sets R = 0", options.window_right), "Use --mask full, or R = 0.");
    }
    mask.right = 0;
  }
  return mask;
}

// Refuses --latent-dim where the file's tensors give another one.
void check_latent_dim(const Config& config, const JobInput& input) {
  if (!config.given("input") || !config.given(kOfPages) || input.op() != Op::kMla) return;
  const int of_file = input.latent().spec.latent_dim;
  if (of_file == config.options.latent_dim) return;
  fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(kOfPages), config.origin("input")),
       fmt::format("latents have {} numbers by the file's tensors", of_file), "Leave it out.");
}

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
  if (!file) check_op(config, config.options.op);
  if (!file) return;
  for (const std::string_view flag : kShapeFlags) {
    if (config.given(flag) && flag != kOfPages) {
      fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(flag), config.origin("input")),
           flag == "op" ? "the file's tensors say what is computed" : "the file's header gives the shape",
           "Leave it out, or use --synthetic.");
    }
  }
}

FileMetadata deciding_values(const Config& config, Op op) {
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

InputRequest input_request(const Config& config, bool require_source) {
  check_source(config, require_source);
  const JobOptions& options = config.options;
  if (config.given("input")) {
    return file_input(config);
  }
  return synthetic_input(config, options.seq.front());
}

FileInput file_input(const Config& config) {
  const JobOptions& options = config.options;
  const bool stated = config.value(kOfPages).source != Source::kDefault;
  return {options.input, options.tensors, options.order, options.page_order, stated ? options.latent_dim : 0};
}

SyntheticInput synthetic_input(const Config& config, std::int64_t seq) {
  check_source(config, false);
  const JobOptions& options = config.options;
  SyntheticInput input;
  input.op = options.op;
  input.seed = options.synthetic;
  input.tokens = seq;
  input.q_len = options.q_len;
  input.page_size = options.page_size;
  input.prefix = options.prefix;
  input.batch = options.batch;
  input.heads = options.heads;
  input.kv_heads = options.kv_heads;
  input.head_dim = options.head_dim;
  input.head_dim_v = options.head_dim_v;
  input.rope_dim = options.rope_dim;
  input.latent_dim = options.latent_dim;
  input.dtype = options.dtype;
  input.order = options.order;
  input.cache_format = options.cache_format;
  return input;
}

Numerics numerics_of(const Config& config) {
  const JobOptions& options = config.options;
  return {mask_of(config),
          options.softmax_scale,
          options.softcap,
          options.query_offset,
          options.block_mask,
          options.form,
          static_cast<std::size_t>(options.memory)};
}

TopKDevice top_k_device(const Config& config, const Transport& world) {
  return top_k_device(KernelRequest{config.options.backend, config.options.kernel}, world);
}

JobInput open_input(const Config& config, bool require_source, const TopKDevice& target) {
  JobInput input(input_request(config, require_source), numerics_of(config), target, config.share);
  // Queries stand among evicted tokens, which decides whether the job is a decode step.
  check_op(config, input.op(), input.has_evicted_tokens() ? "query-offset" : "");
  check_latent_dim(config, input);
  if (input.op() == Op::kMla && input.decodes() && !input.makes_cache()) check_mla_decode(config);
  check_model(config, input);
  return decode_or_requested_rows(std::move(input), config);
}

JobInput decode_or_requested_rows(JobInput input, const Config& config) {
  if (!input.makes_cache()) return input;
  std::string why = why_mla_not_decoded(config);
  return why.empty() ? std::move(input) : input.attended(std::move(why));
}

Options library_options(const Config& config) {
  const JobOptions& from = config.options;
  const Mask mask = mask_of(config);
  const bool sliding = !mask.is_full() && !mask.is_causal();
  Options options;
  options.kernel = {from.backend, from.kernel};
  // A stripe was asked for: that is what tells the layouts apart.
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
