// SPDX-License-Identifier: Apache-2.0
// What every kernel with a table of configurations promises of its choice: sm80_fold's and sm90_fold's tests share it.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/fold_inputs.hpp"

namespace ringattn::testing {

inline FoldSpec spec_of_dims(Dtype dtype, int head_dim, int head_dim_v) {
  return make_spec(dtype, 8, 2, head_dim, {-1, 0}, head_dim_v);
}

// Calls check(config, spec) for every entry of the table, with all else of the spec varied.
template <class Configs, class Check>
void for_specs_of(const Configs& configs, Check check) {
  for (const auto& config : configs) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      FoldSpec spec = spec_of_dims(dtype, config.head_dim, config.head_dim_v);
      for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{100, 3}}) {
        spec.mask = mask;
        spec.softcap = mask.left > 0 ? 20.0F : 0.0F;
        spec.sinks = mask.left > 0;
        spec.softmax_scale = mask.right < 0 ? -1.0F : 0.1F;
        spec.kv_heads = mask.right < 0 ? 8 : 1;
        SCOPED_TRACE(describe(config));
        check(config, spec);
      }
    }
  }
}

// `missing(spec)` is the kernel's fold_missing(); both kernels have the same head dims.
template <class Missing>
void expect_missing_texts(Missing missing) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(missing(spec_of_dims(Dtype::kF32, 128, 128)), Texts{"fp32 (supported: bf16, fp16)"});
  EXPECT_EQ(missing(spec_of_dims(Dtype::kBf16, 80, 80)), Texts{"head_dim 80 (supported: 64, 96, 128, 256)"});
  EXPECT_EQ(missing(spec_of_dims(Dtype::kF16, 192, 192)), Texts{"head_dim 192 (supported: 64, 96, 128, 256)"});
  EXPECT_EQ(missing(spec_of_dims(Dtype::kF16, 128, 64)),
            Texts{"head_dim 128 with head_dim_v 64 (supported: 192 with 128)"});
  EXPECT_EQ(missing(spec_of_dims(Dtype::kF32, 40, 40)),
            (Texts{"fp32 (supported: bf16, fp16)", "head_dim 40 (supported: 64, 96, 128, 256)"}));
}

}  // namespace ringattn::testing
