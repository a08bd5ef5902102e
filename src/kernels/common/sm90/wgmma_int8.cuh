// SPDX-License-Identifier: Apache-2.0
// wgmma of int8: D[64, n] ← A[64, 32] · B[32, n] + D, with int32 accumulators that wrap around. A and B are K-major in
// shared memory, with the layouts of wgmma.cuh.
#pragma once

#include <cstdint>

#include "kernels/common/sm90/wgmma.cuh"

namespace ringattn::sm90 {

template <int kColumns>
struct Int8Wgmma;

#define RINGATTN_D(j) "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])
#define RINGATTN_D_2(j) RINGATTN_D(j), RINGATTN_D(j + 1)
#define RINGATTN_D_4(j) RINGATTN_D_2(j), RINGATTN_D_2(j + 2)
#define RINGATTN_D_8(j) RINGATTN_D_4(j), RINGATTN_D_4(j + 4)
#define RINGATTN_D_16(j) RINGATTN_D_8(j), RINGATTN_D_8(j + 8)
#define RINGATTN_D_32(j) RINGATTN_D_16(j), RINGATTN_D_16(j + 16)
#define RINGATTN_N_1 "%0,%1,%2,%3"
#define RINGATTN_N_2 RINGATTN_N_1 ",%4,%5,%6,%7"
#define RINGATTN_N_4 RINGATTN_N_2 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define RINGATTN_N_8 RINGATTN_N_4 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define RINGATTN_N_16                                                                                             \
  RINGATTN_N_8                                                                                                    \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
  "%59,%60,%61,%62,%63"
#define RINGATTN_N_32                                                                                             \
  RINGATTN_N_16                                                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90," \
  "%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,"    \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// blocks: of 8 columns; a, b, c: the numbers of the operands that follow D's registers.
#define RINGATTN_INT8_WGMMA(columns, blocks, a, b, c)                                                      \
  template <>                                                                                              \
  struct Int8Wgmma<columns> {                                                                              \
    __device__ static __forceinline__ void multiply(int (&d)[blocks][4], std::uint64_t x, std::uint64_t y, \
                                                    bool accumulate) {                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                 \
                   ", 0;\n"                                                                                \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k32.s32.s8.s8 {" RINGATTN_N_##blocks      \
                   "}, %" #a ", %" #b ", p;\n}"                                                            \
                   : RINGATTN_D_##blocks(0)                                                                \
                   : "l"(x), "l"(y), "r"(static_cast<int>(accumulate)));                                   \
    }                                                                                                      \
  };
#define RINGATTN_D_1(j) RINGATTN_D(j)
RINGATTN_INT8_WGMMA(8, 1, 4, 5, 6)
RINGATTN_INT8_WGMMA(16, 2, 8, 9, 10)
RINGATTN_INT8_WGMMA(32, 4, 16, 17, 18)
RINGATTN_INT8_WGMMA(64, 8, 32, 33, 34)
RINGATTN_INT8_WGMMA(128, 16, 64, 65, 66)
RINGATTN_INT8_WGMMA(256, 32, 128, 129, 130)
#undef RINGATTN_INT8_WGMMA
#undef RINGATTN_N_32
#undef RINGATTN_N_16
#undef RINGATTN_N_8
#undef RINGATTN_N_4
#undef RINGATTN_N_2
#undef RINGATTN_N_1
#undef RINGATTN_D_32
#undef RINGATTN_D_16
#undef RINGATTN_D_8
#undef RINGATTN_D_4
#undef RINGATTN_D_2
#undef RINGATTN_D_1
#undef RINGATTN_D

// As pin() of wgmma.cuh.
template <int kBlocks>
__device__ __forceinline__ void pin(int (&d)[kBlocks][4]) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(d[j][i])::"memory");
  }
}

}  // namespace ringattn::sm90
