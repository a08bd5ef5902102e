// SPDX-License-Identifier: Apache-2.0
// wgmma wrappers: D[64, n] ← A[64, 16] · B[16, n] + D, with fp32 accumulators. d[j] is a thread's share of columns 8j …
// 8j + 7, in mma.sync's order: columns 2t and 2t + 1 of row r (elements 0, 1) and of row r + 8 (2, 3). PTX ISA,
// "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ringattn::sm90 {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the accumulators over the fences and waits around a wgmma.
template <int kBlocks>
__device__ __forceinline__ void pin(float (&d)[kBlocks][4]) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[j][i])::"memory");
  }
}

// Shared-memory matrix descriptor: panels of 64 columns with the 128-byte swizzle, 8 rows per 1,024 bytes. The low word
// holds the address of the first element and, for an MN-major operand (V), the stride in bytes from panel to panel.
inline constexpr std::uint32_t kDescriptorHigh = 1U << 30 | 1024U >> 4;
__device__ __forceinline__ std::uint32_t descriptor_low(std::uint32_t address, int panel_bytes = 16) {
  return (address & 0x3FFFFU) >> 4 | static_cast<std::uint32_t>(panel_bytes >> 4) << 16;
}
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t low) {
  std::uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(kDescriptorHigh));
  return d;
}

// ss: A and B in shared memory, both K-major (Q and K).
// sv: A in shared memory, K-major; B in shared memory, MN-major (V, [k][n]).
// rs: A in registers, B MN-major (V).
// rk: A in registers, B K-major (K).
template <class Element, int kColumns>
struct Wgmma;

#define RINGATTN_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define RINGATTN_D_16 RINGATTN_D(0), RINGATTN_D(1), RINGATTN_D(2), RINGATTN_D(3)
#define RINGATTN_D_32 RINGATTN_D_16, RINGATTN_D(4), RINGATTN_D(5), RINGATTN_D(6), RINGATTN_D(7)
#define RINGATTN_D_40 RINGATTN_D_32, RINGATTN_D(8), RINGATTN_D(9)
#define RINGATTN_D_48 RINGATTN_D_40, RINGATTN_D(10), RINGATTN_D(11)
#define RINGATTN_D_56 RINGATTN_D_48, RINGATTN_D(12), RINGATTN_D(13)
#define RINGATTN_D_64 RINGATTN_D_56, RINGATTN_D(14), RINGATTN_D(15)
#define RINGATTN_D_96                                                                                            \
  RINGATTN_D_64, RINGATTN_D(16), RINGATTN_D(17), RINGATTN_D(18), RINGATTN_D(19), RINGATTN_D(20), RINGATTN_D(21), \
      RINGATTN_D(22), RINGATTN_D(23)
#define RINGATTN_D_128                                                                                           \
  RINGATTN_D_96, RINGATTN_D(24), RINGATTN_D(25), RINGATTN_D(26), RINGATTN_D(27), RINGATTN_D(28), RINGATTN_D(29), \
      RINGATTN_D(30), RINGATTN_D(31)
#define RINGATTN_N_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define RINGATTN_N_32 RINGATTN_N_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define RINGATTN_N_40 RINGATTN_N_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define RINGATTN_N_48 RINGATTN_N_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define RINGATTN_N_56 RINGATTN_N_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define RINGATTN_N_64 RINGATTN_N_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define RINGATTN_N_96                                                                                             \
  RINGATTN_N_64                                                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90," \
  "%91,%92,%93,%94,%95"
#define RINGATTN_N_128                                                                                         \
  RINGATTN_N_96                                                                                                \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117" \
  ",%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// kRegisters is the number of D's registers; a, b, … are the numbers of the operands that follow them.
#define RINGATTN_WGMMA(Element_, type, columns, kRegisters, a, b, c, e, f, g)                                         \
  template <>                                                                                                         \
  struct Wgmma<Element_, columns> {                                                                                   \
    __device__ static __forceinline__ void ss(float (&d)[columns / 8][4], std::uint64_t q, std::uint64_t k,           \
                                              bool accumulate) {                                                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                            \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" RINGATTN_N_##kRegisters \
                   "}, %" #a ", %" #b ", p, 1, 1, 0, 0;\n}"                                                           \
                   : RINGATTN_D_##kRegisters                                                                          \
                   : "l"(q), "l"(k), "r"(static_cast<int>(accumulate)));                                              \
    }                                                                                                                 \
    __device__ static __forceinline__ void sv(float (&d)[columns / 8][4], std::uint64_t p, std::uint64_t v,           \
                                              bool accumulate) {                                                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                            \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" RINGATTN_N_##kRegisters \
                   "}, %" #a ", %" #b ", p, 1, 1, 0, 1;\n}"                                                           \
                   : RINGATTN_D_##kRegisters                                                                          \
                   : "l"(p), "l"(v), "r"(static_cast<int>(accumulate)));                                              \
    }                                                                                                                 \
    __device__ static __forceinline__ void rs(float (&d)[columns / 8][4], const std::uint32_t (&p)[4],                \
                                              std::uint64_t v, bool accumulate) {                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #g                                                            \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" RINGATTN_N_##kRegisters \
                   "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f ", p, 1, 1, 1;\n}"                                 \
                   : RINGATTN_D_##kRegisters                                                                          \
                   : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v), "r"(static_cast<int>(accumulate)));          \
    }                                                                                                                 \
    __device__ static __forceinline__ void rk(float (&d)[columns / 8][4], const std::uint32_t (&q)[4],                \
                                              std::uint64_t k, bool accumulate) {                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #g                                                            \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" RINGATTN_N_##kRegisters \
                   "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f ", p, 1, 1, 0;\n}"                                 \
                   : RINGATTN_D_##kRegisters                                                                          \
                   : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k), "r"(static_cast<int>(accumulate)));          \
    }                                                                                                                 \
  };
#define RINGATTN_WGMMA_BOTH(...)                     \
  RINGATTN_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__) \
  RINGATTN_WGMMA(__half, "f16", __VA_ARGS__)
RINGATTN_WGMMA_BOTH(32, 16, 16, 17, 18, 19, 20, 21)
RINGATTN_WGMMA_BOTH(64, 32, 32, 33, 34, 35, 36, 37)
RINGATTN_WGMMA_BOTH(80, 40, 40, 41, 42, 43, 44, 45)
RINGATTN_WGMMA_BOTH(96, 48, 48, 49, 50, 51, 52, 53)
RINGATTN_WGMMA_BOTH(112, 56, 56, 57, 58, 59, 60, 61)
RINGATTN_WGMMA_BOTH(128, 64, 64, 65, 66, 67, 68, 69)
RINGATTN_WGMMA_BOTH(192, 96, 96, 97, 98, 99, 100, 101)
RINGATTN_WGMMA_BOTH(256, 128, 128, 129, 130, 131, 132, 133)
#undef RINGATTN_WGMMA_BOTH
#undef RINGATTN_WGMMA
#undef RINGATTN_N_128
#undef RINGATTN_N_96
#undef RINGATTN_N_64
#undef RINGATTN_N_56
#undef RINGATTN_N_48
#undef RINGATTN_N_40
#undef RINGATTN_N_32
#undef RINGATTN_N_16
#undef RINGATTN_D_128
#undef RINGATTN_D_96
#undef RINGATTN_D_64
#undef RINGATTN_D_56
#undef RINGATTN_D_48
#undef RINGATTN_D_40
#undef RINGATTN_D_32
#undef RINGATTN_D_16
#undef RINGATTN_D

}  // namespace ringattn::sm90
