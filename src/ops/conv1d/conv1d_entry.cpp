// SPDX-License-Identifier: Apache-2.0
// The row of the causal convolution in the table of ops.
#include "ops/ssm/ssm_entry.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"x", "[tokens, channels]"},
                                 {"conv1d_weight", "[channels, width]"},
                                 {"conv1d_bias", "[channels]", true},
                                 {"conv_state", "[sequences, channels, width - 1]", true},
                                 {"cu_seqlens", "[sequences + 1]", true}};
constexpr std::string_view kSettings[] = {"conv-width", "final-states"};
constexpr SettingDefault kDefaults[] = {{"heads", "256"}, {"conv-width", "4"}};

void fill_conv1d(const ModelLayer& layer, const Settings&, const FillSetting& fill) {
  Fill{fill}("heads", layer.conv_channels)("conv-width", layer.conv_width);
}

}  // namespace

extern const OpEntry kConv1dOp;
const OpEntry kConv1dOp{.name = "conv1d",
                        .help = "causal depthwise conv1d, as before an SSM layer",
                        .file = "a file with a convolution's tensors",
                        .tensors = kTensors,
                        .settings = kSettings,
                        .defaults = kDefaults,
                        .layers = layer_bit(LayerKind::kSsd) | layer_bit(LayerKind::kSelectiveScan),
                        .fill = fill_conv1d,
                        .old_name = "convolution",
                        .make = make_ssm_job<Op::kConv1d>};

}  // namespace ringattn
