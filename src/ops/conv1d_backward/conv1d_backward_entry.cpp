// SPDX-License-Identifier: Apache-2.0
// The row of the causal convolution's gradients in the table of ops.
#include <memory>
#include <string_view>

#include "ops/conv1d_backward/conv1d_backward_op_job.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"x", "[tokens, channels]"},
                                 {"conv1d_weight", "[channels, width]"},
                                 {"dy", "[tokens, channels]"},
                                 {"conv1d_bias", "[channels]", true},
                                 {"conv_state", "[sequences, channels, width - 1]", true},
                                 {"cu_seqlens", "[sequences + 1]", true}};
constexpr std::string_view kSettings[] = {"conv-width"};
constexpr SettingDefault kDefaults[] = {{"heads", "256"}, {"conv-width", "4"}};

}  // namespace

extern const OpEntry kConv1dBackwardOp;
const OpEntry kConv1dBackwardOp{.name = "conv1d_backward",
                                .help = "the gradients of the causal conv1d: dx, dweight, dbias",
                                .file = "a file with a convolution's tensors and dy",
                                .tensors = kTensors,
                                .settings = kSettings,
                                .defaults = kDefaults,
                                .recognizes = holds_conv1d_gradient,
                                .make = [](const OpRequest& request) -> std::unique_ptr<OpJob> {
                                  return std::make_unique<Conv1dBackwardOpJob>(request);
                                }};

}  // namespace ringattn
