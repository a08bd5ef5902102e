// SPDX-License-Identifier: Apache-2.0
// Bulk tensor copies between global and shared memory: boxes of a tensor [heads, panels, rows, columns] as
// tensor_maps.hpp makes them. What lies outside the tensor is read as zero and not written. PTX ISA,
// "cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include <cstdint>

namespace ringattn::sm90 {

// The barrier's phase ends once the box's bytes, those outside included, have arrived.
__device__ __forceinline__ void tma_load_box(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                             int column, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head)
      : "memory");
}
// The same into the shared memory of all CTAs of `ctas`, bits by rank in the cluster, at the same place in each; and
// their barriers at the place of `barrier`.
__device__ __forceinline__ void tma_multicast_box(std::uint16_t ctas, std::uint32_t target, const CUtensorMap* map,
                                                  std::uint32_t barrier, int column, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head), "h"(ctas)
      : "memory");
}
// A box of one page of a tensor [pages, heads, panels, rows, columns].
__device__ __forceinline__ void tma_load_page_box(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                                  int column, int head, int page, int row) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head), "r"(page)
      : "memory");
}
// The same of what is read once: in the L2 cache it makes way for what comes later, and what else is there stays, as
// code and what CTAs tell each other. The policy is the one that createpolicy.fractional.L2::evict_first makes.
inline constexpr std::uint64_t kReadOnce = 0x12F0000000000000ULL;
__device__ __forceinline__ void tma_load_page_box_once(std::uint32_t target, const CUtensorMap* map,
                                                       std::uint32_t barrier, int column, int head, int page, int row) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5, %6, %7}], [%2], %8;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head), "r"(page), "l"(kReadOnce)
      : "memory");
}
// The same for all CTAs of `ctas`, as tma_multicast_box().
__device__ __forceinline__ void tma_multicast_page_box_once(std::uint16_t ctas, std::uint32_t target,
                                                            const CUtensorMap* map, std::uint32_t barrier, int column,
                                                            int head, int page, int row) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(head), "r"(page), "h"(ctas), "l"(kReadOnce)
      : "memory");
}
// Copies bytes that follow each other, at addresses and of a number that are multiples of 16.
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
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until they are done.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// This thread's ordinary writes to shared memory come before what the copy engine and the tensor cores do there next.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace ringattn::sm90
