// SPDX-License-Identifier: Apache-2.0
// The producer warps of the sliced kernel over a quantized cache: TMA loads quantized values and qparams, box by box.
// Where TMA can't load the qparams, the lanes copy them.
#pragma once

#include "kernels/common/sm90/threads.cuh"
#include "kernels/decode/sm90/compressed.hpp"
#include "kernels/decode/sm90/launch.cuh"
#include "kernels/decode/sm90/sliced_fetch.cuh"

namespace ringattn::sm90 {

// The sliced kernel over a quantized cache: its configuration, and its shared memory after that of ColumnSliceMap.
//
//   barriers
//   qparams           [warps with outputs][scales, zero points][key_tile rows]  of a V tile, two bytes each
//   quantized_stage K [K stages]  quantized values of a tile, [key_tile rows], swizzled as elements in rows of the same
//                                 bytes, then 16 bytes of qparams for each row
//   quantized_stage V [V stages]  the same for this CTA's columns
//
// The launch sets the number of stages: 4-bit values take half of the memory of 8-bit ones. There are no tiles of
// elements, since values are dequantized in registers.

inline constexpr int kMaxQuantizedStages = 16;    // stages of K, or of V
inline constexpr int kQuantizedAlignment = 1024;  // the swizzle pattern repeats after 1,024 bytes
inline constexpr int kQparamPitch = 16;           // bytes from row to row

// The kernel for row blocks of 64 rows, which also recomputes failed work tiles.
template <class Element_, AttentionConfig kAttention>
struct CompressedWholeConfig : DecodeConfig<Element_, kAttention> {
  using Params = CompressedParams;
};

// A CTA that is its own cluster scores all tiles, so it has two scoring warpgroups.
template <class Element_, AttentionConfig kAttention, int kSlices_>
struct CompressedConfig : ColumnSliceConfig<Element_, kAttention, kSlices_, kSlices_ == 1 ? 2 : 1> {
  using Plain = ColumnSliceConfig<Element_, kAttention, kSlices_, kSlices_ == 1 ? 2 : 1>;
  using Params = CompressedParams;
  using Whole = CompressedWholeConfig<Element_, kAttention>;
  static constexpr int kKBytes = 0;
  static constexpr int kVBytes = 0;
  static constexpr int kKStages = 1;
  static constexpr int kVStages = 2;
  static_assert(Plain::kKeyTile % (16 * Plain::kScoringWarpgroupWarps) == 0 && Plain::kDim % 64 == 0);
  static_assert(Plain::kDimV == Plain::kDim);
};

template <class C>
struct CompressedMap : ColumnSliceMap<C> {
  static constexpr int kBarrierOffset = (ColumnSliceMap<C>::kBytes + 7) / 8 * 8;
  static constexpr int kQuantizedBarriers = 4 * kMaxQuantizedStages;
  static constexpr int kQparamOffset = kBarrierOffset + kQuantizedBarriers * kBarrierBytes;
  static constexpr int kQparamBytes = 2 * C::kKeyTile * 2;  // bytes for each output warp
  // The stages are aligned, since the reserved bytes are a multiple of the alignment.
  static constexpr int kQuantizedOffset = (kQparamOffset + C::kOutWarps * kQparamBytes + kQuantizedAlignment - 1) /
                                          kQuantizedAlignment * kQuantizedAlignment;
  static constexpr int kQuantizedCapacity = kMaxSharedBytes - kQuantizedOffset;
  static_assert(kReservedBytes % kQuantizedAlignment == 0);

  // `values`: of V. The stages of K come first.
  __device__ __forceinline__ std::uint32_t quantized_stage(const CompressedParams& p, bool values,
                                                           std::uint32_t stage) const {
    return shared_base<C>() + static_cast<std::uint32_t>(kQuantizedOffset) +
           (values ? static_cast<std::uint32_t>(p.k.stages * p.k.stage_bytes) +
                         stage * static_cast<std::uint32_t>(p.v.stage_bytes)
                   : stage * static_cast<std::uint32_t>(p.k.stage_bytes));
  }
  // A tile's scales and zero points, two bytes each, which an output warp reorders for itself.
  __device__ __forceinline__ std::uint32_t qparams(int out_warp) const {
    return shared_base<C>() + static_cast<std::uint32_t>(kQparamOffset + out_warp * kQparamBytes);
  }
  // Barriers of a stage: full (loaded) and empty (released by every reader).
  __device__ __forceinline__ std::uint32_t quantized_full(bool values, std::uint32_t stage) const {
    return shared_base<C>() + static_cast<std::uint32_t>(kBarrierOffset) +
           ((values ? kMaxQuantizedStages : 0U) + stage) * static_cast<std::uint32_t>(kBarrierBytes);
  }
  __device__ __forceinline__ std::uint32_t quantized_empty(bool values, std::uint32_t stage) const {
    return quantized_full(values, 2 * kMaxQuantizedStages + stage);
  }
};

// Offset of 16 bytes of a row in rows of `row_bytes`, a power of 2 up to 128, with TMA's swizzle.
__device__ __forceinline__ std::uint32_t swizzled_chunk(int row_bytes, int row, int chunk) {
  const auto at = static_cast<std::uint32_t>(row * row_bytes + chunk * 16);
  return at ^ ((at >> 7 & static_cast<std::uint32_t>(row_bytes / 16 - 1)) << 4);
}

__device__ __forceinline__ std::uint32_t load_word(std::uint32_t address) {
  std::uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ uint2 load_words(std::uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
  return words;
}

// The scale of 8-bit values whose rows have none.
__device__ __forceinline__ float table_scale(const QuantizedTensor& tensor, int head) {
  return __ldcg(reinterpret_cast<const float*>(tensor.table) + (tensor.scales == ScaleGrain::kHead ? head : 0));
}

// PipelineState of a ring with `stage_count` stages.
struct RuntimePipelineState {
  std::uint32_t index = 0, parity = 0;

  __device__ __forceinline__ void advance(int stage_count) {
    const bool around = index + 1 == static_cast<std::uint32_t>(stage_count);
    index = around ? 0 : index + 1;
    parity ^= around ? 1U : 0U;
  }
};

// One thread calls it, as init_sliced_barriers().
template <class C>
__device__ __forceinline__ void init_quantized_barriers(const CompressedParams& p, const CompressedMap<C>& map) {
  // TMA's arrival, and if lanes copy the qparams, one from each lane of the producer warp.
  const auto arrivals = [](const QuantizedTensor& t) { return 1 + (t.qparam_bytes > 0 && !t.qparams_mapped ? 32 : 0); };
  const int of_k = arrivals(p.k), of_v = arrivals(p.v);
#pragma unroll
  for (std::uint32_t stage = 0; stage < kMaxQuantizedStages; ++stage) {
    barrier_init(map.quantized_full(false, stage), of_k);
    barrier_init(map.quantized_empty(false, stage), C::kScoringWarpgroupWarps);
    barrier_init(map.quantized_full(true, stage), of_v);
    barrier_init(map.quantized_empty(true, stage), C::kOutWarps);
  }
  barrier_init_fence();
}

__device__ __forceinline__ void copy_qparam(std::uint32_t target, const std::byte* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Loads tiles of K or, if kValues, this CTA's columns of tiles of V.
template <class C, bool kValues>
class QuantizedBoxes : public TileBoxes<C> {
 public:
  using Box = typename TileBoxes<C>::Box;

  __device__ __forceinline__ QuantizedBoxes(const CompressedParams& p, const CompressedMap<C>& map, std::uint32_t rank)
      : TileBoxes<C>(p),
        tensor_(kValues ? p.v : p.k),
        map_(map),
        box_log_(p.box_log),
        first_column_(kValues ? static_cast<int>(rank) * p.v.row_bytes / 2 : 0),  // a map's elements have two bytes
        stages_(map.quantized_stage(p, kValues, 0)),
        stage_bytes_(static_cast<std::uint32_t>(tensor_.stage_bytes)),
        tile_bytes_(C::kKeyTile * tensor_.row_bytes) {
    if (p.boxes.per_tile == 1)
      path_ = tensor_.qparams_mapped ? kBoxAndQparams : tensor_.qparam_bytes == 0 ? kBox : kParts;
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
      fetch_parts(target, tile, this->p_.boxes.per_tile == 1 ? box_of(box, nth) : box, nth, head);
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
    const bool single_box = this->p_.boxes.per_tile == 1;
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
    const CompressedParams& p = this->p_;
    const int rows = this->length_ - tile * C::kKeyTile;  // may exceed the tile
    const std::uint32_t to = target + static_cast<std::uint32_t>(this->lane_ * kQparamPitch);
    if (p.boxes.per_tile == 1) {  // all rows of a tile have the same stride
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
      const int lane = nth * p.boxes.per_tile + (row >> box_log_);  // boxes have 2ⁿ rows
      const int page = __shfl_sync(0xffffffffU, box.page, lane);
      const int box_row = __shfl_sync(0xffffffffU, box.row, lane);
      if (row >= rows) continue;
      copy_row(to, first, tensor_.qparams.at(page, box_row + (row & (p.boxes.rows - 1)), head));
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
