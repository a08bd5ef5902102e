// SPDX-License-Identifier: Apache-2.0
// Few rows: weights are operand A, x is operand B, splits of K are computed by different CTAs. The last CTA of a tile
// adds them in ascending order.
#include "bench/linear_spike.cu"

struct Small {
  CUtensorMap w, x;
  bf16* y;
  int m, n, k, split_blocks, splits, tiles;
  float* scratch;      // [splits, n, M]
  unsigned* counters;  // [tiles], zero
};

template <int TN_, int M_, int kStages_, int kCtas_>
struct SmallConfig {
  static constexpr int TN = TN_, M = M_, kStages = kStages_, kCtas = kCtas_;
  static constexpr int kW = TN * 128, kX = M * 128, kStage = kW + kX;
  static constexpr int kShared = kStages * (kStage + 16) + 1024;
  static constexpr int kThreads = TN / 64 * 128 + 32;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) small_kernel(const __grid_constant__ Small p) {
  extern __shared__ unsigned char raw[];
  __shared__ unsigned last;
  const u32 base = (smem(raw) + 1023) & ~1023u, bars = base + C::kStages * C::kStage;
  const auto full = [&](u32 s) { return bars + s * 8; };
  const auto empty = [&](u32 s) { return bars + (C::kStages + s) * 8; };
  constexpr int kConsumers = C::TN / 64 * 128;
  const int tile = blockIdx.x % p.tiles, split = blockIdx.x / p.tiles;
  const int from = split * p.split_blocks, to = min(p.k / 64, from + p.split_blocks);
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      bar_init(full(s), 1);
      bar_init(empty(s), kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      u32 s = 0, parity = 0;
      for (int kb = from; kb < to; ++kb) {
        bar_wait(empty(s), parity ^ 1);
        bar_expect(full(s), C::kStage);
        const u32 at = base + s * C::kStage;
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
            "{%3, %4}], [%2], %5;" ::"r"(at),
            "l"(&p.w), "r"(full(s)), "r"(kb * 64), "r"(tile * C::TN), "l"(0x12F0000000000000ULL)
            : "memory");
        tma2(at + C::kW, &p.x, full(s), kb * 64, 0);
        if (++s == C::kStages) {
          s = 0;
          parity ^= 1;
        }
      }
    }
  } else {
    const int w = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    float d[C::M / 2];
    u32 s = 0, parity = 0, prev = 0;
    for (int kb = from; kb < to; ++kb) {
      bar_wait(full(s), parity);
      const u32 at = __shfl_sync(0xffffffffu, base + s * C::kStage, 0);
      const u64 da = desc128(at + __shfl_sync(0xffffffffu, w, 0) * 64 * 128), db = desc128(at + C::kW);
      pin(d);
      wg_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) Wgmma<bf16, C::M>::multiply(d, da + i * 2, db + i * 2, kb > from || i > 0);
      wg_commit();
      if (kb > from) {
        wg_wait<1>();
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty(prev)) : "memory");
      }
      prev = s;
      if (++s == C::kStages) {
        s = 0;
        parity ^= 1;
      }
    }
    wg_wait<0>();
    pin(d);
    const int row = tile * C::TN + w * 64 + thread / 32 * 16 + lane / 4;
    float* const out = p.scratch + ((long)split * p.n + row) * C::M + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < C::M / 8; ++i) {
      if (row < p.n) __stcg((float2*)(out + i * 8), make_float2(d[4 * i], d[4 * i + 1]));
      if (row + 8 < p.n) __stcg((float2*)(out + 8 * C::M + i * 8), make_float2(d[4 * i + 2], d[4 * i + 3]));
    }
    __threadfence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned before = atomicAdd(p.counters + tile, 1);
    last = before == (unsigned)p.splits - 1;
    if (last) p.counters[tile] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  for (int i = threadIdx.x; i < C::TN * (C::M / 4); i += C::kThreads) {
    const int n = tile * C::TN + i % C::TN, m = i / C::TN * 4;
    if (n >= p.n) continue;
    float4 sum;
    for (int split = 0; split < p.splits; ++split) {
      const float4 c = __ldcg((const float4*)(p.scratch + ((long)split * p.n + n) * C::M + m));
      if (split == 0)
        sum = c;
      else {
        sum.x = __fadd_rn(sum.x, c.x);
        sum.y = __fadd_rn(sum.y, c.y);
        sum.z = __fadd_rn(sum.z, c.z);
        sum.w = __fadd_rn(sum.w, c.w);
      }
    }
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
    for (int j = 0; j < 4; ++j)
      if (m + j < p.m) p.y[(long)(m + j) * p.n + n] = __float2bfloat16_rn(v[j]);
  }
}

template <class C>
static void launch_small(const void* x, const void* w, void* y, int m, int n, int k, int split, float* scratch,
                         unsigned* counters, cudaStream_t stream) {
  static const bool once = [] {
    CHECK(cudaFuncSetAttribute(small_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared));
    return true;
  }();
  (void)once;
  const int tiles = (n + C::TN - 1) / C::TN, splits = (k + split - 1) / split;
  const Small p{
      map2(w, n, k, C::TN), map2(x, m, k, C::M), (bf16*)y, m, n, k, split / 64, splits, tiles, scratch, counters};
  small_kernel<C><<<tiles * splits, C::kThreads, C::kShared, stream>>>(p);
  CHECK(cudaGetLastError());
}
// form 0: 64 columns, 3 CTAs; 1: 128 columns, 2 CTAs; 2: 128 columns, 1 CTA; 3: 64 columns, 2 CTAs
template <int M>
static int small_of(int form, const void* x, const void* w, void* y, int m, int n, int k, int split, float* scratch,
                    unsigned* counters, cudaStream_t s) {
  constexpr int kX = M * 128;
  if (form == 0)
    launch_small<SmallConfig<64, M, (74 * 1024) / (64 * 128 + kX + 16), 3>>(x, w, y, m, n, k, split, scratch, counters,
                                                                            s);
  else if (form == 1)
    launch_small<SmallConfig<128, M, (110 * 1024) / (128 * 128 + kX + 16), 2>>(x, w, y, m, n, k, split, scratch,
                                                                               counters, s);
  else if (form == 2)
    launch_small<SmallConfig<128, M, (222 * 1024) / (128 * 128 + kX + 16), 1>>(x, w, y, m, n, k, split, scratch,
                                                                               counters, s);
  else if (form == 3)
    launch_small<SmallConfig<64, M, (110 * 1024) / (64 * 128 + kX + 16), 2>>(x, w, y, m, n, k, split, scratch, counters,
                                                                             s);
  else
    return 0;
  return 1;
}
extern "C" int spike_small(int form, const void* x, const void* w, void* y, int m, int n, int k, int split,
                           float* scratch, unsigned* counters, void* stream) {
  auto s = (cudaStream_t)stream;
  if (m <= 8) return small_of<8>(form, x, w, y, m, n, k, split, scratch, counters, s);
  if (m <= 16) return small_of<16>(form, x, w, y, m, n, k, split, scratch, counters, s);
  if (m <= 32) return small_of<32>(form, x, w, y, m, n, k, split, scratch, counters, s);
  if (m <= 64) return small_of<64>(form, x, w, y, m, n, k, split, scratch, counters, s);
  return 0;
}
