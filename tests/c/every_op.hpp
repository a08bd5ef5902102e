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

inline ringattn_spec attention_spec() {
  auto spec = sized<ringattn_spec>();
  spec.dtype = kFp32;
  spec.heads = kHeads;
  spec.head_dim = kDim;
  return spec;
}

// Makes each op with these options, and destroys what it made.
class Ops {
 public:
  using Make = std::function<ringattn_status(const ringattn_options&)>;

  Ops() {
    batch_.sequences = runs_.sequences = limits_.sequences = 1;
    batch_.q_lengths = runs_.lengths = &kTokens;
    limits_.keys = 64;
    latent_.dtype = scan_.dtype = convolution_.dtype = kFp32;
    latent_.heads = scan_.heads = kHeads;
    latent_.head_dim = latent_.head_dim_v = latent_.rope_dim = scan_.head_dim = scan_.state_dim = 16;
    latent_.latent_dim = 64;
    convolution_.width = 4;
    convolution_.channels = 16;
    compression_.format = "int8";
    compression_.sequences = 1;
    compression_.dtype = kFp16;
    compression_.heads = kHeads;
    compression_.dim = kDim;
  }

  std::vector<std::pair<std::string, Make>> all() {
    return {
        {"attention", made<ringattn_attention>(ringattn_attention_destroy,
                                               [this](auto* options, auto** object) {
                                                 return ringattn_attention_create(world_.get(), &spec_, &batch_,
                                                                                  options, object);
                                               })},
        {"decode", made<ringattn_decode>(ringattn_decode_destroy,
                                         [this](auto* options, auto** object) {
                                           return ringattn_decode_create(world_.get(), &spec_, &limits_, options,
                                                                         object);
                                         })},
        {"latent", made<ringattn_latent>(ringattn_latent_destroy,
                                         [this](auto* options, auto** object) {
                                           return ringattn_latent_create(world_.get(), &latent_, &batch_,
                                                                         RINGATTN_ANY_FORM, options, object);
                                         })},
        {"latent decode", made<ringattn_latent_decode>(ringattn_latent_decode_destroy,
                                                       [this](auto* options, auto** object) {
                                                         return ringattn_latent_decode_create(
                                                             world_.get(), &latent_, &limits_, options, object);
                                                       })},
        {"scan", made<ringattn_scan>(ringattn_scan_destroy,
                                     [this](auto* options, auto** object) {
                                       return ringattn_scan_create(world_.get(), &scan_, &runs_, options, object);
                                     })},
        {"convolution", made<ringattn_convolution>(ringattn_convolution_destroy,
                                                   [this](auto* options, auto** object) {
                                                     return ringattn_convolution_create(world_.get(), &convolution_,
                                                                                        &runs_, options, object);
                                                   })},
        {"compression", made<ringattn_compression>(ringattn_compression_destroy, [this](auto* options, auto** object) {
           return ringattn_compression_create(world_.get(), &compression_, options, object);
         })}};
  }

  const SelfWorld& world() const { return world_; }

 private:
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

  SelfWorld world_;
  ringattn_spec spec_ = attention_spec();
  ringattn_batch batch_ = sized<ringattn_batch>();
  ringattn_decode_limits limits_ = sized<ringattn_decode_limits>();
  ringattn_latent_spec latent_ = sized<ringattn_latent_spec>();
  ringattn_scan_spec scan_ = sized<ringattn_scan_spec>();
  ringattn_scan_batch runs_ = sized<ringattn_scan_batch>();
  ringattn_convolution_spec convolution_ = sized<ringattn_convolution_spec>();
  ringattn_compression_spec compression_ = sized<ringattn_compression_spec>();
};

}  // namespace ringattn::testing
