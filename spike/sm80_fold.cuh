// SPDX-License-Identifier: Apache-2.0
// The fold on tensor cores through mma.sync (sm_80 and later): bf16, state (m, l, O) in and out, any tile → address
// map. One CTA folds the key tiles of one query tile of one head, in ascending order. Every number is a function of the
// row, its keys and the template parameters; the work item only says where things lie and where to stop.
//
// (m, l, O): m is the running maximum of the raw scores, l is kept as the four partial sums of the row's quad of
// threads, O is not normalised. That is what the loop holds, so that is what a saved state holds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ringattn::sm80 {

struct Source {
  const __nv_bfloat16* k;                                                     // [rows, kv_heads, head_dim]
  const __nv_bfloat16* v;                                                     // [rows, kv_heads, head_dim]
  std::int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;  // elements
};

inline constexpr int kMaxSources = 8;

struct Tile {
  std::int32_t source;
  std::int32_t padding;
  std::int64_t row;
};

// The rows of one run that share a canonical query tile, and the key tiles of this task that they fold.
struct Item {
  std::int64_t row;         // q row of slot 0 (of slot_begin, minus slot_begin); slots outside [begin, end) are absent
  std::int64_t position;    // of slot 0, a multiple of the query tile
  std::int64_t key_length;  // of the sequence
  std::int64_t table;       // tiles[table + i] maps key tile first_tile + i
  std::int32_t first_tile;
  std::int32_t tiles;
  std::int32_t slot_begin, slot_end;
};

// Where one head of a key tile lies; strides in bytes.
struct __align__(16) Place {
  const char* k;
  const char* v;
  std::int32_t k_stride, v_stride;
  std::int64_t padding;
};

struct Params {
  const __nv_bfloat16* q;  // [rows, heads, head_dim]
  std::int64_t q_token_stride, q_head_stride;
  __nv_bfloat16* out;  // [rows, heads, head_dim]
  std::int64_t out_token_stride, out_head_stride;
  float* lse;  // [rows, heads]
  std::int64_t lse_token_stride, lse_head_stride;
  const Item* items;
  const Tile* tiles;
  Source sources[kMaxSources];
  float* state_o;                      // [rows, heads, head_dim] in fragment order
  float* state_l;                      // [rows, heads, 8]: l0 l1 l2 l3 m - - -
  std::int64_t mask_left, mask_right;  // −1: unlimited
  int heads, group;                    // query heads, query heads of a kv head
  float scale_log2;                    // softmax_scale · log2(e)
  float scale;
  bool resume, save, finish;
};

template <int kHeadDim_, int kKeyTile_, int kWarps_, int kRowBlocks_, int kStages_, int kMinBlocks_,
          bool kInPlace_ = false, int kColumns_ = 2, bool kSeam_ = true, bool kLate_ = false>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kKeyTile = kKeyTile_;  // keys of a tile
  static constexpr int kWarps = kWarps_;
  static constexpr int kRowBlocks = kRowBlocks_;  // blocks of 16 rows of a warp
  static constexpr int kStages = kStages_;        // tiles of K and V in shared memory
  static constexpr int kMinBlocks = kMinBlocks_;  // CTAs of a multiprocessor, for the register budget
  static constexpr bool kInPlace = kInPlace_;     // accumulate PV straight into O
  static constexpr int kColumns = kColumns_;      // blocks of 16 columns of O that PV works on at a time
  static constexpr bool kSeam = kSeam_;           // see fold_tile
  static constexpr bool kLate = kLate_;           // copies of the next tile are issued after Q Kᵀ, not before
  static constexpr int kQueryTile = 16 * kRowBlocks * kWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTileBytes = 2 * kHeadDim * kKeyTile;
  static constexpr int kPlaces = 64;  // of the tile map that are held resolved: two halves, one in use, one ahead
  static constexpr int kPlacesOffset = 2 * kHeadDim * kQueryTile + 2 * kStages * kTileBytes;
  static constexpr int kSharedBytes = kPlacesOffset + kPlaces * 32;
};

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
// Copies 16 bytes, or writes zeros without reading.
__device__ inline void copy_16(std::uint32_t target, const void* source, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(present ? 16 : 0)
               : "memory");
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ inline void load_matrix(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrix_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                           const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
// As above from zero: the compiler then needs no register for c.
__device__ inline void mma_from_zero(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const float zero[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  mma(d, a, b0, b1, zero);
}
__device__ inline Place load_place(std::uint32_t address) {
  Place p;
  asm volatile("ld.shared.v2.u64 {%0,%1}, [%2];" : "=l"(p.k), "=l"(p.v) : "r"(address) : "memory");
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(p.k_stride), "=r"(p.v_stride) : "r"(address + 16) : "memory");
  return p;
}
__device__ inline void store_place(std::uint32_t address, const Place& p) {
  asm volatile("st.shared.v2.u64 [%0], {%1,%2};" ::"r"(address), "l"(p.k), "l"(p.v) : "memory");
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address + 16), "r"(p.k_stride), "r"(p.v_stride) : "memory");
}
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// (low, high) rounded to nearest even.
__device__ inline std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a [rows, kHeadDim] bf16 tile: the chunk is XORed with the row,
// so that eight rows of one column of chunks lie in different banks.
template <int kHeadDim>
__device__ inline std::uint32_t swizzled(int row, int chunk) {
  return static_cast<std::uint32_t>(row * (2 * kHeadDim) + ((chunk ^ (row & 7)) << 4));
}

// Copies rows [0, kRows) of a tile, `stride` bytes apart; rows outside [begin, end) become zeros.
template <int kHeadDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_tile(std::uint32_t target, const char* source, int stride, int begin, int end) {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kStep = kThreads / kChunks;  // rows of one pass, a multiple of 8: the swizzle is the same in each
  static_assert(kRows % kStep == 0 && kThreads % kChunks == 0 && kStep % 8 == 0);
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int row0 = static_cast<int>(threadIdx.x) / kChunks;
  const std::uint32_t to = target + swizzled<kHeadDim>(row0, chunk);
  const char* from = source + static_cast<std::int64_t>(row0) * stride + chunk * 16;
  const std::int64_t step = static_cast<std::int64_t>(stride) * kStep;
  if (begin == 0 && end == kRows) {
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      copy_16(to + static_cast<std::uint32_t>(i * kStep * 2 * kHeadDim), from, true);
      from += step;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kRows / kStep; ++i) {
      const int row = row0 + i * kStep;
      const bool present = row >= begin && row < end;
      copy_16(to + static_cast<std::uint32_t>(i * kStep * 2 * kHeadDim),
              present ? from : source + static_cast<std::int64_t>(begin) * stride, present);
      from += step;
    }
  }
}

// What a warp holds of its rows.
template <class C>
struct RowState {
  float o[C::kRowBlocks][C::kHeadDim / 8][4];
  float m[C::kRowBlocks][2];
  float l[C::kRowBlocks][2];
};

// The one tile step: (m, l, O) ← fold((m, l, O), tile).
template <class C, class Prefetch>
__device__ __forceinline__ void fold_tile(RowState<C>& state, std::uint32_t q_tile, std::uint32_t k_tile,
                                          std::uint32_t v_tile, const Params& p, bool masked, const Item& item,
                                          int tile, Prefetch&& prefetch) {
  if constexpr (!C::kLate) prefetch();
  constexpr int kD = C::kHeadDim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  // S = Q Kᵀ. Moving 16 columns on flips bits of a swizzled address; moving 16 rows on adds to it.
  float s[C::kRowBlocks][C::kKeyTile / 8][4];
  const std::uint32_t q_address = q_tile + swizzled<kD>(warp * C::kRowBlocks * 16 + lane % 16, lane / 16);
  const std::uint32_t k_address = k_tile + swizzled<kD>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    std::uint32_t a[C::kRowBlocks][4];
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b)
      load_matrix(a[b], (q_address ^ static_cast<std::uint32_t>(k << 5)) + static_cast<std::uint32_t>(b * 32 * kD));
#pragma unroll
    for (int n = 0; n < C::kKeyTile / 16; ++n) {
      std::uint32_t kb[4];
      load_matrix(kb, (k_address ^ static_cast<std::uint32_t>(k << 5)) + static_cast<std::uint32_t>(n * 32 * kD));
#pragma unroll
      for (int b = 0; b < C::kRowBlocks; ++b) {
        if (k == 0) {
          mma_from_zero(s[b][2 * n], a[b], kb[0], kb[1]);
          mma_from_zero(s[b][2 * n + 1], a[b], kb[2], kb[3]);
        } else {
          mma(s[b][2 * n], a[b], kb[0], kb[1], s[b][2 * n]);
          mma(s[b][2 * n + 1], a[b], kb[2], kb[3], s[b][2 * n + 1]);
        }
      }
    }
  }

  if constexpr (C::kLate) prefetch();

  if (masked) {
    const std::int64_t first_key = static_cast<std::int64_t>(item.first_tile + tile) * C::kKeyTile;
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t position = item.position + (warp * C::kRowBlocks + b) * 16 + lane / 4 + 8 * half;
        std::int64_t begin = p.mask_left < 0 ? 0 : position - p.mask_left;
        std::int64_t end = p.mask_right < 0 ? item.key_length : position + p.mask_right + 1;
        if (end > item.key_length) end = item.key_length;
        const std::int64_t from = begin - first_key, to = end - first_key;
        const int low = from > C::kKeyTile ? C::kKeyTile : from < 0 ? 0 : static_cast<int>(from);
        const int high = to > C::kKeyTile ? C::kKeyTile : to < 0 ? 0 : static_cast<int>(to);
#pragma unroll
        for (int n = 0; n < C::kKeyTile / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = n * 8 + lane % 4 * 2 + i;
            if (key < low || key >= high) s[b][n][2 * half + i] = -INFINITY;
          }
      }
  }

  std::uint32_t probability[C::kRowBlocks][C::kKeyTile / 16][4];
  float scale[C::kRowBlocks][2];
#pragma unroll
  for (int b = 0; b < C::kRowBlocks; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float maximum = s[b][0][2 * half];
#pragma unroll
      for (int n = 0; n < C::kKeyTile / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) maximum = fmaxf(maximum, s[b][n][2 * half + i]);
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 2));
      const float m_old = state.m[b][half];
      const float m_new = fmaxf(m_old, maximum);
      const float reference = m_new == -INFINITY ? 0.0F : m_new;  // nothing visible yet: exp2(−∞) = 0 everywhere
      state.m[b][half] = m_new;
      scale[b][half] = exp2_approx(__fmul_rn(__fsub_rn(m_old, reference), p.scale_log2));
      const float shift = __fmul_rn(-reference, p.scale_log2);
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < C::kKeyTile / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[b][n][2 * half + i];
          x = exp2_approx(__fmaf_rn(x, p.scale_log2, shift));
          sum = __fadd_rn(sum, x);
        }
      state.l[b][half] = __fmaf_rn(state.l[b][half], scale[b][half], sum);
#pragma unroll
      for (int n = 0; n < C::kKeyTile / 8; ++n)
        probability[b][n / 2][2 * (n % 2) + half] = pack_bf16(s[b][n][2 * half], s[b][n][2 * half + 1]);
    }

  // Never taken. It ends the basic block: with softmax and PV in one, ptxas (13.0) chains PV's products two at a time.
  if (C::kSeam && p.heads == 0) __trap();

  // O = O · scale + P V
  const std::uint32_t v_address = v_tile + swizzled<kD>(lane % 16, lane / 16);
  if constexpr (C::kInPlace) {
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b)
#pragma unroll
      for (int n = 0; n < kD / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[b][n][i] = __fmul_rn(state.o[b][n][i], scale[b][i / 2]);
#pragma unroll
    for (int k = 0; k < C::kKeyTile / 16; ++k)
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) {
        std::uint32_t vb[4];
        load_matrix_transposed(
            vb, (v_address ^ static_cast<std::uint32_t>(n << 5)) + static_cast<std::uint32_t>(k * 32 * kD));
#pragma unroll
        for (int b = 0; b < C::kRowBlocks; ++b) {
          mma(state.o[b][2 * n], probability[b][k], vb[0], vb[1], state.o[b][2 * n]);
          mma(state.o[b][2 * n + 1], probability[b][k], vb[2], vb[3], state.o[b][2 * n + 1]);
        }
      }
  } else {
    // The tensor cores sum one tile from zero; tiles are added by the fp32 units, rounded to nearest.
    constexpr int kColumns = C::kColumns;  // blocks of 16 columns in flight
#pragma unroll
    for (int n = 0; n < kD / 16; n += kColumns) {
      float acc[kColumns][C::kRowBlocks][2][4];
#pragma unroll
      for (int k = 0; k < C::kKeyTile / 16; ++k)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          std::uint32_t vb[4];
          load_matrix_transposed(
              vb, (v_address ^ static_cast<std::uint32_t>((n + c) << 5)) + static_cast<std::uint32_t>(k * 32 * kD));
#pragma unroll
          for (int b = 0; b < C::kRowBlocks; ++b) {
            if (k == 0) {
              mma_from_zero(acc[c][b][0], probability[b][k], vb[0], vb[1]);
              mma_from_zero(acc[c][b][1], probability[b][k], vb[2], vb[3]);
            } else {
              mma(acc[c][b][0], probability[b][k], vb[0], vb[1], acc[c][b][0]);
              mma(acc[c][b][1], probability[b][k], vb[2], vb[3], acc[c][b][1]);
            }
          }
        }
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int b = 0; b < C::kRowBlocks; ++b)
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& o = state.o[b][2 * (n + c) + h][i];
              o = __fmaf_rn(o, scale[b][i / 2], acc[c][b][h][i]);
            }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) fold_kernel(const __grid_constant__ Params p) {
  constexpr int kD = C::kHeadDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int head = static_cast<int>(blockIdx.x) % p.heads;
  __shared__ Item item;  // not in registers: most of it is wanted at both ends only
  const int kv_head = head / p.group;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  const std::uint32_t q_tile = shared_address(shared);
  const std::uint32_t kv_tiles = q_tile + 2 * kD * C::kQueryTile;

  if (threadIdx.x == 0) item = p.items[static_cast<int>(blockIdx.x) / p.heads];
  __syncthreads();
  const int tiles = item.tiles;
  // Tiles [0, whole) of the item have all their keys.
  const int whole = static_cast<int>(item.key_length / C::kKeyTile - item.first_tile);
  const std::uint32_t places = q_tile + C::kPlacesOffset;
  const auto resolve = [&](int first) {  // map entries [first, first + kPlaces / 2), by the first warp
    const int i = first + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) < C::kPlaces / 2 && i < tiles) {
      const Tile tile = p.tiles[item.table + i];
      const Source& source = p.sources[tile.source];
      store_place(
          places + static_cast<std::uint32_t>(i % C::kPlaces) * 32,
          {reinterpret_cast<const char*>(source.k + tile.row * source.k_token_stride + kv_head * source.k_head_stride),
           reinterpret_cast<const char*>(source.v + tile.row * source.v_token_stride + kv_head * source.v_head_stride),
           static_cast<std::int32_t>(source.k_token_stride * 2), static_cast<std::int32_t>(source.v_token_stride * 2),
           0});
    }
  };
  resolve(0);
  resolve(C::kPlaces / 2);
  __syncthreads();
  const auto load = [&](int i) {
    const Place place = load_place(places + static_cast<std::uint32_t>(i % C::kPlaces) * 32);
    const std::uint32_t target = kv_tiles + static_cast<std::uint32_t>(i % C::kStages) * 2 * C::kTileBytes;
    const int rows = i < whole ? C::kKeyTile : static_cast<int>(item.key_length % C::kKeyTile);
    copy_tile<kD, C::kKeyTile, C::kThreads>(target, place.k, place.k_stride, 0, rows);
    copy_tile<kD, C::kKeyTile, C::kThreads>(target + C::kTileBytes, place.v, place.v_stride, 0, rows);
  };

  if (tiles > 0) {
    copy_tile<kD, C::kQueryTile, C::kThreads>(
        q_tile, reinterpret_cast<const char*>(p.q + item.row * p.q_token_stride + head * p.q_head_stride),
        static_cast<int>(p.q_token_stride * 2), item.slot_begin, item.slot_end);
  }
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (i < tiles) load(i);
    copy_commit();
  }

  RowState<C> state;
#pragma unroll
  for (int b = 0; b < C::kRowBlocks; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = (warp * C::kRowBlocks + b) * 16 + lane / 4 + 8 * half;
      const bool read = p.resume && slot >= item.slot_begin && slot < item.slot_end;
      const std::int64_t index = (item.row + slot) * p.heads + head;
      const float* o = p.state_o + index * kD + lane % 4 * 4;
      state.m[b][half] = read ? p.state_l[index * 8 + 4] : -INFINITY;
      state.l[b][half] = read ? p.state_l[index * 8 + lane % 4] : 0.0F;
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) {
        const float4 x = read ? *reinterpret_cast<const float4*>(o + n * 16) : float4{0.0F, 0.0F, 0.0F, 0.0F};
        state.o[b][2 * n][2 * half] = x.x;
        state.o[b][2 * n][2 * half + 1] = x.y;
        state.o[b][2 * n + 1][2 * half] = x.z;
        state.o[b][2 * n + 1][2 * half + 1] = x.w;
      }
    }

  // Tiles [plain_begin, plain_end) need no masking: every key is there, the last one visible to the first row and the
  // first one to the last row.
  int plain_begin = 0, plain_end = whole;
  if (p.mask_right >= 0) {
    const std::int64_t visible = item.position + p.mask_right + 1;
    plain_end = min(plain_end, static_cast<int>((visible < 0 ? 0 : visible) / C::kKeyTile) - item.first_tile);
  }
  if (p.mask_left >= 0) {
    const std::int64_t hidden = item.position + C::kQueryTile - 1 - p.mask_left;
    plain_begin = static_cast<int>((hidden < 0 ? 0 : hidden + C::kKeyTile - 1) / C::kKeyTile) - item.first_tile;
  }
  for (int i = 0; i < tiles; ++i) {
    copy_wait<C::kStages - 2>();
    __syncthreads();
    const int next = i + C::kStages - 1;
    const std::uint32_t k_tile = kv_tiles + static_cast<std::uint32_t>(i % C::kStages) * 2 * C::kTileBytes;
    fold_tile<C>(state, q_tile, k_tile, k_tile + C::kTileBytes, p, i < plain_begin || i >= plain_end, item, i, [&] {
      if (next < tiles) load(next);
      copy_commit();
      // The half that holds tile i − 1 and those before it is free once everyone is past it.
      if (next % (C::kPlaces / 2) == C::kPlaces / 4 && next > C::kPlaces / 2)
        resolve(next / (C::kPlaces / 2) * (C::kPlaces / 2) + C::kPlaces / 2);
    });
  }

#pragma unroll
  for (int b = 0; b < C::kRowBlocks; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = (warp * C::kRowBlocks + b) * 16 + lane / 4 + 8 * half;
      const bool present = slot >= item.slot_begin && slot < item.slot_end;
      const std::int64_t row = item.row + slot;
      const std::int64_t index = row * p.heads + head;
      if (p.save && present) {
        float* o = p.state_o + index * kD + lane % 4 * 4;
        p.state_l[index * 8 + lane % 4] = state.l[b][half];
        if (lane % 4 == 0) p.state_l[index * 8 + 4] = state.m[b][half];
#pragma unroll
        for (int n = 0; n < kD / 16; ++n) {
          *reinterpret_cast<float4*>(o + n * 16) =
              float4{state.o[b][2 * n][2 * half], state.o[b][2 * n][2 * half + 1], state.o[b][2 * n + 1][2 * half],
                     state.o[b][2 * n + 1][2 * half + 1]};
        }
      }
      if (p.finish) {
        float l = state.l[b][half];
        l = __fadd_rn(l, __shfl_xor_sync(0xffffffffU, l, 1));
        l = __fadd_rn(l, __shfl_xor_sync(0xffffffffU, l, 2));
        const bool empty = state.m[b][half] == -INFINITY;
        const float inverse = empty ? 0.0F : __frcp_rn(l);
        if (present && p.lse != nullptr && lane % 4 == 0) {
          p.lse[row * p.lse_token_stride + head * p.lse_head_stride] =
              empty ? -INFINITY : __fmaf_rn(state.m[b][half], p.scale, logf(l));
        }
        if (present) {
          __nv_bfloat16* out = p.out + row * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
          for (int n = 0; n < kD / 8; ++n) {
            const std::uint32_t pair =
                pack_bf16(__fmul_rn(state.o[b][n][2 * half], inverse), __fmul_rn(state.o[b][n][2 * half + 1], inverse));
            *reinterpret_cast<std::uint32_t*>(out + n * 8 + lane % 4 * 2) = pair;
          }
        }
      }
    }
}

}  // namespace ringattn::sm80
