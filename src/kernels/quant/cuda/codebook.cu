// SPDX-License-Identifier: Apache-2.0
// Codebooks by k-means on any GPU, bitwise equal to the host's. A thread block has one run of channels of one head and
// updates its 256 vectors in each iteration. A thread finds the nearest vectors of some points, and keeps the sums of
// one vector, to which the points are added in their order.
#include <algorithm>

#include "base/cuda.hpp"
#include "base/philox.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/quant/codebook.hpp"
#include "kernels/quant/cuda/nearest_vector.cuh"
#include "kernels/quant/cuda/row_quads.cuh"
#include "kernels/quant/cuda/rows.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kCodebookThreads = kCodebookVectors;  // one vector's sums per thread
constexpr int kPoints = 4;                          // points per thread at a time
constexpr unsigned kAllLanes = 0xffffffffU;

struct CodebookParams {
  DeviceRows rows;
  std::int64_t tokens;
  int points;  // per codebook
  int dim;
  std::uint64_t seed;
  std::uint16_t* codebook;
};

// Loads point i of a run of channels.
template <class Element, int kWidth>
struct PointsOfRun {
  const CodebookParams& p;
  int head, channel;

  __device__ __forceinline__ void load(int i, float (&point)[kWidth]) const {
    const auto* const from =
        reinterpret_cast<const std::uint16_t*>(p.rows.at(codebook_token(i, p.points, p.tokens), head)) + channel;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) point[c] = widen<Element>(from[c]);
  }
};

// Initial vectors: the first points in a random order. `order` has space for all points.
template <class Points, int kWidth>
__device__ void start_vectors(const Points& points, std::uint32_t stream, std::uint16_t* order, float* vectors) {
  const CodebookParams& p = points.p;
  for (int i = static_cast<int>(threadIdx.x); i < p.points; i += kCodebookThreads)
    order[i] = static_cast<std::uint16_t>(i);
  __syncthreads();
  if (threadIdx.x == 0) {
    const int drawn = p.points < kCodebookVectors ? p.points : kCodebookVectors;
    for (int i = 0; i < drawn; ++i) {
      const int other = codebook_draw(i, p.points, stream, p.seed);
      const std::uint16_t kept = order[i];
      order[i] = order[other];
      order[other] = kept;
    }
  }
  __syncthreads();
  float start[kWidth] = {};
  if (p.points > 0) points.load(order[static_cast<int>(threadIdx.x) % p.points], start);
#pragma unroll
  for (int c = 0; c < kWidth; ++c) vectors[static_cast<int>(threadIdx.x) * kWidth + c] = start[c];
  __syncthreads();
}

// Finds the nearest vector of every point.
template <class Points, int kWidth>
__device__ __forceinline__ void find_indices(const Points& points, const float* vectors,
                                             std::uint8_t* codebook_indices) {
  const int count = points.p.points;
  for (int begin = static_cast<int>(threadIdx.x); begin < count; begin += kCodebookThreads * kPoints) {
    float some[kPoints][kWidth];
#pragma unroll
    for (int i = 0; i < kPoints; ++i) {
      const int at = begin + i * kCodebookThreads;
      points.load(at < count ? at : begin, some[i]);
    }
    int nearest[kPoints];
    find_nearest<kWidth, kPoints>(vectors, some, nearest);
#pragma unroll
    for (int i = 0; i < kPoints; ++i) {
      if (begin + i * kCodebookThreads < count)
        codebook_indices[begin + i * kCodebookThreads] = static_cast<std::uint8_t>(nearest[i]);
    }
  }
}

// The thread's vector becomes the mean of its points. A warp reads 32 points at a time. Those whose nearest vector
// belongs to the warp are added in ascending order.
template <class Points, int kWidth>
__device__ __forceinline__ void move_vector(const Points& points, const std::uint8_t* codebook_indices, float* vector) {
  const auto lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int count = points.p.points;
  double sums[kWidth] = {};
  int added = 0;
  for (int begin = 0; begin < count; begin += 32) {
    const int code = begin + lane < count ? codebook_indices[begin + lane] : -1;
    const bool of_warp = code >> 5 == warp;
    float point[kWidth] = {};
    if (of_warp) points.load(begin + lane, point);
    for (unsigned left = __ballot_sync(kAllLanes, of_warp); left != 0; left &= left - 1) {
      const int from = __ffs(static_cast<int>(left)) - 1;
      const bool own = (__shfl_sync(kAllLanes, code, from) & 31) == lane;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const float value = __shfl_sync(kAllLanes, point[c], from);
        if (own) sums[c] += static_cast<double>(value);
      }
      if (own) ++added;
    }
  }
  if (added == 0) return;
#pragma unroll
  for (int c = 0; c < kWidth; ++c) vector[c] = static_cast<float>(sums[c] / static_cast<double>(added));
}

template <class Element, int kWidth>
__global__ void __launch_bounds__(kCodebookThreads, 2) codebook_kernel(const __grid_constant__ CodebookParams p) {
  __shared__ __align__(16) float vectors[kCodebookVectors * kWidth];
  __shared__ std::uint16_t order[kCodebookSample];  // later the codebook indices
  const auto run = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const auto runs = static_cast<int>(gridDim.x);
  using Points = PointsOfRun<Element, kWidth>;
  const Points points{p, head, run * kWidth};
  start_vectors<Points, kWidth>(points, static_cast<std::uint32_t>(head * runs + run), order, vectors);
  auto* const codebook_indices = reinterpret_cast<std::uint8_t*>(order);
  const int own = static_cast<int>(threadIdx.x) * kWidth;
  for (int iteration = 0; iteration < kKMeansIterations; ++iteration) {
    find_indices<Points, kWidth>(points, vectors, codebook_indices);
    __syncthreads();
    move_vector<Points, kWidth>(points, codebook_indices, vectors + own);
    __syncthreads();
  }
  std::uint16_t* const to =
      p.codebook + (static_cast<std::int64_t>(head) * runs + run) * kCodebookVectors * kWidth + own;
#pragma unroll
  for (int c = 0; c < kWidth; ++c) to[c] = static_cast<std::uint16_t>(MmaTraits<Element>::pack(vectors[own + c], 0.0F));
}

template <class Element, int kWidth>
void launch_codebook(const CodebookParams& p, std::int64_t heads, cudaStream_t queue) {
  const dim3 grid(static_cast<unsigned>(p.dim / kWidth), static_cast<unsigned>(heads));
  codebook_kernel<Element, kWidth><<<grid, kCodebookThreads, 0, queue>>>(p);
}

template <class Element>
void launch_codebook(const CodebookTask& task, const CodebookParams& p, cudaStream_t queue) {
  if (task.width == 2) launch_codebook<Element, 2>(p, task.rows.heads, queue);
  if (task.width == 4) launch_codebook<Element, 4>(p, task.rows.heads, queue);
  if (task.width == 8) launch_codebook<Element, 8>(p, task.rows.heads, queue);
}

}  // namespace

void find_codebook(const CodebookTask& task, Stream stream) {
  check_task(task);
  const TensorView& rows = task.rows;
  const auto element = static_cast<std::int64_t>(size_of(rows.dtype));
  CodebookParams p{};
  p.rows = {const_cast<std::byte*>(static_cast<const std::byte*>(rows.data)), rows.token_stride * element,
            rows.head_stride * element};
  p.tokens = rows.tokens;
  p.points = static_cast<int>(codebook_points(rows.tokens));
  p.dim = static_cast<int>(rows.dim);
  p.seed = task.seed;
  p.codebook = reinterpret_cast<std::uint16_t*>(task.codebook);
  const cudaStream_t queue = cuda_stream(stream);
  rows.dtype == Dtype::kBf16 ? launch_codebook<__nv_bfloat16>(task, p, queue) : launch_codebook<__half>(task, p, queue);
  check_cuda(cudaGetLastError(), "find_codebook");
}

}  // namespace ringattn::cuda
