// SPDX-License-Identifier: Apache-2.0
// wgmma for warpgroups with few registers: D[64, 32] ← A[64, 16] · B[16, 32] + D in bf16 with fp32 accumulators, A and
// B K-major in shared memory. Layouts are those of wgmma.cuh.
#pragma once

#include "kernels/common/sm90/wgmma.cuh"

namespace ringattn::sm90 {

#define RINGATTN_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
__device__ __forceinline__ void wgmma_m64n32_ss(float (&d)[4][4], std::uint64_t a, std::uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;\n}"
      : RINGATTN_D(0), RINGATTN_D(1), RINGATTN_D(2), RINGATTN_D(3)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
#undef RINGATTN_D

}  // namespace ringattn::sm90
