// SPDX-License-Identifier: Apache-2.0
// stmatrix wrappers: fragments of 16-bit elements to shared memory. PTX ISA, "stmatrix".
#pragma once

#include <cstdint>

namespace ringattn::sm90 {

// Stores four 8×8 matrices in the layout that cuda::load_matrix() reads: lane i gives the address of row i.
__device__ __forceinline__ void store_matrix(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// Stores two 8×8 matrices: lanes 0 … 15 give the addresses.
__device__ __forceinline__ void store_matrix(std::uint32_t address, const std::uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
               : "memory");
}

// Stores four 8×8 matrices transposed, in the layout that cuda::load_matrix_transposed() reads.
__device__ __forceinline__ void store_matrix_transposed(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace ringattn::sm90
