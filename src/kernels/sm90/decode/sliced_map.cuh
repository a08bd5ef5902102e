// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a CTA of the sliced kernel (sliced.cuh).
//
//   K      [K stages][key_tile rows]   tiles that this CTA scores, and each unit's reference tile
//   V      [V stages][key_tile rows]   this CTA's columns of every tile
//   Q      [16 rows]                   of a unit that is folded tile by tile
//   slots  [slots]                     what one tile's scores come to; the CTA that scores the tile writes it into
//   every
//                                      CTA of the cluster
//   units  [sequences + 1]             how many units come before each sequence (units.cuh)
//   barriers
#pragma once

#include "kernels/cuda/device/panels.hpp"
#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm90/decode/config.hpp"
#include "kernels/sm90/decode/slots.cuh"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

// A tile's slot: for each of 16 rows, what its outputs are multiplied by first, its reference, its four threads' shares
// of Σ p, and its probabilities, 256 bytes whose 16-byte chunks are XORed with the row.
struct ScoreSlot {
  static constexpr int kFlags = 0;
  static constexpr int kFactors = 16;
  static constexpr int kReferences = 80;
  static constexpr int kSums = 144;
  static constexpr int kProbabilities = 400;
  static constexpr int kRowBytes = 256;
  static constexpr int kBytes = kProbabilities + kSlicedRows * kRowBytes;

  // Flags: the unit must be folded tile by tile; the factors are not all 1.
  static constexpr int kFails = 1;
  static constexpr int kRescales = 2;

  std::uint32_t address;

  __device__ std::uint32_t factor(int row) const { return address + kFactors + static_cast<std::uint32_t>(row * 4); }
  __device__ std::uint32_t reference(int row) const {
    return address + kReferences + static_cast<std::uint32_t>(row * 4);
  }
  __device__ std::uint32_t sum(int row, int thread) const {
    return address + kSums + static_cast<std::uint32_t>(row * 16 + thread * 4);
  }
  // Eight columns of probabilities.
  __device__ std::uint32_t chunk(int row, int chunk) const {
    return address + kProbabilities + static_cast<std::uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
  }
  // Of a unit of so many rows, what has to travel.
  static __device__ int bytes(int rows) { return kProbabilities + rows * kRowBytes; }
};

template <class C>
struct SlicedMap {
  static constexpr int kKOffset = 0;
  static constexpr int kVOffset = kKOffset + C::kKStages * C::kKBytes;
  static constexpr int kQOffset = (kVOffset + C::kVStages * C::kVBytes + 1023) / 1024 * 1024;
  static constexpr int kSlotOffset = kQOffset + C::kQBytes;
  static constexpr int kBarrierOffset = kSlotOffset + C::kSlots * ScoreSlot::kBytes;
  static constexpr int kBarriers = 2 * (C::kKStages + C::kVStages + C::kSlots);
  static constexpr int kAnyFailedOffset = kBarrierOffset + kBarriers * kBarrierBytes;
  static constexpr int kUnitOffset = kAnyFailedOffset + 8;
  static constexpr int kBytes = kUnitOffset + (kMostDecodeSequences + 1) * 4;
  static_assert(C::kVStages >= 2 && kBytes <= kMostSharedBytes);

  __device__ std::uint32_t k(std::uint32_t stage) const { return at(kKOffset, stage, C::kKBytes); }
  __device__ std::uint32_t v(std::uint32_t stage) const { return at(kVOffset, stage, C::kVBytes); }
  __device__ std::uint32_t q() const { return at(kQOffset, 0, 0); }
  __device__ ScoreSlot slot(std::uint32_t slot) const { return {at(kSlotOffset, slot, ScoreSlot::kBytes)}; }
  __device__ std::uint32_t any_failed() const { return at(kAnyFailedOffset, 0, 0); }
  __device__ std::uint32_t units_before(int sequence) const {
    return at(kUnitOffset, static_cast<std::uint32_t>(sequence), 4);
  }
  // Of a stage: it has arrived; who reads it is done with it.
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return at(kBarrierOffset, stage, kBarrierBytes); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const { return k_full(C::kKStages + stage); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return k_full(2 * C::kKStages + stage); }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const { return v_full(C::kVStages + stage); }
  // Of a slot: it has been written here; all CTAs are done with theirs, which the one that writes it next is told.
  __device__ std::uint32_t slot_full(std::uint32_t slot) const { return v_full(2 * C::kVStages + slot); }
  __device__ std::uint32_t slot_empty(std::uint32_t slot) const { return slot_full(C::kSlots + slot); }

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

// The tile from which all rows of a unit take their references, and whether there is one: the first in which a row that
// folds the unit sees a key, if it is the same for all such rows.
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
