// SPDX-License-Identifier: Apache-2.0
// Attends a few rows to a key tile of bf16 directly in a KV cache. The bits are those of amx_step-inl.hpp.
//
// S is computed as K · Qᵀ: rows of K are the left factor of a tile product, so they are read from the cache as they
// are, and the few rows of Q are the right factor, packed once for all key tiles. A product of tiles is a sum of the
// same terms in the same order either way. V is packed, because the rows of a right factor are pairs of keys: 32 keys
// at a time, so that the pairs stay in the L1 cache.
//
// Loaders dequantize all rows of a tile before its first product. While the tile unit computes a product, and for some
// 100 cycles after it, 512-bit floating-point instructions start on one port instead of two. Dequantizing consists of
// such instructions, so products in between would cost more than writing a tile to memory (bench/notes/decoding.md).
//
// A step is bound by memory. The rows of a head are far apart, so processors do not recognize the stream. For each row
// of this tile, the step prefetches a row of the next tile into the L2 cache, which has more outstanding lines than L1.
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

// The same warning as in amx_step-inl.hpp.
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

// Rows of 32 keys from `first` on, up to `keys`, at their addresses in the cache.
HWY_INLINE TileRows group_in_place(const TileRows& tile, int first, int keys) {
  TileRows rows;
  rows.page_runs[0] = tile.at(first);
  rows.page_runs[1] = first + kTileRows < keys ? tile.at(first + kTileRows) : nullptr;
  rows.stride = tile.stride;
  rows.page_run_log2 = 4;  // kTileRows: no page is shorter
  return rows;
}
static_assert(kMinPageRunKeys == kTileRows && kTileRows == 1 << 4);

// What loaders write for a tile: the rows of K, and later the pairs of V in the same memory, which is in the L1 cache.
struct LoadedTile {
  alignas(64) std::byte bytes[kKeyTile * kMaxHeadDim * sizeof(std::uint16_t)];
};

// Four columns of 16 rows, as rows of a block of S.
HWY_INLINE void store_four_columns(const float* sums, float* scores) {
  __m512 rows[4];  // row j has 4 elements of each of rows j, 4 + j, 8 + j and 12 + j
  for (int j = 0; j < 4; ++j, sums += kTileColumns) {
    rows[j] = _mm512_castps128_ps512(_mm_load_ps(sums));
    rows[j] = _mm512_insertf32x4(rows[j], _mm_load_ps(sums + 4 * kTileColumns), 1);
    rows[j] = _mm512_insertf32x4(rows[j], _mm_load_ps(sums + 8 * kTileColumns), 2);
    rows[j] = _mm512_insertf32x4(rows[j], _mm_load_ps(sums + 12 * kTileColumns), 3);
  }
  const __m512d low_01 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[0], rows[1]));
  const __m512d low_23 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[2], rows[3]));
  const __m512d high_01 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[0], rows[1]));
  const __m512d high_23 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[2], rows[3]));
  _mm512_store_pd(scores, _mm512_unpacklo_pd(low_01, low_23));
  _mm512_store_pd(scores + kScoreColumns, _mm512_unpackhi_pd(low_01, low_23));
  _mm512_store_pd(scores + 2 * kScoreColumns, _mm512_unpacklo_pd(high_01, high_23));
  _mm512_store_pd(scores + 3 * kScoreColumns, _mm512_unpackhi_pd(high_01, high_23));
}

// The first `columns` columns of Sᵀ of 16 keys, as rows of a block of S. More rows may be written.
HWY_INLINE void store_columns(const float (&sums)[kTileRows][kTileColumns], int columns, float* scores) {
  if (columns <= 8) {
    store_four_columns(sums[0], scores);
    if (columns > 4) store_four_columns(sums[0] + 4, scores + 4 * kScoreColumns);
    return;
  }
  __m512i keys[kTileRows];
  for (int key = 0; key < kTileRows; ++key) keys[key] = _mm512_load_si512(sums[key]);
  transpose_pairs(keys, reinterpret_cast<std::byte*>(scores), kScoreStride);
}

// S of groups [begin, end) of 32 keys. Scores of keys after the last are unspecified, as they are masked.
inline void score_in_place(const TileShape& shape, const TileInPlace& tile, const TileRows& k, const float* queries,
                           int batch_rows, int begin, int end, float (*scores)[kScoreColumns]) {
  constexpr int kGroup = 2 * kTileRows;
  alignas(64) float sums[2][kTileRows][kTileColumns];  // [halves, keys, rows]
  alignas(64) std::byte last[kTileRows * kMaxHeadDim * sizeof(std::uint16_t)];
  const int tiles = tiles_of_dims(shape.head_dim);
  const std::size_t row_bytes = static_cast<std::size_t>(tiles) * kTileRowBytes;
  RowRequests requests(tile.next_k, tile.next_keys, static_cast<int>(row_bytes));
  for (int group = begin; group < end; ++group) {
    const TileRows rows = group_in_place(k, group * kGroup, tile.keys);
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
    for (int i = 0; i < 2; ++i) store_columns(sums[i], batch_rows, scores[0] + group * kGroup + i * kTileRows);
  }
}

// O ← O + P · V of a block, whose values a loader makes. O stays in tiles, because storing a tile takes port 5 for 16
// cycles, however few rows it has. Returns false if values cannot be loaded.
inline bool add_loaded_values(const AmxCall& call, const AmxBlock& block, const PairLoader& loader,
                              LoadedTile& loaded) {
  const std::size_t stride = call.o_stride * sizeof(float);
  const int tiles = tiles_of_dims(call.shape.head_dim_v);
  const std::size_t group_bytes = static_cast<std::size_t>(tiles) * 2 * kTileBytes;
  for (int group = block.begin_group; group < block.end_group; ++group) {
    const int key = group * kTileDepth;
    std::byte* const pairs = loaded.bytes + static_cast<std::size_t>(group) * group_bytes;
    if (!loader.load(loader.tile, key, key + kTileDepth, pairs)) return false;
  }
  const auto* const weights = reinterpret_cast<const std::byte*>(block.scores);
  float* acc = call.batch.acc;
  const std::byte* block_values = loaded.bytes;
  for (int dims = 0; dims < tiles; ++dims, acc += kTileDepth, block_values += 2 * kTileBytes) {
    load_tile<0>(acc, stride);
    load_tile<1>(acc + kTileColumns, stride);
    for (int group = block.begin_group; group < block.end_group; ++group) {
      const std::byte* const values = block_values + static_cast<std::size_t>(group) * group_bytes;
      load_tile<4>(weights + group * kTileRowBytes, kScoreStride);
      load_tile<6>(values, kTileRowBytes);
      multiply_tiles<0, 4, 6>();
      load_tile<7>(values + kTileBytes, kTileRowBytes);
      multiply_tiles<1, 4, 7>();
    }
    store_tile<0>(acc, stride);
    store_tile<1>(acc + kTileColumns, stride);
  }
  if (block.masked) clear_zero_signs(call, block);
  return true;
}

// O ← O + P · V of a block, 32 keys at a time, so that packed values stay in the L1 cache. While the products of 32
// keys are computed, the next 32 are packed, a few pairs between two products. Returns false if a value is
// not finite.
inline bool add_values_in_place(const AmxCall& call, const AmxBlock& block, const TileInPlace& tile) {
  // [dims / 16, 16 pairs of keys, 16 dims, 2], of two groups of keys
  alignas(64) std::byte packed[2][kMaxHeadDim * kTileDepth * sizeof(std::uint16_t)];
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
    if (packs) rows = group_in_place(tile.v, first, tile.keys);
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
        std::byte* const target = packed[group % 2] + begin / 2 * kTileRowBytes;
        requests.advance((end - begin) * tiles);
        special |= pack_value_pairs(dims_v, rows, begin, end, tile.keys - first, kTileBytes, target);
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

// A copy of a batch's partials before a step, from which the step is repeated in another form if a value is not finite.
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
  LoadedTile loaded;
  const FlushSubnormals flush;
  const AmxCall call(shape, PackedTile{}, batch, *reinterpret_cast<AmxScratch*>(scores));
  saved.save(batch, call.o_stride);
  const RowBlock rows = next_block(batch.visible, batch.rows, /*finite=*/true, 0, kTileRows);
  AmxBlock block{rows, rows.span.begin / kTileDepth, (rows.span.end + kTileDepth - 1) / kTileDepth};
  block.masked = !sees_whole(batch.visible, rows, kTileDepth);
  block.scores = call.scratch.scores[0];
  TileRows k = tile.k;
  bool done = true;
  if (tile.load_k.load != nullptr) {
    const std::int64_t row_bytes = tiles_of_dims(shape.head_dim) * kTileRowBytes;
    const int first = block.begin_group * kTileDepth;
    done = tile.load_k.load(tile.load_k.tile, first, std::min(tile.keys, block.end_group * kTileDepth),
                            loaded.bytes + first * row_bytes);
    k = {{loaded.bytes}, row_bytes};
  }
  configure_for_rows(batch.rows);
  if (done) {
    score_in_place(shape, tile, k, queries, batch.rows, block.begin_group, block.end_group, block.scores);
    AmxSoftmax softmax(call, &block, /*products=*/0);
    softmax.finish();
    done = tile.load_v.load != nullptr ? add_loaded_values(call, block, tile.load_v, loaded)
                                       : add_values_in_place(call, block, tile);
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
