// SPDX-License-Identifier: Apache-2.0
// The names that tensors of a scan may have in files besides the role's own: those of models' parameters
// ("conv1d.weight") and of causal_conv1d. Names that mean the same are read. Those that mean something else, or might,
// are refused, so that no tensor of a scan is left out unsaid.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "attention/files/input_tensors.hpp"

namespace ringattn {

inline constexpr std::string_view kInitialStatesNames[] = {"initial_states", "initial_state"};
inline constexpr std::string_view kConvWeightNames[] = {"conv1d_weight", "conv1d.weight"};
inline constexpr std::string_view kConvBiasNames[] = {"conv1d_bias", "conv1d.bias"};
inline constexpr std::string_view kConvStateNames[] = {"conv_state"};
// Of a convolution alone, causal_conv1d's besides.
inline constexpr std::string_view kLoneWeightNames[] = {"conv1d_weight", "conv1d.weight", "weight"};
inline constexpr std::string_view kLoneBiasNames[] = {"conv1d_bias", "conv1d.bias", "bias"};
inline constexpr std::string_view kLoneConvStateNames[] = {"conv_state", "initial_states", "initial_state"};

// The tensor of that name, which must be there, or else the one with any of the role's names, which need not. Throws
// kFile where the file has two of them.
std::optional<TensorSource> find_by_names(const SafetensorsFile& file, const std::optional<std::string>& name,
                                          std::span<const std::string_view> usual);

// Refuses (kFile) what isn't read and would change a scan, by name: tensors that nothing of `names` gives a role.
// `alone`: a convolution alone, which has fewer of them.
void refuse_unread(const SafetensorsFile& file, const InputNames& names, bool selective, bool alone);

}  // namespace ringattn
