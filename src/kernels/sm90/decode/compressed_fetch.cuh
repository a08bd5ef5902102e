// SPDX-License-Identifier: Apache-2.0
// What the fetching warps of the sliced kernel do over a compressed cache: the copy engine brings codes and numbers,
// box by box; where numbers lie so that it can't, the lanes copy them.
#pragma once

#include "kernels/sm90/decode/compressed_map.cuh"
#include "kernels/sm90/decode/sliced_fetch.cuh"

namespace ringattn::sm90 {

__device__ __forceinline__ void copy_number(std::uint32_t target, const std::byte* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}
// The barrier counts one of its arrivals once this thread's copies have arrived.
__device__ __forceinline__ void arrive_with_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Fetches tiles of K, or this CTA's columns of tiles of V.
template <class C>
class PackedBoxes : public TileBoxes<C> {
 public:
  using Box = typename TileBoxes<C>::Box;

  __device__ __forceinline__ PackedBoxes(const CompressedParams& p, const CompressedMap<C>& map, std::uint32_t rank)
      : TileBoxes<C>(p.step), all_(p), map_(map), rank_(rank), box_log_(p.box_log) {}

  __device__ __forceinline__ void fetch_keys(const SlicedMap<C>&, const Lap<C::kKStages>&, int tile, Box box,
                                             int head) {
    fetch_packed(all_.k, false, tile, box, 0, head, 0);
  }
  __device__ __forceinline__ void fetch_values(const SlicedMap<C>&, const Lap<C::kVStages>&, int tile, Box box, int nth,
                                               int head, std::uint32_t) {
    // A map's elements are of two bytes.
    fetch_packed(all_.v, true, tile, box, nth, head, static_cast<int>(rank_) * all_.v.row_bytes / 2);
  }

 private:
  __device__ __forceinline__ void fetch_packed(const PackedTensor& tensor, bool values, int tile, Box box, int nth,
                                               int head, int first_column) {
    const DecodeParams& p = this->p_;
    const std::uint32_t target = map_.packed(all_, values, lap_.place);
    const std::uint32_t barrier = map_.packed_full(values, lap_.place);
    const bool alone = p.boxes == 1;
    if (alone) {
      box.page = __shfl_sync(0xffffffffU, box.page, nth);
      box.row = __shfl_sync(0xffffffffU, box.row, nth);
    }
    barrier_wait(map_.packed_empty(values, lap_.place), lap_.parity ^ 1U);
    const bool mapped = tensor.numbers_mapped;
    if (this->lane_ == 0) {
      barrier_arrive_expect(barrier, this->rows(tile) * (tensor.row_bytes + (mapped ? kNumberPitch : 0)));
    }
    const std::uint32_t numbers = target + static_cast<std::uint32_t>(C::kKeyTile * tensor.row_bytes);
    if (alone ? this->lane_ == 0 : this->nth_ == nth && box.row >= 0) {
      const int row = alone ? 0 : this->row_;
      load_page_box(target + static_cast<std::uint32_t>(row * tensor.row_bytes), &tensor.map, barrier, first_column,
                    head, box.page, box.row);
      if (mapped) {
        const bool joined = tensor.numbers_step > 0;  // heads are columns
        load_page_box(numbers + static_cast<std::uint32_t>(row * kNumberPitch), &tensor.number_map, barrier,
                      head * tensor.numbers_step / kNumberPitch * (kNumberPitch / 2), joined ? 0 : head, box.page,
                      box.row);
      }
    }
    __syncwarp();
    if (tensor.number_bytes > 0 && !mapped) {
      fetch_numbers(tensor, numbers, tile, box, nth, head);
      arrive_with_copies(barrier);
    }
    lap_.advance(tensor.stages);
  }

  // Those of rows lane, lane + 32, …
  __device__ __forceinline__ void fetch_numbers(const PackedTensor& tensor, std::uint32_t target, int tile,
                                                const Box& box, int nth, int head) const {
    const DecodeParams& p = this->p_;
    const int rows = this->length_ - tile * C::kKeyTile;  // there may be more
    const std::uint32_t to = target + static_cast<std::uint32_t>(this->lane_ * kNumberPitch);
    if (p.boxes == 1) {  // all of a tile's rows lie at one distance from each other
      const std::byte* from = tensor.numbers.at(box.page, box.row + this->lane_, head);
      const std::int64_t step = 32 * tensor.numbers.token_stride;
#pragma unroll
      for (int first = 0; first < C::kKeyTile; first += 32, from += step) {
        if (first + this->lane_ < rows) copy_row(tensor, to, first, from);
      }
      return;
    }
#pragma unroll
    for (int first = 0; first < C::kKeyTile; first += 32) {
      const int row = first + this->lane_;
      const int lane = nth * p.boxes + (row >> box_log_);  // the boxes have 2ⁿ rows
      const int page = __shfl_sync(0xffffffffU, box.page, lane);
      const int box_row = __shfl_sync(0xffffffffU, box.row, lane);
      if (row >= rows) continue;
      copy_row(tensor, to, first, tensor.numbers.at(page, box_row + (row & (p.box_rows - 1)), head));
    }
  }

  // Those of one row, to `to` and `first` rows behind.
  __device__ __forceinline__ static void copy_row(const PackedTensor& tensor, std::uint32_t to, int first,
                                                  const std::byte* from) {
    to += static_cast<std::uint32_t>(first * kNumberPitch);
#pragma unroll 1
    for (int at = 0; at < tensor.number_bytes; at += 4) copy_number(to + static_cast<std::uint32_t>(at), from + at);
  }

  const CompressedParams& all_;
  const CompressedMap<C>& map_;
  const std::uint32_t rank_;
  const int box_log_;
  PackedLap lap_;
};

}  // namespace ringattn::sm90
