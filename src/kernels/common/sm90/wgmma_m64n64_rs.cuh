// SPDX-License-Identifier: Apache-2.0
// wgmma with A in registers: D[64, 64] ← A[64, 16] · B[16, 64] + D in bf16 with fp32 accumulators, B K-major in shared
// memory. Layouts are those of wgmma.cuh.
#pragma once

#include "kernels/common/sm90/wgmma.cuh"

namespace ringattn::sm90 {

#define RINGATTN_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
__device__ __forceinline__ void wgmma_m64n64_rs(float (&d)[8][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                                bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
      "%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
      : RINGATTN_D(0), RINGATTN_D(1), RINGATTN_D(2), RINGATTN_D(3), RINGATTN_D(4), RINGATTN_D(5), RINGATTN_D(6),
        RINGATTN_D(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
#undef RINGATTN_D

}  // namespace ringattn::sm90
