// SPDX-License-Identifier: Apache-2.0
// The row of SSD's gradients in the table of ops.
#include <memory>
#include <string_view>

#include "ops/jobs/gradients_setting.hpp"
#include "ops/ssd_backward/ssd_backward_op_job.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"x", "[tokens, heads, head_dim]"},
                                 {"dt", "[tokens, heads]"},
                                 {"A", "[heads]"},
                                 {"B", "[tokens, groups, state_dim]"},
                                 {"C", "[tokens, groups, state_dim]"},
                                 {"dy", "[tokens, heads, head_dim]"},
                                 {"D", "[heads]", true},
                                 {"z", "[tokens, heads, head_dim]", true},
                                 {"dt_bias", "[heads]", true},
                                 {"initial_states", "[sequences, heads, head_dim, state_dim]", true},
                                 {"dfinal_states", "[sequences, heads, head_dim, state_dim]", true},
                                 {"cu_seqlens", "[sequences + 1]", true}};

constexpr std::string_view kSettings[] = {"head-dim", "state-dim", "groups", "dt-softplus", "dt-limit"};
constexpr SettingDefault kDefaults[] = {{"head-dim", "64"}};

constexpr SettingRow kOwn[] = {kGradientsSetting};

}  // namespace

extern const OpEntry kSsdBackwardOp;
const OpEntry kSsdBackwardOp{.name = "ssd_backward",
                             .help = "the gradients of Mamba-2: dx, ddt, dA, dB, dC",
                             .file = "a file with Mamba-2 tensors and dy",
                             .tensors = kTensors,
                             .settings = kSettings,
                             .own_settings = kOwn,
                             .defaults = kDefaults,
                             .recognizes = holds_ssd_gradient,
                             .make = [](const OpRequest& request) -> std::unique_ptr<OpJob> {
                               return std::make_unique<SsdBackwardOpJob>(request);
                             }};

}  // namespace ringattn
