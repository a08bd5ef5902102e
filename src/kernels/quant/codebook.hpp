// SPDX-License-Identifier: Apache-2.0
// Codebooks for vector quantization: k-means over a sample of a tensor's tokens, with a fixed seed and fixed orders of
// sums. So a tensor's codebooks are bitwise equal for any number of threads and on every backend
// (Backend::find_codebook()).
//
// Each run of `width` channels of a head has its own codebook. Its points are those channels of sampled tokens. Initial
// vectors are points drawn with the seed. In each of a fixed number of iterations every point is assigned to its
// nearest vector (quant/row_quantization.hpp), and each vector becomes the mean of its points: an fp64 sum in ascending
// order, divided by their number, in fp32. A vector without points stays. The result is rounded once to the rows'
// dtype.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.hpp"
#include "base/philox.hpp"
#include "base/tensor.hpp"

namespace ringattn {

// Sampled tokens, evenly spaced, and k-means iterations. More of either changes the error by less than 1 %.
inline constexpr int kCodebookSample = 8192;
inline constexpr int kKMeansIterations = 10;

// Points per codebook for a tensor of `tokens` tokens.
RINGATTN_HOST_DEVICE inline std::int64_t codebook_points(std::int64_t tokens) {
  return tokens < kCodebookSample ? tokens : kCodebookSample;
}
// The token of point i.
RINGATTN_HOST_DEVICE inline std::int64_t codebook_token(std::int64_t i, std::int64_t points, std::int64_t tokens) {
  return i * tokens / points;
}
// Fisher-Yates shuffle: the index that is swapped with index i, for i ascending from 0. `stream` is the codebook's
// index, head by head, run by run.
RINGATTN_HOST_DEVICE inline int codebook_draw(int i, int points, std::uint32_t stream, std::uint64_t seed) {
  const std::uint32_t word = philox4x32_10({{static_cast<std::uint32_t>(i), stream, 0, 0}}, seed).word[0];
  return i + static_cast<int>(word % static_cast<std::uint32_t>(points - i));
}

// Memory is of the backend's kind.
struct CodebookTask {
  TensorView rows;         // [tokens, heads, dim], bf16 or fp16, finite
  std::int64_t width = 0;  // channels per codebook index: 2, 4 or 8
  std::uint64_t seed = 0;
  std::byte* codebook = nullptr;  // [heads, dim / width, 256, width] of the rows' dtype
};
// Validation of a task, shared by all backends. Throws kInternal if the width is unsupported or does not divide the
// dim.
void check_task(const CodebookTask& task);

// Host implementation of Backend::find_codebook().
void find_codebook_on_host(const CodebookTask& task, int threads);

}  // namespace ringattn
