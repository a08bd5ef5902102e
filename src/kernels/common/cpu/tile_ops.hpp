// SPDX-License-Identifier: Apache-2.0
// Arithmetic of CPU attention, one function table per SIMD target: packs a key tile, attends rows to it, merges KV
// splits. The target is chosen at run time: Highway's best one or, on a processor with AMX, that target with AMX tiles,
// which has a separate table for bf16. Code outside these tables does not affect results.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/attention/attention.hpp"

namespace ringattn::cpu {

inline constexpr int kKeyTile = 128;
inline constexpr int kMaxHeadDim = 576;              // absorbed MLA: latent and rotary key
inline constexpr std::size_t kVectorAlignment = 64;  // alignment of every array in TileOps' signatures

// The part of an AttentionSpec that the arithmetic depends on.
struct TileShape {
  Dtype dtype = Dtype::kBf16;
  int head_dim = 0;
  int head_dim_v = 0;
  float softmax_scale = 1.0F;
  float softcap = 0.0F;
};

// One head's rows of a tile in memory: row i is row i % 2^page_run_log2 of page run i / 2^page_run_log2.
inline constexpr int kMaxPageRuns = kKeyTile / kMinPageRunKeys;
struct TileRows {
  const std::byte* page_runs[kMaxPageRuns] = {};
  std::int64_t stride = 0;  // bytes from row to row of a page run
  int page_run_log2 = 62;   // one page run

  const std::byte* at(std::int64_t row) const {
    return page_runs[row >> page_run_log2] + (row & ((std::int64_t{1} << page_run_log2) - 1)) * stride;
  }
};

// One head's keys and values of one tile in fp32, in panels of TileOps::panel_width columns, so that the inner loops of
// both products read memory sequentially. AMX has its own layout, in bf16 (attention/cpu/amx_pack-inl.hpp).
struct PackedTile {
  float* k = nullptr;    // [kKeyTile / panel_width, head_dim, panel_width]: transposed
  float* v = nullptr;    // [⌈head_dim_v / panel_width⌉, kKeyTile, panel_width]
  bool v_finite = true;  // no value of the tile is NaN or ∞
};

// Writes rows [first, end) of a tile to `rows`, one after the other. Returns false if that is not possible.
struct RowLoader {
  bool (*load)(const void* tile, int first, int end, std::byte* rows) = nullptr;
  const void* tile = nullptr;
};

// Writes keys [first, end) of up to 32 consecutive ones as the pairs that AMX multiplies: [dims / 16, 16 pairs of keys,
// 16 dims, 2]. `first` and `end` are even, and `pairs` is the address of the pair that starts with `first`. Keys after
// the tile's last one are zero. Returns false if that is not possible or an element is not finite.
struct PairLoader {
  bool (*load)(const void* tile, int first, int end, std::byte* pairs) = nullptr;
  const void* tile = nullptr;
};

// The first `keys` rows of a key tile: either their addresses in the cache, or loaders that produce them.
struct TileInPlace {
  TileRows k;
  TileRows v;
  RowLoader load_k;
  PairLoader load_v;
  int keys = 0;
  const TileRows* next_k = nullptr;  // rows that will be read after these; null: not known
  const TileRows* next_v = nullptr;
  int next_keys = 0;
};

// Prefetches the next packed tile into the L2 cache, a few lines at a time: a burst would stall the core, which has few
// line fill buffers.
class TilePrefetcher {
 public:
  TilePrefetcher() = default;
  // `steps` is the sum of the arguments of all later calls of advance().
  TilePrefetcher(const void* k, std::size_t k_bytes, const void* v, std::size_t v_bytes, std::size_t steps)
      : at_(static_cast<const std::byte*>(k)),
        end_(at_ + k_bytes),
        v_(static_cast<const std::byte*>(v)),
        v_end_(v_ + v_bytes),
        rate_((((k_bytes + v_bytes) / kLine) << kRateBits) / std::max<std::size_t>(1, steps) + 1) {}

  void advance(std::size_t steps) {
    if (at_ == nullptr) return;
    for (due_ += rate_ * steps; due_ >= kOneLine; due_ -= kOneLine) {
      if (at_ == end_) {
        at_ = v_;
        end_ = v_end_;
        v_ = nullptr;
        if (at_ == nullptr) return;
      }
      __builtin_prefetch(at_, /*rw=*/0, /*locality=*/2);
      at_ += kLine;
    }
  }

 private:
  static constexpr std::size_t kLine = 64;
  static constexpr int kRateBits = 16;
  static constexpr std::size_t kOneLine = std::size_t{1} << kRateBits;

  const std::byte* at_ = nullptr;  // null: nothing is left to prefetch
  const std::byte* end_ = nullptr;
  const std::byte* v_ = nullptr;  // null: at_ is in v
  const std::byte* v_end_ = nullptr;
  std::size_t rate_ = 0;  // lines for each step, with kRateBits after the point
  std::size_t due_ = 0;
};

// A row's partial of one KV split, or of several merged splits (kernels/attention/merge.hpp).
struct Partial {
  float offset = 0.0F;   // subtracted from the scores
  float sum = 0.0F;      // Σ exp(x − offset)
  float* acc = nullptr;  // [head_dim_v]: Σ exp(x − offset) · v
};

// Rows that share a KV head, with the partials of their current splits.
struct RowBatch {
  const float* q = nullptr;              // [rows, q_stride()], as load_query() wrote it
  float* offset = nullptr;               // [rows]
  float* sum = nullptr;                  // [rows]
  float* acc = nullptr;                  // [rows, o_stride()]
  const ColumnRange* visible = nullptr;  // [rows]: columns of the tile that the row sees; none empty
  int rows = 0;
  const PackedTile* next = nullptr;  // the tile after this one, if it is packed already
};

struct TileOps {
  const char* target;        // Highway's name, e.g. "AVX2", and "+AMX-BF16" with AMX tiles
  int lanes;                 // at least the floats per vector; o_stride() is a multiple of it
  int panel_width;           // columns per panel
  int row_block;             // rows per score block
  int dim_multiple;          // head_dim is padded to a multiple of it, in q and packed keys
  int q_per_float;           // elements of q stored per float: 1 in fp32, or 2 in bf16
  std::size_t score_floats;  // size of attend()'s scratch
  // Limits of a work tile: rows × heads, and the bytes of their q and acc, which stay in the cache.
  std::size_t work_tile_rows;
  std::size_t work_tile_bytes;
  // Default speed estimate of one thread.
  double flops_per_second;

  // Converts `count` elements of `dtype` to fp32; a multiple of 8.
  void (*widen)(const void* source, Dtype dtype, int count, float* target);
  // Writes one row of RowBatch::q; `count` is head_dim.
  void (*load_query)(const void* source, Dtype dtype, int count, float* target);
  // Packs the first `keys` rows of k and v.
  void (*pack)(const TileShape& shape, const TileRows& k, const TileRows& v, int keys, PackedTile& tile);
  // Attends each row of the batch to the tile: updates its (offset, sum, acc). scores: [score_floats] scratch.
  void (*attend)(const TileShape& shape, const PackedTile& tile, const RowBatch& rows, float* scores);
  // As pack() and attend() of up to `few_rows` rows, for a head_dim that is a multiple of dim_multiple. `queries` are
  // the rows as pack_queries() wrote them, [queries_floats()]. Returns false, and leaves the batch as it was, if a
  // value of the tile is not finite or a loader cannot write a row.
  int few_rows;  // 0: these functions do not exist
  void (*pack_queries)(const TileShape& shape, const float* q, int rows, float* queries);
  bool (*attend_in_place)(const TileShape& shape, const TileInPlace& tile, const float* queries, const RowBatch& rows,
                          float* scores);
  // The merge step: merges `partial` into `row`. Neither acc needs to be aligned.
  void (*merge)(int head_dim_v, const Partial& partial, Partial& row);

  // Floats between rows of q and of acc, and in a packed tile.
  int q_stride(int head_dim) const { return padded(head_dim) / q_per_float; }
  int o_stride(int head_dim_v) const { return (head_dim_v + lanes - 1) / lanes * lanes; }
  std::size_t k_floats(int head_dim) const {
    return static_cast<std::size_t>(padded(head_dim) / q_per_float) * kKeyTile;
  }
  std::size_t v_floats(int head_dim_v) const {
    return static_cast<std::size_t>((head_dim_v + panel_width - 1) / panel_width * panel_width) * kKeyTile;
  }
  std::size_t queries_floats(int head_dim) const {
    return static_cast<std::size_t>(few_rows) * static_cast<std::size_t>(padded(head_dim) / q_per_float);
  }
  // The part of v_floats() that pack() writes; attend() may use the rest.
  std::size_t packed_v_floats(int head_dim_v) const {
    return v_floats(head_dim_v) / static_cast<std::size_t>(q_per_float);
  }

 private:
  int padded(int head_dim) const { return (head_dim + dim_multiple - 1) / dim_multiple * dim_multiple; }
};

// The table of the best SIMD target that this machine has (and that set_simd_target() leaves).
const TileOps& best_tile_ops();
// The table of the same target with AMX tiles, for bf16. Null if the processor, the kernel or the target does not have
// them.
const TileOps* amx_tile_ops();

}  // namespace ringattn::cpu
