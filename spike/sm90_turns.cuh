// SPDX-License-Identifier: Apache-2.0
// The fold on Hopper, second form: two warpgroups of 64 rows in turn, Q Kᵀ of the next tile beside P V of this one,
// also from one item to the next. The tensor cores sum into O over a group of kGroup key tiles at fixed tile indices; a
// full group is added by one fp32 fma an element to a sum that rests outside the registers. One producer warp.
//
// State of a row: m, l as four partials, A (the open group, relative to m), B (the full groups, relative to mb).
#pragma once

#include "sm90_fold.cuh"

namespace ringattn::sm90 {

template <int kGroup_, bool kLazy_ = true, int kBulkOut_ = 0, bool kChain_ = true, int kSeam_ = 1, int kProducer_ = 40,
          bool kAhead_ = false>
struct Turns {
  static constexpr bool kHopper = true;
  static constexpr bool kTurns = true;
  static constexpr bool kInPlace = kGroup_ > 100000;
  static constexpr int kHeadDim = 128;
  static constexpr int kKeyTile = 128;
  static constexpr int kConsumers = 2;
  static constexpr int kQueryTile = 128;
  static constexpr int kStages = 2;
  static constexpr int kGroup = kGroup_;      // key tiles that the tensor cores sum, a power of two
  static constexpr bool kLazy = kLazy_;       // a row's reference moves only when its maximum outgrows it by 2^8
  static constexpr int kBulkOut = kBulkOut_;  // outputs through shared memory; 2: only so (a bench's whole tiles)
  static constexpr bool kChain = kChain_;     // the next item's first Q Kᵀ beside this item's last P V
  static constexpr int kSeam = kSeam_;
  static constexpr int kProducerRegisters = kProducer_;
  static constexpr int kConsumerRegisters = kProducer_ > 32 ? 232 : 240;
  static constexpr bool kAhead = kAhead_;  // the producer reads an item one item ahead
  static constexpr int kThreads = 384;
  static constexpr int kPanelBytes = 128 * 128;
  static constexpr int kTileBytes = 2 * kPanelBytes;
  static constexpr int kQueryPanelBytes = kQueryTile * 128;
  static constexpr int kQueryBytes = 2 * kQueryPanelBytes;
  static constexpr int kOutOffset = 2 * kQueryBytes + kTileBytes * 2 * kStages;
  static constexpr int kBarriersOffset = kOutOffset + (kBulkOut ? kQueryBytes : 0);
  static constexpr int kSharedBytes = 1024 + kBarriersOffset + 8 * (4 + 4 * kStages);
  static constexpr int kScratchFloats = 16 * 128 * 4;  // of a warpgroup: B in 16 pieces of four, and mb
};

__device__ __forceinline__ void store_box(const CUtensorMap* map, std::uint32_t source, int column, int head, int row) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(source), "r"(column), "r"(head), "r"(row)
               : "memory");
}
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                               std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

template <class C, bool kState>
__global__ void __launch_bounds__(C::kThreads, 1) turns_kernel(const __grid_constant__ Params params) {
  constexpr int kD = C::kHeadDim;
  const sm80::Params& p = params.base;
  const bool resume = kState && p.resume, save = kState && p.save, finish = !kState || p.finish;
  extern __shared__ unsigned char shared[];
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023U;
  const auto q_tile = [&](int round) { return base + static_cast<std::uint32_t>(C::kQueryBytes * (round % 2)); };
  const auto k_tile = [&](int i) {
    return base + static_cast<std::uint32_t>(2 * C::kQueryBytes + C::kTileBytes * 2 * (i % C::kStages));
  };
  const auto v_tile = [&](int i) { return k_tile(i) + static_cast<std::uint32_t>(C::kTileBytes); };
  const std::uint32_t barriers = base + C::kBarriersOffset;
  const auto q_full = [&](int round) { return barriers + 8 * static_cast<std::uint32_t>(round % 2); };
  const auto q_empty = [&](int round) { return barriers + 8 * static_cast<std::uint32_t>(2 + round % 2); };
  const auto stage_barrier = [&](int kind, int i) {
    return barriers + 8 * static_cast<std::uint32_t>(4 + kind * C::kStages + i % C::kStages);
  };
  const auto k_full = [&](int i) { return stage_barrier(0, i); };
  const auto k_empty = [&](int i) { return stage_barrier(1, i); };
  const auto v_full = [&](int i) { return stage_barrier(2, i); };
  const auto v_empty = [&](int i) { return stage_barrier(3, i); };
  const auto q_phase = [](int round) { return static_cast<std::uint32_t>(round / 2) & 1U; };
  const auto phase = [](int i) { return static_cast<std::uint32_t>(i / C::kStages) & 1U; };

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
  __shared__ int heads[2];  // −1: no item, the end
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
      // K of a tile is asked for before V of the tile before it.
      int it = 0;
      Tile waiting{};  // whose V hasn't been asked for
      int waiting_head = -1;
      const auto copy_values = [&] {
        if (waiting_head < 0) return;
        const int i = it - 1, row = static_cast<int>(waiting.row);
        if (i >= C::kStages) barrier_wait(v_empty(i), phase(i) ^ 1U);
        barrier_expect(v_full(i), C::kTileBytes);
        copy_box(v_tile(i), &params.v[waiting.source], v_full(i), 0, waiting_head, row);
        copy_box(v_tile(i) + C::kPanelBytes, &params.v[waiting.source], v_full(i), 64, waiting_head, row);
        waiting_head = -1;
      };
      const auto read = [&](int round, Work& now, Item& item, Tile& first) {
        now.head = -1;
        item.tiles = 0;
        if (work_of(round) >= work) return;
        now = split(work_of(round));
        item = p.items[now.item];
        if (item.tiles > 0) first = p.tiles[item.table];
      };
      Work now{}, then{};
      Item item{}, later{};
      Tile next{}, later_tile{};
      read(0, now, item, next);
      for (int round = 0;; ++round) {
        if (item.tiles == 0) copy_values();
        if (round >= 2) barrier_wait(q_empty(round), q_phase(round) ^ 1U);
        items[round % 2] = item;
        heads[round % 2] = now.head;
        if (C::kAhead && now.head >= 0) read(round + 1, then, later, later_tile);
        if (item.tiles == 0) {
          barrier_arrive(q_full(round));
          if (now.head < 0) break;
        } else {
          const int kv_head = now.head / p.group, q_row = static_cast<int>(item.row);
          barrier_expect(q_full(round), C::kQueryBytes);
          copy_box(q_tile(round), &params.q, q_full(round), 0, now.head, q_row);
          copy_box(q_tile(round) + C::kQueryPanelBytes, &params.q, q_full(round), 64, now.head, q_row);
          for (int i = 0; i < item.tiles; ++i, ++it) {
            const Tile tile = next;
            if (i + 1 < item.tiles) next = p.tiles[item.table + i + 1];
            const int row = static_cast<int>(tile.row);
            if (it >= C::kStages) barrier_wait(k_empty(it), phase(it) ^ 1U);
            barrier_expect(k_full(it), C::kTileBytes);
            copy_box(k_tile(it), &params.k[tile.source], k_full(it), 0, kv_head, row);
            copy_box(k_tile(it) + C::kPanelBytes, &params.k[tile.source], k_full(it), 64, kv_head, row);
            copy_values();
            waiting = tile;
            waiting_head = kv_head;
          }
        }
        if constexpr (C::kAhead) {
          now = then;
          item = later;
          next = later_tile;
        } else {
          read(round + 1, now, item, next);
        }
      }
    }
    return;
  }

  registers_grow<C::kConsumerRegisters>();
  const int consumer = group - 1;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const int slot0 = consumer * 64 + thread / 32 * 16 + lane / 4;  // and slot0 + 8
  float* scratch = params.scratch + (2 * blockIdx.x + static_cast<unsigned>(consumer)) * C::kScratchFloats + 4 * thread;

  float o[16][4], s[16][4];
  std::uint32_t probability[8][4];
  float m[2], l[2], scale[2] = {1.0F, 1.0F}, m_before[2], l_before[2], shift[2], sum[2], mb[2] = {0.0F, 0.0F};
  int plain_begin = 0, plain_end = 0, whole = 0;

  const auto state_index = [&](const Item& item, int head, int half) {
    return (item.row + slot0 + 8 * half) * p.heads + head;
  };
  const auto present = [&](const Item& item, int half) {
    return slot0 + 8 * half >= item.slot_begin && slot0 + 8 * half < item.slot_end;
  };
  // m and l of a new item, and where its tiles need no mask.
  const auto begin_item = [&](const Item& item, int head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool read = resume && present(item, half);
      const float* from = p.state_l + state_index(item, head, half) * 8;
      m[half] = read ? from[4] : -INFINITY;
      l[half] = read ? from[lane % 4] : 0.0F;
    }
    whole = static_cast<int>(item.key_length / C::kKeyTile - item.first_tile);
    const std::int64_t first_row = item.position + 64 * consumer;
    plain_begin = 0;
    plain_end = whole;
    if (p.mask_right >= 0) {
      const std::int64_t to = first_row + p.mask_right + 1;  // keys that the first row sees end here
      plain_end = min(plain_end, static_cast<int>((to < 0 ? 0 : to) / C::kKeyTile) - item.first_tile);
    }
    if (p.mask_left >= 0) {
      const std::int64_t from = first_row + 63 - p.mask_left;  // keys that the last row sees begin here
      plain_begin = static_cast<int>((from < 0 ? 0 : from + C::kKeyTile - 1) / C::kKeyTile) - item.first_tile;
    }
  };
  // Whether a group of the item's rows was full before this task.
  const auto has_groups = [&](const Item& item) {
    if (!resume) return false;
    const std::int64_t from = p.mask_left < 0 ? 0 : item.position - p.mask_left;
    const int first = static_cast<int>((from < 0 ? 0 : from) / C::kKeyTile);
    int at = item.first_tile;
    if (item.tiles == 0) {
      std::int64_t to = item.key_length;
      if (p.mask_right >= 0) to = min(to, item.position + 127 + p.mask_right + 1);
      at = max(first, static_cast<int>((to < 0 ? 0 : to + C::kKeyTile - 1) / C::kKeyTile));
    }
    return at / C::kGroup > first / C::kGroup;
  };
  const auto load_output = [&](const Item& item, int head, bool groups) {
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0.0F;
    if (resume) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!present(item, half)) continue;
        const float* from = p.state_o + state_index(item, head, half) * kD + lane % 4 * 4;
        const float* from_b = params.state_b + state_index(item, head, half) * kD + lane % 4 * 4;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float4 x = *reinterpret_cast<const float4*>(from + n * 16);
          o[2 * n][2 * half] = x.x;
          o[2 * n][2 * half + 1] = x.y;
          o[2 * n + 1][2 * half] = x.z;
          o[2 * n + 1][2 * half + 1] = x.w;
          if (groups)
            __stcg(reinterpret_cast<float4*>(scratch + (8 * half + n) * 512),
                   *reinterpret_cast<const float4*>(from_b + n * 16));
        }
        if (groups) mb[half] = p.state_l[state_index(item, head, half) * 8 + 5];
      }
    }
  };
  // B ← fma(B, 2^(mb − m), A), into A.
  const auto add_half = [&](const int half, float at) {
    const float to = at == -INFINITY ? 0.0F : at;
    const float factor = exp2_approx(__fmul_rn(__fsub_rn(mb[half], to), p.scale_log2));
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 b = __ldcg(reinterpret_cast<const float4*>(scratch + (8 * half + n) * 512));
      o[2 * n][2 * half] = __fmaf_rn(b.x, factor, o[2 * n][2 * half]);
      o[2 * n][2 * half + 1] = __fmaf_rn(b.y, factor, o[2 * n][2 * half + 1]);
      o[2 * n + 1][2 * half] = __fmaf_rn(b.z, factor, o[2 * n + 1][2 * half]);
      o[2 * n + 1][2 * half + 1] = __fmaf_rn(b.w, factor, o[2 * n + 1][2 * half + 1]);
    }
  };
  const auto add_groups = [&](const float(&at)[2]) {
    add_half(0, at[0]);
    add_half(1, at[1]);
  };
  // The group that ends with this tile goes to B.
  const auto close_group = [&](int tile, bool& groups, const float(&at)[2]) {
    if ((tile + 1) % C::kGroup != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The usual case, a reference that hasn't moved, needs no answer from memory. Which case it is is the row's own
      // affair: red flushes subnormal numbers, fma doesn't.
      if (groups && mb[half] == at[half]) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
          asm volatile(
              "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(scratch + (8 * half + n) * 512),
              "f"(o[2 * n][2 * half]), "f"(o[2 * n][2 * half + 1]), "f"(o[2 * n + 1][2 * half]),
              "f"(o[2 * n + 1][2 * half + 1])
              : "memory");
      } else {
        if (groups) add_half(half, at[half]);
#pragma unroll
        for (int n = 0; n < 8; ++n)
          __stcg(
              reinterpret_cast<float4*>(scratch + (8 * half + n) * 512),
              float4{o[2 * n][2 * half], o[2 * n][2 * half + 1], o[2 * n + 1][2 * half], o[2 * n + 1][2 * half + 1]});
        mb[half] = at[half];
      }
    }
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0.0F;
    groups = true;
  };
  const auto issue_scores = [&](int round, int stage) {
    const std::uint64_t q_descriptor = descriptor(q_tile(round) + static_cast<std::uint32_t>(consumer * 64 * 128));
    const std::uint64_t k_descriptor = descriptor(k_tile(stage));
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      const auto at = [k](int panel) { return static_cast<std::uint64_t>((k / 4) * (panel >> 4) + (k % 4) * 2); };
      wgmma_m64n128k16_ss(s, q_descriptor + at(C::kQueryPanelBytes), k_descriptor + at(C::kPanelBytes), k > 0);
    }
    wgmma_commit();
  };
  const auto issue_values = [&](int stage) {
    const std::uint64_t v_descriptor = descriptor(v_tile(stage), C::kPanelBytes);
    pin(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kKeyTile / 16; ++k)
      wgmma_m64n128k16_rs(o, probability[k], v_descriptor + static_cast<std::uint64_t>(k * (2048 >> 4)), 1);
    wgmma_commit();
  };
  const auto rescale = [&] {
    if (C::kLazy && !__any_sync(0xffffffffU, scale[0] != 1.0F || scale[1] != 1.0F)) return;
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = __fmul_rn(o[n][i], scale[i / 2]);
  };
  const auto mask = [&](const Item& item, int tile) {
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
  const auto clear_tail = [&](const Item& item, int tile, int stage) {
    if (tile < whole) return;
    const int rows = static_cast<int>(item.key_length % C::kKeyTile);
    for (int at = rows * 8 + thread; at < C::kKeyTile * 8; at += 128) {
      const std::uint32_t address = v_tile(stage) + static_cast<std::uint32_t>(at * 16);
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
  const auto reference = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most[4] = {s[0][2 * half], s[0][2 * half + 1], s[1][2 * half], s[1][2 * half + 1]};  // four short chains
#pragma unroll
      for (int n = 2; n < 16; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) most[n % 2 * 2 + i] = fmaxf(most[n % 2 * 2 + i], s[n][2 * half + i]);
      float maximum = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 2));
      float m_new = fmaxf(m[half], maximum);
      if (C::kLazy && __fmul_rn(__fsub_rn(m_new, m[half]), p.scale_log2) <= 8.0F) m_new = m[half];
      const float to = m_new == -INFINITY ? 0.0F : m_new;
      scale[half] = exp2_approx(__fmul_rn(__fsub_rn(m[half], to), p.scale_log2));
      shift[half] = __fmul_rn(-to, p.scale_log2);
      m[half] = m_new;
      sum[half] = 0.0F;
    }
  };
  const auto exponentials = [&] {
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[n][2 * half + i];
          x = exp2_approx(__fmaf_rn(x, p.scale_log2, shift[half]));
          sum[half] = __fadd_rn(sum[half], x);
        }
#pragma unroll
    for (int half = 0; half < 2; ++half) l[half] = __fmaf_rn(l[half], scale[half], sum[half]);
  };
  // ptxas sinks the softmax behind the wait for P V, which it is to run beside, unless a branch needs its result.
  const auto seam = [&] {
    const bool never = l[0] < 0.0F || l[1] < 0.0F;
    if (C::kSeam == 1 && never) asm volatile("trap;");
    if (C::kSeam >= 2 && __any_sync(0xffffffffU, never)) asm volatile("trap;");
  };
  const auto pack = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < 16; ++n)
        probability[n / 2][2 * (n % 2) + half] = pack_bf16(s[n][2 * half], s[n][2 * half + 1]);
  };
  // Saves or finishes an item with m_before and l_before.
  const auto end_item = [&](const Item& item, int head, bool groups) {
    if (save) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!present(item, half)) continue;
        const std::int64_t index = state_index(item, head, half);
        p.state_l[index * 8 + lane % 4] = l_before[half];
        if (lane % 4 == 0) p.state_l[index * 8 + 4] = m_before[half];
        if (groups && lane % 4 == 0) p.state_l[index * 8 + 5] = mb[half];
        float* to = p.state_o + index * kD + lane % 4 * 4;
        float* to_b = params.state_b + index * kD + lane % 4 * 4;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          *reinterpret_cast<float4*>(to + n * 16) =
              float4{o[2 * n][2 * half], o[2 * n][2 * half + 1], o[2 * n + 1][2 * half], o[2 * n + 1][2 * half + 1]};
          if (groups)
            *reinterpret_cast<float4*>(to_b + n * 16) =
                __ldcg(reinterpret_cast<const float4*>(scratch + (8 * half + n) * 512));
        }
      }
    }
    if (!finish) return;
    if (groups) add_groups(m_before);
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = l_before[half];
      total = __fadd_rn(total, __shfl_xor_sync(0xffffffffU, total, 1));
      total = __fadd_rn(total, __shfl_xor_sync(0xffffffffU, total, 2));
      const bool empty = m_before[half] == -INFINITY;
      inverse[half] = empty ? 0.0F : __frcp_rn(total);
      if (present(item, half) && p.lse != nullptr && lane % 4 == 0)
        p.lse[(item.row + slot0 + 8 * half) * p.lse_token_stride + head * p.lse_head_stride] =
            empty ? -INFINITY : __fmaf_rn(m_before[half], p.scale, logf(total));
    }
    const bool all = item.slot_begin <= 64 * consumer && item.slot_end >= 64 * consumer + 64;
    if (C::kBulkOut == 2 || (C::kBulkOut == 1 && all)) {
      const std::uint32_t staging = base + static_cast<std::uint32_t>(C::kOutOffset + consumer * (C::kQueryBytes / 2));
      if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      named_sync(3 + consumer, 128);
      const int row = thread / 32 * 16 + lane % 16;
#pragma unroll
      for (int n = 0; n < 16; n += 2) {
        const auto column = static_cast<std::uint32_t>((n + lane / 16) % 8);
        const std::uint32_t address = staging + static_cast<std::uint32_t>(n / 8 * 64 * 128 + row * 128) +
                                      ((column ^ static_cast<std::uint32_t>(row % 8)) << 4);
        const auto pair = [&](int block, int half) {
          return pack_bf16(__fmul_rn(o[block][2 * half], inverse[half]),
                           __fmul_rn(o[block][2 * half + 1], inverse[half]));
        };
        store_matrices(address, pair(n, 0), pair(n, 1), pair(n + 1, 0), pair(n + 1, 1));
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      named_sync(3 + consumer, 128);
      if (thread == 0) {
        const int to = static_cast<int>(item.row) + 64 * consumer;
        store_box(&params.out, staging, 0, head, to);
        store_box(&params.out, staging + 64 * 128, 64, head, to);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!present(item, half)) continue;
      __nv_bfloat16* out = p.out + (item.row + slot0 + 8 * half) * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
      for (int n = 0; n < 16; ++n)
        *reinterpret_cast<std::uint32_t*>(out + n * 8 + lane % 4 * 2) =
            pack_bf16(__fmul_rn(o[n][2 * half], inverse[half]), __fmul_rn(o[n][2 * half + 1], inverse[half]));
    }
  };
  const auto turn_begin = [&] { named_sync(1 + consumer, 256); };
  const auto turn_end = [&] { named_arrive(2 - consumer, 256); };
  const auto remember = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      m_before[half] = m[half];
      l_before[half] = l[half];
    }
  };

  if (consumer == 1) named_arrive(1, 256);
  int it = 0, round = 0;
  barrier_wait(q_full(0), 0);
  while (heads[round % 2] >= 0) {
    const Item* item = &items[round % 2];
    int head = heads[round % 2];
    bool groups = has_groups(*item);
    begin_item(*item, head);
    load_output(*item, head, groups);
    if (item->tiles > 0) {
      barrier_wait(k_full(it), phase(it));
      turn_begin();
      issue_scores(round, it);
      turn_end();
      wgmma_wait<0>();
      pin(s);
      if (thread == 0) barrier_arrive(k_empty(it));
      mask(*item, 0);
      reference();
      exponentials();
      pack();
      rescale();
      for (;;) {
        int tiles = item->tiles;
        for (int i = 0; i + 1 < tiles; ++i, ++it) {
          barrier_wait(k_full(it + 1), phase(it + 1));
          turn_begin();
          issue_scores(round, it + 1);
          barrier_wait(v_full(it), phase(it));
          issue_values(it);
          turn_end();
          wgmma_wait<1>();
          pin(s);
          if (thread == 0) barrier_arrive(k_empty(it + 1));
          remember();
          mask(*item, i + 1);
          reference();
          exponentials();
          seam();
          wgmma_wait<0>();
          pin(o);
          if (thread == 0) barrier_arrive(v_empty(it));
          close_group(item->first_tile + i, groups, m_before);
          pack();
          rescale();
        }
        const int last = item->first_tile + tiles - 1;
        if (C::kChain) barrier_wait(q_full(round + 1), q_phase(round + 1));
        if (C::kChain && items[(round + 1) % 2].tiles > 0) {
          const Item* next = &items[(round + 1) % 2];
          const int next_head = heads[(round + 1) % 2];
          barrier_wait(k_full(it + 1), phase(it + 1));
          barrier_wait(v_full(it), phase(it));
          clear_tail(*item, tiles - 1, it);
          turn_begin();
          issue_scores(round + 1, it + 1);
          issue_values(it);
          turn_end();
          wgmma_wait<1>();
          pin(s);
          if (thread == 0) barrier_arrive(k_empty(it + 1));
          remember();
          begin_item(*next, next_head);
          mask(*next, 0);
          reference();
          exponentials();
          if (C::kSeam == 3) seam();
          wgmma_wait<0>();
          pin(o);
          if (thread == 0) barrier_arrive(v_empty(it));
          pack();
          ++it;
          close_group(last, groups, m_before);
          end_item(*item, head, groups);
          barrier_arrive(q_empty(round));
          ++round;
          item = next;
          head = next_head;
          groups = has_groups(*item);
          load_output(*item, head, groups);
          rescale();
          continue;
        }
        barrier_wait(v_full(it), phase(it));
        clear_tail(*item, tiles - 1, it);
        issue_values(it);
        wgmma_wait<0>();
        pin(o);
        if (thread == 0) barrier_arrive(v_empty(it));
        ++it;
        remember();
        close_group(last, groups, m_before);
        break;
      }
    } else {
      remember();
    }
    end_item(*item, head, groups);
    barrier_arrive(q_empty(round));
    ++round;
    barrier_wait(q_full(round), q_phase(round));
  }
  if (C::kBulkOut && thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace ringattn::sm90
