// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a CTA of the sliced kernel (sliced.cuh).
//
//   K        [K stages][key_tile rows]  tiles that this CTA scores, and each unit's reference tile
//   V        [V stages][key_tile rows]  this CTA's columns of every tile
//   slots    [slots]                    what one tile's scores come to; the CTA that scores the tile writes it into
//                                       every CTA of the cluster
//   weights  [2][16 rows]               probabilities before rounding, of which sums are made
//   maxima   [2][4 warps][16 rows]      of the scores in a unit's reference tile
//   barriers
//   units    [sequences + 1]            how many units come before each sequence (units.cuh)
#pragma once

#include "kernels/cuda/device/panels.hpp"
#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm90/decode/config.hpp"
#include "kernels/sm90/decode/slots.cuh"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

// A tile's slot. It travels in two parts: the probabilities, 256 bytes a row whose 16-byte chunks are XORed with the
// row; and, as soon as they are known, the numbers: flags, the references of 16 rows, and for each row the four shares
// of Σ p that the fold's threads have.
struct ScoreSlot {
  static constexpr int kRowBytes = 256;
  static constexpr int kNumbers = kSlicedRows * kRowBytes;
  static constexpr int kReferences = kNumbers + 16;
  static constexpr int kSums = kReferences + kSlicedRows * 4;
  static constexpr int kBytes = kSums + kSlicedRows * 16;

  // A flag: the unit must be folded tile by tile.
  static constexpr int kFails = 1;

  std::uint32_t address;

  __device__ std::uint32_t flags() const { return address + kNumbers; }
  __device__ std::uint32_t reference(int row) const {
    return address + kReferences + static_cast<std::uint32_t>(row * 4);
  }
  __device__ std::uint32_t sum(int row, int share) const {
    return address + kSums + static_cast<std::uint32_t>(row * 16 + share * 4);
  }
  // Eight columns of probabilities.
  __device__ std::uint32_t chunk(int row, int chunk) const {
    return address + static_cast<std::uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
  }
  // Of a unit of so many rows, what has to travel.
  static __device__ int probability_bytes(int rows) { return rows * kRowBytes; }
  static __device__ int number_bytes(int rows) { return kSums - kNumbers + rows * 16; }
};

template <class C>
struct SlicedMap {
  static constexpr int kWeightStride = 132;  // floats of a row: threads that write 8 keys of 4 rows meet no bank twice
  static constexpr int kWeightBytes = kSlicedRows * kWeightStride * 4;
  static constexpr int kMaximaBytes = kScoreWarps * kSlicedRows * 4;

  static constexpr int kKOffset = 0;
  static constexpr int kVOffset = kKOffset + C::kKStages * C::kKBytes;
  static constexpr int kSlotOffset = (kVOffset + C::kVStages * C::kVBytes + 1023) / 1024 * 1024;
  static constexpr int kWeightOffset = kSlotOffset + C::kSlots * ScoreSlot::kBytes;
  static constexpr int kMaximaOffset = kWeightOffset + 2 * kWeightBytes;
  static constexpr int kBarrierOffset = kMaximaOffset + 2 * kMaximaBytes;
  static constexpr int kBarriers = 2 * (C::kKStages + C::kVStages) + 3 * C::kSlots;
  static constexpr int kAnyFailedOffset = kBarrierOffset + kBarriers * kBarrierBytes;
  static constexpr int kUnitOffset = kAnyFailedOffset + 8;
  static constexpr int kBytes = kUnitOffset + (kMostDecodeSequences + 1) * 4;
  static_assert(C::kVStages >= 2 && kBytes <= kMostSharedBytes);

  __device__ std::uint32_t k(std::uint32_t stage) const { return at(kKOffset, stage, C::kKBytes); }
  __device__ std::uint32_t v(std::uint32_t stage) const { return at(kVOffset, stage, C::kVBytes); }
  __device__ ScoreSlot slot(std::uint32_t slot) const { return {at(kSlotOffset, slot, ScoreSlot::kBytes)}; }
  // Of tiles in turn.
  __device__ std::uint32_t weights(std::uint32_t turn, int row, int key) const {
    return at(kWeightOffset, turn & 1U, kWeightBytes) + static_cast<std::uint32_t>((row * kWeightStride + key) * 4);
  }
  // Of units in turn.
  __device__ std::uint32_t maximum(std::uint32_t turn, int warp, int row) const {
    return at(kMaximaOffset, turn & 1U, kMaximaBytes) + static_cast<std::uint32_t>((warp * kSlicedRows + row) * 4);
  }
  __device__ std::uint32_t any_failed() const { return at(kAnyFailedOffset, 0, 0); }
  __device__ std::uint32_t units_before(int sequence) const {
    return at(kUnitOffset, static_cast<std::uint32_t>(sequence), 4);
  }
  // Of a stage: it has arrived; who reads it is done with it.
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return at(kBarrierOffset, stage, kBarrierBytes); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const { return k_full(C::kKStages + stage); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return k_full(2 * C::kKStages + stage); }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const { return v_full(C::kVStages + stage); }
  // Of a slot: its probabilities have been written here; its numbers have; all CTAs are done with theirs, which the one
  // that writes it next is told.
  __device__ std::uint32_t slot_full(std::uint32_t slot) const { return v_full(2 * C::kVStages + slot); }
  __device__ std::uint32_t numbers_full(std::uint32_t slot) const { return slot_full(C::kSlots + slot); }
  __device__ std::uint32_t slot_empty(std::uint32_t slot) const { return slot_full(2 * C::kSlots + slot); }

 private:
  // In a cluster an address also says whose memory it is: copies and arrivals would reach the first CTA's else.
  static __device__ std::uint32_t base() {
    if constexpr (C::kSlices > 1) return in_cta(kReservedBytes, rank_in_cluster());
    return kReservedBytes;
  }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return base() + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// A number that goes through a ring of kPlaces again and again: which place, and the parity of its turn.
template <int kPlaces>
struct Turn {
  std::uint32_t place, parity;

  __device__ explicit Turn(std::uint32_t number) : place(number % kPlaces), parity(number / kPlaces & 1U) {}
};

// The tile from which all rows of a unit take their references: the first in which the unit's first row that folds it
// sees a key. Rows for which it is another one make the unit fail.
template <class C>
__device__ __forceinline__ int reference_tile(const DecodeParams& p, const DecodeUnit& unit) {
  const Visibility visibility(p.fold.mask, unit.of.length);
  DecodeRow row = row_of<C>(p, unit, 0);
  if (row.tiles.empty() || row.tiles.end <= unit.begin) row = row_of<C>(p, unit, rows_of(p, unit) - 1);
  const KeyRange keys = visibility.keys(row.position);
  const int tile = keys.empty() ? unit.begin : static_cast<int>(quotient(keys.begin, C::kKeyTile));
  return tile <= unit.begin || tile >= unit.end ? unit.begin : tile;
}

}  // namespace ringattn::sm90
