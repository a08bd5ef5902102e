// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>

#include "base/cuda.hpp"
#include "kernels/cuda/gather_pages.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::size_t kPagesOfLaunch = 512;  // they travel in the launch's parameters, so nothing is uploaded

struct GatherParams {
  const char* data;
  char* target;                                         // of the launch's first page
  std::int64_t page_stride, token_stride, head_stride;  // bytes
  std::int64_t rows;                                    // of all pages of the launch
  std::int32_t page_size, heads, row_bytes;             // of a row of one head
  std::int32_t pages[kPagesOfLaunch];
};

// A CTA copies a page. Unit: what is copied at a time.
template <class Unit>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  constexpr int kUnit = sizeof(Unit);
  const auto nth = static_cast<std::int64_t>(blockIdx.x);
  const std::int64_t left = p.rows - nth * p.page_size;
  const int rows = left < p.page_size ? static_cast<int>(left) : p.page_size;
  const int units = p.row_bytes / kUnit;
  const char* const page = p.data + p.pages[nth] * p.page_stride;
  auto* const target = reinterpret_cast<Unit*>(p.target + nth * p.page_size * p.heads * p.row_bytes);
  for (int i = static_cast<int>(threadIdx.x); i < rows * p.heads * units; i += kThreads) {
    const int head = i / units % p.heads;
    const int row = i / units / p.heads;
    target[i] = *reinterpret_cast<const Unit*>(page + row * p.token_stride + head * p.head_stride + i % units * kUnit);
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
      gather_kernel<uint4><<<blocks, kThreads, 0, cuda_stream(stream)>>>(p);
    } else {
      gather_kernel<std::uint16_t><<<blocks, kThreads, 0, cuda_stream(stream)>>>(p);
    }
    check_cuda(cudaGetLastError(), "gather_pages");
    p.target += static_cast<std::int64_t>(some.size()) * page_bytes;
    rows -= p.rows;
  }
}

}  // namespace ringattn::cuda
