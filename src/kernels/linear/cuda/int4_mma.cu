// SPDX-License-Identifier: Apache-2.0
// int4 linear layers with mma.sync, for every GPU and any alignment of x. A CTA has 64 rows of W, 16 per warp, and 32
// rows of x. The sums of splits or leaves stay in registers. wgmma gives the same bits.
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/linear/cuda/fold.cuh"
#include "kernels/linear/cuda/int4_operand.cuh"
#include "kernels/linear/cuda/quantized_finish.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kInt4MmaThreads = 128;
constexpr int kInt4MmaRows = 32;                     // of x
constexpr int kInt4MmaBlocks = kInt4MmaRows / 8;     // of an MMA's columns
constexpr int kInt4XRowBytes = 2 * kInt4Group + 16;  // padded: ldmatrix reads 8 rows in all banks
constexpr int kInt4Steps = static_cast<int>(kInt4Group) / 16;
constexpr int kInt4Chunks = static_cast<int>(kInt4Group) / 8;  // of 16 bytes, in a row of x

// Starts the copy of a group of x.
__device__ __forceinline__ void copy_int4_x(const Int4Gemm& p, int first_row, int group, std::uint32_t to) {
#pragma unroll
  for (int i = 0; i < kInt4MmaRows * kInt4Chunks / kInt4MmaThreads; ++i) {
    const int at = i * kInt4MmaThreads + static_cast<int>(threadIdx.x);
    const int row = at / kInt4Chunks;
    const int chunk = at % kInt4Chunks;
    const bool present = first_row + row < p.out.rows;
    const char* const from =
        p.x.data + (present ? first_row + row : 0) * p.x.stride + (group * kInt4Chunks + chunk) * 16;
    copy_chunk(to + static_cast<std::uint32_t>(row * kInt4XRowBytes + chunk * 16), from, present, p.x.aligned);
  }
  copy_commit();
}

// sums = the products of a group, from zero. codes: this thread's words of the group.
template <class Element>
__device__ __forceinline__ void multiply_int4_group(float (&sums)[kInt4MmaBlocks][4], const uint4 (&codes)[2],
                                                    const std::uint32_t (&zeros)[2], std::uint32_t x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t mine = x + static_cast<std::uint32_t>(lane % 8 * kInt4XRowBytes + lane / 8 * 16);
#pragma unroll
  for (int pair = 0; pair < kInt4Steps / 2; ++pair) {
    const uint4& words = codes[pair / 2];
    std::uint32_t a[2][4];
    int4_operand<Element>(a[0], pair % 2 == 0 ? words.x : words.z, zeros);
    int4_operand<Element>(a[1], pair % 2 == 0 ? words.y : words.w, zeros);
#pragma unroll
    for (int j = 0; j < kInt4MmaBlocks; ++j) {
      std::uint32_t b[4];
      load_matrix(b, mine + static_cast<std::uint32_t>(j * 8 * kInt4XRowBytes + pair * 64));
      multiply<Element>(sums[j], a[0], b[0], b[1], pair == 0);
      multiply<Element>(sums[j], a[1], b[2], b[3], false);
    }
  }
}

template <class Element, bool kLeaves>
__global__ void __launch_bounds__(kInt4MmaThreads) int4_mma_kernel(const __grid_constant__ Int4Gemm p) {
  __shared__ __align__(16) unsigned char int4_x[2][kInt4MmaRows * kInt4XRowBytes];
  __shared__ __align__(16) float int4_staged[kInt4MmaRows * kStagedRow];
  const auto tiles = static_cast<unsigned>(int4_row_tiles(p.out.columns));
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int first_row = static_cast<int>(blockIdx.x / tiles) * kInt4MmaRows;
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread / 32 * 16 + thread % 32 / 4;  // of the fragment's even registers; odd ones: + 8
  const int groups = p.chains.features / static_cast<int>(kInt4Group);
  for (int m = 0; m < p.out.matrices; ++m) {
    LinearFold<kInt4MmaBlocks, kLeaves> fold;
    fold.start();
    if (groups > 0) copy_int4_x(p, first_row, 0, shared_address(int4_x[0]));
    int group = 0;
    for (int chain = 0; chain < p.chains.count; ++chain) {
      float acc[kInt4MmaBlocks][4] = {};
      const int end = p.chains.end(chain) / static_cast<int>(kInt4Group);
      const bool is_empty = group == end;
      for (; group < end; ++group) {
        const char* const block = int4_block(p, m, tile, group);
        const auto* const words = reinterpret_cast<const uint4*>(block);
        const uint4 codes[2] = {words[thread], words[kInt4MmaThreads + thread]};
        const auto* const scales = reinterpret_cast<const float*>(block + kInt4ScalesAt);
        const auto* const zeros = reinterpret_cast<const unsigned char*>(block + kInt4ZerosAt);
        const std::uint32_t zero_pairs[2] = {int4_zero_pair<Element>(zeros[column]),
                                             int4_zero_pair<Element>(zeros[column + 8])};
        const float scale[2] = {scales[column], scales[column + 8]};
        copy_wait<0>();
        __syncthreads();  // this group has landed, and no thread reads the other buffer any more
        if (group + 1 < groups) copy_int4_x(p, first_row, group + 1, shared_address(int4_x[(group + 1) % 2]));
        float sums[kInt4MmaBlocks][4];
        multiply_int4_group<Element>(sums, codes, zero_pairs, shared_address(int4_x[group % 2]));
#pragma unroll
        for (int j = 0; j < kInt4MmaBlocks; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[j][i] = __fmaf_rn(scale[i / 2], sums[j][i], acc[j][i]);
        }
      }
      fold.add(chain, is_empty, acc);
    }
    const auto& total = fold.total(p.chains.count);
#pragma unroll
    for (int j = 0; j < kInt4MmaBlocks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int4_staged[(8 * j + thread % 4 * 2 + i % 2) * kStagedRow + m * kInt4TileRows + column + i / 2 * 8] =
            total[j][i];
      }
    }
    __syncthreads();  // x of the next matrix overwrites this one's
  }
  finish_float_tile<kInt4MmaThreads>(
      p.out, first_row, min(kInt4MmaRows, p.out.rows - first_row), tile * kInt4TileRows, kInt4TileRows, thread,
      [&](int row, int at) { return *reinterpret_cast<const float4*>(int4_staged + row * kStagedRow + at); });
}

template <class Element>
void launch_int4_mma_of(const Int4Gemm& p, Stream stream) {
  const std::int64_t tiles =
      (std::int64_t{p.out.rows} + kInt4MmaRows - 1) / kInt4MmaRows * int4_row_tiles(p.out.columns);
  const auto kernel = p.chains.leaves ? int4_mma_kernel<Element, true> : int4_mma_kernel<Element, false>;
  kernel<<<static_cast<unsigned>(tiles), kInt4MmaThreads, 0, cuda_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), "int4_mma");
}

}  // namespace

void prepare_int4_mma() {
  load_kernel(int4_mma_kernel<__nv_bfloat16, false>);
  load_kernel(int4_mma_kernel<__nv_bfloat16, true>);
  load_kernel(int4_mma_kernel<__half, false>);
  load_kernel(int4_mma_kernel<__half, true>);
}

void launch_int4_mma(const Int4Gemm& params, Stream stream) {
  params.out.dtype == Dtype::kBf16 ? launch_int4_mma_of<__nv_bfloat16>(params, stream)
                                   : launch_int4_mma_of<__half>(params, stream);
}

}  // namespace ringattn::cuda
