// SPDX-License-Identifier: Apache-2.0
#include "attention/files/scan_names.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "attention/files/tensor_checks.hpp"
#include "attention/files/tensor_roles.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

struct UnreadName {
  std::string_view name;
  std::string_view why;
  std::string_view remedy;  // where it can be given a role, by the setting that names tensors
  bool role = true;
};

constexpr std::string_view kStates =
    "states of a step of one token are `state`, those in front of whole sequences `initial_states`";
constexpr UnreadName kUnread[] = {
    {"seq_idx", "sequences are told by their ends", "Write cu_seqlens instead.", false},
    {"ssm_state", kStates, "Say which it is"},
    {"ssm_states", kStates, "Say which it is"},
    {"conv_states", "the tokens in front of a convolution are `conv_state`", "Rename it, or say so"},
};

bool is_named(const InputNames& names, std::string_view tensor) {
  return std::ranges::any_of(tensor_roles(), [&](const TensorRole& role) { return names.*role.member == tensor; });
}

// The bias of dt under a name that this kind of scan doesn't have: without it neither bias nor softplus is applied.
void refuse_other_bias(const SafetensorsFile& file, const InputNames& names, bool selective) {
  const std::string_view own = selective ? "delta_bias" : "dt_bias";
  if (selective ? names.delta_bias.has_value() : names.dt_bias.has_value()) return;
  const auto refuse = [&](std::string_view name) {
    fail(ErrorCode::kFile, described(file.tensor(name)),
         fmt::format("the bias of a scan of {} is `{}`", selective ? "u and delta" : "x and dt", own),
         {fmt::format("Rename it, name it as {} with ", own), setting("tensors"), ", or leave it out."});
  };
  // The other kind's is no mistake in a file that holds a scan of that kind, too.
  const std::string_view other = selective ? "dt_bias" : "delta_bias";
  if (file.contains(other) && !file.contains(selective ? "dt" : "delta")) refuse(other);
  if (file.contains("dt_proj.bias") && !file.contains(own)) refuse("dt_proj.bias");
}

// A scan whose dt is missing looks like a convolution alone.
void refuse_rest_of_scan(const SafetensorsFile& file, const InputNames& names) {
  if (names.conv1d_weight) return;  // somebody has said what is meant
  for (const std::string_view name : {"A", "A_log", "dt_bias", "delta_bias", "delta"}) {
    if (!file.contains(name)) continue;
    fail(ErrorCode::kFile, fmt::format("{} has `{}`, and no `dt` beside `x`", file.path(), name),
         "without dt it is a convolution alone, which reads nothing of a scan",
         {"Add dt, or name x and conv1d_weight with ", setting("tensors"), "."});
  }
}

}  // namespace

std::optional<TensorSource> find_by_names(const SafetensorsFile& file, const std::optional<std::string>& name,
                                          std::span<const std::string_view> usual) {
  std::optional<TensorSource> found;
  if (name) return file.tensor(*name);
  for (const std::string_view other : usual) {
    if (!file.contains(other)) continue;
    const TensorSource tensor = file.tensor(other);
    if (found) {
      require(false, tensor, fmt::format("{}, and both names mean {}", described(*found), usual.front()),
              {"Leave one of them out, or name the one that is meant with ", setting("tensors"), "."});
    }
    found = tensor;
  }
  return found;
}

void refuse_unread(const SafetensorsFile& file, const InputNames& names, bool selective, bool alone) {
  for (const UnreadName& unread : kUnread) {
    if (!file.contains(unread.name) || is_named(names, unread.name)) continue;
    fail(ErrorCode::kFile, fmt::format("{} has `{}`, which isn't read", file.path(), unread.name), unread.why,
         unread.role ? Wording{unread.remedy, " with ", setting("tensors"), "."} : Wording(unread.remedy));
  }
  if (alone) {
    refuse_rest_of_scan(file, names);
    return;
  }
  refuse_other_bias(file, names, selective);
  if (!names.a && !file.contains("A") && file.contains("A_log")) {
    fail(ErrorCode::kFile, fmt::format("{} has no tensor `A`", file.path()),
         "its `A_log` is the logarithm that models store", "Write A = -exp(A_log).");
  }
}

}  // namespace ringattn
