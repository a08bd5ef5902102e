// SPDX-License-Identifier: Apache-2.0
// Spike of linear layers on one H200 (notes/linear.md): bits of GEMM tiles by wgmma and mma.sync, exactness of int8
// wgmma, and the speed of closing splits of K in registers and through L2. A shared library for linear_spike.py.
//
// Build: nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -I. -Isrc -shared -Xcompiler -fPIC -o
// linear_spike.so FILE
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "bench/linear_wgmma.cuh"
#include "kernels/common/sm90/tma.cuh"

#define CHECK(x)                                                                     \
  do {                                                                               \
    cudaError_t e = (x);                                                             \
    if (e != cudaSuccess) {                                                          \
      std::fprintf(stderr, "%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (0)

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using bf16 = __nv_bfloat16;

__device__ __forceinline__ u32 smem(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n>
__device__ __forceinline__ void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
template <int n>
__device__ __forceinline__ void pin(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int n>
__device__ __forceinline__ void pin(int (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
__device__ __forceinline__ u64 desc128(u32 a) {
  return (u64)((a & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ u64 desc64(u32 a) {
  return (u64)((a & 0x3FFFF) >> 4) | (1ull << 16) | (32ull << 32) | (2ull << 62);
}

// ---- bits: one warpgroup, a tile of 64 x N, K blocks of KB elements, all of K in one chain --------------------------
template <class E, int N, int KB>
__global__ void __launch_bounds__(128)
    bits_kernel(const E* a, const E* b, void* out, int k_dim, long row_stride, long col_stride) {
  constexpr bool kInt = std::is_same_v<E, signed char>;
  using Acc = std::conditional_t<kInt, int, float>;
  constexpr int kBytes = KB * (int)sizeof(E);        // of a row of a K block
  constexpr int kRow = kBytes < 128 ? kBytes : 128;  // bytes of a panel's row: 64 or 128
  extern __shared__ __align__(1024) unsigned char raw[];
  unsigned char* base = (unsigned char*)(((u64)raw + 1023) & ~1023ull);
  unsigned char* sa = base;
  unsigned char* sb = base + 64 * kBytes;
  a += (long)blockIdx.y * 64 * k_dim;
  b += (long)blockIdx.x * N * k_dim;
  Acc d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = 0;
  const auto fill = [&](unsigned char* to, const E* from, int rows, int k) {
    constexpr int kChunks = kBytes / 16;
    for (int i = threadIdx.x; i < rows * kChunks; i += 128) {
      const int row = i / kChunks, c = i % kChunks, panel = c / (kRow / 16), cc = c % (kRow / 16);
      const int sw = kRow == 128 ? cc ^ (row & 7) : cc ^ ((row >> 1) & 3);
      *(uint4*)(to + (panel * rows + row) * kRow + sw * 16) =
          *(const uint4*)((const char*)(from + (long)row * k_dim + k) + c * 16);
    }
  };
  for (int k = 0; k < k_dim; k += KB) {
    fill(sa, a, 64, k);
    fill(sb, b, N, k);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    pin(d);
    wg_fence();
#pragma unroll
    for (int s = 0; s < kBytes / 32; ++s) {
      const int panel = s / (kRow / 32), in = s % (kRow / 32) * 32;
      const u32 pa = smem(sa) + panel * 64 * kRow + in, pb = smem(sb) + panel * N * kRow + in;
      Wgmma<E, N>::multiply(d, kRow == 128 ? desc128(pa) : desc64(pa), kRow == 128 ? desc128(pb) : desc64(pb),
                            k > 0 || s > 0);
    }
    wg_commit();
    wg_wait<0>();
    pin(d);
    __syncthreads();
  }
  const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const long r = (long)blockIdx.y * 64 + row + (i / 2 % 2) * 8,
               c = (long)blockIdx.x * N + i / 4 * 8 + t % 4 * 2 + i % 2;
    ((Acc*)out)[r * row_stride + c * col_stride] = d[i];
  }
}

// mma.sync, a warp a tile of 16 x 8, operands from global memory. split: elements of K after which sums are closed
// (0: never). k8: m16n8k8 twice, the control.
template <class E, bool k8>
__global__ void mma_kernel(const E* a, const E* b, float* out, bf16* rounded, int m, int n, int k_dim, int split) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const long row = (long)blockIdx.y * 16, col = (long)blockIdx.x * 8;
  float d[4] = {0, 0, 0, 0}, closed[4] = {0, 0, 0, 0};
  bool first = true;
  const auto at = [&](const E* p, long r, int k) { return *(const u32*)(p + r * k_dim + k); };
  for (int k = 0; k < k_dim; k += 16) {
    u32 a0 = at(a, row + g, k + 2 * t), a1 = at(a, row + g + 8, k + 2 * t), a2 = at(a, row + g, k + 8 + 2 * t),
        a3 = at(a, row + g + 8, k + 8 + 2 * t), b0 = at(b, col + g, k + 2 * t), b1 = at(b, col + g, k + 8 + 2 * t);
#define MMA16(type)                                                         \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
#define MMA8(type, x0, x1, y)                                        \
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type \
               ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"   \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])      \
               : "r"(x0), "r"(x1), "r"(y))
    if constexpr (std::is_same_v<E, bf16>) {
      if constexpr (k8) {
        MMA8("bf16", a0, a1, b0);
        MMA8("bf16", a2, a3, b1);
      } else {
        MMA16("bf16");
      }
    } else {
      if constexpr (k8) {
        MMA8("f16", a0, a1, b0);
        MMA8("f16", a2, a3, b1);
      } else {
        MMA16("f16");
      }
    }
    if (split > 0 && ((k + 16) % split == 0 || k + 16 == k_dim)) {
      for (int i = 0; i < 4; ++i) {
        closed[i] = first ? d[i] : closed[i] + d[i];
        d[i] = 0;
      }
      first = false;
    }
  }
  for (int i = 0; i < 4; ++i) {
    const long r = row + g + i / 2 * 8, c = col + 2 * t + i % 2;
    const float v = split > 0 ? closed[i] : d[i];
    if (out) out[r * n + c] = v;
    if (rounded) rounded[r * n + c] = __float2bfloat16_rn(v);
  }
}

// ---- speed ---------------------------------------------------------------------------------------------------------
enum Close { kNone, kRegisters, kL2, kL2Red };

struct Gemm {
  CUtensorMap a, b, c;
  int m, n, k;
  int split_blocks;  // K blocks of 64 in a split
  int group;         // row pairs of an L2 swizzle group
  float* scratch;    // [CTAs, 256 * 128]
};

__device__ __forceinline__ void bar_init(u32 b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void bar_expect(u32 b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void bar_arrive_at(u32 b) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(b) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 b, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra through;\nbra "
      "again;\nthrough:\n}" ::"r"(b),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ u32 map_to(u32 a, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
  return r;
}
__device__ __forceinline__ void tma2(u32 to, const CUtensorMap* m, u32 bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(m), "r"(bar), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void tma2_multi(u32 to, const CUtensorMap* m, u32 bar, int x, int y, std::uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(to),
      "l"(m), "r"(bar), "r"(x), "r"(y), "h"(ctas)
      : "memory");
}

template <int kN_, int kClose_, int kStages_, int kEpilogue_>
struct Config {
  static constexpr int kN = kN_, kClose = kClose_, kStages = kStages_,
                       kEpilogue = kEpilogue_;  // kEpilogue: panels of 64 x 64 a warpgroup
  static constexpr int kABytes = 128 * 128, kBBytes = kN * 128, kStage = kABytes + kBBytes;
  static constexpr int kShared = kStages * (kStage + 16) + 2 * kEpilogue * 8192 + 1024;
  static_assert(kShared <= 232448);
};

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) gemm_kernel(const __grid_constant__ Gemm p) {
  constexpr int kN = C::kN;
  extern __shared__ unsigned char raw[];
  const u32 base = (smem(raw) + 1023) & ~1023u;
  const u32 staging = base + C::kStages * C::kStage, bars = staging + 2 * C::kEpilogue * 8192;
  const auto full = [&](u32 s) { return bars + s * 8; };
  const auto empty = [&](u32 s) { return bars + (C::kStages + s) * 8; };
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      bar_init(full(s), 1);
      bar_init(empty(s), 16);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const int pairs_m = (p.m + 255) / 256, tiles_n = (p.n + kN - 1) / kN, tiles = pairs_m * tiles_n;
  const int blocks = (p.k + 63) / 64;
  const int clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
  const auto place = [&](int t, int& m, int& n) {
    const int per = p.group * tiles_n, g = t / per, first = g * p.group, rows = min(p.group, pairs_m - first),
              r = t - g * per;
    m = (first + r % rows) * 256 + (int)rank * 128;
    n = r / rows * kN;
  };
  const int wg = threadIdx.x / 128;
  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      u32 s = 0, parity = 0;
      for (int t = cluster; t < tiles; t += clusters) {
        int m, n;
        place(t, m, n);
        for (int kb = 0; kb < blocks; ++kb) {
          bar_wait(empty(s), parity ^ 1);
          bar_expect(full(s), C::kStage);
          const u32 to = base + s * C::kStage;
          tma2(to, &p.a, full(s), kb * 64, m);
          tma2_multi(to + C::kABytes + rank * (C::kBBytes / 2), &p.b, full(s), kb * 64, n + (int)rank * (kN / 2), 3);
          if (++s == C::kStages) {
            s = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int w = wg - 1, thread = threadIdx.x % 128, lane = thread % 32;
    float d[kN / 2];
    float closed[C::kClose == kRegisters ? kN / 2 : 1];
    float4* const scratch = (float4*)(p.scratch + (long)blockIdx.x * 256 * 128) + w * 128 + thread;
    u32 s = 0, parity = 0;
    const u32 peer0 = map_to(empty(0), lane & 1);  // lanes 0 and 1 release both CTAs' stages
    const auto release = [&](u32 stage) {
      __syncwarp();
      if (lane < 2) bar_arrive_at(peer0 + stage * 8);
    };
    for (int t = cluster; t < tiles; t += clusters) {
      int m, n;
      place(t, m, n);
      if constexpr (C::kClose == kRegisters) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) closed[i] = -0.0f;  // −0 + x is x
      }
      for (int from = 0; from < blocks; from += p.split_blocks) {
        const int to = min(blocks, from + p.split_blocks);
        u32 prev = 0;
        for (int kb = from; kb < to; ++kb) {
          bar_wait(full(s), parity);
          const u32 at = __shfl_sync(0xffffffffu, base + s * C::kStage, 0);
          const u64 da = desc128(at + __shfl_sync(0xffffffffu, w, 0) * 64 * 128), db = desc128(at + C::kABytes);
          pin(d);
          wg_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i) Wgmma<bf16, kN>::multiply(d, da + i * 2, db + i * 2, kb > from || i > 0);
          wg_commit();
          if (kb > from) {
            wg_wait<1>();
            release(prev);
          }
          prev = s;
          if (++s == C::kStages) {
            s = 0;
            parity ^= 1;
          }
        }
        wg_wait<0>();
        pin(d);
        release(prev);
        if constexpr (C::kClose == kRegisters) {
#pragma unroll
          for (int i = 0; i < kN / 2; ++i) closed[i] = __fadd_rn(closed[i], d[i]);
        } else if constexpr (C::kClose == kL2 || C::kClose == kL2Red) {
          if (blocks > p.split_blocks) {
            if (from == 0) {
#pragma unroll
              for (int i = 0; i < kN / 8; ++i)
                __stcg(scratch + i * 256, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
            } else if (C::kClose == kL2Red && to < blocks) {
#pragma unroll
              for (int i = 0; i < kN / 8; ++i)
                asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(scratch + i * 256),
                             "f"(d[4 * i]), "f"(d[4 * i + 1]), "f"(d[4 * i + 2]), "f"(d[4 * i + 3])
                             : "memory");
            } else {
              constexpr int kAtOnce = 8;
#pragma unroll
              for (int i = 0; i < kN / 8; i += kAtOnce) {
                float4 c[kAtOnce];
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) c[j] = __ldcg(scratch + (i + j) * 256);
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                  float* e = d + 4 * (i + j);
                  e[0] = __fadd_rn(c[j].x, e[0]);
                  e[1] = __fadd_rn(c[j].y, e[1]);
                  e[2] = __fadd_rn(c[j].z, e[2]);
                  e[3] = __fadd_rn(c[j].w, e[3]);
                  if (to < blocks) __stcg(scratch + (i + j) * 256, make_float4(e[0], e[1], e[2], e[3]));
                }
              }
            }
          }
        }
      }
      // Epilogue: bf16 through shared memory.
      const u32 mine = staging + w * C::kEpilogue * 8192;
#pragma unroll
      for (int panel = 0; panel < kN / 64; ++panel) {
        const u32 to = mine + panel % C::kEpilogue * 8192;
        if (panel % C::kEpilogue == 0) {
          if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
          asm volatile("bar.sync %0, 128;" ::"r"(w + 1) : "memory");
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 16 columns each: two 8-column blocks
          u32 r[4];
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const int i = panel * 32 + j * 8 + q * 2;
            const float x = C::kClose == kRegisters ? closed[C::kClose == kRegisters ? i : 0] : d[i];
            const float y = C::kClose == kRegisters ? closed[C::kClose == kRegisters ? i + 1 : 0] : d[i + 1];
            const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
            r[q] = *(const u32*)&both;
          }
          // matrices: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15
          const int row = thread / 32 * 16 + lane % 16, chunk = j * 2 + lane / 16;
          const u32 addr = to + row * 128 + ((chunk ^ (row & 7)) << 4);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(r[0]),
                       "r"(r[1]), "r"(r[2]), "r"(r[3])
                       : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(w + 1) : "memory");
        if (thread == 0) {
          asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&p.c),
                       "r"(to), "r"(n + panel * 64), "r"(m + w * 64)
                       : "memory");
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
      }
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

static CUtensorMap map2(const void* data, long rows, long cols, int box_rows) {
  static const auto encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
  }();
  const cuuint64_t sizes[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)cols * 2};
  const cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, steps[2] = {1, 1};
  CUtensorMap m;
  if (encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    std::fprintf(stderr, "tensor map refused\n");
    std::exit(1);
  }
  return m;
}

template <class C>
static void launch(const void* a, const void* b, void* c, int m, int n, int k, int split, int group, float* scratch,
                   cudaStream_t stream) {
  static const bool once = [] {
    CHECK(cudaFuncSetAttribute(gemm_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared));
    return true;
  }();
  (void)once;
  const Gemm p{map2(a, m, k, 128), map2(b, n, k, C::kN / 2), map2(c, m, n, 64), m, n, k, split / 64, group, scratch};
  const int tiles = (m + 255) / 256 * ((n + C::kN - 1) / C::kN), clusters = tiles < 66 ? tiles : 66;
  gemm_kernel<C><<<clusters * 2, 384, C::kShared, stream>>>(p);
  CHECK(cudaGetLastError());
}

extern "C" {
// variant: see linear_spike.py
void spike_gemm(int variant, const void* a, const void* b, void* c, int m, int n, int k, int split, int group,
                float* scratch, void* stream) {
  auto s = (cudaStream_t)stream;
  switch (variant) {
    case 0:
      return launch<Config<256, kNone, 4, 2>>(a, b, c, m, n, k, 1 << 30, group, scratch, s);
    case 1:
      return launch<Config<192, kNone, 4, 3>>(a, b, c, m, n, k, 1 << 30, group, scratch, s);
    case 2:
      return launch<Config<192, kRegisters, 4, 3>>(a, b, c, m, n, k, split, group, scratch, s);
    case 3:
      return launch<Config<192, kRegisters, 5, 1>>(a, b, c, m, n, k, split, group, scratch, s);
    case 4:
      return launch<Config<256, kL2, 4, 2>>(a, b, c, m, n, k, split, group, scratch, s);
    case 5:
      return launch<Config<256, kL2Red, 4, 2>>(a, b, c, m, n, k, split, group, scratch, s);
    case 6:
      return launch<Config<128, kRegisters, 6, 1>>(a, b, c, m, n, k, split, group, scratch, s);
  }
}

#define BITS(E, N, KB)                                                                                      \
  if (n_tile == N && kb == KB) {                                                                            \
    const int bytes = (64 + N) * KB * (int)sizeof(E) + 1024;                                                \
    CHECK(cudaFuncSetAttribute(bits_kernel<E, N, KB>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)); \
    if (swapped)                                                                                            \
      bits_kernel<E, N, KB><<<dim3(m / N, n / 64), 128, bytes>>>((const E*)b, (const E*)a, out, k, 1, n);   \
    else                                                                                                    \
      bits_kernel<E, N, KB><<<dim3(n / N, m / 64), 128, bytes>>>((const E*)a, (const E*)b, out, k, n, 1);   \
    CHECK(cudaGetLastError());                                                                              \
    return 1;                                                                                               \
  }
#define BITS3(E, N) BITS(E, N, 32) BITS(E, N, 64) BITS(E, N, 128)
// dtype 0: bf16, 1: fp16, 2: int8. out [m, n] fp32 or int32.
int spike_bits(int dtype, int n_tile, int kb, int swapped, const void* a, const void* b, void* out, int m, int n,
               int k) {
  if (dtype == 0) {
    BITS3(bf16, 8) BITS3(bf16, 16) BITS3(bf16, 32) BITS3(bf16, 64) BITS3(bf16, 128) BITS3(bf16, 192) BITS3(bf16, 256)
  }
  if (dtype == 1) {
    BITS3(__half, 8) BITS3(__half, 64) BITS3(__half, 128) BITS3(__half, 192) BITS3(__half, 256)
  }
  if (dtype == 2) {
    BITS(signed char, 8, 128)
    BITS(signed char, 64, 128) BITS(signed char, 128, 128) BITS(signed char, 256, 128) BITS(signed char, 256, 64)
  }
  return 0;
}
void spike_mma(int dtype, int k8, const void* a, const void* b, float* out, void* rounded, int m, int n, int k,
               int split) {
  const dim3 grid(n / 8, m / 16);
  if (dtype == 0) {
    if (k8)
      mma_kernel<bf16, true><<<grid, 32>>>((const bf16*)a, (const bf16*)b, out, (bf16*)rounded, m, n, k, split);
    else
      mma_kernel<bf16, false><<<grid, 32>>>((const bf16*)a, (const bf16*)b, out, (bf16*)rounded, m, n, k, split);
  } else {
    if (k8)
      mma_kernel<__half, true><<<grid, 32>>>((const __half*)a, (const __half*)b, out, (bf16*)rounded, m, n, k, split);
    else
      mma_kernel<__half, false><<<grid, 32>>>((const __half*)a, (const __half*)b, out, (bf16*)rounded, m, n, k, split);
  }
  CHECK(cudaGetLastError());
}
}
