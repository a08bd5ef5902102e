// SPDX-License-Identifier: Apache-2.0
// The fold on Hopper: wgmma, bulk tensor copies, one producer warp and two consumer warpgroups of 64 rows. The same
// items, tile map and state as sm80_fold.cuh.
//
// A consumer has Q Kᵀ of tile n + 1 in flight while it sums P V of tile n, in two halves of the columns, from zero, and
// adds each half to O with one fma an element: the tensor cores never carry a sum past a tile.
#pragma once

#include <cuda.h>

#include "sm80_fold.cuh"
#include "sm90_wgmma.cuh"

namespace ringattn::sm90 {

using sm80::exp2_approx;
using sm80::Item;
using sm80::pack_bf16;
using sm80::shared_address;
using sm80::Tile;

inline constexpr int kMaxMaps = 4;

struct Params {
  sm80::Params base;
  CUtensorMap q;            // [rows, heads, head_dim], boxes of kQueryTile × 1 × 64
  CUtensorMap k[kMaxMaps];  // [rows, kv_heads, head_dim], boxes of kKeyTile × 1 × 64
  CUtensorMap v[kMaxMaps];
  CUtensorMap out;  // [rows, heads, head_dim], boxes of 64 × 1 × 64; sm90_turns only, as the next two
  float* state_b;   // [rows, heads, head_dim]
  float* scratch;   // what a CTA's warpgroups keep outside their registers
  int items;
  int section_heads;  // query heads whose K and V share the L2 cache at a time; divides base.heads
};

template <int kStages_, bool kPingPong_, int kPieces_ = 2, bool kEarly_ = false, bool kInPlace_ = false,
          int kConsumers_ = 2, bool kOverlap_ = true>
struct Config {
  static constexpr bool kHopper = true;
  static constexpr int kHeadDim = 128;
  static constexpr int kKeyTile = 128;
  static constexpr int kConsumers = kConsumers_;  // warpgroups of 64 rows
  static constexpr bool kOverlap = kOverlap_;     // Q Kᵀ of the next tile runs beside P V of this one
  static constexpr int kQueryTile = 64 * kConsumers;
  static constexpr int kStages = kStages_;
  static constexpr bool kPingPong = kPingPong_;
  static constexpr int kPieces = kPieces_;     // P V is summed in this many pieces of the columns, one after another
  static constexpr bool kEarly = kEarly_;      // the second piece is issued before the exponentials
  static constexpr bool kInPlace = kInPlace_;  // for comparison: the tensor cores sum into O itself (kPieces = 1)
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kPanelBytes = 128 * 128;  // 128 rows of 64 columns
  static constexpr int kTileBytes = 2 * kPanelBytes;
  static constexpr int kQueryPanelBytes = kQueryTile * 128;
  static constexpr int kQueryBytes = 2 * kQueryPanelBytes;
  static constexpr int kBarriersOffset = 2 * kQueryBytes + kTileBytes * 2 * kStages;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr int kSharedBytes = 1024 + kBarriersOffset + 8 * (4 + 4 * kStages);
};

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nwaiting:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra "
      "waiting;\ndone:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Copies a box of 64 columns of one head from row `row`.
__device__ __forceinline__ void copy_box(std::uint32_t target, const CUtensorMap* map, std::uint32_t barrier,
                                         int column, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row)
      : "memory");
}
template <int kCount>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of wgmma's registers over the fences and waits around them.
template <int n>
__device__ __forceinline__ void pin(float (&d)[n][4]) {
#pragma unroll
  for (int j = 0; j < n; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[j][i])::"memory");
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A matrix in shared memory with the 128-byte swizzle, 1024 bytes from one group of 8 rows to the next.
// `panels`: bytes from one panel of 64 columns to the next, for matrices whose columns are contiguous (V).
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t address, int panels = 16) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) | (static_cast<std::uint64_t>(panels >> 4) << 16) |
         static_cast<std::uint64_t>((address & 0x3ffff) >> 4);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) fold_kernel(const __grid_constant__ Params params) {
  constexpr int kD = C::kHeadDim;
  const sm80::Params& p = params.base;
  extern __shared__ unsigned char shared[];
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023U;
  // Two tiles of Q, so that the next item's is here in time; kStages tiles of K and V, counted on from item to item.
  const auto q_tile = [&](int round) { return base + static_cast<std::uint32_t>(C::kQueryBytes * (round % 2)); };
  const auto k_tile = [&](int i) {
    return base + static_cast<std::uint32_t>(2 * C::kQueryBytes + C::kTileBytes * 2 * (i % C::kStages));
  };
  const auto v_tile = [&](int i) { return k_tile(i) + static_cast<std::uint32_t>(C::kTileBytes); };
  const std::uint32_t barriers = base + C::kBarriersOffset;
  const auto q_full = [&](int round) { return barriers + 8 * static_cast<std::uint32_t>(round % 2); };
  const auto q_empty = [&](int round) { return barriers + 8 * static_cast<std::uint32_t>(2 + round % 2); };
  const auto k_full = [&](int i) { return barriers + 8 * static_cast<std::uint32_t>(4 + i % C::kStages); };
  const auto k_empty = [&](int i) {
    return barriers + 8 * static_cast<std::uint32_t>(4 + C::kStages + i % C::kStages);
  };
  const auto v_full = [&](int i) {
    return barriers + 8 * static_cast<std::uint32_t>(4 + 2 * C::kStages + i % C::kStages);
  };
  const auto v_empty = [&](int i) {
    return barriers + 8 * static_cast<std::uint32_t>(4 + 3 * C::kStages + i % C::kStages);
  };
  const auto q_phase = [](int round) { return static_cast<std::uint32_t>(round / 2) & 1U; };
  const auto phase = [](int i) { return static_cast<std::uint32_t>(i / C::kStages) & 1U; };

  // Sections of heads, in each the items, sorted by their work, the longest first, and dealt to the CTAs like a snake.
  struct Work {
    int item, head;
  };
  const int work = params.items * p.heads;
  const auto split = [&](int index) {
    const int section = index / (params.items * params.section_heads);
    const int rest = index % (params.items * params.section_heads);
    return Work{rest / params.section_heads, section * params.section_heads + rest % params.section_heads};
  };
  const auto work_of = [&](int round) {
    const int place = static_cast<int>(round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    return round * static_cast<int>(gridDim.x) + place;
  };

  __shared__ Item items[2];
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      barrier_init(q_full(i), 1);
      barrier_init(q_empty(i), 128 * C::kConsumers);
    }
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(k_full(i), 1);
      barrier_init(v_full(i), 1);
      barrier_init(k_empty(i), C::kConsumers);
      barrier_init(v_empty(i), C::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;

  if (group == 0) {
    registers_shrink<C::kProducerRegisters>();
    if (threadIdx.x == 0) {
      int it = 0;
      for (int round = 0; work_of(round) < work; ++round) {
        const auto [index, head] = split(work_of(round));
        const int kv_head = head / p.group;
        const Item item = p.items[index];
        if (round >= 2) barrier_wait(q_empty(round), q_phase(round) ^ 1U);
        items[round % 2] = item;
        if (item.tiles == 0) {
          barrier_arrive(q_full(round));
          continue;
        }
        barrier_expect(q_full(round), C::kQueryBytes);
        copy_box(q_tile(round), &params.q, q_full(round), 0, head, static_cast<int>(item.row));
        copy_box(q_tile(round) + C::kQueryPanelBytes, &params.q, q_full(round), 64, head, static_cast<int>(item.row));
        const Tile* map = p.tiles + item.table;
        Tile next = map[0];
        for (int i = 0; i < item.tiles; ++i, ++it) {
          const Tile tile = next;
          if (i + 1 < item.tiles) next = map[i + 1];
          const int row = static_cast<int>(tile.row);
          if (it >= C::kStages) barrier_wait(k_empty(it), phase(it) ^ 1U);
          barrier_expect(k_full(it), C::kTileBytes);
          copy_box(k_tile(it), &params.k[tile.source], k_full(it), 0, kv_head, row);
          copy_box(k_tile(it) + C::kPanelBytes, &params.k[tile.source], k_full(it), 64, kv_head, row);
          if (it >= C::kStages) barrier_wait(v_empty(it), phase(it) ^ 1U);
          barrier_expect(v_full(it), C::kTileBytes);
          copy_box(v_tile(it), &params.v[tile.source], v_full(it), 0, kv_head, row);
          copy_box(v_tile(it) + C::kPanelBytes, &params.v[tile.source], v_full(it), 64, kv_head, row);
        }
      }
    }
  } else {
    registers_grow<C::kConsumerRegisters>();
    const int consumer = group - 1;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int lane = thread % 32;
    const int slot0 = consumer * 64 + thread / 32 * 16 + lane / 4;  // and slot0 + 8
    if (C::kPingPong && consumer == 1) named_arrive(1, 256);
    int it = 0;
    for (int round = 0; work_of(round) < work; ++round) {
      barrier_wait(q_full(round), q_phase(round));
      const int head = split(work_of(round)).head;
      const Item& item = items[round % 2];
      const int tiles = item.tiles;

      float o[C::kPieces][16 / C::kPieces][4];  // pieces of consecutive columns
      constexpr int kBlocks = 16 / C::kPieces;  // of 8 columns in a piece
      float m[2], l[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slot = slot0 + 8 * half;
        const bool read = p.resume && slot >= item.slot_begin && slot < item.slot_end;
        const std::int64_t index = (item.row + slot) * p.heads + head;
        const float* from = p.state_o + index * kD + lane % 4 * 4;
        m[half] = read ? p.state_l[index * 8 + 4] : -INFINITY;
        l[half] = read ? p.state_l[index * 8 + lane % 4] : 0.0F;
#pragma unroll
        for (int n = 0; n < kD / 16; ++n) {
          const float4 x = read ? *reinterpret_cast<const float4*>(from + n * 16) : float4{0.0F, 0.0F, 0.0F, 0.0F};
          float(&left)[4] = o[2 * n / kBlocks][2 * n % kBlocks];
          float(&right)[4] = o[2 * n / kBlocks][2 * n % kBlocks + 1];
          left[2 * half] = x.x;
          left[2 * half + 1] = x.y;
          right[2 * half] = x.z;
          right[2 * half + 1] = x.w;
        }
      }

      if (tiles > 0) {
        // This warpgroup's 64 rows: the tiles [begin, end) that any of them sees, of which [plain_begin, plain_end)
        // need no masking. It lets the others pass.
        const int whole = static_cast<int>(item.key_length / C::kKeyTile - item.first_tile);
        const std::int64_t first_row = item.position + 64 * consumer;
        int begin = 0, end = tiles, plain_begin = 0, plain_end = whole;
        if (p.mask_right >= 0) {
          const std::int64_t to = first_row + p.mask_right + 1;  // keys that the first row sees end here
          plain_end = min(plain_end, static_cast<int>((to < 0 ? 0 : to) / C::kKeyTile) - item.first_tile);
          end =
              min(end, static_cast<int>((to + 63 < 0 ? 0 : to + 63 + C::kKeyTile - 1) / C::kKeyTile) - item.first_tile);
        }
        if (p.mask_left >= 0) {
          const std::int64_t from = first_row - p.mask_left;  // and begin here
          begin = max(begin, static_cast<int>((from < 0 ? 0 : from) / C::kKeyTile) - item.first_tile);
          plain_begin =
              static_cast<int>((from + 63 < 0 ? 0 : from + 63 + C::kKeyTile - 1) / C::kKeyTile) - item.first_tile;
        }
        if (64 * consumer >= item.slot_end || 64 * consumer + 64 <= item.slot_begin) end = begin;
        begin = min(begin, tiles);
        end = max(begin, min(end, tiles));
        begin = __shfl_sync(0xffffffffU, begin, 0);  // the compiler can't know that they are uniform
        end = __shfl_sync(0xffffffffU, end, 0);

        float s[16][4];
        float h[kBlocks][4];
        std::uint32_t probability[8][4];
        float scale[2];

        const std::uint64_t q_descriptor = descriptor(q_tile(round) + static_cast<std::uint32_t>(consumer * 64 * 128));
        const auto issue_scores = [&](int i) {
          const std::uint64_t k_descriptor = descriptor(k_tile(it + i));
          pin(s);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kD / 16; ++k) {
            const auto at = [k](int panel) { return static_cast<std::uint64_t>((k / 4) * (panel >> 4) + (k % 4) * 2); };
            wgmma_m64n128k16_ss(s, q_descriptor + at(C::kQueryPanelBytes), k_descriptor + at(C::kPanelBytes), k > 0);
          }
          wgmma_commit();
        };
        const auto issue_values = [&](int i, int half) {
          const std::uint64_t v_descriptor =
              descriptor(v_tile(it + i) + static_cast<std::uint32_t>(half * C::kPanelBytes), C::kPanelBytes);
          if constexpr (C::kInPlace) pin(o[0]);
          if constexpr (!C::kInPlace) pin(h);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < C::kKeyTile / 16; ++k) {
            const std::uint64_t v_step = v_descriptor + static_cast<std::uint64_t>(k * (2048 >> 4));
            if constexpr (C::kInPlace) wgmma_m64n128k16_rs(o[0], probability[k], v_step, 1);
            if constexpr (C::kPieces == 1 && !C::kInPlace) wgmma_m64n128k16_rs(h, probability[k], v_step, k > 0);
            if constexpr (C::kPieces == 2) wgmma_m64n64k16_rs(h, probability[k], v_step, k > 0);
          }
          wgmma_commit();
        };
        const auto rescale = [&] {
          if constexpr (C::kInPlace)
#pragma unroll
            for (int n = 0; n < 16; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) o[0][n][i] = __fmul_rn(o[0][n][i], scale[i / 2]);
        };
        const auto add_values = [&](int half, const float(&factor)[2]) {
          if constexpr (C::kInPlace) {
            pin(o[0]);
            return;
          }
          pin(h);
#pragma unroll
          for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[half][n][i] = __fmaf_rn(o[half][n][i], factor[i / 2], h[n][i]);
        };
        const auto mask = [&](int tile) {
          if (tile >= plain_begin && tile < plain_end) return;
          const std::int64_t first_key = static_cast<std::int64_t>(item.first_tile + tile) * C::kKeyTile;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const std::int64_t position = item.position + slot0 + 8 * half;
            const std::int64_t begin = p.mask_left < 0 ? 0 : position - p.mask_left;
            std::int64_t end = p.mask_right < 0 ? item.key_length : position + p.mask_right + 1;
            if (end > item.key_length) end = item.key_length;
            const std::int64_t from = begin - first_key, to = end - first_key;
            const int column = lane % 4 * 2;
            const int low = (from > C::kKeyTile ? C::kKeyTile : from < 0 ? 0 : static_cast<int>(from)) - column;
            const int high = (to > C::kKeyTile ? C::kKeyTile : to < 0 ? 0 : static_cast<int>(to)) - column;
#pragma unroll
            for (int n = 0; n < 16; ++n)
#pragma unroll
              for (int i = 0; i < 2; ++i)
                if (n * 8 + i >= high) s[n][2 * half + i] = -INFINITY;
            if (p.mask_left >= 0) {
#pragma unroll
              for (int n = 0; n < 16; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                  if (n * 8 + i < low) s[n][2 * half + i] = -INFINITY;
            }
          }
        };
        // Keys past the sequence's end belong to somebody else: their V must not reach a product with 0.
        const auto clear_tail = [&](int tile) {
          if (tile < whole) return;
          const int rows = static_cast<int>(item.key_length % C::kKeyTile);
          for (int at = rows * 8 + thread; at < C::kKeyTile * 8; at += 128) {
            const std::uint32_t address = v_tile(it + tile) + static_cast<std::uint32_t>(at * 16);
#pragma unroll
            for (int panel = 0; panel < 2; ++panel)
              asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                               address + static_cast<std::uint32_t>(panel * C::kPanelBytes)),
                           "r"(0)
                           : "memory");
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          named_sync(3 + consumer, 128);
        };
        float shift[2], sum[2];
        const auto reference = [&] {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float most[4] = {s[0][2 * half], s[0][2 * half + 1], s[1][2 * half],
                             s[1][2 * half + 1]};  // four short chains
#pragma unroll
            for (int n = 2; n < 16; ++n)
#pragma unroll
              for (int i = 0; i < 2; ++i) most[n % 2 * 2 + i] = fmaxf(most[n % 2 * 2 + i], s[n][2 * half + i]);
            float maximum = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
            maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 1));
            maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 2));
            const float m_new = fmaxf(m[half], maximum);
            const float to = m_new == -INFINITY ? 0.0F : m_new;
            scale[half] = exp2_approx(__fmul_rn(__fsub_rn(m[half], to), p.scale_log2));
            shift[half] = __fmul_rn(-to, p.scale_log2);
            m[half] = m_new;
            sum[half] = 0.0F;
          }
        };
        const auto exponentials = [&](const int from, const int to) {
#pragma unroll
          for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                if (n < from || n >= to) continue;
                float& x = s[n][2 * half + i];
                x = exp2_approx(__fmaf_rn(x, p.scale_log2, shift[half]));
                sum[half] = __fadd_rn(sum[half], x);
              }
        };
        const auto finish_softmax = [&] {
#pragma unroll
          for (int half = 0; half < 2; ++half) l[half] = __fmaf_rn(l[half], scale[half], sum[half]);
#pragma unroll
          for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              probability[n / 2][2 * (n % 2) + half] = pack_bf16(s[n][2 * half], s[n][2 * half + 1]);
        };
        if constexpr (C::kOverlap) {
          barrier_wait(k_full(it), phase(it));
          if (C::kPingPong) named_sync(1 + consumer, 256);
          issue_scores(0);
          wgmma_wait<0>();
          pin(s);
          if (C::kPingPong) named_arrive(2 - consumer, 256);
          if (thread == 0) barrier_arrive(k_empty(it));
          mask(0);
          reference();
          exponentials(0, 16);
          finish_softmax();
          rescale();
          for (int i = 0; i + 1 < tiles; ++i) {
            const float factor[2] = {scale[0], scale[1]};
            barrier_wait(k_full(it + i + 1), phase(it + i + 1));
            if (C::kPingPong) named_sync(1 + consumer, 256);
            issue_scores(i + 1);
            barrier_wait(v_full(it + i), phase(it + i));
            issue_values(i, 0);
            if (C::kPingPong) named_arrive(2 - consumer, 256);
            wgmma_wait<1>();
            pin(s);
            if (thread == 0) barrier_arrive(k_empty(it + i + 1));
            mask(i + 1);
            reference();
            if constexpr (C::kPieces == 2) {
              if (!C::kEarly) exponentials(0, 8);
              wgmma_wait<0>();
              add_values(0, factor);
              issue_values(i, 1);
              exponentials(C::kEarly ? 0 : 8, 16);
            } else {
              exponentials(0, 16);
            }
            wgmma_wait<0>();
            if (thread == 0) barrier_arrive(v_empty(it + i));
            add_values(C::kPieces - 1, factor);
            finish_softmax();
            rescale();
          }
          barrier_wait(v_full(it + tiles - 1), phase(it + tiles - 1));
          clear_tail(tiles - 1);
#pragma unroll
          for (int half = 0; half < C::kPieces; ++half) {
            issue_values(tiles - 1, half);
            wgmma_wait<0>();
            if (half + 1 == C::kPieces && thread == 0) barrier_arrive(v_empty(it + tiles - 1));
            add_values(half, scale);
          }
        } else {
          const auto pass = [&](int from, int to) {
            for (int i = from; i < to; ++i) {
              barrier_wait(k_full(it + i), phase(it + i));
              barrier_wait(v_full(it + i), phase(it + i));
              named_sync(3 + consumer, 128);  // no warp may fall behind by a turn of the stages
              if (thread == 0) {
                barrier_arrive(k_empty(it + i));
                barrier_arrive(v_empty(it + i));
              }
            }
          };
          pass(0, begin);
          for (int i = begin; i < end; ++i) {
            barrier_wait(k_full(it + i), phase(it + i));
            issue_scores(i);
            wgmma_wait<0>();
            pin(s);
            if (thread == 0) barrier_arrive(k_empty(it + i));
            mask(i);
            reference();
            exponentials(0, 16);
            finish_softmax();
            barrier_wait(v_full(it + i), phase(it + i));
            if (i + 1 == tiles) clear_tail(i);
#pragma unroll
            for (int piece = 0; piece < C::kPieces; ++piece) {
              issue_values(i, piece);
              wgmma_wait<0>();
              if (piece + 1 == C::kPieces && thread == 0) barrier_arrive(v_empty(it + i));
              add_values(piece, scale);
            }
          }
          pass(end, tiles);
        }
      }

#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slot = slot0 + 8 * half;
        const bool present = slot >= item.slot_begin && slot < item.slot_end;
        const std::int64_t row = item.row + slot;
        const std::int64_t index = row * p.heads + head;
        if (p.save && present) {
          float* to = p.state_o + index * kD + lane % 4 * 4;
          p.state_l[index * 8 + lane % 4] = l[half];
          if (lane % 4 == 0) p.state_l[index * 8 + 4] = m[half];
#pragma unroll
          for (int n = 0; n < kD / 16; ++n) {
            const float(&left)[4] = o[2 * n / kBlocks][2 * n % kBlocks];
            const float(&right)[4] = o[2 * n / kBlocks][2 * n % kBlocks + 1];
            *reinterpret_cast<float4*>(to + n * 16) =
                float4{left[2 * half], left[2 * half + 1], right[2 * half], right[2 * half + 1]};
          }
        }
        if (p.finish) {
          float total = l[half];
          total = __fadd_rn(total, __shfl_xor_sync(0xffffffffU, total, 1));
          total = __fadd_rn(total, __shfl_xor_sync(0xffffffffU, total, 2));
          const bool empty = m[half] == -INFINITY;
          const float inverse = empty ? 0.0F : __frcp_rn(total);
          if (present && p.lse != nullptr && lane % 4 == 0) {
            p.lse[row * p.lse_token_stride + head * p.lse_head_stride] =
                empty ? -INFINITY : __fmaf_rn(m[half], p.scale, logf(total));
          }
          if (present) {
            __nv_bfloat16* out = p.out + row * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
            for (int n = 0; n < kD / 8; ++n) {
              const float(&x)[4] = o[n / kBlocks][n % kBlocks];
              *reinterpret_cast<std::uint32_t*>(out + n * 8 + lane % 4 * 2) =
                  pack_bf16(__fmul_rn(x[2 * half], inverse), __fmul_rn(x[2 * half + 1], inverse));
            }
          }
        }
      }
      it += tiles;
      barrier_arrive(q_empty(round));
    }
  }
}

}  // namespace ringattn::sm90
