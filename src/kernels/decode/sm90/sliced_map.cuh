// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of the sliced kernel (sliced.cuh): layout.
//
//   K            [K stages][key_tile rows]  tiles that this CTA scores, and each work tile's softmax_offset tile
//   V            [V stages][key_tile rows]  this CTA's columns of every tile
//   score stages [score stages]             a tile's probabilities and the sums of its rows; the CTA that scores the
//                                           tile writes them to every CTA of the cluster
//   Q            [16 rows]                  of a work tile
//   unrounded_p  [2][16 rows]               probabilities before rounding, from which the sums are made
//   maxima       [2][4 warps][16 rows]      of the scores in a work tile's softmax_offset tile
//   offsets      [2][16 rows]               softmax_offsets of a work tile's rows, and flags
//   ends         [2][16 rows]               softmax_offsets and sums of rows that end, and flags
//   infos        [2]                        WorkTileInfo
//   barriers
//   work_tiles   [sequences + 1]            how many work tiles come before each sequence (work_tiles.cuh)
//
// Arrays of two are double buffers for consecutive work tiles, tiles or row ends.
#pragma once

#include "kernels/attention/sm90/shared_map.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/decode/sm90/config.hpp"
#include "kernels/decode/sm90/decode_map.cuh"
#include "kernels/decode/sm90/work_tile_rows.cuh"

namespace ringattn::sm90 {

// Stage and parity of the `number`-th use of a ring of kStages.
template <int kStages>
struct PipelineStateAt {
  std::uint32_t index, parity;

  __device__ explicit PipelineStateAt(std::uint32_t number) : index(number % kStages), parity(number / kStages & 1U) {}
};

// The same for a warp that uses every stage in turn, without a division.
template <int kStages>
struct PipelineState {
  std::uint32_t index = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    const bool around = index + 1 == kStages;
    index = around ? 0 : index + 1;
    parity ^= around ? 1U : 0U;
  }
};

// Offset of 16 bytes of a row in a tile of panels of kTileRows rows of kRowBytes, with TMA's swizzle. The pattern
// repeats every 16 rows.
template <int kTileRows, int kRowBytes>
__device__ __forceinline__ std::uint32_t tile_chunk(int row, int chunk) {
  constexpr int kChunks = kRowBytes / 16;
  const auto at = static_cast<std::uint32_t>(row * kRowBytes + chunk % kChunks * 16);
  return static_cast<std::uint32_t>(chunk / kChunks * kTileRows * kRowBytes) +
         (at ^ ((at >> 7 & static_cast<std::uint32_t>(kChunks - 1)) << 4));
}

// A score stage: one tile's probabilities and sums. Probabilities are in blocks of 16 keys and 8 rows, with rows of 32
// bytes whose two chunks are swapped in every second four rows, so that eight rows of a chunk are in different banks.
// The kMine blocks of 16 keys that a warp scores are contiguous, rows 0 … 7 first, so that less is sent if there are no
// other rows. Then come flags and, for each row, the four shares of Σ p that prefill's quad of threads would have.
struct ScoreStage {
  static constexpr int kRowBytes = 32;
  static constexpr int kBlockBytes = 8 * kRowBytes;
  static constexpr int kProbabilityBytes = 2 * 8 * kBlockBytes;  // at most 8 blocks of 16 keys
  static constexpr int kBytes = kProbabilityBytes + 16 + kColumnSliceRows * 16;

  // Flag: the work tile must be recomputed tile by tile.
  static constexpr int kFails = 1;

  std::uint32_t address;

  // Offset of a block's 16 keys and rows 0 … 7 (half 0) or 8 … 15 (half 1).
  template <int kMine>
  static constexpr __host__ __device__ std::uint32_t block(int block, int half) {
    return static_cast<std::uint32_t>(((block / kMine * 2 + half) * kMine + block % kMine) * kBlockBytes);
  }
  // Offset in a block of 8 keys of one of 8 rows.
  static __device__ std::uint32_t chunk(int row, int chunk) {
    return static_cast<std::uint32_t>(row * kRowBytes + ((chunk ^ (row >> 2 & 1)) << 4));
  }
  __device__ std::uint32_t flags() const { return address + kProbabilityBytes; }
  __device__ std::uint32_t sum(int row, int share) const {
    return flags() + 16 + static_cast<std::uint32_t>(row * 16 + share * 4);
  }
  // Bytes of flags and sums.
  static __device__ int stats_bytes(int rows) { return 16 + rows * 16; }
};

// The K producer warp's description of a work tile, as 32-bit fields for the CTA's other warps.
struct WorkTileInfo {
  // kBegin of an info that ends the work: there are no more work tiles.
  static constexpr int kNoMore = -1;
  enum Field {
    kBegin,
    kEnd,
    kLength,
    kSequence,
    kKvHead,
    kBlock,
    kNumber,
    kCacheSplit,
    kLag,
    kMaskRow,
    kSelected,
    kGap,
    kFirstNumber,
    kBeginSplit,
    kSplits,
    kPosition,
    kRows,        // rows of the work tile
    kOffsetTile,  // the tile from which softmax_offsets are taken
    kFails,       // there is no such tile for all rows
    kCommonBegin,
    kCommonEnd,  // keys that all rows see
    kResumes,    // rows resume from states
    kFields
  };
  // Fields of 16 rows each.
  enum RowField { kLow, kHigh, kRowBegin, kRowEnd, kRowFields };
  static constexpr int kBytes = (kFields + 3) / 4 * 16 + kRowFields * kColumnSliceRows * 4;

  std::uint32_t address;

  __device__ std::uint32_t at(Field field) const { return address + static_cast<std::uint32_t>(field * 4); }
  __device__ std::uint32_t at(RowField field, int row) const {
    return address + static_cast<std::uint32_t>((kFields + 3) / 4 * 16 + (field * kColumnSliceRows + row) * 4);
  }
  __device__ int get(Field field) const { return load_number(at(field)); }
  __device__ int get(RowField field, int row) const { return load_number(at(field, row)); }

  // The work tile, without the fields that locate its tiles and keys in memory.
  __device__ DecodeWorkTile work_tile(const DecodeParams& p) const {
    DecodeWorkTile work_tile;
    work_tile.seq_info = {get(kLength), get(kPosition), 0, 0, get(kBeginSplit), get(kSplits), 0, 0, false};
    work_tile.mask_row = 0;
    work_tile.sequence = get(kSequence);
    work_tile.kv_head = get(kKvHead);
    work_tile.block = get(kBlock);
    work_tile.number = get(kNumber);
    work_tile.cache_split = get(kCacheSplit);
    work_tile.begin = get(kBegin);
    work_tile.end = get(kEnd);
    work_tile.first_number = get(kFirstNumber);
    work_tile.stride = work_tile_stride(p);
    work_tile.lag = 0;
    work_tile.resumes = get(kResumes) != 0;
    return work_tile;
  }
};

template <class C>
struct ColumnSliceMap {
  static constexpr int kUnroundedPStride =
      // floats of a row; with this stride threads that write 8 keys of 4 rows have no bank conflict
      132;
  static constexpr int kUnroundedPBytes = kColumnSliceRows * kUnroundedPStride * 4;
  static constexpr int kMaximaBytes = C::kScoringWarpgroupWarps * kColumnSliceRows * 4;
  static constexpr int kSoftmaxOffsetBytes = kColumnSliceRows * 4 + 16;
  static constexpr int kEndBytes = kColumnSliceRows * 8 + 16;

  static constexpr int kKOffset = 0;
  static constexpr int kVOffset = kKOffset + C::kKStages * C::kKBytes;
  static constexpr int kScoreOffset = (kVOffset + C::kVStages * C::kVBytes + 1023) / 1024 * 1024;
  static constexpr int kQOffset = kScoreOffset + C::kScoreStages * ScoreStage::kBytes;
  static constexpr int kUnroundedPOffset = kQOffset + kColumnSliceRows * cuda::padded_row_bytes(C::kDim);
  static constexpr int kMaximaOffset = kUnroundedPOffset + 2 * kUnroundedPBytes;
  static constexpr int kSoftmaxOffsetsOffset = kMaximaOffset + 2 * kMaximaBytes;
  static constexpr int kEndOffset = kSoftmaxOffsetsOffset + 2 * kSoftmaxOffsetBytes;
  static constexpr int kInfoOffset = kEndOffset + 2 * kEndBytes;
  static constexpr int kBarrierOffset = kInfoOffset + 2 * WorkTileInfo::kBytes;
  static constexpr int kBarriers = 2 * (C::kKStages + C::kVStages) + 3 * C::kScoreStages + 14;
  static constexpr int kAnyFailedOffset = kBarrierOffset + kBarriers * kBarrierBytes;
  static constexpr int kWorkTileOffset = kAnyFailedOffset + 8;
  static constexpr int kBytes = kWorkTileOffset + (kMaxDecodeSequences + 1) * 4;
  static_assert(C::kVStages >= 2 && kBytes <= kMaxSharedBytes);

  __device__ std::uint32_t k(std::uint32_t stage) const { return at(kKOffset, stage, C::kKBytes); }
  __device__ std::uint32_t v(std::uint32_t stage) const { return at(kVOffset, stage, C::kVBytes); }
  __device__ ScoreStage score_stage(std::uint32_t stage) const { return {at(kScoreOffset, stage, ScoreStage::kBytes)}; }
  // 8 columns of a row of Q: the lowest three bits of the 16-byte chunk's number are XORed with the row.
  __device__ std::uint32_t q(int row, int chunk) const {
    return at(kQOffset, 0, 0) +
           static_cast<std::uint32_t>(row * cuda::padded_row_bytes(C::kDim) + ((chunk ^ (row & 7)) << 4));
  }
  __device__ std::uint32_t unrounded_p(std::uint32_t turn, int row, int key) const {
    return at(kUnroundedPOffset, turn & 1U, kUnroundedPBytes) +
           static_cast<std::uint32_t>((row * kUnroundedPStride + key) * 4);
  }
  // Distance of `rows` rows and `keys` keys.
  static constexpr __host__ __device__ std::uint32_t unrounded_p_offset(int rows, int keys) {
    return static_cast<std::uint32_t>((rows * kUnroundedPStride + keys) * 4);
  }
  __device__ std::uint32_t maximum(std::uint32_t turn, int warp, int row) const {
    return at(kMaximaOffset, turn & 1U, kMaximaBytes) + static_cast<std::uint32_t>((warp * kColumnSliceRows + row) * 4);
  }
  __device__ std::uint32_t softmax_offset(std::uint32_t turn, int row) const {
    return at(kSoftmaxOffsetsOffset, turn & 1U, kSoftmaxOffsetBytes) + static_cast<std::uint32_t>(row * 4);
  }
  __device__ std::uint32_t offset_flags(std::uint32_t turn) const { return softmax_offset(turn, kColumnSliceRows); }
  // softmax_offset and sum of a row.
  __device__ std::uint32_t row_end(std::uint32_t turn, int row) const {
    return at(kEndOffset, turn & 1U, kEndBytes) + static_cast<std::uint32_t>(row * 8);
  }
  __device__ std::uint32_t row_end_flags(std::uint32_t turn) const { return row_end(turn, kColumnSliceRows); }
  __device__ WorkTileInfo info(std::uint32_t turn) const { return {at(kInfoOffset, turn & 1U, WorkTileInfo::kBytes)}; }
  __device__ std::uint32_t any_failed() const { return at(kAnyFailedOffset, 0, 0); }
  __device__ std::uint32_t work_tiles_before(int sequence) const {
    return at(kWorkTileOffset, static_cast<std::uint32_t>(sequence), 4);
  }

  __device__ std::uint32_t barrier(int number) const {
    return k_full(0) + static_cast<std::uint32_t>(number * kBarrierBytes);
  }
  // Barriers of K and V stages: full (loaded) and empty (released by every reader).
  __device__ std::uint32_t k_full(std::uint32_t stage) const { return at(kBarrierOffset, stage, kBarrierBytes); }
  __device__ std::uint32_t k_empty(std::uint32_t stage) const { return k_full(C::kKStages + stage); }
  __device__ std::uint32_t v_full(std::uint32_t stage) const { return k_full(2 * C::kKStages + stage); }
  __device__ std::uint32_t v_empty(std::uint32_t stage) const { return v_full(C::kVStages + stage); }
  // Barriers of a score stage: score_full (the probabilities are in this CTA), sums_full (the sums are), score_empty
  // (all CTAs have released theirs; signalled at the CTA that writes the stage next).
  __device__ std::uint32_t score_full(std::uint32_t stage) const { return v_full(2 * C::kVStages + stage); }
  __device__ std::uint32_t sums_full(std::uint32_t stage) const { return score_full(C::kScoreStages + stage); }
  __device__ std::uint32_t score_empty(std::uint32_t stage) const { return score_full(2 * C::kScoreStages + stage); }
  // Barriers of the double buffers: full (written) and empty (read).
  __device__ std::uint32_t unrounded_p_full(std::uint32_t turn) const { return in_turn(0, turn); }
  __device__ std::uint32_t unrounded_p_empty(std::uint32_t turn) const { return in_turn(1, turn); }
  __device__ std::uint32_t info_full(std::uint32_t turn) const { return in_turn(2, turn); }
  __device__ std::uint32_t info_empty(std::uint32_t turn) const { return in_turn(3, turn); }
  __device__ std::uint32_t ends_full(std::uint32_t turn) const { return in_turn(4, turn); }
  __device__ std::uint32_t ends_empty(std::uint32_t turn) const { return in_turn(5, turn); }
  __device__ std::uint32_t softmax_offsets_full(std::uint32_t turn) const { return in_turn(6, turn); }

 private:
  __device__ std::uint32_t in_turn(std::uint32_t which, std::uint32_t turn) const {
    return score_full(3 * C::kScoreStages + 2 * which + (turn & 1U));
  }
  __device__ std::uint32_t at(int offset, std::uint32_t index, int bytes) const {
    return shared_base<C>() + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(bytes);
  }
};

// `kReleases`: this thread's earlier writes to shared memory are visible to threads that have waited.
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

// Work tiles of a CTA's cluster: first, first + step, …
struct ClusterWorkTiles {
  int first, step;
};
template <class C>
__device__ __forceinline__ ClusterWorkTiles cluster_work_tiles() {
  return {static_cast<int>(blockIdx.x) / C::kSlices, static_cast<int>(gridDim.x) / C::kSlices};
}

// A warp calls it: copies bytes of this CTA's shared memory to the same offset in the other CTAs of the cluster, and
// arrives once at each one's barrier.
template <class C>
__device__ __forceinline__ void send_to_others(std::uint32_t rank, std::uint32_t from, int bytes,
                                               std::uint32_t barrier) {
  const auto to = static_cast<std::uint32_t>(thread_of_cta() % 32);
  if (to < C::kSlices && to != rank) dsmem_copy(map_to_cta(from, to), from, bytes, map_to_cta(barrier, to));
}
// Only the arrival.
template <class C>
__device__ __forceinline__ void arrive_at_others(std::uint32_t rank, std::uint32_t barrier) {
  const auto to = static_cast<std::uint32_t>(thread_of_cta() % 32);
  if (to < C::kSlices && to != rank) barrier_arrive_at(map_to_cta(barrier, to));
}

// Releases the score stage of tile `number` for `readers` warps, by the thread where `says` is true. Arrives at the CTA
// that has written it.
template <class C>
__device__ __forceinline__ void release_score_stage(bool says, const ColumnSliceMap<C>& map, std::uint32_t number,
                                                    int readers) {
  const std::uint32_t barrier = map.score_empty(PipelineStateAt<C::kScoreStages>(number).index);
  if constexpr (C::kSlices > 1) {
    barrier_arrive_at_if(says, map_to_cta(barrier, number & (C::kSlices - 1U)), readers);
  } else {
    barrier_arrive_if(says, barrier, readers);
  }
}
// The same by one thread of a warp that has read the stage.
template <class C>
__device__ __forceinline__ void release_score_stage(const ColumnSliceMap<C>& map, std::uint32_t number) {
  const std::uint32_t barrier = map.score_empty(PipelineStateAt<C::kScoreStages>(number).index);
  if constexpr (C::kSlices > 1) {
    barrier_arrive_at(map_to_cta(barrier, number & (C::kSlices - 1U)));
  } else {
    barrier_arrive(barrier);
  }
}

}  // namespace ringattn::sm90
