// SPDX-License-Identifier: Apache-2.0
#include "io/tensor_roles.hpp"

#include <algorithm>

namespace ringattn {

namespace {

constexpr TensorRole kRoles[] = {
    TensorRole{"q", &InputNames::q},
    TensorRole{"k", &InputNames::k},
    TensorRole{"v", &InputNames::v},
    TensorRole{"k_pages", &InputNames::k_pages},
    TensorRole{"v_pages", &InputNames::v_pages},
    TensorRole{"block_table", &InputNames::block_table},
    TensorRole{"lengths_k", &InputNames::lengths_k},
    TensorRole{"latent", &InputNames::latent},
    TensorRole{"k_rope", &InputNames::k_rope},
    TensorRole{"latent_fp8", &InputNames::latent_fp8},
    TensorRole{"latent_pages", &InputNames::latent_pages},
    TensorRole{"w_uk", &InputNames::w_uk},
    TensorRole{"w_uv", &InputNames::w_uv},
    TensorRole{"kv_b_proj", &InputNames::kv_b_proj},
    TensorRole{"cu_seqlens_q", &InputNames::cu_seqlens_q},
    TensorRole{"cu_seqlens_k", &InputNames::cu_seqlens_k},
    TensorRole{"q_offset", &InputNames::q_offset},
    TensorRole{"sinks", &InputNames::sinks},
    TensorRole{"x", &InputNames::x},
    TensorRole{"dt", &InputNames::dt},
    TensorRole{"A", &InputNames::a},
    TensorRole{"B", &InputNames::b},
    TensorRole{"C", &InputNames::c},
    TensorRole{"D", &InputNames::d},
    TensorRole{"z", &InputNames::z},
    TensorRole{"dt_bias", &InputNames::dt_bias},
    TensorRole{"u", &InputNames::u},
    TensorRole{"delta", &InputNames::delta},
    TensorRole{"delta_bias", &InputNames::delta_bias},
    TensorRole{"initial_states", &InputNames::initial_states},
    TensorRole{"cu_seqlens", &InputNames::cu_seqlens},
    TensorRole{"state", &InputNames::state},
    TensorRole{"conv1d_weight", &InputNames::conv1d_weight},
    TensorRole{"conv1d_bias", &InputNames::conv1d_bias},
    TensorRole{"conv_state", &InputNames::conv_state},
};

}  // namespace

std::span<const TensorRole> tensor_roles() { return kRoles; }

bool is_tensor_role(std::string_view name) {
  return std::ranges::find(kRoles, name, &TensorRole::name) != std::end(kRoles);
}

}  // namespace ringattn
