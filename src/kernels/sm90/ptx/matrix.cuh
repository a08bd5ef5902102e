// SPDX-License-Identifier: Apache-2.0
// Fragments of 16-bit elements into shared memory. PTX ISA, "stmatrix".
#pragma once

#include <cstdint>

namespace ringattn::sm90 {

// Four 8×8 matrices, as cuda::load_matrix() reads them: lane i gives the address of row i.
__device__ __forceinline__ void store_matrix(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// Two of them: addresses of lanes 0 … 15.
__device__ __forceinline__ void store_matrix(std::uint32_t address, const std::uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
               : "memory");
}

// Four of them, each matrix stored as its transposed: as cuda::load_matrix_transposed() reads them.
__device__ __forceinline__ void store_matrix_transposed(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace ringattn::sm90
