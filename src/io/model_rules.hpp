// SPDX-License-Identifier: Apache-2.0
// Rules of families of models for K/V heads and for the scale of scores.
#pragma once

#include <cstdint>

#include "io/model_keys.hpp"

namespace ringattn {

// K/V heads of a layer, by the keys of its family. `heads`: its query heads.
std::int64_t plain_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);
std::int64_t kv_groups(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);
std::int64_t falcon_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);
std::int64_t bigcode_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);
std::int64_t chatglm_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);
std::int64_t dbrx_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);
std::int64_t mpt_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);
std::int64_t all_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);
std::int64_t nas_kv_heads(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);

// The factor by which scores are multiplied. `head_dim`: dims of q and k.
double head_dim_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);
double unit_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);
double query_scalar_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);
double multiplier_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);
double unlisted_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);
double yarn_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);
double phi3small_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);
double half_head_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);
double gpt2_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);
double mpt_scale(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);

}  // namespace ringattn
