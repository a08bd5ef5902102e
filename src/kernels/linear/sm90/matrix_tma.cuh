// SPDX-License-Identifier: Apache-2.0
// TMA wrappers for boxes of a matrix [rows, columns], with maps from map_matrix() (tensor_maps.hpp). Elements outside
// the matrix are read as zero. They are not written, except those that share 16 bytes with a row's last element. PTX
// ISA, "cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/common/sm90/tma.cuh"

namespace ringattn::sm90 {

// Completes the box's bytes at `barrier`, including those of elements outside the matrix.
__device__ __forceinline__ void tma_load_rows(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                              int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          target),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
// The same with the L2 policy evict_first, for data that is read once.
__device__ __forceinline__ void tma_load_rows_once(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                                   int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(kReadOnce)
      : "memory");
}
// Multicasts the box to both CTAs of a pair, at the same shared-memory offset in each. Completes the bytes at the
// barrier at the same offset in each.
__device__ __forceinline__ void tma_load_rows_to_pair(std::uint32_t target, const CUtensorMap* map,
                                                      std::uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(static_cast<std::uint16_t>(3))
      : "memory");
}
// Prefetches the box into L2. L2 is where all writes are seen, so this may come before pdl_wait().
__device__ __forceinline__ void tma_prefetch_rows(const CUtensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
               : "memory");
}
__device__ __forceinline__ void tma_store_rows(const CUtensorMap* map, std::uint32_t source, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(source),
               "r"(column), "r"(row)
               : "memory");
}

}  // namespace ringattn::sm90
