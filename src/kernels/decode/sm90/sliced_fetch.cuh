// SPDX-License-Identifier: Apache-2.0
// The producer warps of the sliced kernel: one loads K of the tiles that its CTA scores, one its CTA's columns of every
// V tile. The K producer also posts the WorkTileInfos to all other warps.
#pragma once

#include <type_traits>

#include "kernels/attention/sm90/scheduler.cuh"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/cluster.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/decode/sm90/config.hpp"
#include "kernels/decode/sm90/decode.cuh"
#include "kernels/decode/sm90/decode_common.cuh"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

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
//   work_tiles   [sequences + 1]            how many work tiles come before each sequence (decode_common.cuh)
//
// Arrays of two are double buffers for consecutive work tiles, tiles or row ends.

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
  __device__ DecodeWorkTile work_tile(const WorkTileParams& p) const {
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

// Copies of V rows by the lanes of a warp (cp.async), for boxes too small for TMA (config.hpp): those of small pages,
// and of tiles of 80 and 112 keys, whose boxes have 16 rows whatever the page size. The rows land where TMA would put
// them, and the stage's barrier counts the copies, so no lane waits. Readers must use ordinary loads or ldmatrix: the
// copies are not ordered for the async proxy.

// Page runs of a tile: kPageRunRows rows that lie in one page. Lanes look up those of several tiles at a time: lane i
// looks up page run i % kPageRuns of tile i / kPageRuns.
template <class C>
struct TilePageRuns {
  static constexpr int kPageRuns = C::kKeyTile / kPageRunRows;
  static constexpr int kTiles = 32 / kPageRuns;
  static_assert(C::kKeyTile % kPageRunRows == 0);
};

// A warp calls it: waits until the stage is empty, then copies this CTA's columns of tile `nth` of those looked up,
// into panels at `target`. `page_run` is the address of this lane's page run; null: it has no key, and becomes zeros. A
// lane copies 16-byte chunks of some rows of every fourth page run. Eight lanes write 128 contiguous bytes of shared
// memory at a time.
template <class C>
__device__ __forceinline__ void copy_by_lanes(unsigned lane, const std::byte* page_run, std::int64_t token_stride,
                                              int nth, std::uint32_t target, std::uint32_t empty, std::uint32_t parity,
                                              std::uint32_t full) {
  constexpr int kPageRuns = TilePageRuns<C>::kPageRuns;
  constexpr int kRowBytes = C::kVRowBytes;
  constexpr int kChunks = C::kSliceColumns / 8;                               // 16-byte chunks of a row
  constexpr int kRowLanes = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;  // lanes that share a row
  constexpr int kRows = 8 / kRowLanes;  // rows of a page run that are copied at a time
  constexpr int kTurns = (kPageRuns + 3) / 4;
  constexpr int kHalf = kPageRunRows / 2;                  // the swizzle is the same in both halves
  constexpr std::uint32_t kSwizzledBits = kRowBytes - 16;  // address bits that the swizzle changes
  static_assert(kChunks % kRowLanes == 0 && (kRowLanes * 16 == kRowBytes || kRowBytes == kPanelRowBytes));
  const auto first = static_cast<int>(lane / 8);
  const auto row = static_cast<int>(lane % 8 / kRowLanes);
  const auto chunk = static_cast<int>(lane % kRowLanes);
  const std::int64_t offset = row * token_stride + chunk * 16;
  std::uint64_t from[kTurns];
  bool present[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    from[turn] =
        __shfl_sync(0xffffffffU, reinterpret_cast<std::uint64_t>(page_run), nth * kPageRuns + turn * 4 + first);
    present[turn] = from[turn] != 0;
    from[turn] += static_cast<std::uint64_t>(offset);
  }
  barrier_wait(empty, parity);
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (kPageRuns % 4 != 0 && turn * 4 + first >= kPageRuns) continue;
    const auto* source = reinterpret_cast<const std::byte*>(from[turn]);
    std::uint32_t to = target + tile_chunk<C::kKeyTile, kRowBytes>(first * kPageRunRows + row, chunk) +
                       turn * 4 * kPageRunRows * kRowBytes;
#pragma unroll(kChunks > 8 ? 1 : 2)
    for (int half = 0; half < 2; ++half, to += kHalf * kRowBytes) {
#pragma unroll
      for (int i = 0; i < kHalf; i += kRows, source += kRows * token_stride) {
#pragma unroll
        for (int column = 0; column < kChunks; column += kRowLanes) {
          // Rows and chunks after the lane's first one flip bits of its address, or add to it.
          const std::uint32_t delta = tile_chunk<C::kKeyTile, kRowBytes>(i, column);
          cuda::copy_16((to ^ (delta & kSwizzledBits)) + (delta & ~kSwizzledBits), source + column * 16, present[turn]);
        }
      }
    }
  }
  cp_async_arrive(full);
}

// Locates a sequence's tiles. Lanes look up the boxes of several tiles at a time, well ahead of the loads.
template <class C>
class TileBoxes {
 public:
  using Box = PageBox;

  __device__ __forceinline__ explicit TileBoxes(const typename C::Params& p)
      : p_(p),
        lane_(thread_of_cta() % 32),
        at_a_time_(p.boxes.by_per_tile.quotient(32)),
        nth_(p.boxes.by_per_tile.quotient(lane_)) {
    row_ = (lane_ - nth_ * p.boxes.per_tile) * p.boxes.rows;
  }
  __device__ __forceinline__ void begin(const WorkTileInfo& info) {
    sequence_ = info.get(WorkTileInfo::kSequence);
    pages_ = p_.table.pages + sequence_ * p_.table.stride;
    length_ = info.get(WorkTileInfo::kLength);
    end_ = info.get(WorkTileInfo::kEnd);
    lag_ = info.get(WorkTileInfo::kLag);
    mask_row_ = info.get(WorkTileInfo::kMaskRow);
    selected_ = info.get(WorkTileInfo::kSelected);
    gap_ = info.get(WorkTileInfo::kGap);
  }
  __device__ __forceinline__ void begin(const DecodeWorkTile& work_tile) {
    sequence_ = work_tile.sequence;
    pages_ = p_.table.pages + sequence_ * p_.table.stride;
    length_ = work_tile.seq_info.length;
    end_ = work_tile.end;
    lag_ = work_tile.lag;
    mask_row_ = work_tile.mask_row;
    selected_ = work_tile.seq_info.selected;
    gap_ = work_tile.seq_info.gap;
  }

  // Tiles whose boxes are looked up at a time, and this lane's tile among them.
  __device__ int at_a_time() const { return at_a_time_; }
  __device__ int nth() const { return nth_; }
  // This lane's box of a tile, which starts row_ keys after the tile's first.
  __device__ __forceinline__ Box find(int tile) const {
    if (nth_ >= at_a_time_ || tile >= end_ || tile * C::kKeyTile + row_ >= length_) return {0, -1};
    return locate_rows(tile, row_);
  }
  // Whether a tile is one box. Then one lane does everything for the tiles of a work tile, which is faster.
  __device__ bool single_box() const { return p_.boxes.per_tile == 1; }
  // Whether a tile's location must be read from memory: a block table or a block mask.
  __device__ bool needs_lookup() const { return p_.table.pages != nullptr || p_.mask.indices != nullptr; }
  // For that one lane, the box of a tile.
  __device__ __forceinline__ Box find_single(int tile) const {
    return tile >= end_ ? Box{0, -1} : locate_rows(tile, 0);
  }
  __device__ __forceinline__ void load_single_keys(const ColumnSliceMap<C>& map, const PipelineState<C::kKStages>& turn,
                                                   const Box& box, int head) const {
    barrier_wait(map.k_empty(turn.index), turn.parity ^ 1U);
    load_single<C::kDim, kPanelRowBytes>(&p_.cache.k, map.k(turn.index), map.k_full(turn.index), box, head, 0,
                                         p_.cache.k_columns);
  }
  __device__ __forceinline__ void load_single_values(const ColumnSliceMap<C>& map,
                                                     const PipelineState<C::kVStages>& turn, const Box& box, int head,
                                                     std::uint32_t rank) const {
    barrier_wait(map.v_empty(turn.index), turn.parity ^ 1U);
    load_single<C::kSliceColumns, C::kVRowBytes>(&p_.v_slices.map, map.v(turn.index), map.v_full(turn.index), box, head,
                                                 static_cast<int>(rank) * C::kSliceColumns, p_.v_slices.box_columns);
  }
  // Waits for the stage to be empty, then loads the next K tile, or this CTA's columns of the next V tile.
  __device__ __forceinline__ void fetch_keys(const ColumnSliceMap<C>& map, const PipelineState<C::kKStages>& turn,
                                             int tile, Box box, int head) const {
    barrier_wait(map.k_empty(turn.index), turn.parity ^ 1U);
    fetch<C::kDim, kPanelRowBytes>(&p_.cache.k, map.k(turn.index), map.k_full(turn.index), tile, box, 0, head, 0,
                                   p_.cache.k_columns);
  }
  __device__ __forceinline__ void fetch_values(const ColumnSliceMap<C>& map, const PipelineState<C::kVStages>& turn,
                                               int tile, Box box, int nth, int head, std::uint32_t rank) const {
    barrier_wait(map.v_empty(turn.index), turn.parity ^ 1U);
    fetch<C::kSliceColumns, C::kVRowBytes>(&p_.v_slices.map, map.v(turn.index), map.v_full(turn.index), tile, box, nth,
                                           head, static_cast<int>(rank) * C::kSliceColumns, p_.v_slices.box_columns);
  }

  // Whether lanes copy rows of V. Then they look up page runs of TilePageRuns::kTiles tiles at a time: this lane's tile
  // among them, and its page run of a tile.
  __device__ bool by_lanes() const { return p_.v_slices.by_lanes; }
  __device__ int tile_of_page_run() const { return lane_ / TilePageRuns<C>::kPageRuns; }
  __device__ __forceinline__ Box find_page_run(int tile) const {
    const int row = lane_ % TilePageRuns<C>::kPageRuns * kPageRunRows;
    if (tile >= end_ || tile * C::kKeyTile + row >= length_) return {0, -1};
    return locate_rows(tile, row);
  }
  // The address of this CTA's columns of a page run that has been looked up; null if it is in no page of the pool.
  __device__ __forceinline__ const std::byte* page_run_at(const Box& page_run, int head, std::uint32_t rank) const {
    const bool found = page_run.row >= 0 &&
                       static_cast<std::uint32_t>(page_run.page) < static_cast<std::uint32_t>(p_.v_slices.pool_pages);
    return found ? p_.v_slices.rows.at(page_run.page, page_run.row, head) + rank * (2 * C::kSliceColumns) : nullptr;
  }
  __device__ __forceinline__ void copy_values(const ColumnSliceMap<C>& map, const PipelineState<C::kVStages>& turn,
                                              const std::byte* page_run, int nth) const {
    copy_by_lanes<C>(static_cast<unsigned>(lane_), page_run, p_.v_slices.rows.token_stride, nth, map.v(turn.index),
                     map.v_empty(turn.index), turn.parity ^ 1U, map.v_full(turn.index));
  }

 protected:
  // Loads tile `tile` from the boxes that the lanes with this nth() have looked up, `columns` at a time from
  // first_column on, into `target`, in rows of kRowBytes, and signals the barrier.
  template <int kColumns, int kRowBytes>
  __device__ __forceinline__ void fetch(const CUtensorMap* map, std::uint32_t target, std::uint32_t barrier, int tile,
                                        const Box& box, int nth, int head, int first_column, int columns) const {
    // bytes of a tile row in all panels
    constexpr int kAllRowBytes = (kColumns * 2 + kRowBytes - 1) / kRowBytes * kRowBytes;
    // Other lanes' loads may come first: the phase waits for this arrival however many bytes have landed.
    if (lane_ == 0) barrier_arrive_expect(barrier, rows(tile) * kAllRowBytes);
    if (nth_ != nth || box.row < 0) return;
    const std::uint32_t to = target + static_cast<std::uint32_t>(row_ * kRowBytes);
#pragma unroll 1
    for (int column = 0; column < kColumns; column += columns) {
      tma_load_page_box(to + static_cast<std::uint32_t>(column / kPanelColumns * (C::kKeyTile * kRowBytes)), map,
                        barrier, first_column + column, head, box.page, box.row);
    }
  }

  // The same by one lane, for a tile that is one box.
  template <int kColumns, int kRowBytes>
  __device__ __forceinline__ static void load_single(const CUtensorMap* map, std::uint32_t target,
                                                     std::uint32_t barrier, const Box& box, int head, int first_column,
                                                     int columns) {
    constexpr int kAllRowBytes = (kColumns * 2 + kRowBytes - 1) / kRowBytes * kRowBytes;
    barrier_arrive_expect(barrier, C::kKeyTile * kAllRowBytes);
    if (columns < kColumns) {
      load_columns<C::kKeyTile, kColumns, kRowBytes, true>(target, map, barrier, box, head, first_column);
    } else {
      load_columns<C::kKeyTile, kColumns, kRowBytes, false>(target, map, barrier, box, head, first_column);
    }
  }

  // Locates the rows of a tile from `row` on, as far as they lie in one box.
  __device__ __forceinline__ Box locate_rows(int tile, int row) const {
    const int here = tile_in_sequence(p_, mask_row_, selected_, gap_, tile) * C::kKeyTile + row - lag_;
    if (p_.table.pages == nullptr) return {sequence_, here};
    return {__ldcg(pages_ + (here >> p_.table.page_log)), here & ((1 << p_.table.page_log) - 1)};
  }

  // Rows of a tile that its boxes load: after the last key, only the rest of its box.
  __device__ __forceinline__ int rows(int tile) const {
    const int left = length_ - tile * C::kKeyTile;
    if (p_.boxes.per_tile == 1 || left >= C::kKeyTile) return C::kKeyTile;
    return (left + p_.boxes.rows - 1) & ~(p_.boxes.rows - 1);  // with several boxes the rows of a box are a power of 2
  }

  const typename C::Params& p_;
  const int lane_;
  const int at_a_time_;
  const int nth_;
  int row_;  // where in its tile this lane's box starts
  const std::int32_t* pages_ = nullptr;
  int sequence_ = 0, length_ = 0, end_ = 0, lag_ = 0;
  int mask_row_ = 0, selected_ = 0, gap_ = 0;
};

template <class C, class Boxes = TileBoxes<C>>
class KeyProducer {
 public:
  __device__ __forceinline__ KeyProducer(const typename C::Params& p, const ColumnSliceMap<C>& map, std::uint32_t rank,
                                         const Boxes& boxes)
      : p_(p), map_(map), rank_(rank), lane_(thread_of_cta() % 32), boxes_(boxes) {}

  // Posts and loads the work tiles first, first + step, … Data written by earlier kernels is read, here and by the
  // warps that get infos, only after those kernels are complete.
  __device__ __forceinline__ void run(int first, int step) {
    prefetch_metadata(first);
    pdl_wait_before_step(p_);
    int work_tiles = kNoKey;  // unknown; with one sequence, its first work tile here tells
    if (p_.blocks.sequences > 1) {
      work_tiles = count_work_tiles<C>(p_, map_);
    } else {
      if (lane_ == 0) store_number(map_.work_tiles_before(0), 0);
      __syncwarp();
    }
#pragma unroll 1
    for (int n = first; n < work_tiles; n += step) {
      const DecodeWorkTile work_tile = work_tile_of<C>(p_, map_, n);
      if (p_.blocks.sequences == 1) work_tiles = work_tile.seq_info.splits * work_tile.stride;
      if (n < work_tiles) process(work_tile);
    }
    arrive_end();
  }

 private:
  // Prefetches the lengths and block table into L2, and the query rows if they are known. Data written later is seen
  // all the same.
  __device__ __forceinline__ void prefetch_metadata(int first) const {
    if (lane_ * 32 < p_.blocks.sequences) cuda::prefetch_to_l2(p_.rows.lengths + lane_ * 32);
    if (p_.blocks.sequences > 1) return;
    const int stride = work_tile_stride(p_);
    const int nth = p_.blocks.by_stride.quotient(first);
    DecodeWorkTile work_tile{};
    work_tile.kv_head = p_.blocks.by_count.quotient(first - nth * stride);
    work_tile.block = first - nth * stride - work_tile.kv_head * p_.blocks.count;
    if (p_.table.pages != nullptr && lane_ == 0) {
      cuda::prefetch_to_l2(p_.table.pages + (nth * kTilesPerKvSplit * C::kKeyTile >> p_.table.page_log));
    }
    const auto& q = p_.attention.q;
    for (int i = lane_; i < rows_of(p_, work_tile) * 2; i += 32) {
      const DecodeCoord coord = coord_of(p_, work_tile, i / 2);
      const auto* const row =
          static_cast<const std::uint16_t*>(q.data) + coord.row * q.token_stride + coord.query_head * q.head_stride;
      for (int column = i % 2 * 64; column < C::kDim; column += 128) cuda::prefetch_to_l2(row + column);
    }
  }

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
    const RowSummary summary = summarize_rows(work_tile);
    boxes_.begin(work_tile);
    bool single_box = false;
    if constexpr (std::is_same_v<Boxes, TileBoxes<C>>) single_box = boxes_.single_box();
    const std::uint32_t begin = tiles_;
    tiles_ += static_cast<std::uint32_t>(work_tile.end - work_tile.begin);
    const auto tile_at = [&](std::uint32_t number) { return work_tile.begin + static_cast<int>(number - begin); };
    // The softmax_offset tile first, then the tiles that this CTA scores: own, own + kSlices, … If offsets come from
    // states, only the latter.
    std::uint32_t own = begin + ((rank_ - begin) & (C::kSlices - 1U));
    const int softmax_offset =
        HasPrefixes<typename C::Params> && work_tile.resumes ? tile_at(own) : summary.softmax_offset;
    int tile = softmax_offset;
    const auto find = [&](int of) { return single_box ? boxes_.find_single(of) : boxes_.find(of); };
    auto ahead = find(tile);
    bool more = tile < work_tile.end && work_tile.begin < work_tile.end;
    const int info_at = more && infos_ == 0 ? 1 : 0;  // the first tile is urgent, the info less so
#pragma unroll 1
    for (int n = 0;; ++n) {
      if (n == info_at) write_info(work_tile, summary);
      if (!more) break;
      const auto box = ahead;
      const int now = tile;
      if (own < tiles_ && tile_at(own) == softmax_offset) own += C::kSlices;
      more = own < tiles_;
      tile = tile_at(own);
      own += C::kSlices;
      ahead = find(tile);
      if constexpr (std::is_same_v<Boxes, TileBoxes<C>>) {
        if (single_box) {
          if (elect_one()) boxes_.load_single_keys(map_, stage_, box, work_tile.kv_head);
          __syncwarp();
        }
      }
      if (!single_box) boxes_.fetch_keys(map_, stage_, now, box, work_tile.kv_head);
      stage_.advance();
    }
  }

  // The rows of a work tile: this lane's range, and properties of all. The softmax_offset tile is the first one in
  // which a row with tiles here sees a key. If it differs between rows, the work tile fails.
  struct RowSummary {
    RowRange row_range;
    int rows, softmax_offset;
    bool fails;
    int common_begin, common_end;
  };
  __device__ __forceinline__ RowSummary summarize_rows(const DecodeWorkTile& work_tile) const {
    const int rows = rows_of(p_, work_tile);
    RowRange row_range{kNoKey, 0, work_tile.end, work_tile.end};
    if (lane_ < rows) row_range = range_of<C>(p_, work_tile, coord_of(p_, work_tile, lane_));
    const bool attends = row_range.begin < row_range.end;
    int own = row_range.low / C::kKeyTile;
    own = own > work_tile.begin ? own : work_tile.begin;
    const std::uint32_t attending = __ballot_sync(0xffffffffU, attends);
    const int first = __shfl_sync(0xffffffffU, own, attending == 0 ? 0 : __ffs(static_cast<int>(attending)) - 1);
    const bool inside = attending != 0 && first < work_tile.end;
    const int softmax_offset = inside ? first : work_tile.begin;
    const bool fails = __any_sync(0xffffffffU, attends && own != softmax_offset);
    const int common_begin = __reduce_max_sync(0xffffffffU, lane_ < rows ? row_range.low : 0);
    const int common_end = __reduce_min_sync(0xffffffffU, lane_ < rows ? row_range.high : kNoKey);
    return {row_range, rows, softmax_offset, fails, common_begin, common_end};
  }

  __device__ __forceinline__ void write_info(const DecodeWorkTile& work_tile, const RowSummary& summary) {
    const PipelineStateAt<2> turn(infos_++);
    const WorkTileInfo info = map_.info(turn.index);
    barrier_wait(map_.info_empty(turn.index), turn.parity ^ 1U);
    const auto put = [&info](WorkTileInfo::Field field, int number) { store_number(info.at(field), number); };
    if (lane_ < kColumnSliceRows) {
      store_number(info.at(WorkTileInfo::kLow, lane_), summary.row_range.low);
      store_number(info.at(WorkTileInfo::kHigh, lane_), summary.row_range.high);
      store_number(info.at(WorkTileInfo::kRowBegin, lane_), summary.row_range.begin);
      store_number(info.at(WorkTileInfo::kRowEnd, lane_), summary.row_range.end);
    }
    if (lane_ == 0) {
      put(WorkTileInfo::kBegin, work_tile.begin);
      put(WorkTileInfo::kEnd, work_tile.end);
      put(WorkTileInfo::kLength, work_tile.seq_info.length);
      put(WorkTileInfo::kPosition, work_tile.seq_info.position);
      put(WorkTileInfo::kBeginSplit, work_tile.seq_info.begin_split);
      put(WorkTileInfo::kSplits, work_tile.seq_info.splits);
      put(WorkTileInfo::kSequence, work_tile.sequence);
      put(WorkTileInfo::kKvHead, work_tile.kv_head);
      put(WorkTileInfo::kBlock, work_tile.block);
      put(WorkTileInfo::kNumber, work_tile.number);
      put(WorkTileInfo::kCacheSplit, work_tile.cache_split);
      put(WorkTileInfo::kLag, work_tile.lag);
      put(WorkTileInfo::kMaskRow, work_tile.mask_row);
      put(WorkTileInfo::kSelected, work_tile.seq_info.selected);
      put(WorkTileInfo::kGap, work_tile.seq_info.gap);
      put(WorkTileInfo::kFirstNumber, work_tile.first_number);
      put(WorkTileInfo::kRows, summary.rows);
      put(WorkTileInfo::kOffsetTile, summary.softmax_offset);
      put(WorkTileInfo::kFails, summary.fails ? 1 : 0);
      put(WorkTileInfo::kCommonBegin, summary.common_begin);
      put(WorkTileInfo::kCommonEnd, summary.common_end);
      put(WorkTileInfo::kResumes, work_tile.resumes ? 1 : 0);
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(map_.info_full(turn.index));
  }

  // Posts that there are no more work tiles.
  __device__ __forceinline__ void arrive_end() {
    const PipelineStateAt<2> turn(infos_++);
    barrier_wait(map_.info_empty(turn.index), turn.parity ^ 1U);
    if (lane_ != 0) return;
    store_number(map_.info(turn.index).at(WorkTileInfo::kBegin), WorkTileInfo::kNoMore);
    barrier_arrive(map_.info_full(turn.index));
  }

  const typename C::Params& p_;
  const ColumnSliceMap<C>& map_;
  const std::uint32_t rank_;
  const int lane_;
  Boxes boxes_;
  std::uint32_t infos_ = 0;           // posted so far
  std::uint32_t tiles_ = 0;           // tiles of all work tiles so far
  PipelineState<C::kKStages> stage_;  // the next K stage that this warp fills
};

template <class C, class Boxes = TileBoxes<C>>
class ValueProducer {
 public:
  __device__ __forceinline__ ValueProducer(const ColumnSliceMap<C>& map, std::uint32_t rank, const Boxes& boxes)
      : map_(map), rank_(rank), boxes_(boxes) {}

  __device__ __forceinline__ void process(const WorkTileInfo& info) {
    const int end = info.get(WorkTileInfo::kEnd);
    const int kv_head = info.get(WorkTileInfo::kKvHead);
    int tile = info.get(WorkTileInfo::kBegin);
    boxes_.begin(info);
    if constexpr (std::is_same_v<Boxes, TileBoxes<C>>) {
      if (boxes_.single_box()) {
        if (boxes_.needs_lookup()) {
          load_single_boxes<4>(tile, end, kv_head);  // a lookup in memory takes longer than the computation of a tile
        } else {
          load_single_boxes<1>(tile, end, kv_head);
        }
        return;
      }
      if (boxes_.by_lanes()) {
        load_page_runs(tile, end, kv_head);
        return;
      }
    }
    auto ahead = boxes_.find(tile + boxes_.nth());
#pragma unroll 1
    while (tile < end) {
      const auto box = ahead;
      ahead = boxes_.find(tile + boxes_.at_a_time() + boxes_.nth());
#pragma unroll 1
      for (int nth = 0; nth < boxes_.at_a_time() && tile < end; ++nth, ++tile) {
        boxes_.fetch_values(map_, stage_, tile, box, nth, kv_head, rank_);
        stage_.advance();
      }
    }
  }

 private:
  // Tiles are looked up kAhead tiles before their load.
  template <int kAhead>
  __device__ __forceinline__ void load_single_boxes(int tile, int end, int head) {
    if (elect_one()) {  // always the same lane, whose stage_ is the valid one
      typename Boxes::Box ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) ahead[i] = boxes_.find_single(tile + i);
#pragma unroll 1
      for (; tile < end; tile += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (tile + i >= end) break;
          const auto box = ahead[i];
          ahead[i] = boxes_.find_single(tile + i + kAhead);
          boxes_.load_single_values(map_, stage_, box, head, rank_);
          stage_.advance();
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_page_runs(int tile, int end, int head) {
    auto ahead = boxes_.find_page_run(tile + boxes_.tile_of_page_run());
#pragma unroll 1
    while (tile < end) {
      const std::byte* const page_run = boxes_.page_run_at(ahead, head, rank_);
      ahead = boxes_.find_page_run(tile + TilePageRuns<C>::kTiles + boxes_.tile_of_page_run());
#pragma unroll 1
      for (int nth = 0; nth < TilePageRuns<C>::kTiles && tile < end; ++nth, ++tile) {
        boxes_.copy_values(map_, stage_, page_run, nth);
        stage_.advance();
      }
    }
  }

  const ColumnSliceMap<C>& map_;
  const std::uint32_t rank_;
  Boxes boxes_;
  PipelineState<C::kVStages> stage_;
};

}  // namespace ringattn::sm90
