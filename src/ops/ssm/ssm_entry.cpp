// SPDX-License-Identifier: Apache-2.0
// The rows of SSD and selective scan in the table of ops.
#include "ops/ssm/ssm_entry.hpp"

#include <fmt/format.h>

#include <utility>

#include "base/error.hpp"
#include "ops/conv1d_backward/conv1d_backward_input.hpp"
#include "ops/ssd_backward/ssd_backward_input.hpp"
#include "ops/ssm/ssm_op_job.hpp"
#include "ops/ssm/ssm_tensors.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kSsdTensors[] = {{"x", "[tokens, heads, head_dim]"},
                                    {"dt", "[tokens, heads]"},
                                    {"A", "[heads]"},
                                    {"B", "[tokens, groups, state_dim]"},
                                    {"C", "[tokens, groups, state_dim]"},
                                    {"D", "[heads]", true},
                                    {"z", "[tokens, heads, head_dim]", true},
                                    {"dt_bias", "[heads]", true},
                                    {"initial_states", "[sequences, heads, head_dim, state_dim]", true},
                                    {"cu_seqlens", "[sequences + 1]", true},
                                    {"conv1d_weight", "[channels of x, B and C, width]", true},
                                    {"conv1d_bias", "[channels of x, B and C]", true},
                                    {"conv_state", "[sequences, channels of x, B and C, width - 1]", true}};

constexpr OpTensor kScanTensors[] = {{"u", "[tokens, channels]"},
                                     {"delta", "[tokens, channels]"},
                                     {"A", "[channels, state_dim]"},
                                     {"B", "[tokens, groups, state_dim]"},
                                     {"C", "[tokens, groups, state_dim]"},
                                     {"D", "[channels]", true},
                                     {"z", "[tokens, channels]", true},
                                     {"delta_bias", "[channels]", true},
                                     {"initial_states", "[sequences, channels, state_dim]", true},
                                     {"cu_seqlens", "[sequences + 1]", true},
                                     {"conv1d_weight", "[channels, width]", true},
                                     {"conv1d_bias", "[channels]", true},
                                     {"conv_state", "[sequences, channels, width - 1]", true}};

constexpr std::string_view kNotes[] = {"with state instead of initial_states, it is a decode step"};

constexpr std::string_view kSsdSettings[] = {"q-len",       "head-dim", "state-dim",    "groups", "conv-width",
                                             "dt-softplus", "dt-limit", "final-states", "trace"};
constexpr std::string_view kScanSettings[] = {"q-len",       "state-dim", "groups",       "conv-width",
                                              "dt-softplus", "dt-limit",  "final-states", "trace"};
constexpr SettingDefault kSsdDefaults[] = {{"head-dim", "64"}};
constexpr SettingDefault kScanDefaults[] = {{"heads", "256"}, {"state-dim", "16"}};

// Heads of a selective scan are channels, which have no dim.
void fill_scan(const ModelLayer& layer, const Settings&, const FillSetting& fill) {
  Fill{fill}("heads", layer.heads)("state-dim", layer.state_dim)("groups", layer.groups);
  Fill{fill}("conv-width", layer.conv_width);
  if (layer.dt_limit) fill("dt-limit", fmt::format("{},{}", layer.dt_limit->first, layer.dt_limit->second));
}

void fill_ssd(const ModelLayer& layer, const Settings& settings, const FillSetting& fill) {
  Fill{fill}("head-dim", layer.head_dim);
  fill_scan(layer, settings, fill);
}

// If there is only x, or x and a bias, less is missing for a linear layer than for an SSM. The weight may be in a model
// file.
bool lacks_a_weight(const TensorFile& opened) {
  const SafetensorsFile& file = opened.file;
  return file.contains("x") && file.names().size() == (file.contains("bias") ? 2 : 1);
}

bool recognizes_ssm(const TensorFile& opened) {
  return !holds_log_decays(opened) && holds_ssm(opened.file, opened.request.names) && !lacks_a_weight(opened) &&
         !holds_ssd_gradient(opened) && !holds_conv1d_gradient(opened);
}

// A decode step takes one token of each sequence. The earlier tokens are in its state, so their number is not a
// parameter.
void check_update(const OpRequest& request) {
  if (request.settings.q_len != 1) {
    fail(ErrorCode::kUsage, setting("q_len", *request.settings.q_len), "a decode step takes one token of each sequence",
         {"Use ", setting("q_len", 1), ", or leave it out to process ", setting("seq"), " tokens."});
  }
  if (request.sources.chosen("seq")) {
    fail(ErrorCode::kUsage, {setting("seq"), " contradicts ", setting("q_len")},
         "a decode step continues from a state, whose size does not depend on the number of earlier tokens",
         "Leave one of them out.");
  }
}

SsmRequest source_of(Op op, const OpRequest& request) {
  const Settings& settings = request.settings;
  if (request.from_file()) return file_input(settings);
  if (settings.q_len) check_update(request);
  SyntheticSsmInput input;
  input.update = settings.q_len.has_value();
  input.selective = op == Op::kSelectiveScan;
  input.convolution = op == Op::kConv1d;
  const bool linear = op == Op::kLinearAttention;
  if (linear) input.linear = linear_decay(settings);
  input.seed = settings.synthetic;
  input.tokens = input.update ? 1 : request.tokens;
  input.batch = settings.batch;
  input.heads = settings.heads;
  input.head_dim = linear ? settings.head_dim_v.value_or(settings.head_dim) : settings.head_dim;
  input.groups = settings.groups;
  input.state_dim = linear ? settings.head_dim : settings.state_dim;
  input.conv_width = settings.conv_width;
  input.dtype = settings.dtype;
  input.order = settings.order;
  return input;
}

}  // namespace

SsmInput make_ssm_input(Op op, const OpRequest& request) {
  const Settings& settings = request.settings;
  // A check compares all of the result.
  const bool final_states = settings.final_states || request.use == OpUse::kVerify;
  const SsmNumerics numerics{
      settings.dt_softplus, settings.dt_min, settings.dt_max, final_states, settings.ranks.value_or(1), op};
  return {source_of(op, request), numerics, request.share};
}

std::unique_ptr<OpJob> make_ssm_job(Op op, const OpRequest& request) {
  return std::make_unique<SsmOpJob>(make_ssm_input(op, request), request.timeline);
}

extern const OpEntry kSsdOp, kSelectiveScanOp;
const OpEntry kSsdOp{.name = "ssd",
                     .help = "Mamba-2's state-space model",
                     .file = "a file with Mamba-2 tensors",
                     .tensors = kSsdTensors,
                     .tensor_notes = kNotes,
                     .settings = kSsdSettings,
                     .defaults = kSsdDefaults,
                     .layers = layer_bit(LayerKind::kSsd),
                     .fill = fill_ssd,
                     .recognizes = recognizes_ssm,
                     .make = make_ssm_job<Op::kSsd>};
const OpEntry kSelectiveScanOp{.name = "selective_scan",
                               .help = "Mamba-1's state-space model",
                               .file = "a file with Mamba-1 tensors",
                               .tensors = kScanTensors,
                               .tensor_notes = kNotes,
                               .settings = kScanSettings,
                               .defaults = kScanDefaults,
                               .layers = layer_bit(LayerKind::kSelectiveScan),
                               .fill = fill_scan,
                               .make = make_ssm_job<Op::kSelectiveScan>};

}  // namespace ringattn
