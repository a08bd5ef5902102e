// SPDX-License-Identifier: Apache-2.0
// Pages of a pool in GPU memory whose distances exceed 32-bit offsets. Each page is at the end of its own allocation,
// so a read beyond a page's end faults and the kernel fails. For tests that link ringattn_cuda.
#pragma once

#include <cuda.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "base/cuda.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/cache_view.hpp"

namespace ringattn::testing {

class FarPages {
 public:
  // Copies the pages of a contiguous pool.
  FarPages(Backend& backend, const CacheView& pool) : view_(pool) {
    const std::int64_t bytes = pool.page_stride * static_cast<std::int64_t>(size_of(pool.dtype));
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    CUmemAllocationProp kind{};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    call<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity", &size_, &kind,
                                                  CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    range_ = static_cast<std::size_t>(pool.pages) * kApart;
    call<decltype(cuMemAddressReserve)>("cuMemAddressReserve", &base_, range_, std::size_t{0}, CUdeviceptr{0}, 0ULL);
    const CUmemAccessDesc access{kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (std::int64_t page = 0; page < pool.pages; ++page) {
      CUmemGenericAllocationHandle memory{};
      call<decltype(cuMemCreate)>("cuMemCreate", &memory, size_, &kind, 0ULL);
      call<decltype(cuMemMap)>("cuMemMap", memory_of(page), size_, std::size_t{0}, memory, 0ULL);
      ++mapped_;
      call<decltype(cuMemRelease)>("cuMemRelease", memory);  // it lives as long as it is mapped
      call<decltype(cuMemSetAccess)>("cuMemSetAccess", memory_of(page), size_, &access, std::size_t{1});
    }
    view_.data = reinterpret_cast<void*>(base_ + size_ - static_cast<std::size_t>(bytes));
    view_.page_stride = kApart / static_cast<std::int64_t>(size_of(pool.dtype));
    for (std::int64_t page = 0; page < pool.pages; ++page) {
      backend.copy_rows(const_cast<std::byte*>(view_.at(page, 0, 0)), bytes, pool.at(page, 0, 0), bytes, bytes, 1,
                        backend.stream());
    }
    backend.synchronize(backend.stream(), Deadline::after(60.0), {});
  }
  // Destroy it only after the kernels that read the pages have finished.
  ~FarPages() {
    for (std::int64_t page = 0; page < mapped_; ++page) {
      function<decltype(cuMemUnmap)>("cuMemUnmap")(memory_of(page), size_);
    }
    function<decltype(cuMemAddressFree)>("cuMemAddressFree")(base_, range_);
  }
  FarPages(const FarPages&) = delete;
  FarPages& operator=(const FarPages&) = delete;

  const CacheView& view() const { return view_; }

 private:
  static constexpr std::int64_t kApart = std::int64_t{1} << 28;  // bytes

  // Functions of the driver, looked up at run time, because programs must start without a driver.
  template <class Function>
  static Function* function(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
    return reinterpret_cast<Function*>(found);
  }
  template <class Function, class... Arguments>
  static void call(const char* name, Arguments... arguments) {
    const CUresult result = function<Function>(name)(arguments...);
    if (result != CUDA_SUCCESS) throw std::runtime_error(fmt::format("{}: error {}", name, static_cast<int>(result)));
  }
  CUdeviceptr memory_of(std::int64_t page) const { return base_ + static_cast<std::size_t>(page * kApart); }

  CacheView view_;
  std::size_t size_ = 0;  // of a page's memory
  std::size_t range_ = 0;
  CUdeviceptr base_ = 0;
  std::int64_t mapped_ = 0;
};

}  // namespace ringattn::testing
