// SPDX-License-Identifier: Apache-2.0
// TMA wrappers: copies between global and shared memory of boxes of a tensor [heads, panels, rows, columns], with maps
// from tensor_maps.hpp. Elements outside the tensor are read as zero and not written. PTX ISA, "cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include <cstdint>

namespace ringattn::sm90 {

// Completes the box's bytes at `barrier`, including those of elements outside the tensor.
__device__ __forceinline__ void tma_load_box(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                             int column, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head)
      : "memory");
}
// Multicasts the box to every CTA in the bit mask `ctas` (by cluster rank), at the same shared-memory offset in each.
// Completes the bytes at the barrier at the same offset in each CTA.
__device__ __forceinline__ void tma_multicast_box(std::uint16_t ctas, std::uint32_t target, const CUtensorMap* map,
                                                  std::uint32_t barrier, int column, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head), "h"(ctas)
      : "memory");
}
// Loads a box that lies in one page of a tensor [pages, heads, panels, rows, columns].
__device__ __forceinline__ void tma_load_page_box(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                                  int column, int head, int page, int row) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head), "r"(page)
      : "memory");
}
// The same with the L2 policy evict_first, for data that is read once. It leaves L2 to code and to data that CTAs
// exchange. The value is what createpolicy.fractional.L2::evict_first returns.
inline constexpr std::uint64_t kReadOnce = 0x12F0000000000000ULL;
__device__ __forceinline__ void tma_load_page_box_once(std::uint32_t target, const CUtensorMap* map,
                                                       std::uint32_t barrier, int column, int head, int page, int row) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5, %6, %7}], [%2], %8;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head), "r"(page), "l"(kReadOnce)
      : "memory");
}
// The same, multicast as in tma_multicast_box().
__device__ __forceinline__ void tma_multicast_page_box_once(std::uint16_t ctas, std::uint32_t target,
                                                            const CUtensorMap* map, std::uint32_t barrier, int column,
                                                            int head, int page, int row) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head), "r"(page), "h"(ctas), "l"(kReadOnce)
      : "memory");
}
// Copies contiguous bytes. Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void tma_load_bytes(std::uint32_t target, const void* source, int bytes,
                                               std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void tma_store_box(const CUtensorMap* map, std::uint32_t source, int column, int head,
                                              int row) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(source), "r"(column), "r"(row), "r"(0), "r"(head)
               : "memory");
}
// Copies contiguous bytes from shared to global memory. Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void tma_store_bytes(void* target, std::uint32_t source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's TMA stores have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until this thread's TMA stores are complete.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's ordinary writes to shared memory before later accesses by the async proxy: TMA and wgmma.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace ringattn::sm90
