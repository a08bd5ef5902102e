// SPDX-License-Identifier: Apache-2.0
// wgmma for GEMM: D[64, 128] ← A[64, 16] · B[16, 128] + D, with fp32 accumulators, A and B in shared memory. A is
// K-major. B is K-major, or MN-major ([k][n]) where kTransposed. Layouts are those of wgmma.cuh.
#pragma once

#include "kernels/common/sm90/wgmma.cuh"

namespace ringattn::sm90 {

template <class Element, bool kTransposed>
struct GemmWgmma;

#define RINGATTN_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define RINGATTN_GEMM_WGMMA(Element_, type, transposed)                                                              \
  template <>                                                                                                        \
  struct GemmWgmma<Element_, transposed> {                                                                           \
    __device__ static __forceinline__ void multiply(float (&d)[16][4], std::uint64_t a, std::uint64_t b,             \
                                                    bool accumulate) {                                               \
      asm volatile(                                                                                                  \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                               \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                               \
          " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
          "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
          "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, p, 1, 1, 0, %67;\n}"                                  \
          : RINGATTN_D(0), RINGATTN_D(1), RINGATTN_D(2), RINGATTN_D(3), RINGATTN_D(4), RINGATTN_D(5), RINGATTN_D(6), \
            RINGATTN_D(7), RINGATTN_D(8), RINGATTN_D(9), RINGATTN_D(10), RINGATTN_D(11), RINGATTN_D(12),             \
            RINGATTN_D(13), RINGATTN_D(14), RINGATTN_D(15)                                                           \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(transposed ? 1 : 0));                             \
    }                                                                                                                \
  };
RINGATTN_GEMM_WGMMA(__nv_bfloat16, "bf16", false)
RINGATTN_GEMM_WGMMA(__nv_bfloat16, "bf16", true)
RINGATTN_GEMM_WGMMA(__half, "f16", false)
RINGATTN_GEMM_WGMMA(__half, "f16", true)
#undef RINGATTN_GEMM_WGMMA
#undef RINGATTN_D

}  // namespace ringattn::sm90
