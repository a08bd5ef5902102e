// SPDX-License-Identifier: Apache-2.0
// V of a 16-bit cache as the A operand of ColumnOutputs (column_outputs.cuh).
#pragma once

#include "kernels/attention/cuda/attention_state.cuh"
#include "kernels/decode/sm90/value_tail.cuh"

namespace ringattn::sm90 {

// V tiles of 16-bit elements in TMA's layout, for a warp with outputs: it has some of its CTA's columns, in blocks of
// 16, the M of its mma.
template <class C>
class TileColumns {
 private:
  static constexpr int kColumnBlocks = C::kSliceColumns / 16;

 public:
  // warps that share the same columns: 8 query rows each
  static constexpr int kSharing = kColumnBlocks < C::kOutWarps ? 2 : 1;
  static constexpr int kColumnWarps = C::kOutWarps / kSharing;
  static constexpr int kBlocks = kColumnBlocks / kColumnWarps;  // column blocks of a warp
  static constexpr int kAhead = kBlocks == 1 ? 4 : 2;           // k16 steps that are loaded before their mma
  static constexpr bool kScoresAhead = true;                    // the next tile has been scored when a tile's mma begin
  static_assert(kBlocks * kColumnWarps == kColumnBlocks);

  // A fragments of 16 keys.
  struct Fragment {
    std::uint32_t v[kBlocks][4];
  };

  __device__ __forceinline__ explicit TileColumns(const ColumnSliceMap<C>& map)
      : map_(map),
        lane_(thread_of_cta() % 32),
        first_column_((thread_of_cta() / 32 - C::kScoreWarps) % kColumnWarps * kBlocks * 16) {
    const int row = lane_ % 8 + lane_ / 16 * 8;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) v_at_[n] = value_chunk<C>(row, first_column_ / 8 + 2 * n + lane_ / 8 % 2);
  }

  __device__ __forceinline__ void begin(const WorkTileInfo&) {}

  // Whether the next tile has landed, without waiting.
  __device__ __forceinline__ bool landed() const { return barrier_ended(map_.v_full(stage_.index), stage_.parity); }
  // Waits for the next tile, which has `keys` keys.
  __device__ __forceinline__ void await(int keys) const {
    barrier_wait(map_.v_full(stage_.index), stage_.parity);
    if (keys < C::kKeyTile) clear_value_tail<C, 2 * kBlocks>(map_.v(stage_.index), first_column_ / 8, keys, lane_);
  }
  // Makes it the tile that is read from.
  __device__ __forceinline__ void acquire(int) {
    v_tile_ = map_.v(stage_.index);
    stage_.advance();
  }
  // Skips the next tile.
  __device__ __forceinline__ void skip() {
    stage_.advance();
    released_.advance();
  }
  // The barrier at which a warp arrives when it has finished reading the tile before the current one.
  __device__ __forceinline__ std::uint32_t next_released() {
    const std::uint32_t barrier = map_.v_empty(released_.index);
    released_.advance();
    return barrier;
  }

  // Calls with(path): how tiles are loaded and converted.
  template <class With>
  __device__ __forceinline__ static void choose_path(const With& with) {
    with(0);
  }
  // Whether this is the path of the current tile too; else unusual(path) is.
  __device__ __forceinline__ static constexpr bool is_usual(int) { return true; }
  __device__ __forceinline__ static constexpr int unusual(int path) { return path; }
  // Only constants of the instructions differ from step to step.
  __device__ __forceinline__ void fetch(int, Fragment& to, int step) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      cuda::load_matrix_transposed(to.v[n], v_tile_ + v_at_[n] + static_cast<std::uint32_t>(step * 16 * C::kVRowBytes));
    }
  }
  __device__ __forceinline__ static const Fragment& elements(int, const Fragment& fetched) { return fetched; }

  // Whether this warp has the first columns of the slice.
  __device__ __forceinline__ bool has_first() const { return first_column_ == 0; }
  // Four columns of a row, of block n: the mma rows 2s, 2s + 1, 2s + 8 and 2s + 9, where s is lane / 8.
  __device__ __forceinline__ void store_partial(float* outputs, int n, const float4& columns) const {
    __stcg(reinterpret_cast<float4*>(outputs + first_column_ + 16 * n) + lane_ / 8, columns);
  }
  template <class Write>
  __device__ __forceinline__ void finish(const Write& write, int n, const float4& columns) const {
    const int column = first_column_ + 16 * n + lane_ / 8 * 2;
    write(column, columns.x, columns.y);
    write(column + 8, columns.z, columns.w);
  }
  // This thread's columns of block n of a row's state.
  __device__ __forceinline__ float2 restored(const float* outputs, int first, int n) const {
    const int column = first + first_column_ + 16 * n + lane_ / 4;
    return {__ldcg(outputs + cuda::fragment_offset(column)), __ldcg(outputs + cuda::fragment_offset(column + 8))};
  }

 private:
  const ColumnSliceMap<C>& map_;
  const int lane_;
  const int first_column_;                       // this warp's first column in the slice
  std::uint32_t v_at_[kBlocks];                  // offset of this lane's share in a tile
  std::uint32_t v_tile_ = 0;                     // the current tile
  PipelineState<C::kVStages> stage_, released_;  // the next tile to wait for, and the next to release
};

}  // namespace ringattn::sm90
