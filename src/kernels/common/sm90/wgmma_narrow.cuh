// SPDX-License-Identifier: Apache-2.0
// wgmma with A in registers for any number of columns, B K-major in shared memory: Wgmma::rk of wgmma.cuh, and the same
// for 8 and 16 columns.
#pragma once

#include "kernels/common/sm90/wgmma.cuh"

namespace ringattn::sm90 {

template <class Element, int kColumns>
struct RegisterWgmma {
  __device__ static __forceinline__ void multiply(float (&d)[kColumns / 8][4], const std::uint32_t (&a)[4],
                                                  std::uint64_t b, bool accumulate) {
    Wgmma<Element, kColumns>::rk(d, a, b, accumulate);
  }
};

#define RINGATTN_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define RINGATTN_NARROW_WGMMA(Element_, type)                                                                       \
  template <>                                                                                                       \
  struct RegisterWgmma<Element_, 8> {                                                                               \
    __device__ static __forceinline__ void multiply(float (&d)[1][4], const std::uint32_t (&a)[4], std::uint64_t b, \
                                                    bool accumulate) {                                              \
      asm volatile(                                                                                                 \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"                                                               \
          "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type                                                \
          " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;\n}"                                                       \
          : RINGATTN_D(0)                                                                                           \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));                 \
    }                                                                                                               \
  };                                                                                                                \
  template <>                                                                                                       \
  struct RegisterWgmma<Element_, 16> {                                                                              \
    __device__ static __forceinline__ void multiply(float (&d)[2][4], const std::uint32_t (&a)[4], std::uint64_t b, \
                                                    bool accumulate) {                                              \
      asm volatile(                                                                                                 \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"                                                              \
          "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                                               \
          " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"                                        \
          : RINGATTN_D(0), RINGATTN_D(1)                                                                            \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));                 \
    }                                                                                                               \
  };
RINGATTN_NARROW_WGMMA(__nv_bfloat16, "bf16")
RINGATTN_NARROW_WGMMA(__half, "f16")
#undef RINGATTN_NARROW_WGMMA
#undef RINGATTN_D

}  // namespace ringattn::sm90
