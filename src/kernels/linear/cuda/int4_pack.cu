// SPDX-License-Identifier: Apache-2.0
// Packs int4 weights into the layout of quantized_params.hpp, one CTA for each block.
#include "base/cuda.hpp"
#include "kernels/linear/cuda/quantized_params.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kPackThreads = 128;
constexpr std::uint8_t kSymmetricZero = 8;

__global__ void __launch_bounds__(kPackThreads) int4_pack_kernel(const __grid_constant__ Int4Pack p) {
  const int tile = static_cast<int>(blockIdx.x) / p.groups;
  const int group = static_cast<int>(blockIdx.x) % p.groups;
  const int thread = static_cast<int>(threadIdx.x);
  char* const block = p.packed + std::int64_t{blockIdx.x} * kInt4BlockBytes;
  // Row of the fragment's even registers; odd ones are 8 rows below.
  const int row = tile * kInt4TileRows + thread / 32 * 16 + thread % 32 / 4;
  const auto byte_at = [&](int r, int step, int half_step) -> std::uint32_t {
    if (r >= p.columns) return 0;
    return p.data[r * p.row_stride + group * (kInt4Group / 2) + step * 8 + half_step * 4 + thread % 4];
  };
  for (int half = 0; half < 2; ++half) {
    std::uint32_t words[4];
    for (int step = 0; step < 4; ++step) {
      words[step] = 0;
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t pair = byte_at(row + i % 2 * 8, half * 4 + step, i / 2);
        words[step] |= (pair & 15U) << (4 * i) | (pair >> 4) << (16 + 4 * i);
      }
    }
    reinterpret_cast<uint4*>(block)[half * kPackThreads + thread] = {words[0], words[1], words[2], words[3]};
  }
  static_assert(kInt4BlockBytes - kInt4UsedBytes == kInt4TileRows);
  if (thread < kInt4TileRows) {
    const int r = tile * kInt4TileRows + thread;
    const std::int64_t at = r * p.group_stride + group;
    const bool present = r < p.columns;
    reinterpret_cast<float*>(block + kInt4ScalesAt)[thread] = present ? p.scales[at] : 0.0F;
    reinterpret_cast<std::uint8_t*>(block + kInt4ZerosAt)[thread] =
        present && p.zeros != nullptr ? p.zeros[at] : kSymmetricZero;
    block[kInt4UsedBytes + thread] = 0;
  }
}

}  // namespace

void launch_int4_pack(const Int4Pack& params, Stream stream) {
  const std::int64_t blocks = int4_row_tiles(params.columns) * params.groups;
  if (blocks == 0) return;
  int4_pack_kernel<<<static_cast<unsigned>(blocks), kPackThreads, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "int4_pack");
}

}  // namespace ringattn::cuda
