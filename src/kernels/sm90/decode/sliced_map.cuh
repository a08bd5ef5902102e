// SPDX-License-Identifier: Apache-2.0
// What lies where in the shared memory of a CTA of the sliced kernel (sliced.cuh).
//
//   K        [K stages][key_tile rows]  tiles that this CTA scores, and each unit's reference tile
//   V        [V stages][key_tile rows]  this CTA's columns of every tile
//   slots    [slots]                    a tile's probabilities, and the sums of its rows; the CTA that scores the tile
//                                       writes them into every CTA of the cluster
//   weights  [2][16 rows]               probabilities before rounding, of which the sums are made
//   Q        [16 rows]                  of a unit
//   maxima   [2][4 warps][16 rows]      of the scores in a unit's reference tile
//   refs     [2][16 rows]               references of a unit's rows, and flags
//   ends     [2][16 rows]               references and sums of rows that end, and flags
//   notes    [2]                        what there is to know of a unit
//   barriers
//   units    [sequences + 1]            how many units come before each sequence (units.cuh)
//
// Of two copies, units, tiles or ends take turns.
#pragma once

#include "kernels/cuda/device/panels.hpp"
#include "kernels/cuda/device/tile_copy.cuh"
#include "kernels/sm90/decode/config.hpp"
#include "kernels/sm90/decode/decode_map.cuh"
#include "kernels/sm90/decode/slots.cuh"
#include "kernels/sm90/fold/shared_map.cuh"
#include "kernels/sm90/ptx/cluster.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringattn::sm90 {

// A number that goes through a ring of kPlaces again and again: which place, and the parity of its turn.
template <int kPlaces>
struct Turn {
  std::uint32_t place, parity;

  __device__ explicit Turn(std::uint32_t number) : place(number % kPlaces), parity(number / kPlaces & 1U) {}
};

// The same for a warp that takes every number: nothing is divided.
template <int kPlaces>
struct Lap {
  std::uint32_t place = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    const bool around = place + 1 == kPlaces;
    place = around ? 0 : place + 1;
    parity ^= around ? 1U : 0U;
  }
};

// Where 16 bytes of a row lie in a tile of panels of kTileRows rows of kRowBytes, as the copy engine swizzles them. 16
// rows behind, they lie 16 rows' bytes behind.
template <int kTileRows, int kRowBytes>
__device__ __forceinline__ std::uint32_t tile_chunk(int row, int chunk) {
  constexpr int kChunks = kRowBytes / 16;
  const auto at = static_cast<std::uint32_t>(row * kRowBytes + chunk % kChunks * 16);
  return static_cast<std::uint32_t>(chunk / kChunks * kTileRows * kRowBytes) +
         (at ^ ((at >> 7 & static_cast<std::uint32_t>(kChunks - 1)) << 4));
}

// A tile's slot. Probabilities lie in blocks of 16 keys and 8 rows, rows of 32 bytes, whose two chunks change places in
// every second four rows; so eight rows of a chunk lie in different banks. What a warp has scored, kMine blocks of 16
// keys, is one piece: those of rows 0 … 7 first, so that less is sent where there are no more rows. Behind them flags,
// and for each row the four shares of Σ p that the fold's threads have.
struct ScoreSlot {
  static constexpr int kRowBytes = 32;
  static constexpr int kBlockBytes = 8 * kRowBytes;
  static constexpr int kNumbers = 2 * 8 * kBlockBytes;  // 8 blocks of 16 keys at most
  static constexpr int kBytes = kNumbers + 16 + kSlicedRows * 16;

  // A flag: the unit must be folded tile by tile.
  static constexpr int kFails = 1;

  std::uint32_t address;

  // Where the 16 keys of a block and rows 0 … 7 lie, or 8 … 15 of half 1.
  template <int kMine>
  static constexpr __host__ __device__ std::uint32_t block(int block, int half) {
    return static_cast<std::uint32_t>(((block / kMine * 2 + half) * kMine + block % kMine) * kBlockBytes);
  }
  // Where in a block 8 keys of one of 8 rows lie.
  static __device__ std::uint32_t chunk(int row, int chunk) {
    return static_cast<std::uint32_t>(row * kRowBytes + ((chunk ^ (row >> 2 & 1)) << 4));
  }
  __device__ std::uint32_t flags() const { return address + kNumbers; }
  __device__ std::uint32_t sum(int row, int share) const {
    return flags() + 16 + static_cast<std::uint32_t>(row * 16 + share * 4);
  }
  // Flags and sums.
  static __device__ int number_bytes(int rows) { return 16 + rows * 16; }
};

// What the fetching warp has found out about a unit, as numbers of 4 bytes.
struct UnitNote {
  // A note of which kBegin is kNoMore says that there are no more units.
  static constexpr int kNoMore = -1;
  enum Field {
    kBegin,
    kEnd,
    kLength,
    kSequence,
    kKvHead,
    kBlock,
    kNumber,
    kCacheGroup,
    kLag,
    kList,
    kListed,
    kGap,
    kFirstNumber,
    kBeginGroup,
    kGroups,
    kPosition,
    kRows,       // that the unit has
    kReference,  // the tile of which references are taken
    kFails,      // they can't be
    kCommonBegin,
    kCommonEnd,  // keys that all rows see
    kResumes,    // rows go on from states
    kFields
  };
  // Of 16 rows each.
  enum RowField { kLow, kHigh, kRowBegin, kRowEnd, kRowFields };
  static constexpr int kBytes = (kFields + 3) / 4 * 16 + kRowFields * kSlicedRows * 4;

  std::uint32_t address;

  __device__ std::uint32_t at(Field field) const { return address + static_cast<std::uint32_t>(field * 4); }
  __device__ std::uint32_t at(RowField field, int row) const {
    return address + static_cast<std::uint32_t>((kFields + 3) / 4 * 16 + (field * kSlicedRows + row) * 4);
  }
  __device__ int get(Field field) const { return load_number(at(field)); }
  __device__ int get(RowField field, int row) const { return load_number(at(field, row)); }

  // All of it but where tiles and keys lie in memory.
  __device__ DecodeUnit unit(const DecodeParams& p) const {
    DecodeUnit unit;
    unit.of = {get(kLength), get(kPosition), 0, 0, get(kBeginGroup), get(kGroups), 0, 0, false};
    unit.list = 0;
    unit.sequence = get(kSequence);
    unit.kv_head = get(kKvHead);
    unit.block = get(kBlock);
    unit.number = get(kNumber);
    unit.cache_group = get(kCacheGroup);
    unit.begin = get(kBegin);
    unit.end = get(kEnd);
    unit.first_number = get(kFirstNumber);
    unit.stride = unit_stride(p);
    unit.lag = 0;
    unit.resumes = get(kResumes) != 0;
    return unit;
  }
};

template <class C>
struct SlicedMap {
  static constexpr int kWeightStride = 132;  // floats of a row: threads that write 8 keys of 4 rows meet no bank twice
  static constexpr int kWeightBytes = kSlicedRows * kWeightStride * 4;
  static constexpr int kMaximaBytes = C::kTeamWarps * kSlicedRows * 4;
  static constexpr int kReferenceBytes = kSlicedRows * 4 + 16;
  static constexpr int kEndBytes = kSlicedRows * 8 + 16;

  static constexpr int kKOffset = 0;
  static constexpr int kVOffset = kKOffset + C::kKStages * C::kKBytes;
  static constexpr int kSlotOffset = (kVOffset + C::kVStages * C::kVBytes + 1023) / 1024 * 1024;
  static constexpr int kQOffset = kSlotOffset + C::kSlots * ScoreSlot::kBytes;
  static constexpr int kWeightOffset = kQOffset + kSlicedRows * cuda::padded_row_bytes(C::kDim);
  static constexpr int kMaximaOffset = kWeightOffset + 2 * kWeightBytes;
  static constexpr int kReferenceOffset = kMaximaOffset + 2 * kMaximaBytes;
  static constexpr int kEndOffset = kReferenceOffset + 2 * kReferenceBytes;
  static constexpr int kNoteOffset = kEndOffset + 2 * kEndBytes;
  static constexpr int kBarrierOffset = kNoteOffset + 2 * UnitNote::kBytes;
  static constexpr int kBarriers = 2 * (C::kKStages + C::kVStages) + 3 * C::kSlots + 14;
  static constexpr int kAnyFailedOffset = kBarrierOffset + kBarriers * kBarrierBytes;
  static constexpr int kUnitOffset = kAnyFailedOffset + 8;
  static constexpr int kBytes = kUnitOffset + (kMostDecodeSequences + 1) * 4;
  static_assert(C::kVStages >= 2 && kBytes <= kMostSharedBytes);

  __device__ std::uint32_t k(std::uint32_t stage) const { return at(kKOffset, stage, C::kKBytes); }
  __device__ std::uint32_t v(std::uint32_t stage) const { return at(kVOffset, stage, C::kVBytes); }
  __device__ ScoreSlot slot(std::uint32_t slot) const { return {at(kSlotOffset, slot, ScoreSlot::kBytes)}; }
  // 8 columns of a row of Q: 16-byte chunks of a row, whose lowest three bits of the number are XORed with the row.
  __device__ std::uint32_t q(int row, int chunk) const {
    return at(kQOffset, 0, 0) +
           static_cast<std::uint32_t>(row * cuda::padded_row_bytes(C::kDim) + ((chunk ^ (row & 7)) << 4));
  }
  __device__ std::uint32_t weights(std::uint32_t turn, int row, int key) const {
    return at(kWeightOffset, turn & 1U, kWeightBytes) + static_cast<std::uint32_t>((row * kWeightStride + key) * 4);
  }
  // So many rows and keys further on.
  static constexpr __host__ __device__ std::uint32_t weights_behind(int rows, int keys) {
    return static_cast<std::uint32_t>((rows * kWeightStride + keys) * 4);
  }
  __device__ std::uint32_t maximum(std::uint32_t turn, int warp, int row) const {
    return at(kMaximaOffset, turn & 1U, kMaximaBytes) + static_cast<std::uint32_t>((warp * kSlicedRows + row) * 4);
  }
  __device__ std::uint32_t reference(std::uint32_t turn, int row) const {
    return at(kReferenceOffset, turn & 1U, kReferenceBytes) + static_cast<std::uint32_t>(row * 4);
  }
  __device__ std::uint32_t reference_flags(std::uint32_t turn) const { return reference(turn, kSlicedRows); }
  // A reference and a sum.
  __device__ std::uint32_t row_end(std::uint32_t turn, int row) const {
    return at(kEndOffset, turn & 1U, kEndBytes) + static_cast<std::uint32_t>(row * 8);
  }
  __device__ std::uint32_t row_end_flags(std::uint32_t turn) const { return row_end(turn, kSlicedRows); }
  __device__ UnitNote note(std::uint32_t turn) const { return {at(kNoteOffset, turn & 1U, UnitNote::kBytes)}; }
  __device__ std::uint32_t any_failed() const { return at(kAnyFailedOffset, 0, 0); }
  __device__ std::uint32_t units_before(int sequence) const {
    return at(kUnitOffset, static_cast<std::uint32_t>(sequence), 4);
  }

  __device__ std::uint32_t barrier(int number) const {
    return k_full(0) + static_cast<std::uint32_t>(number * kBarrierBytes);
  }
  // Of a stage: it has arrived; who reads it is done with it.
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return at(kBarrierOffset, stage, kBarrierBytes); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const { return k_full(C::kKStages + stage); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return k_full(2 * C::kKStages + stage); }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const { return v_full(C::kVStages + stage); }
  // Of a slot: its probabilities have been written here; its sums have; all CTAs are done with theirs, which the one
  // that writes it next is told.
  __device__ std::uint32_t slot_full(std::uint32_t slot) const { return v_full(2 * C::kVStages + slot); }
  __device__ std::uint32_t sums_full(std::uint32_t slot) const { return slot_full(C::kSlots + slot); }
  __device__ std::uint32_t slot_empty(std::uint32_t slot) const { return slot_full(2 * C::kSlots + slot); }
  // Of things in turn: they are written; they have been read.
  __device__ std::uint32_t weights_full(std::uint32_t turn) const { return in_turn(0, turn); }
  __device__ std::uint32_t weights_empty(std::uint32_t turn) const { return in_turn(1, turn); }
  __device__ std::uint32_t note_full(std::uint32_t turn) const { return in_turn(2, turn); }
  __device__ std::uint32_t note_empty(std::uint32_t turn) const { return in_turn(3, turn); }
  __device__ std::uint32_t ends_full(std::uint32_t turn) const { return in_turn(4, turn); }
  __device__ std::uint32_t ends_empty(std::uint32_t turn) const { return in_turn(5, turn); }
  __device__ std::uint32_t references_full(std::uint32_t turn) const { return in_turn(6, turn); }

 private:
  __device__ std::uint32_t in_turn(std::uint32_t which, std::uint32_t turn) const {
    return slot_full(3 * C::kSlots + 2 * which + (turn & 1U));
  }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return shared_base<C>() + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// `kReleases`: what this thread has written to shared memory before is seen by those that have waited.
template <class C, bool kReleases>
__device__ __forceinline__ void arrive_in_cluster() {
  if constexpr (C::kSlices > 1) {
    __syncwarp();
    cluster_arrive<kReleases>();
  }
}
template <class C>
__device__ __forceinline__ void wait_for_cluster() {
  if constexpr (C::kSlices > 1) {
    __syncwarp();
    cluster_wait();
  }
}

// The units of a CTA's cluster: first, first + step, …
struct SlicedWork {
  int first, step;
};
template <class C>
__device__ __forceinline__ SlicedWork work_of() {
  return {static_cast<int>(blockIdx.x) / C::kSlices, static_cast<int>(gridDim.x) / C::kSlices};
}

// By a warp: bytes of this CTA's shared memory go to the same place of the cluster's other CTAs, and count there at a
// barrier as one arrival.
template <class C>
__device__ __forceinline__ void send_to_others(std::uint32_t rank, std::uint32_t from, int bytes,
                                               std::uint32_t barrier) {
  const auto to = static_cast<std::uint32_t>(thread_of_cta() % 32);
  if (to < C::kSlices && to != rank) send_bytes(in_cta(from, to), from, bytes, in_cta(barrier, to));
}
// The arrival alone.
template <class C>
__device__ __forceinline__ void arrive_at_others(std::uint32_t rank, std::uint32_t barrier) {
  const auto to = static_cast<std::uint32_t>(thread_of_cta() % 32);
  if (to < C::kSlices && to != rank) barrier_arrive_at(in_cta(barrier, to));
}

// For `readers` warps that have read the slot of tile `number`, by the thread that `says` so: the CTA that has written
// it is told.
template <class C>
__device__ __forceinline__ void slot_is_read(bool says, const SlicedMap<C>& map, std::uint32_t number, int readers) {
  const std::uint32_t barrier = map.slot_empty(Turn<C::kSlots>(number).place);
  if constexpr (C::kSlices > 1) {
    barrier_arrive_at_if(says, in_cta(barrier, number & (C::kSlices - 1U)), readers);
  } else {
    barrier_arrive_if(says, barrier, readers);
  }
}
// By one thread of a warp that has read it.
template <class C>
__device__ __forceinline__ void slot_is_read(const SlicedMap<C>& map, std::uint32_t number) {
  const std::uint32_t barrier = map.slot_empty(Turn<C::kSlots>(number).place);
  if constexpr (C::kSlices > 1) {
    barrier_arrive_at(in_cta(barrier, number & (C::kSlices - 1U)));
  } else {
    barrier_arrive(barrier);
  }
}

}  // namespace ringattn::sm90
