// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>

#include "base/cuda.hpp"
#include "kernels/attention/cuda/gather_pages.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kGatherThreads = 256;
constexpr std::size_t kPagesOfLaunch = 512;  // page numbers are passed in the launch parameters, so nothing is uploaded

struct GatherParams {
  const char* data;
  char* target;                                         // for the launch's first page
  std::int64_t page_stride, token_stride, head_stride;  // bytes
  std::int64_t rows;                                    // for all pages of the launch
  std::int32_t page_size, heads, row_bytes;             // row_bytes: one row of one head
  std::int32_t pages[kPagesOfLaunch];
};

// One CTA copies one page, `Vector` by `Vector`.
template <class Vector>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  constexpr int kVectorBytes = sizeof(Vector);
  const auto page_index = static_cast<std::int64_t>(blockIdx.x);
  const std::int64_t left = p.rows - page_index * p.page_size;
  const int rows = left < p.page_size ? static_cast<int>(left) : p.page_size;
  const int vectors = p.row_bytes / kVectorBytes;
  const char* const page = p.data + p.pages[page_index] * p.page_stride;
  auto* const target = reinterpret_cast<Vector*>(p.target + page_index * p.page_size * p.heads * p.row_bytes);
  for (int i = static_cast<int>(threadIdx.x); i < rows * p.heads * vectors; i += kGatherThreads) {
    const int head = i / vectors % p.heads;
    const int row = i / vectors / p.heads;
    target[i] = *reinterpret_cast<const Vector*>(page + row * p.token_stride + head * p.head_stride +
                                                 i % vectors * kVectorBytes);
  }
}

}  // namespace

void gather_pages(void* target, const CacheView& cache, std::span<const std::int32_t> pages, std::int64_t rows,
                  Stream stream) {
  const auto element = static_cast<std::int64_t>(size_of(cache.dtype));
  GatherParams p{};
  p.data = static_cast<const char*>(cache.data);
  p.target = static_cast<char*>(target);
  p.page_stride = cache.page_stride * element;
  p.token_stride = cache.token_stride * element;
  p.head_stride = cache.head_stride * element;
  p.page_size = static_cast<std::int32_t>(cache.page_size);
  p.heads = static_cast<std::int32_t>(cache.heads);
  p.row_bytes = static_cast<std::int32_t>(cache.dim * element);
  const std::int64_t page_bytes = cache.page_size * cache.heads * p.row_bytes;
  const auto addresses = reinterpret_cast<std::uintptr_t>(p.data) | reinterpret_cast<std::uintptr_t>(p.target);
  const auto strides = static_cast<std::uintptr_t>(p.page_stride | p.token_stride | p.head_stride | p.row_bytes);
  const bool aligned = (addresses | strides) % sizeof(uint4) == 0;
  for (std::size_t first = 0; first < pages.size(); first += kPagesOfLaunch) {
    const std::span<const std::int32_t> some = pages.subspan(first, std::min(kPagesOfLaunch, pages.size() - first));
    std::ranges::copy(some, p.pages);
    p.rows = std::min(rows, static_cast<std::int64_t>(some.size()) * cache.page_size);
    const auto blocks = static_cast<unsigned>(some.size());
    if (aligned) {
      gather_kernel<uint4><<<blocks, kGatherThreads, 0, cuda_stream(stream)>>>(p);
    } else {
      gather_kernel<std::uint16_t><<<blocks, kGatherThreads, 0, cuda_stream(stream)>>>(p);
    }
    check_cuda(cudaGetLastError(), "gather_pages");
    p.target += static_cast<std::int64_t>(some.size()) * page_bytes;
    rows -= p.rows;
  }
}

}  // namespace ringattn::cuda
