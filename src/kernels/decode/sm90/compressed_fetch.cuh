// SPDX-License-Identifier: Apache-2.0
// The producer warps of the sliced kernel over a quantized cache: TMA loads quantized values and qparams, box by box.
// Where TMA can't load the qparams, the lanes copy them.
#pragma once

#include "kernels/common/sm90/threads.cuh"
#include "kernels/decode/sm90/compressed_map.cuh"
#include "kernels/decode/sm90/sliced_fetch.cuh"

namespace ringattn::sm90 {

__device__ __forceinline__ void copy_qparam(std::uint32_t target, const std::byte* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Loads tiles of K or, if kValues, this CTA's columns of tiles of V.
template <class C, bool kValues>
class QuantizedBoxes : public TileBoxes<C> {
 public:
  using Box = typename TileBoxes<C>::Box;

  __device__ __forceinline__ QuantizedBoxes(const CompressedParams& p, const CompressedMap<C>& map, std::uint32_t rank)
      : TileBoxes<C>(p.step),
        tensor_(kValues ? p.v : p.k),
        map_(map),
        box_log_(p.box_log),
        first_column_(kValues ? static_cast<int>(rank) * p.v.row_bytes / 2 : 0),  // a map's elements have two bytes
        stages_(map.quantized_stage(p, kValues, 0)),
        stage_bytes_(static_cast<std::uint32_t>(tensor_.stage_bytes)),
        tile_bytes_(C::kKeyTile * tensor_.row_bytes) {
    if (p.step.boxes == 1) path_ = tensor_.qparams_mapped ? kBoxAndQparams : tensor_.qparam_bytes == 0 ? kBox : kParts;
    keep(path_);
    keep(stage_bytes_);
    keep(tile_bytes_);
  }

  __device__ __forceinline__ void fetch_keys(const ColumnSliceMap<C>&, const PipelineState<C::kKStages>&, int tile,
                                             Box box, int head) {
    fetch_quantized(tile, box, 0, head);
  }
  __device__ __forceinline__ void fetch_values(const ColumnSliceMap<C>&, const PipelineState<C::kVStages>&, int tile,
                                               Box box, int nth, int head, std::uint32_t) {
    fetch_quantized(tile, box, nth, head);
  }

 private:
  // One tile is loaded as one TMA box, as a box of values and one of qparams, or in parts.
  enum Path : int { kBox, kBoxAndQparams, kParts };

  __device__ __forceinline__ void fetch_quantized(int tile, Box box, int nth, int head) {
    const std::uint32_t target = stages_ + pipeline_state_.index * stage_bytes_;
    if (path_ == kParts) {
      fetch_parts(target, tile, this->p_.boxes == 1 ? box_of(box, nth) : box, nth, head);
      pipeline_state_.advance(tensor_.stages);
      return;
    }
    box = box_of(box, nth);
    if (this->lane_ == 0) {  // one lane does everything, since a whole warp takes as long for each part
      const std::uint32_t barrier = map_.quantized_full(kValues, pipeline_state_.index);
      barrier_wait(map_.quantized_empty(kValues, pipeline_state_.index), pipeline_state_.parity ^ 1U);
      barrier_arrive_expect(barrier, tile_bytes_ + (path_ == kBoxAndQparams ? C::kKeyTile * kQparamPitch : 0));
      fetch_quantized_box(target, barrier, 0, box, head);
      if (path_ == kBoxAndQparams) fetch_qparams(target, barrier, 0, box, head);
    }
    pipeline_state_.advance(tensor_.stages);
  }
  // Broadcasts lane `lane`'s box to the warp.
  __device__ __forceinline__ static Box box_of(const Box& box, int lane) {
    return {__shfl_sync(0xffffffffU, box.page, lane), __shfl_sync(0xffffffffU, box.row, lane)};
  }
  __device__ __forceinline__ void fetch_parts(std::uint32_t target, int tile, const Box& box, int nth, int head) const {
    const std::uint32_t barrier = map_.quantized_full(kValues, pipeline_state_.index);
    barrier_wait(map_.quantized_empty(kValues, pipeline_state_.index), pipeline_state_.parity ^ 1U);
    const bool mapped = tensor_.qparams_mapped;
    if (this->lane_ == 0) {
      barrier_arrive_expect(barrier, this->rows(tile) * (tensor_.row_bytes + (mapped ? kQparamPitch : 0)));
    }
    const bool single_box = this->p_.boxes == 1;
    if (single_box ? this->lane_ == 0 : this->nth_ == nth && box.row >= 0) {
      const int row = single_box ? 0 : this->row_;
      fetch_quantized_box(target, barrier, row, box, head);
      if (mapped) fetch_qparams(target, barrier, row, box, head);
    }
    __syncwarp();
    if (tensor_.qparam_bytes > 0 && !mapped) {
      copy_qparams(target + static_cast<std::uint32_t>(tile_bytes_), tile, box, nth, head);
      cp_async_arrive(barrier);
    }
  }

  // One lane calls them: loads a box that starts `row` rows after the tile's first, and its qparams.
  __device__ __forceinline__ void fetch_quantized_box(std::uint32_t target, std::uint32_t barrier, int row,
                                                      const Box& box, int head) const {
    tma_load_page_box(target + static_cast<std::uint32_t>(row * tensor_.row_bytes), &tensor_.map, barrier,
                      first_column_, head, box.page, box.row);
  }
  __device__ __forceinline__ void fetch_qparams(std::uint32_t target, std::uint32_t barrier, int row, const Box& box,
                                                int head) const {
    const bool joined = tensor_.qparams_step > 0;  // heads are columns
    tma_load_page_box(target + static_cast<std::uint32_t>(tile_bytes_ + row * kQparamPitch), &tensor_.qparam_map,
                      barrier, head * tensor_.qparams_step / kQparamPitch * (kQparamPitch / 2), joined ? 0 : head,
                      box.page, box.row);
  }

  // Copies the qparams of rows lane, lane + 32, …
  __device__ __forceinline__ void copy_qparams(std::uint32_t target, int tile, const Box& box, int nth,
                                               int head) const {
    const DecodeParams& p = this->p_;
    const int rows = this->length_ - tile * C::kKeyTile;  // may exceed the tile
    const std::uint32_t to = target + static_cast<std::uint32_t>(this->lane_ * kQparamPitch);
    if (p.boxes == 1) {  // all rows of a tile have the same stride
      const std::byte* from = tensor_.qparams.at(box.page, box.row + this->lane_, head);
      const std::int64_t step = 32 * tensor_.qparams.token_stride;
#pragma unroll
      for (int first = 0; first < C::kKeyTile; first += 32, from += step) {
        if (first + this->lane_ < rows) copy_row(to, first, from);
      }
      return;
    }
#pragma unroll
    for (int first = 0; first < C::kKeyTile; first += 32) {
      const int row = first + this->lane_;
      const int lane = nth * p.boxes + (row >> box_log_);  // boxes have 2ⁿ rows
      const int page = __shfl_sync(0xffffffffU, box.page, lane);
      const int box_row = __shfl_sync(0xffffffffU, box.row, lane);
      if (row >= rows) continue;
      copy_row(to, first, tensor_.qparams.at(page, box_row + (row & (p.box_rows - 1)), head));
    }
  }

  // Copies the qparams of one row to row `first` after `to`.
  __device__ __forceinline__ void copy_row(std::uint32_t to, int first, const std::byte* from) const {
    to += static_cast<std::uint32_t>(first * kQparamPitch);
#pragma unroll 1
    for (int at = 0; at < tensor_.qparam_bytes; at += 4) copy_qparam(to + static_cast<std::uint32_t>(at), from + at);
  }

  const QuantizedTensor& tensor_;
  const CompressedMap<C>& map_;
  const int box_log_;
  const int first_column_;
  const std::uint32_t stages_;  // address of the first stage
  std::uint32_t stage_bytes_;
  int tile_bytes_;  // bytes of a tile's quantized values
  int path_ = kParts;
  RuntimePipelineState pipeline_state_;
};

}  // namespace ringattn::sm90
