// SPDX-License-Identifier: Apache-2.0
// Attends a few rows to a key tile of bf16 that lies in a KV cache. The bits are those of amx_step-inl.hpp.
//
// S is computed as K · Qᵀ: rows of K are the left factor of a tile product, so they are read where they lie, and the
// few rows of Q are the right factor, packed once for all key tiles. A product of tiles is a sum of the same terms in
// the same order either way. V is packed, because a right factor has pairs of keys. Rows that a loader makes and packed
// values never exceed 32 keys, so that they stay in the L1 cache: a whole tile's would be written to L2 and read back.
//
// A step is bound by memory. The rows of a head lie apart, so processors do not recognize the stream: the step requests
// a row of the next tile for each row of this one, into the L2 cache, which has more outstanding lines than L1.
#if defined(RINGATTN_KERNELS_CPU_AMX_ROWS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_AMX_ROWS_INL_HPP_
#undef RINGATTN_KERNELS_CPU_AMX_ROWS_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_AMX_ROWS_INL_HPP_
#endif

#include <algorithm>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/attention/cpu/amx_step-inl.hpp"

#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX3

// As in amx_step-inl.hpp.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

// Requests rows of the next tile, line by line.
class RowRequests {
 public:
  RowRequests(const TileRows* rows, int keys, int bytes)
      : rows_(rows), keys_(rows != nullptr ? keys : 0), bytes_(bytes) {
    if (keys_ > 0) row_ = rows_->at(0);
  }

  HWY_INLINE void advance(int lines) {
    for (; lines > 0 && key_ < keys_; --lines) {
      _mm_prefetch(row_ + line_, _MM_HINT_T1);
      line_ += static_cast<int>(kTileRowBytes);
      if (line_ < bytes_) continue;
      line_ = 0;
      if (++key_ < keys_) row_ = rows_->at(key_);
    }
  }

 private:
  const TileRows* rows_;
  const std::byte* row_ = nullptr;
  int keys_;
  int bytes_;
  int key_ = 0;
  int line_ = 0;
};

// Packs `rows` rows of q, up to kTileRows, as a right factor: [head_dim / 32, 16 pairs of dims, 16 rows, 2].
inline void pack_amx_queries(const TileShape& shape, const float* q, int rows, float* packed) {
  const int tiles = tiles_of_dims(shape.head_dim);
  const auto* const from = reinterpret_cast<const std::byte*>(q);
  auto* const to = reinterpret_cast<std::byte*>(packed);
  for (int dims = 0; dims < tiles; ++dims) {
    __m512i pairs[kTileRows];
    for (int i = 0; i < kTileRows; ++i) {
      pairs[i] = i < rows ? _mm512_load_si512(from + (std::ptrdiff_t{i} * tiles + dims) * kTileRowBytes)
                          : _mm512_setzero_si512();
    }
    transpose_pairs(pairs, to + static_cast<std::size_t>(dims) * kTileBytes);
  }
}

// Tiles 0, 1 and 4, O and P of the step, have a row for each row of the batch; the others are whole.
inline void configure_for_rows(int rows) {
  TileConfig config;
  for (const int tile : {0, 1, 4}) config.rows[tile] = static_cast<std::uint8_t>(rows);
  configure_tiles(config);
}

// Rows of keys [first, first + 32), up to `keys`: where they lie, or loaded to `memory`, so that row `first` is row 0.
// Returns false if they cannot be loaded.
HWY_INLINE bool group_rows(const TileRows& in_place, const RowLoader& loader, int first, int keys, int dims,
                           std::byte* memory, TileRows& rows) {
  if (loader.load == nullptr) {
    rows.page_runs[0] = in_place.at(first);
    rows.page_runs[1] = first + kTileRows < keys ? in_place.at(first + kTileRows) : nullptr;
    rows.stride = in_place.stride;
  } else {
    rows.page_runs[0] = memory;
    rows.page_runs[1] = memory + std::ptrdiff_t{kTileRows} * dims * 2;
    rows.stride = std::ptrdiff_t{dims} * 2;
    if (!loader.load(loader.tile, first, std::min(keys, first + kTileDepth), memory)) return false;
  }
  rows.page_run_log2 = 4;  // kTileRows: no page is shorter
  return true;
}
static_assert(kMinPageRunKeys == kTileRows && kTileRows == 1 << 4);

// S of groups [begin, end) of 32 keys. Scores of keys after the last are unspecified, as they are masked. Returns false
// if a row cannot be loaded.
inline bool score_in_place(const TileShape& shape, const TileInPlace& tile, const float* queries, int begin, int end,
                           float (*scores)[kScoreColumns]) {
  constexpr int kGroup = 2 * kTileRows;
  alignas(64) float sums[2][kTileRows][kTileColumns];  // [halves, keys, rows]
  alignas(64) std::byte loaded[kGroup * kMaxHeadDim * sizeof(std::uint16_t)];
  alignas(64) std::byte last[kTileRows * kMaxHeadDim * sizeof(std::uint16_t)];
  const int tiles = tiles_of_dims(shape.head_dim);
  const std::size_t row_bytes = static_cast<std::size_t>(tiles) * kTileRowBytes;
  RowRequests requests(tile.next_k, tile.next_keys, static_cast<int>(row_bytes));
  for (int group = begin; group < end; ++group) {
    TileRows rows;
    if (!group_rows(tile.k, tile.load_k, group * kGroup, tile.keys, shape.head_dim, loaded, rows)) return false;
    const std::byte* half[2] = {};
    std::size_t stride[2] = {};
    for (int i = 0; i < 2; ++i) {
      const int first = group * kGroup + i * kTileRows;
      const int keys = std::min(kTileRows, tile.keys - first);
      half[i] = keys > 0 ? rows.page_runs[i] : half[0];
      stride[i] = keys > 0 ? static_cast<std::size_t>(rows.stride) : stride[0];
      if (keys <= 0 || keys == kTileRows) continue;
      std::memset(last, 0, kTileRows * row_bytes);
      for (int key = 0; key < keys; ++key) {
        std::memcpy(last + static_cast<std::size_t>(key) * row_bytes, rows.page_runs[i] + key * rows.stride, row_bytes);
      }
      half[i] = last;
      stride[i] = row_bytes;
    }
    zero_tile<2>();
    zero_tile<3>();
    const auto* q = reinterpret_cast<const std::byte*>(queries);
    for (int dims = 0; dims < tiles; ++dims, q += kTileBytes) {
      load_tile<6>(q, kTileRowBytes);
      load_tile<5>(half[0] + dims * kTileRowBytes, stride[0]);
      multiply_tiles<2, 5, 6>();
      load_tile<7>(half[1] + dims * kTileRowBytes, stride[1]);
      multiply_tiles<3, 7, 6>();
      requests.advance(kGroup);
    }
    store_tile<2>(sums[0], kTileRowBytes);
    store_tile<3>(sums[1], kTileRowBytes);
    for (int i = 0; i < 2; ++i) {
      __m512i keys[kTileRows];
      for (int key = 0; key < kTileRows; ++key) keys[key] = _mm512_load_si512(sums[i][key]);
      transpose_pairs(keys, reinterpret_cast<std::byte*>(scores[0] + group * kGroup + i * kTileRows), kScoreStride);
    }
  }
  return true;
}

// O ← O + P · V of a block, 32 keys at a time, so that packed values stay in the L1 cache. While the products of 32
// keys are computed, the next 32 are packed, a few pairs between two products. Returns false if a value is
// not finite or a row cannot be loaded.
inline bool add_values_in_place(const AmxCall& call, const AmxBlock& block, const TileInPlace& tile) {
  // [dims / 16, 16 pairs of keys, 16 dims, 2], of two groups of keys
  alignas(64) std::byte packed[2][kMaxHeadDim * kTileDepth * sizeof(std::uint16_t)];
  alignas(64) std::byte loaded[kTileDepth * kMaxHeadDim * sizeof(std::uint16_t)];
  const std::size_t stride = call.o_stride * sizeof(float);
  const int dims_v = call.shape.head_dim_v;
  const int tiles = tiles_of_dims(dims_v);
  const int keys_at_once = 2 * ((kTileRows + tiles - 1) / tiles);
  const auto* const weights = reinterpret_cast<const std::byte*>(block.scores);
  RowRequests requests(tile.next_v, tile.next_keys, 2 * dims_v);
  __mmask32 special = 0;
  for (int group = block.begin_group; group <= block.end_group; ++group) {
    const bool multiplies = group > block.begin_group;  // the group before
    const bool packs = group < block.end_group;
    const int first = group * kTileDepth;
    TileRows rows;
    if (packs && !group_rows(tile.v, tile.load_v, first, tile.keys, dims_v, loaded, rows)) return false;
    if (multiplies) load_tile<4>(weights + (group - 1) * kTileRowBytes, kScoreStride);
    float* acc = call.batch.acc;
    const std::byte* values = packed[(group + 1) % 2];
    for (int dims = 0; dims < tiles; ++dims, acc += kTileDepth, values += 2 * kTileBytes) {
      if (multiplies) {
        load_tile<0>(acc, stride);
        load_tile<6>(values, kTileRowBytes);
        multiply_tiles<0, 4, 6>();
        load_tile<1>(acc + kTileColumns, stride);
        load_tile<7>(values + kTileBytes, kTileRowBytes);
        multiply_tiles<1, 4, 7>();
      }
      if (packs) {
        const int begin = std::min(kTileDepth, dims * keys_at_once);
        const int end = std::min(kTileDepth, begin + keys_at_once);
        requests.advance((end - begin) * tiles);
        special |= pack_value_pairs(dims_v, rows, begin, end, tile.keys - first, kTileBytes,
                                    packed[group % 2] + begin / 2 * kTileRowBytes);
      }
      if (multiplies) {
        store_tile<0>(acc, stride);
        store_tile<1>(acc + kTileColumns, stride);
      }
    }
  }
  if (block.masked) clear_zero_signs(call, block);
  return special == 0;
}

// The partials of a batch before a step, which another form repeats if a value is not finite.
struct SavedRows {
  alignas(64) float offset[kTileRows];
  float sum[kTileRows];
  float acc[kTileRows * kMaxHeadDim];

  void save(const RowBatch& batch, std::size_t o_stride) {
    const auto rows = static_cast<std::size_t>(batch.rows);
    std::copy_n(batch.offset, rows, offset);
    std::copy_n(batch.sum, rows, sum);
    std::copy_n(batch.acc, rows * o_stride, acc);
  }
  void restore(const RowBatch& batch, std::size_t o_stride) const {
    const auto rows = static_cast<std::size_t>(batch.rows);
    std::copy_n(offset, rows, batch.offset);
    std::copy_n(sum, rows, batch.sum);
    std::copy_n(acc, rows * o_stride, batch.acc);
  }
};

inline bool attend_in_place(const TileShape& shape, const TileInPlace& tile, const float* queries,
                            const RowBatch& batch, float* scores) {
  SavedRows saved;
  const FlushSubnormals flush;
  const AmxCall call(shape, PackedTile{}, batch, *reinterpret_cast<AmxScratch*>(scores));
  saved.save(batch, call.o_stride);
  const RowBlock rows = next_block(batch.visible, batch.rows, /*finite=*/true, 0, kTileRows);
  AmxBlock block{rows, rows.span.begin / kTileDepth, (rows.span.end + kTileDepth - 1) / kTileDepth};
  block.masked = !sees_whole(batch.visible, rows, kTileDepth);
  block.scores = call.scratch.scores[0];
  configure_for_rows(batch.rows);
  bool done = score_in_place(shape, tile, queries, block.begin_group, block.end_group, block.scores);
  if (done) {
    AmxSoftmax softmax(call, &block, /*products=*/0);
    softmax.finish();
    done = add_values_in_place(call, block, tile);
  }
  release_tiles();
  if (!done) saved.restore(batch, call.o_stride);
  return done;
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
