// SPDX-License-Identifier: Apache-2.0
// Values of a plain cache as rows of products (column_outputs.cuh).
#pragma once

#include "kernels/cuda/device/attention_state.cuh"
#include "kernels/sm90/decode/value_tail.cuh"

namespace ringattn::sm90 {

// Tiles of V of elements, as the copy engine brings them, for a warp with outputs: some of its CTA's columns, 16 of
// which are a block of rows of its products.
template <class C>
class TileColumns {
 private:
  static constexpr int kColumnBlocks = C::kSliceColumns / 16;

 public:
  static constexpr int kSharing = kColumnBlocks < C::kOutWarps ? 2 : 1;  // warps of the same columns: of 8 rows each
  static constexpr int kColumnWarps = C::kOutWarps / kSharing;
  static constexpr int kBlocks = kColumnBlocks / kColumnWarps;  // a warp's
  static constexpr int kAhead = kBlocks == 1 ? 4 : 2;           // steps that are fetched in front of their products
  static constexpr bool kScoresAhead = true;  // the next tile has been scored when a tile's products begin
  static_assert(kBlocks * kColumnWarps == kColumnBlocks);

  // Of the products of 16 keys.
  struct Fragment {
    std::uint32_t v[kBlocks][4];
  };

  __device__ __forceinline__ explicit TileColumns(const SlicedMap<C>& map)
      : map_(map),
        lane_(thread_of_cta() % 32),
        first_column_((thread_of_cta() / 32 - C::kScoreWarps) % kColumnWarps * kBlocks * 16) {
    const int row = lane_ % 8 + lane_ / 16 * 8;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) v_at_[n] = value_chunk<C>(row, first_column_ / 8 + 2 * n + lane_ / 8 % 2);
  }

  __device__ __forceinline__ void begin(const WorkTileInfo&) {}

  // Whether the next tile is here, without waiting.
  __device__ __forceinline__ bool here() const { return barrier_ended(map_.v_full(stage_.index), stage_.parity); }
  // Until it is. `keys`: that it has, from its first one on.
  __device__ __forceinline__ void await(int keys) const {
    barrier_wait(map_.v_full(stage_.index), stage_.parity);
    if (keys < C::kKeyTile) clear_value_tail<C, 2 * kBlocks>(map_.v(stage_.index), first_column_ / 8, keys, lane_);
  }
  // Then it is the one that is fetched from.
  __device__ __forceinline__ void take(int) {
    v_tile_ = map_.v(stage_.index);
    stage_.advance();
  }
  // Past the next tile without a look at it.
  __device__ __forceinline__ void skip() {
    stage_.advance();
    released_.advance();
  }
  // Which barrier a warp tells when nothing of the tile taken before the last one is fetched any more.
  __device__ __forceinline__ std::uint32_t next_released() {
    const std::uint32_t barrier = map_.v_empty(released_.index);
    released_.advance();
    return barrier;
  }

  // Calls with(path): how tiles are fetched and become elements.
  template <class With>
  __device__ __forceinline__ static void choose_path(const With& with) {
    with(0);
  }
  // Whether this is the path of the tile taken last, too; else unusual(path) is.
  __device__ __forceinline__ static constexpr bool is_usual(int) { return true; }
  __device__ __forceinline__ static constexpr int unusual(int path) { return path; }
  // All that differs from step to step is a constant of the instructions.
  __device__ __forceinline__ void fetch(int, Fragment& to, int step) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      cuda::load_matrix_transposed(to.v[n], v_tile_ + v_at_[n] + static_cast<std::uint32_t>(step * 16 * C::kVRowBytes));
    }
  }
  __device__ __forceinline__ static const Fragment& elements(int, const Fragment& fetched) { return fetched; }

  // Whether this warp has the first of the slice's columns.
  __device__ __forceinline__ bool has_first() const { return first_column_ == 0; }
  // Four columns of a row, of block n: those of the product's rows 2s, 2s + 1, 2s + 8 and 2s + 9, where s is lane / 8.
  __device__ __forceinline__ void leave(float* outputs, int n, const float4& columns) const {
    __stcg(reinterpret_cast<float4*>(outputs + first_column_ + 16 * n) + lane_ / 8, columns);
  }
  template <class Write>
  __device__ __forceinline__ void finish(const Write& write, int n, const float4& columns) const {
    const int column = first_column_ + 16 * n + lane_ / 8 * 2;
    write(column, columns.x, columns.y);
    write(column + 8, columns.z, columns.w);
  }
  // What a row's state has of this thread's columns of block n.
  __device__ __forceinline__ float2 restored(const float* outputs, int first, int n) const {
    const int column = first + first_column_ + 16 * n + lane_ / 4;
    return {__ldcg(outputs + cuda::fragment_offset(column)), __ldcg(outputs + cuda::fragment_offset(column + 8))};
  }

 private:
  const SlicedMap<C>& map_;
  const int lane_;
  const int first_column_;                       // of the slice, that this warp has
  std::uint32_t v_at_[kBlocks];                  // where this lane's share of a tile begins
  std::uint32_t v_tile_ = 0;                     // that is fetched from
  PipelineState<C::kVStages> stage_, released_;  // of the next tile to await, and to give back
};

}  // namespace ringattn::sm90
