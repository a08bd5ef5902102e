// SPDX-License-Identifier: Apache-2.0
// The tensors that a job's file may have, with the names they have by default.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ringattn {

// The names of the tensors to look for. A name that isn't set is the role's own ("q", "cu_seqlens_k"); a tensor whose
// name is set must exist. First row: attention. Second: a paged cache, instead of k and v. Third and fourth: MLA
// (mla_tensors.hpp). Fifth: optional tensors. Last three: SSM (ssm_tensors.hpp), which uses none of the others.
struct InputNames {
  std::optional<std::string> q, k, v;
  std::optional<std::string> k_pages, v_pages, block_table, lengths_k;
  std::optional<std::string> latent, k_rope, latent_fp8, latent_pages;
  std::optional<std::string> w_uk, w_uv, kv_b_proj;
  std::optional<std::string> cu_seqlens_q, cu_seqlens_k, q_offset, sinks;
  std::optional<std::string> x, dt, a, b, c, d, z, dt_bias;
  std::optional<std::string> u, delta, delta_bias, initial_states, cu_seqlens;
  std::optional<std::string> state, conv1d_weight, conv1d_bias, conv_state;
  std::map<std::string, std::string, std::less<>> others;  // names of tensors that only one op has

  bool operator==(const InputNames&) const = default;
};

// A tensor that may be renamed.
struct TensorRole {
  std::string_view name;
  std::optional<std::string> InputNames::*member;
};
// All roles. Those that every job of a kind has come first.
std::span<const TensorRole> tensor_roles();
bool is_tensor_role(std::string_view name);

}  // namespace ringattn
