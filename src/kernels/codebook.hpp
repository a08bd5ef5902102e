// SPDX-License-Identifier: Apache-2.0
// Codebooks for vector codes: k-means over a sample of a tensor's tokens, with a fixed seed and fixed orders of sums.
// So a tensor has one codebook, whatever the number of threads, and on every backend: Backend::find_codebook().
//
// A head's run of `width` channels has a codebook of its own. Its points are those channels of sampled tokens. Vectors
// start as points that the seed draws. In each of a fixed number of rounds every point belongs to its nearest vector
// (row_quantization.hpp), and a vector becomes the mean of its points: a sum in fp64 over them in ascending order,
// divided by their number, in fp32. A vector without points stays. What is stored is rounded once to the rows' dtype.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.hpp"
#include "base/philox.hpp"
#include "base/tensor.hpp"

namespace ringattn {

// Tokens that are looked at, evenly spaced, and rounds of k-means: more of either moves the error by less than a
// hundredth.
inline constexpr int kCodebookSample = 8192;
inline constexpr int kKMeansIterations = 10;

// Points of each codebook of a tensor of so many tokens.
RINGATTN_HOST_DEVICE inline std::int64_t codebook_points(std::int64_t tokens) {
  return tokens < kCodebookSample ? tokens : kCodebookSample;
}
// The token that point i is.
RINGATTN_HOST_DEVICE inline std::int64_t codebook_token(std::int64_t i, std::int64_t points, std::int64_t tokens) {
  return i * tokens / points;
}
// The place that is exchanged with place i of the drawn order, for i ascending from 0. `stream`: the codebook's number,
// head by head, run by run.
RINGATTN_HOST_DEVICE inline int codebook_draw(int i, int points, std::uint32_t stream, std::uint64_t seed) {
  const std::uint32_t word = philox4x32_10({{static_cast<std::uint32_t>(i), stream, 0, 0}}, seed).word[0];
  return i + static_cast<int>(word % static_cast<std::uint32_t>(points - i));
}

// Memory is of the backend's kind.
struct CodebookTask {
  TensorView rows;         // [tokens, heads, dim] of bf16 or fp16, finite numbers
  std::int64_t width = 0;  // channels of a code: 2, 4 or 8
  std::uint64_t seed = 0;
  std::byte* codebook = nullptr;  // [heads, dim / width, 256, width] of the rows' dtype
};
// What every backend checks of a task. Throws kInternal where the width isn't one, or doesn't divide the dim.
void check_task(const CodebookTask& task);

// Backend::find_codebook() of host memory.
void find_codebook_on_host(const CodebookTask& task, int threads);

}  // namespace ringattn
