// SPDX-License-Identifier: Apache-2.0
// Vector quantization (vq) on any GPU. A thread block has 32 channels of a head, whose codebooks it keeps in shared
// memory, and loops over tokens. A lane has one run of channels of several tokens.
#include "kernels/quant/cuda/nearest_vector.cuh"
#include "kernels/quant/cuda/row_launch.hpp"
#include "kernels/quant/cuda/row_quads.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kVectorThreads = 256;
constexpr int kSlice = 32;         // channels per thread block
constexpr int kPoints = 4;         // tokens per lane at a time
constexpr int kStepsPerBlock = 4;  // steps of a thread block, for which it loads its codebooks once

// Shape of a thread block's work for vectors of kWidth channels.
template <int kWidth>
struct Slice {
  static constexpr int kRuns = kSlice / kWidth;
  // Floats from one run's vectors to the next one's, padded so that lanes of neighbouring runs read different banks.
  static constexpr int kBook = (kCodebookVectors + 1) * kWidth;
  static constexpr int kTokens = kVectorThreads / kRuns;  // tokens processed concurrently
  static constexpr int kStep = kTokens * kPoints;
};

// Loads the elements of a run of channels. Those after the row's last channel are 0.
template <class Element, int kWidth>
__device__ __forceinline__ void load_run(const RowParams& p, const std::byte* row, int channel,
                                         uint2 (&raw)[(kWidth + 3) / 4]) {
  if constexpr (kWidth == 2) {
    const auto* const elements = reinterpret_cast<const std::uint16_t*>(row) + channel;
    raw[0] = {0, 0};
    if (channel >= p.dim) return;
    raw[0].x = p.by_four ? *reinterpret_cast<const std::uint32_t*>(elements)
                         : std::uint32_t{elements[0]} | std::uint32_t{elements[1]} << 16;
  } else {
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
      const bool present = channel + 4 * i < p.dim;
      raw[i] = present ? load_elements(p, row, channel + 4 * i) : uint2{0, 0};
    }
  }
}

template <class Element, int kWidth>
__global__ void __launch_bounds__(kVectorThreads, 2) compress_vectors_kernel(const __grid_constant__ RowParams p) {
  using S = Slice<kWidth>;
  __shared__ __align__(16) float books[S::kRuns * S::kBook];
  const CompressedRun& run = p.run[blockIdx.y];
  const auto slices = static_cast<unsigned>((p.dim + kSlice - 1) / kSlice);
  const unsigned parts = gridDim.x / (slices * static_cast<unsigned>(p.heads));
  const unsigned part = blockIdx.x % parts;
  const unsigned slice = blockIdx.x / parts % slices;
  const auto head = static_cast<int>(blockIdx.x / parts / slices);
  const std::int64_t begin = std::int64_t{part} * S::kStep;
  if (begin >= run.rows) return;

  const auto first = static_cast<int>(slice) * kSlice;
  const int channels = p.dim - first < kSlice ? p.dim - first : kSlice;
  const auto* const from = reinterpret_cast<const std::uint16_t*>(p.tables[0]) +
                           (static_cast<std::int64_t>(head) * p.dim + first) * kCodebookVectors;
  for (int at = static_cast<int>(threadIdx.x); at < channels * kCodebookVectors; at += kVectorThreads) {
    constexpr int kNumbers = kCodebookVectors * kWidth;
    books[at / kNumbers * S::kBook + at % kNumbers] = widen<Element>(from[at]);
  }
  __syncthreads();

  const auto of_slice = static_cast<int>(threadIdx.x) % S::kRuns;
  const int channel = first + of_slice * kWidth;
  if (channel >= p.dim) return;
  const DeviceRows plain = p.plain.from(run.to), codebook_indices = p.streams[0].from(run.row);
  for (std::int64_t step = begin; step < run.rows; step += std::int64_t{parts} * S::kStep) {
    float points[kPoints][kWidth];
    std::int64_t token[kPoints];
#pragma unroll
    for (int i = 0; i < kPoints; ++i) {
      token[i] = step + i * S::kTokens + static_cast<int>(threadIdx.x) / S::kRuns;
      const std::int64_t present = token[i] < run.rows ? token[i] : run.rows - 1;
      uint2 raw[(kWidth + 3) / 4];
      load_run<Element, kWidth>(p, plain.at(present, head), channel, raw);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const std::uint32_t two = c % 4 < 2 ? raw[c / 4].x : raw[c / 4].y;
        points[i][c] = widen<Element>(two >> c % 2 * 16);
      }
      if (p.invalid == nullptr) continue;
#pragma unroll
      for (int n = 0; n < (kWidth + 3) / 4; ++n) {
        check_elements<Element>(p, raw[n], 0, run.to + present, head, channel + 4 * n);
      }
    }
    int nearest[kPoints];
    find_nearest<kWidth, kPoints>(books + of_slice * S::kBook, points, nearest);
#pragma unroll
    for (int i = 0; i < kPoints; ++i) {
      if (token[i] < run.rows)
        codebook_indices.at(token[i], head)[channel / kWidth] = static_cast<std::byte>(nearest[i]);
    }
  }
}

template <class Element, int kWidth>
void launch_vectors(const RowParams& p, cudaStream_t queue) {
  std::int64_t max_rows = 1;
  for (int i = 0; i < p.runs; ++i) max_rows = std::max(max_rows, p.run[i].rows);
  constexpr std::int64_t kTokens = std::int64_t{Slice<kWidth>::kStep} * kStepsPerBlock;
  const std::int64_t parts = (max_rows + kTokens - 1) / kTokens;
  const std::int64_t blocks = parts * p.heads * ((p.dim + kSlice - 1) / kSlice);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.runs));
  compress_vectors_kernel<Element, kWidth><<<grid, kVectorThreads, 0, queue>>>(p);
}

template <class Element>
void launch_vectors(const RowParams& p, cudaStream_t queue) {
  if (p.format.width == 2) launch_vectors<Element, 2>(p, queue);
  if (p.format.width == 4) launch_vectors<Element, 4>(p, queue);
  if (p.format.width == 8) launch_vectors<Element, 8>(p, queue);
}

}  // namespace

void compress_vectors(const RowParams& p, Stream stream) {
  p.bf16 ? launch_vectors<__nv_bfloat16>(p, cuda_stream(stream)) : launch_vectors<__half>(p, cuda_stream(stream));
}

}  // namespace ringattn::cuda
