// SPDX-License-Identifier: Apache-2.0
// Every op of the C interface, made small by given options, for tests of what all ops have or refuse.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/c/c_tensors.hpp"

namespace ringattn::testing {

inline const DLDataType kFp32 = c_dtype(Dtype::kF32), kFp16{kDLFloat, 16, 1};
inline constexpr std::int64_t kTokens = 40, kHeads = 2, kDim = 64;

inline constexpr ringattn_run kWholeSequence{0, 0, 0, kTokens};

inline ringattn_spec attention_spec() {
  auto spec = sized<ringattn_spec>();
  spec.dtype = kFp32;
  spec.heads = kHeads;
  spec.head_dim = kDim;
  return spec;
}

// Small jobs of every op. all() makes each op with given options, and destroys what it made.
struct Ops {
  using Make = std::function<ringattn_status(const ringattn_options&)>;

  Ops() {
    batch.sequences = runs.sequences = limits.sequences = 1;
    batch.q_lengths = runs.lengths = &kTokens;
    limits.keys = 64;
    latent.dtype = batched_gemm.dtype = linear.dtype = rope.dtype = scan.dtype = convolution.dtype = kFp32;
    latent.heads = batched_gemm.heads = scan.heads = kHeads;
    latent.head_dim = latent.head_dim_v = latent.rope_dim = rope.head_dim = scan.head_dim = scan.state_dim = 16;
    latent.latent_dim = 64;
    batched_gemm.dim_k = 16;
    batched_gemm.dim_n = 64;
    linear.in_features = linear.out_features = linear.max_tokens = 16;
    linear_attention.dtype = gated_delta.dtype = kFp32;
    linear_attention.heads = gated_delta.key_heads = gated_delta.value_heads = kHeads;
    linear_attention.dim = gated_delta.key_dim = gated_delta.value_dim = 16;
    convolution.width = 4;
    convolution.channels = 16;
    reshard.token_bytes = 16;
    reshard.sequences = reshard.from_run_count = reshard.to_run_count = 1;
    reshard.lengths = &kTokens;
    reshard.from_runs = reshard.to_runs = &kWholeSequence;
    compression.format = "int8";
    compression.sequences = 1;
    compression.dtype = kFp16;
    compression.heads = kHeads;
    compression.dim = kDim;
  }

  template <class Object, class Create>
  static Make made(void (*destroy)(Object*), Create create) {
    return [=](const ringattn_options& options) {
      Object* object = nullptr;
      const ringattn_status status = create(&options, &object);
      EXPECT_EQ(object != nullptr, status == RINGATTN_OK);
      destroy(object);
      return status;
    };
  }

  std::vector<std::pair<std::string, Make>> all() {
    return {
        {"attention", made<ringattn_attention>(ringattn_attention_destroy,
                                               [this](auto* options, auto** object) {
                                                 return ringattn_attention_create(world.get(), &spec, &batch, options,
                                                                                  object);
                                               })},
        {"attention backward", made<ringattn_attention_backward>(ringattn_attention_backward_destroy,
                                                                 [this](auto* options, auto** object) {
                                                                   return ringattn_attention_backward_create(
                                                                       world.get(), &spec, &batch,
                                                                       RINGATTN_GRADIENTS_AS_INPUTS, options, object);
                                                                 })},
        {"decode", made<ringattn_decode>(ringattn_decode_destroy,
                                         [this](auto* options, auto** object) {
                                           return ringattn_decode_create(world.get(), &spec, &limits, options, object);
                                         })},
        {"mla", made<ringattn_mla>(ringattn_mla_destroy,
                                   [this](auto* options, auto** object) {
                                     return ringattn_mla_create(world.get(), &latent, &batch, RINGATTN_ANY_FORM,
                                                                options, object);
                                   })},
        {"mla backward", made<ringattn_mla_backward>(ringattn_mla_backward_destroy,
                                                     [this](auto* options, auto** object) {
                                                       return ringattn_mla_backward_create(world.get(), &latent, &batch,
                                                                                           options, object);
                                                     })},
        {"mla decode", made<ringattn_mla_decode>(ringattn_mla_decode_destroy,
                                                 [this](auto* options, auto** object) {
                                                   return ringattn_mla_decode_create(world.get(), &latent, &limits,
                                                                                     options, object);
                                                 })},
        {"batched gemm", made<ringattn_batched_gemm>(ringattn_batched_gemm_destroy,
                                                     [this](auto* options, auto** object) {
                                                       return ringattn_batched_gemm_create(world.get(), &batched_gemm,
                                                                                           options, object);
                                                     })},
        {"linear", made<ringattn_linear>(ringattn_linear_destroy,
                                         [this](auto* options, auto** object) {
                                           return ringattn_linear_create(world.get(), &linear, options, object);
                                         })},
        {"linear backward", made<ringattn_linear_backward>(ringattn_linear_backward_destroy,
                                                           [this](auto* options, auto** object) {
                                                             return ringattn_linear_backward_create(
                                                                 world.get(), &linear, options, object);
                                                           })},
        {"gradient reduction", made<ringattn_gradient_reduction>(ringattn_gradient_reduction_destroy,
                                                                 [this](auto* options, auto** object) {
                                                                   return ringattn_gradient_reduction_create(
                                                                       world.get(), 8, nullptr, options, object);
                                                                 })},
        {"rope", made<ringattn_rope>(ringattn_rope_destroy,
                                     [this](auto* options, auto** object) {
                                       return ringattn_rope_create(world.get(), &rope, options, object);
                                     })},
        {"ssm", made<ringattn_ssm>(ringattn_ssm_destroy,
                                   [this](auto* options, auto** object) {
                                     return ringattn_ssm_create(world.get(), &scan, &runs, options, object);
                                   })},
        {"linear attention", made<ringattn_linear_attention>(ringattn_linear_attention_destroy,
                                                             [this](auto* options, auto** object) {
                                                               return ringattn_linear_attention_create(
                                                                   world.get(), &linear_attention, &runs, options,
                                                                   object);
                                                             })},
        {"gated delta", made<ringattn_gated_delta>(ringattn_gated_delta_destroy,
                                                   [this](auto* options, auto** object) {
                                                     return ringattn_gated_delta_create(world.get(), &gated_delta,
                                                                                        &runs, options, object);
                                                   })},
        {"reshard", made<ringattn_reshard>(ringattn_reshard_destroy,
                                           [this](auto* options, auto** object) {
                                             return ringattn_reshard_create(world.get(), &reshard, options, object);
                                           })},
        {"ssd backward", made<ringattn_ssd_backward>(ringattn_ssd_backward_destroy,
                                                     [this](auto* options, auto** object) {
                                                       return ringattn_ssd_backward_create(world.get(), &scan, &runs,
                                                                                           RINGATTN_GRADIENTS_AS_INPUTS,
                                                                                           options, object);
                                                     })},
        {"conv1d", made<ringattn_causal_conv1d>(ringattn_causal_conv1d_destroy,
                                                [this](auto* options, auto** object) {
                                                  return ringattn_causal_conv1d_create(world.get(), &convolution, &runs,
                                                                                       options, object);
                                                })},
        {"conv1d backward", made<ringattn_causal_conv1d_backward>(ringattn_causal_conv1d_backward_destroy,
                                                                  [this](auto* options, auto** object) {
                                                                    return ringattn_causal_conv1d_backward_create(
                                                                        world.get(), &convolution, &runs, options,
                                                                        object);
                                                                  })},
        {"compression", made<ringattn_compression>(ringattn_compression_destroy, [this](auto* options, auto** object) {
           return ringattn_compression_create(world.get(), &compression, options, object);
         })}};
  }

  SelfWorld world;
  ringattn_spec spec = attention_spec();
  ringattn_batch batch = sized<ringattn_batch>();
  ringattn_decode_limits limits = sized<ringattn_decode_limits>();
  ringattn_mla_spec latent = sized<ringattn_mla_spec>();
  ringattn_batched_gemm_spec batched_gemm = sized<ringattn_batched_gemm_spec>();
  ringattn_rope_spec rope = sized<ringattn_rope_spec>();
  ringattn_linear_spec linear = sized<ringattn_linear_spec>();
  ringattn_ssm_spec scan = sized<ringattn_ssm_spec>();
  ringattn_linear_attention_spec linear_attention = sized<ringattn_linear_attention_spec>();
  ringattn_gated_delta_spec gated_delta = sized<ringattn_gated_delta_spec>();
  ringattn_ssm_batch runs = sized<ringattn_ssm_batch>();
  ringattn_reshard_spec reshard = sized<ringattn_reshard_spec>();
  ringattn_causal_conv1d_spec convolution = sized<ringattn_causal_conv1d_spec>();
  ringattn_compression_spec compression = sized<ringattn_compression_spec>();
};

}  // namespace ringattn::testing
