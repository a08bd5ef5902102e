// SPDX-License-Identifier: Apache-2.0
// Synthetic inputs: each element is a pure function of (seed, tensor, token, head, dim), computed with integer
// arithmetic, one exact conversion and one fp32 multiplication. So results are bitwise equal on all ranks and devices.
//
// One Philox block serves two neighboring dims. Each takes two words as four 16-bit numbers, whose sum is nearly normal
// (Irwin-Hall): mean 4 · 65535 / 2 = 131070, standard deviation √((2³² − 1) / 3) ≈ 37837.2 ≈ 2¹⁶ / √3. Values are
// within ±3.47, with mean 0 and standard deviation 1.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "base/packed_tokens.hpp"
#include "base/philox.hpp"
#include "base/tensor.hpp"

namespace ringattn {

// Below 16. In the weights, [heads, N, K] (kernels/gemm/batched_gemm.hpp), the matrix's head counts as the token and
// its row as the head. So the matrices of some heads are those of a run of tokens.
enum class SyntheticTensor : std::uint32_t {
  kQ = 0,
  kK = 1,
  kV = 2,
  kSinks = 3,
  kLatent = 4,
  kKeyRope = 5,
  kWeightKeys = 6,
  kWeightValues = 7,
  kSsmX = 8,
  kSsmDt = 9,
  kSsmB = 10,
  kSsmC = 11,
  kSsmZ = 12,
  kSsmHeads = 13,  // per-head SSM parameters: D as token 0, dt_bias as token 1
  kDout = 14,      // gradient of attention's out
  kDlse = 15,      // gradient of its LSE
};

inline constexpr float kSyntheticScale = 0x1.bb67aep-16F;  // √3 / 2¹⁶

RINGATTN_HOST_DEVICE inline float synthetic_from_words(std::uint32_t a, std::uint32_t b) {
  const std::uint32_t sum = (a & 0xffffU) + (a >> 16) + (b & 0xffffU) + (b >> 16);  // below 2^18: exact in fp32
  return static_cast<float>(static_cast<std::int32_t>(sum) - 131070) * kSyntheticScale;
}

// The Philox counter of the block for dims 2 · pair and 2 · pair + 1.
RINGATTN_HOST_DEVICE inline PhiloxWords synthetic_counter(SyntheticTensor tensor, std::int64_t token, std::int64_t head,
                                                          std::int64_t pair) {
  const auto t = static_cast<std::uint64_t>(token);
  return {{static_cast<std::uint32_t>(t), static_cast<std::uint32_t>(t >> 32), static_cast<std::uint32_t>(head),
           static_cast<std::uint32_t>(tensor) << 28 | static_cast<std::uint32_t>(pair)}};
}

// Element (token, head, dim), before scaling and rounding to the tensor's dtype. `token` counts on the packed axis.
RINGATTN_HOST_DEVICE inline float synthetic_value(std::uint64_t seed, SyntheticTensor tensor, std::int64_t token,
                                                  std::int64_t head, std::int64_t dim) {
  const PhiloxWords words = philox4x32_10(synthetic_counter(tensor, token, head, dim / 2), seed);
  return dim % 2 == 0 ? synthetic_from_words(words.word[0], words.word[1])
                      : synthetic_from_words(words.word[2], words.word[3]);
}

// Factor of a tensor's elements, applied in fp32 before rounding. Weights: 1/√dim rounded to fp32, so that their
// products with normal rows have about unit variance. All others: 1.
inline float synthetic_scale(SyntheticTensor tensor, std::int64_t dim) {
  const bool weights = tensor == SyntheticTensor::kWeightKeys || tensor == SyntheticTensor::kWeightValues;
  return weights ? static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim))) : 1.0F;
}

// Fills `rows`, [total_tokens(runs), heads, dim] in host memory, with the elements of the runs' tokens, rounded to
// nearest even. `threads` 0: OpenMP chooses. Values do not depend on it.
void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                    const MutableTensorView& rows, int threads = 0);

// A sink logit for each query head.
std::vector<float> synthetic_sinks(std::uint64_t seed, std::int64_t heads);

}  // namespace ringattn
