// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/common/cuda/synthetic.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kSyntheticThreads = 256;
constexpr std::size_t kSyntheticRuns = 128;  // passed in the launch parameters, so nothing is uploaded

struct FillParams {
  std::uint64_t seed;
  SyntheticTensor tensor;
  float scale;  // synthetic_scale()
  MutableTensorView rows;
  std::int64_t token[kSyntheticRuns];  // the packed token of each run's first row
  std::int64_t row[kSyntheticRuns + 1];
};

__device__ float rounded(float value, float /*type*/) { return value; }
__device__ __nv_bfloat16 rounded(float value, __nv_bfloat16 /*type*/) { return __float2bfloat16_rn(value); }
__device__ __half rounded(float value, __half /*type*/) { return __float2half_rn(value); }

template <class Element>
struct Pair {
  Element first, second;
};

// A Philox block makes two neighbouring elements. A CTA makes rows, a thread makes pairs of elements. blockIdx.y is the
// run.
template <class Element>
__global__ void __launch_bounds__(kSyntheticThreads) fill_kernel(const __grid_constant__ FillParams p) {
  const auto pairs_of_head = static_cast<std::uint32_t>((p.rows.dim + 1) / 2);
  const std::uint32_t pairs = static_cast<std::uint32_t>(p.rows.heads) * pairs_of_head;
  const bool vector_stores = p.rows.dim % 2 == 0 && p.rows.token_stride % 2 == 0 && p.rows.head_stride % 2 == 0 &&
                             reinterpret_cast<std::uint64_t>(p.rows.data) % sizeof(Pair<Element>) == 0;
  const std::int64_t first = p.row[blockIdx.y];
  for (std::int64_t row = first + blockIdx.x; row < p.row[blockIdx.y + 1]; row += gridDim.x) {
    const std::int64_t token = p.token[blockIdx.y] + row - first;
    for (std::uint32_t i = threadIdx.x; i < pairs; i += kSyntheticThreads) {
      const std::uint32_t head = i / pairs_of_head;
      const std::uint32_t pair = i % pairs_of_head;
      const PhiloxWords words = philox4x32_10(synthetic_counter(p.tensor, token, head, pair), p.seed);
      const Pair<Element> made{rounded(synthetic_from_words(words.word[0], words.word[1]) * p.scale, Element()),
                               rounded(synthetic_from_words(words.word[2], words.word[3]) * p.scale, Element())};
      Element* to =
          static_cast<Element*>(p.rows.data) + row * p.rows.token_stride + head * p.rows.head_stride + 2 * pair;
      if (vector_stores) {
        // A pair is stored at once.
        if constexpr (sizeof(Element) == 2) {
          *reinterpret_cast<std::uint32_t*>(to) = __builtin_bit_cast(std::uint32_t, made);
        } else {
          *reinterpret_cast<float2*>(to) = float2{made.first, made.second};
        }
      } else {
        to[0] = made.first;
        if (2 * pair + 1 < p.rows.dim) to[1] = made.second;
      }
    }
  }
}

template <class Element>
void launch_fill(const FillParams& params, std::size_t runs, Stream stream) {
  std::int64_t longest = 0;
  for (std::size_t i = 0; i < runs; ++i) longest = std::max(longest, params.row[i + 1] - params.row[i]);
  constexpr std::int64_t kMaxBlocks = 1 << 16;
  const std::int64_t blocks = std::min(kMaxBlocks, longest);
  if (blocks == 0) return;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(runs));
  fill_kernel<Element><<<grid, kSyntheticThreads, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "fill_synthetic");
}

// Calls `call` with a value of the element type of `dtype`.
template <class Call>
void with_element(Dtype dtype, Call call) {
  switch (dtype) {
    case Dtype::kF32:
      return call(float());
    case Dtype::kBf16:
      return call(__nv_bfloat16());
    case Dtype::kF16:
      return call(__half());
  }
}

}  // namespace

void fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                    const MutableTensorView& rows, Stream stream) {
  FillParams params{};
  params.seed = seed;
  params.tensor = tensor;
  params.scale = synthetic_scale(tensor, rows.dim);
  params.rows = rows;
  std::int64_t row = 0;
  for (std::size_t first = 0; first < runs.size(); first += kSyntheticRuns) {
    const std::size_t count = std::min(kSyntheticRuns, runs.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      params.token[i] = runs[first + i].begin;
      params.row[i] = row;
      row += runs[first + i].tokens();
    }
    params.row[count] = row;
    with_element(rows.dtype, [&](auto element) { launch_fill<decltype(element)>(params, count, stream); });
  }
}

}  // namespace ringattn::cuda
