// SPDX-License-Identifier: Apache-2.0
// The tile step of attention/sm80/tile_step.cuh for more columns of O than a warp can hold. The warps of a CTA share
// all of its rows, and each holds a column slice of O of every row. For the scores of a tile each warp computes 16 rows
// × 16 keys. Warps exchange maxima, sums and probabilities through shared memory. K and V are loaded in strips, so that
// Q and the strips in use fit into shared memory together.
//
// Barriers (__syncthreads) per tile: one before each strip is read, after all threads' copies of it have completed, and
// one between the maxima and the probabilities:
//   strips of K: scores | maxima | barrier | probabilities, sums | strips of V: outputs
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/sm80/config.hpp"
#include "kernels/attention/sm80/tile_step.cuh"
#include "kernels/common/cuda/tile_copy.cuh"

namespace ringattn::sm80 {

// Loads of strips of KV tiles into shared memory. A strip of K has all keys of the tile and kStripColumns columns, the
// last one possibly fewer. A strip of V has kStripKeys keys and all columns. Both have the same size, so they share the
// pipeline stages: first the strips of K, then those of V.
//
// A `Keys` locates the keys and values of a tile: k_row(tile, row) and v_row(tile, row) return a row's address. For
// quantized rows, prefetch_strip() and copy_strip() are overloaded (decode/sm80/compressed.cuh).

// Address of a row of K or V of one head.
struct RowAddress {
  const char* data;
  bool present;  // false: the sequence has no such key, and nothing is read
  bool aligned;  // to 16 bytes
};

template <class C>
struct Strips {
  static constexpr int kKStrips = (C::kDim + kStripColumns - 1) / kStripColumns;
  static constexpr int kVStrips = C::kKeyTile / kStripKeys;
  static constexpr int kTileStrips = kKStrips + kVStrips;  // per tile
  static constexpr int kBytes = cuda::kTileBytes<kStripKeys, C::kDimV>;

  // Columns of strip `strip` of K.
  static constexpr int columns(int strip) {
    return strip + 1 < kKStrips ? kStripColumns : C::kDim - (kKStrips - 1) * kStripColumns;
  }

  static_assert(cuda::kTileBytes<C::kKeyTile, kStripColumns> == kBytes);
  static_assert(C::kDim % cuda::kPanelColumns == 0 && C::kDimV % kStripColumns == 0);
};

// Called before the first copy_strip(). Each copy_strip() then prefetches the strip after it.
template <class C, class Keys>
__device__ __forceinline__ void prefetch_strip(const Keys&, int, int) {}

// Copies strip `strip` of the tile with all threads. 16 neighbouring threads copy 256 bytes of a row.
template <class C, class Keys>
__device__ __forceinline__ void copy_strip(const Keys& keys, int tile, int strip, std::uint32_t target) {
  using S = Strips<C>;
  constexpr int kThreadsOfRow = kStripColumns / 8;
  static_assert(C::kThreads == kStripKeys * kThreadsOfRow);
  const int row = static_cast<int>(threadIdx.x) / kThreadsOfRow;  // 0 … 15
  const int first = static_cast<int>(threadIdx.x) % kThreadsOfRow;
  if (strip < S::kKStrips) {
    if (first >= S::columns(strip) / 8) return;
#pragma unroll 1
    for (int i = 0; i < C::kKeyTile; i += kStripKeys) {
      const RowAddress from = keys.k_row(tile, i + row);
      cuda::copy_chunk(target + static_cast<std::uint32_t>(first / 8 * cuda::panel_bytes(C::kKeyTile)) +
                           cuda::swizzled(i + row, first % 8),
                       from.data + strip * kStripColumns * 2 + first * 16, from.present, from.aligned);
    }
    return;
  }
  const RowAddress from = keys.v_row(tile, (strip - S::kKStrips) * kStripKeys + row);
#pragma unroll
  for (int chunk = first; chunk < C::kDimV / 8; chunk += kThreadsOfRow) {
    cuda::copy_chunk(
        target + static_cast<std::uint32_t>(chunk / 8 * cuda::panel_bytes(kStripKeys)) + cuda::swizzled(row, chunk % 8),
        from.data + chunk * 16, from.present, from.aligned);
  }
}

// Byte offsets in a CTA's shared memory.
template <class C>
struct ColumnSliceLayout {
  static constexpr int kKeyBlocks = C::kKeyTile / 16;  // warps that divide the scores of a row
  static constexpr int kProbabilities = cuda::kTileBytes<C::kQueryTile, C::kDim>;  // follow Q
  static constexpr int kStages = kProbabilities + cuda::kTileBytes<C::kQueryTile, C::kKeyTile>;
  static constexpr int kMaxima = kStages + C::kStages * Strips<C>::kBytes;  // [kQueryTile, kKeyBlocks]
  static constexpr int kSums = kMaxima + C::kQueryTile * kKeyBlocks * 4;    // [kQueryTile, 4, kKeyBlocks]
  static constexpr int kBytes = kSums + C::kQueryTile * 4 * kKeyBlocks * 4;
};

// Byte offsets of the pipeline stages of the current tile's strips. Strips take the stages in turn. If the number of
// strips is a multiple of the number of stages, a strip has the same stage in every tile. Else the next tile's first
// strip takes the stage after that of this tile's last strip.
template <class C, bool kEven = Strips<C>::kTileStrips % C::kStages == 0>
class StripStages {
 public:
  static constexpr std::uint32_t at(int strip) {
    return static_cast<std::uint32_t>(ColumnSliceLayout<C>::kStages + strip % C::kStages * Strips<C>::kBytes);
  }
  __device__ __forceinline__ void next_tile() {}
};

template <class C>
class StripStages<C, false> {
 public:
  __device__ __forceinline__ StripStages() {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) offsets_[i] = StripStages<C, true>::at(i);
  }
  __device__ __forceinline__ std::uint32_t at(int strip) const { return offsets_[strip % C::kStages]; }
  __device__ __forceinline__ void next_tile() {
    std::uint32_t next[C::kStages];
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) next[i] = offsets_[(i + Strips<C>::kTileStrips) % C::kStages];
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) offsets_[i] = next[i];
  }

 private:
  std::uint32_t offsets_[C::kStages];
};

// `Rows` as in TileStep, `Keys` as above. `shared` is the start of the CTA's shared memory, where Q is.
template <class C, class Rows>
class ColumnSliceStep {
 public:
  using Element = typename C::Element;
  using Layout = ColumnSliceLayout<C>;
  using S = Strips<C>;

  __device__ ColumnSliceStep(const cuda::AttentionParams& p, const Rows& rows, unsigned char* shared)
      : p_(p), rows_(rows), shared_(shared), q_tile_(cuda::shared_address(shared)) {}

  // Starts the copies of a CTA's first tile. Copies of Q may be in flight. They join the first strip's cp.async group.
  template <class Keys>
  __device__ __forceinline__ void start(const StripStages<C>& stages, Keys& keys, int tile) const {
    prefetch_strip<C>(keys, tile, 0);
#pragma unroll
    for (int strip = 0; strip < kStripsInFlight; ++strip) {
      copy_strip<C>(keys, tile, strip, q_tile_ + stages.at(strip));
      cuda::copy_commit();
    }
  }

  // Attends to the tile, and starts the copies of the next tile if `has_next`. first_key() returns the tile's first
  // key, and is called only if the tile is masked.
  template <class Keys, class FirstKey>
  __device__ __forceinline__ void attend(AttentionState<C>& state, StripStages<C>& stages, Keys& keys, int tile,
                                         bool has_next, bool masked, FirstKey&& first_key) const {
    float s[2][4];
#pragma unroll
    for (int strip = 0; strip < S::kKStrips; ++strip) {
      advance(stages, keys, tile, has_next, strip);
      qk_gemm(s, strip, stages.at(strip));
    }
    if (p_.softmax.scaled_first) {
      scale_scores(p_.softmax, s[0]);
      scale_scores(p_.softmax, s[1]);
    }
    if (masked) mask_scores(s, first_key());
    write_maxima(s);
    __syncthreads();
    float scale[C::kRowBlocks][2];
    float shift[2];
    update_offsets(state, scale, shift);
    exponentiate(s, shift);

    float sum[C::kRowBlocks][kWarpColumns<C> / 8][4];
#pragma unroll
    for (int strip = 0; strip < S::kVStrips; ++strip) {
      advance(stages, keys, tile, has_next, S::kKStrips + strip);
      if (strip == 0) add_sums(state, scale);
      pv_gemm(sum, strip, stages.at(S::kKStrips + strip));
    }
    stages.next_tile();
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kWarpColumns<C> / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[b][n][i] = __fmaf_rn(state.o[b][n][i], scale[b][i / 2], sum[b][n][i]);
      }
    }
  }

 private:
  static constexpr int kWarps = C::kThreads / 32;
  static constexpr int kStripsInFlight = C::kStages - 1;  // strips in flight while one is in use
  static_assert(C::kQueryTile == 16 * C::kRowBlocks && kWarps == C::kSlices);
  static_assert(kWarps == C::kRowBlocks * Layout::kKeyBlocks && Layout::kKeyBlocks == 4);
  static_assert(kStripsInFlight >= 1 && kStripsInFlight <= S::kKStrips);
  static_assert(kWarpColumns<C> == cuda::kPanelColumns && C::kKeyTile == cuda::kPanelColumns);
  static_assert(C::kColumnsAtOnce == kWarpColumns<C> / 16);

  using Scores = float[2][4];

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  // The 16 rows and 16 keys whose scores this warp computes.
  static __device__ int row_block() { return warp() / Layout::kKeyBlocks; }
  static __device__ int key_block() { return warp() % Layout::kKeyBlocks; }
  static __device__ int row_of(int block, int half) { return 16 * block + 8 * half + lane() / 4; }

  __device__ float* maxima(int row) const {
    return reinterpret_cast<float*>(shared_ + Layout::kMaxima) + row * Layout::kKeyBlocks;
  }
  __device__ float* sums(int row) const {  // of this thread's index in its quad
    return reinterpret_cast<float*>(shared_ + Layout::kSums) + (row * 4 + lane() % 4) * Layout::kKeyBlocks;
  }

  // Waits for the strip and for all warps to finish the strip before it, then starts the next copies into its stage.
  template <class Keys>
  __device__ __forceinline__ void advance(const StripStages<C>& stages, Keys& keys, int tile, bool has_next,
                                          int strip) const {
    cuda::copy_wait<kStripsInFlight - 1>();
    __syncthreads();
    const int next = strip + kStripsInFlight;
    if (next < S::kTileStrips) {
      copy_strip<C>(keys, tile, next, q_tile_ + stages.at(next));
    } else if (has_next) {
      copy_strip<C>(keys, tile + 1, next - S::kTileStrips, q_tile_ + stages.at(next));
    }
    cuda::copy_commit();
  }

  // `stage` is the strip's offset. It is added last, so that the addresses in all stages share the other terms.
  __device__ __forceinline__ void qk_gemm(Scores& s, int strip, std::uint32_t stage) const {
    const std::uint32_t q_at = q_tile_ + cuda::swizzled(row_block() * 16 + lane() % 16, lane() / 16);
    const std::uint32_t k_at =
        q_tile_ + cuda::swizzled(key_block() * 16 + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
#pragma unroll
    for (int step = 0; step < S::columns(strip) / 16; ++step) {
      std::uint32_t q[4];
      cuda::load_matrix(q, cuda::at_columns<C::kQueryTile>(q_at, strip * (kStripColumns / 16) + step));
      std::uint32_t k[4];
      cuda::load_matrix(k, cuda::at_columns<C::kKeyTile>(k_at, step) + stage);
      cuda::multiply<Element>(s[0], q, k[0], k[1], strip == 0 && step == 0);
      cuda::multiply<Element>(s[1], q, k[2], k[3], strip == 0 && step == 0);
    }
  }

  __device__ __forceinline__ void mask_scores(Scores& s, std::int64_t first_key) const {
    const Visibility visibility(p_.mask, rows_.key_length() - first_key);
    const auto position = rows_.positions(row_of(row_block(), 0), first_key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ColumnRange seen = columns_of(visibility.keys(position(8 * half)), 0, C::kKeyTile);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = key_block() * 16 + n * 8 + lane() % 4 * 2 + i;
          if (key < seen.begin || key >= seen.end) s[n][2 * half + i] = -INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void write_maxima(const Scores& s) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float maximum = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffU, maximum, 2));
      if (lane() % 4 == 0) maxima(row_of(row_block(), half))[key_block()] = maximum;
    }
  }

  // Updates m in every warp for all of its rows. `shift` is that of the rows whose scores this warp computes. fmaxf
  // passes NaN over, but its p is NaN.
  __device__ __forceinline__ void update_offsets(AttentionState<C>& state, float (&scale)[C::kRowBlocks][2],
                                                 float (&shift)[2]) const {
    const float c = p_.softmax.exponent_base2;
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 of = *reinterpret_cast<const float4*>(maxima(row_of(b, half)));
        const float maximum = fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w));
        const float m_old = state.m[b][half];
        const float m_new = fmaxf(m_old, maximum);
        // If m_new is −∞, every score so far is −∞, and exp2(−∞) = 0.
        const float softmax_offset = m_new == -INFINITY ? 0.0F : m_new;
        state.m[b][half] = m_new;
        // The difference is taken first, so that an unchanged maximum scales by exactly 1.
        scale[b][half] = cuda::exp2_approx(__fmul_rn(__fsub_rn(m_old, softmax_offset), c));
        if (b == row_block()) shift[half] = __fmul_rn(-softmax_offset, c);
      }
    }
  }

  // Turns scores into probabilities, and writes these and their partial sums to shared memory.
  __device__ __forceinline__ void exponentiate(Scores& s, const float (&shift)[2]) const {
    const float c = p_.softmax.exponent_base2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(row_block(), half);
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[n][2 * half + i];
          x = cuda::exp2_approx(__fmaf_rn(x, c, shift[half]));
          sum = __fadd_rn(sum, x);
        }
        cuda::store_shared(q_tile_ + static_cast<std::uint32_t>(Layout::kProbabilities) +
                               cuda::swizzled(row, key_block() * 2 + n) + static_cast<std::uint32_t>(lane() % 4 * 4),
                           cuda::MmaTraits<Element>::pack(s[n][2 * half], s[n][2 * half + 1]));
      }
      sums(row)[key_block()] = sum;
    }
  }

  // Updates l in every warp for all of its rows.
  __device__ __forceinline__ void add_sums(AttentionState<C>& state, const float (&scale)[C::kRowBlocks][2]) const {
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 of = *reinterpret_cast<const float4*>(sums(row_of(b, half)));
        const float sum = __fadd_rn(__fadd_rn(of.x, of.y), __fadd_rn(of.z, of.w));
        state.l[b][half] = __fmaf_rn(state.l[b][half], scale[b][half], sum);
      }
    }
  }

  // Accumulates the strip's keys for the warp's columns of all rows.
  __device__ __forceinline__ void pv_gemm(float (&sum)[C::kRowBlocks][kWarpColumns<C> / 8][4], int strip,
                                          std::uint32_t stage) const {
    const std::uint32_t p_at = q_tile_ + cuda::swizzled(lane() % 16, lane() / 16);
    const std::uint32_t v_at = q_tile_ + static_cast<std::uint32_t>(warp() * cuda::panel_bytes(kStripKeys)) +
                               cuda::swizzled(lane() % 16, lane() / 16);
    std::uint32_t p[C::kRowBlocks][4];
#pragma unroll
    for (int b = 0; b < C::kRowBlocks; ++b) {
      cuda::load_matrix(p[b], cuda::at_columns<C::kQueryTile>(p_at, strip) +
                                  static_cast<std::uint32_t>(Layout::kProbabilities + b * 16 * cuda::kPanelRowBytes));
    }
#pragma unroll
    for (int n = 0; n < kWarpColumns<C> / 16; ++n) {
      std::uint32_t v[4];
      cuda::load_matrix_transposed(v, cuda::at_columns<kStripKeys>(v_at, n) + stage);
#pragma unroll
      for (int b = 0; b < C::kRowBlocks; ++b) {
        cuda::multiply<Element>(sum[b][2 * n], p[b], v[0], v[1], strip == 0);
        cuda::multiply<Element>(sum[b][2 * n + 1], p[b], v[2], v[3], strip == 0);
      }
    }
  }

  const cuda::AttentionParams& p_;
  const Rows rows_;
  unsigned char* shared_;
  std::uint32_t q_tile_;
};

}  // namespace ringattn::sm80
