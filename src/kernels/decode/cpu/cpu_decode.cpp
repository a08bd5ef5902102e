// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/cpu/cpu_decode.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <vector>

#include "base/rank_liveness.hpp"
#include "kernels/attention/cpu/attention_state.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cpu/thread_number.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/cache_partition.hpp"
#include "kernels/decode/cache_update.hpp"
#include "kernels/decode/cpu/quantized_tile.hpp"
#include "kernels/quant/row_codec.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn::cpu {

namespace {

// Maximum number of KV heads of a work tile. In most caches their rows of a token are adjacent, so they share memory
// pages and hardware prefetches.
constexpr int kMaxHeads = 8;
constexpr int kNoTile = std::numeric_limits<int>::max();

std::int64_t kv_splits_of(const TileRange& tiles) {
  return tiles.empty() ? 0 : (tiles.end - 1) / kTilesPerKvSplit + 1 - tiles.begin / kTilesPerKvSplit;
}

// One thread's scratch: views into one allocation.
struct DecodeScratch {
  std::byte* k = nullptr;  // [kKeyTile, head_dim], a tile's decompressed rows
  std::byte* v = nullptr;  // [kKeyTile, head_dim_v]
  PackedTile tile;
  float* q = nullptr;              // [kv_heads, rows · ratio, q_stride], for up to kMaxHeads KV heads
  float* queries = nullptr;        // [kv_heads, queries_floats], the same for attend_in_place()
  float* scores = nullptr;         // [score_floats]
  float* offset = nullptr;         // [kv_heads, rows · ratio]
  float* sum = nullptr;            // [kv_heads, rows · ratio]
  float* acc = nullptr;            // [kv_heads, rows · ratio, o_stride]
  ColumnRange* visible = nullptr;  // [rows · ratio]

  // As TileScratch::layout().
  static std::size_t layout(const AttentionSpec& spec, const TileOps& ops, int rows, std::byte* base,
                            DecodeScratch& scratch) {
    std::size_t bytes = 0;
    const auto take = [&]<typename T>(T*& array, std::size_t count) {
      if (base != nullptr) array = reinterpret_cast<T*>(base + bytes);
      bytes += (count * sizeof(T) + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
    };
    const auto count = [](int n) { return static_cast<std::size_t>(n); };
    const std::size_t stacked = count(rows) * count(spec.heads / spec.kv_heads);
    const std::size_t all = stacked * count(std::min(kMaxHeads, spec.kv_heads));
    take(scratch.k, kKeyTile * count(spec.head_dim) * size_of(spec.dtype));
    take(scratch.v, kKeyTile * count(spec.head_dim_v) * size_of(spec.dtype));
    take(scratch.tile.k, ops.k_floats(spec.head_dim));
    take(scratch.tile.v, ops.v_floats(spec.head_dim_v));
    take(scratch.q, all * count(ops.q_stride(spec.head_dim)));
    take(scratch.queries, count(std::min(kMaxHeads, spec.kv_heads)) * ops.queries_floats(spec.head_dim));
    take(scratch.scores, ops.score_floats);
    take(scratch.offset, all);
    take(scratch.sum, all);
    take(scratch.acc, all * count(ops.o_stride(spec.head_dim_v)));
    take(scratch.visible, stacked);
    return bytes;
  }
};

// A sequence's keys as the rows see them: all keys, or those of the mask row's key blocks as contiguous keys
// (kernels/decode/decode_block_mask.hpp).
struct SeenKeys {
  std::int64_t length;  // number of keys that the rows see
  int selected;         // key blocks in the mask row before the rows' own
  std::int64_t gap;     // key blocks before the rows' own that the mask row leaves out
  const std::int32_t* blocks;
};

// A key tile of one KV head in the cache: rows of a plain cache, or of a format that load_quantized_rows() reads.
struct HeadTile {
  std::int64_t tile;  // among the keys that the rows see
  int head;           // of the work tile
  std::int64_t first_key = 0;
  int keys = 0;
  TileRows k = {};
  TileRows v = {};
  QuantizedTile quantized_k = {};
  QuantizedTile quantized_v = {};
};

// One KV split of a sequence, for the rows of all query heads of some KV heads.
struct DecodeWorkTile {
  std::int64_t sequence;
  int kv_head;            // the first
  int kv_heads;           // how many
  std::int64_t kv_split;  // KV split of the sequence
  SeenKeys seen;
};

class CpuDecode final : public DecodeKernel {
 public:
  CpuDecode(const DecodeSpec& spec, const CpuBackend& backend)
      : decode_(spec),
        spec_(spec.attention),
        ops_(backend.attention_ops(spec.attention.dtype)),
        threads_(backend.threads()),
        dequantizes_k_(dequantizes(spec.format.k, spec.attention.head_dim)),
        dequantizes_v_(dequantizes(spec.format.v, spec.attention.head_dim_v)) {}

  // m and l, then O after a gap, so that all partials and their O are aligned alike.
  std::int64_t partial_floats() const override { return kPartialAcc + spec_.head_dim_v; }
  int key_tile() const override { return kKeyTile; }
  std::size_t scratch_bytes(const DecodeLimits& limits) const override {
    return thread_bytes(limits) * static_cast<std::size_t>(threads_) + partial_bytes(limits);
  }
  void reserve(const DecodeLimits& limits) override {
    limits_ = limits;
    scratch_ = allocate_host(thread_bytes(limits) * static_cast<std::size_t>(threads_));
    partials_ = allocate_host(partial_bytes(limits));
  }

  void enqueue(const DecodeStep& step, Stream) override {
    check_decode_step(decode_, limits_, step);
    std::vector<DecodeWorkTile> work_tiles;
    const std::int64_t sequences = step.q.tokens / step.rows;
    const int mask_heads = mask_heads_of(spec_.block_mask);
    const int at_once = kv_heads_at_once(step, sequences);
    for (std::int64_t s = 0; s < sequences; ++s) {
      for (int mask_row = 0; mask_row < mask_heads; ++mask_row) {
        const SeenKeys seen = seen_keys(step, s, mask_row);
        const TileRange tiles = rows_tiles(seen.length, step.rows);
        for (std::int64_t g = 0; g < kv_splits_of(tiles); ++g) {
          const std::int64_t kv_split = tiles.begin / kTilesPerKvSplit + g;
          if (kv_split % step.partition.stride != step.partition.first) continue;
          const int last = (mask_row + 1) * spec_.kv_heads / mask_heads;
          for (int head = mask_row * spec_.kv_heads / mask_heads; head < last; head += at_once) {
            work_tiles.push_back({s, head, std::min(at_once, last - head), kv_split, seen});
          }
        }
      }
    }
    const auto work_tile_count = static_cast<std::int64_t>(work_tiles.size());
    const auto bytes = static_cast<std::int64_t>(thread_bytes(limits_));
    const std::int64_t per_heartbeat = std::int64_t{kWorkTilesPerHeartbeat} * threads_;
    for (std::int64_t begin = 0; begin < work_tile_count; begin += per_heartbeat) {
      heartbeat();
      const std::int64_t end = std::min(work_tile_count, begin + per_heartbeat);
#pragma omp parallel num_threads(threads_)
      {
        DecodeScratch scratch;
        DecodeScratch::layout(spec_, ops_, limits_.rows, scratch_.data() + thread_number() * bytes, scratch);
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = begin; i < end; ++i)
          decode_work_tile(step, work_tiles[static_cast<std::size_t>(i)], scratch);
      }
    }
    if (step.partials.data != nullptr) return;
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t row = 0; row < step.q.tokens; ++row) {
      const std::int64_t s = row / step.rows;
      for (int head = 0; head < spec_.heads; ++head) {
        const std::int64_t length = seen_keys(step, s, head / (spec_.heads / mask_heads)).length;
        const std::int64_t first = rows_tiles(length, step.rows).begin / kTilesPerKvSplit;
        finish(length, step.rows, step.output, row, head,
               [&](std::int64_t kv_split) { return own_partial(row, head, kv_split - first); });
      }
    }
  }

  void merge(const DecodeMerge& merge, Stream) override {
    check_decode_merge(decode_, merge);
    const auto partitions = static_cast<std::int64_t>(merge.partitions.size());
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t row = 0; row < merge.output.out.tokens; ++row) {
      for (int head = 0; head < spec_.heads; ++head) {
        finish(merge.lengths[row / merge.rows], merge.rows, merge.output, row, head, [&](std::int64_t kv_split) {
          return merge.partitions[static_cast<std::size_t>(kv_split % partitions)] +
                 ((row * merge.kv_splits + kv_split / partitions) * spec_.heads + head) * partial_floats();
        });
      }
    }
  }

 private:
  static constexpr TileSizes kSizes{/*query=*/1, kKeyTile};
  static constexpr std::int64_t kKeysPerKvSplit = std::int64_t{kTilesPerKvSplit} * kKeyTile;
  // With several threads, each gets at least this many work tiles, because threads are not equally fast. Rows of 8 bits
  // or less are short, so they have fewer work tiles, each with more adjacent rows (bench/notes/decoding.md).
  static constexpr int kWorkTilesPerThread = 8;
  static constexpr int kQuantizedTilesPerThread = 4;
  static constexpr int kWorkTilesPerHeartbeat = 32;  // per thread, between heartbeats

  // A head's rows are far apart in memory, so processors don't recognize the stream and need explicit prefetches.
  static constexpr std::int64_t kCacheLine = 64;
  static constexpr std::int64_t kKeysAhead = 16;  // of a compressed cache

  static constexpr std::int64_t kPartialAcc = 4;  // offset of O in a partial

  // With AMX tiles subnormal elements are zero, as load_quantized_rows() has them.
  bool dequantizes(const RowFormat& format, int dim) const {
    return ops_.few_rows > 0 && !decode_.values_in_keys &&
           dequantizes_tiles(format, {spec_.dtype, spec_.kv_heads, dim});
  }

  // The keys of a sequence that rows see through mask row `mask_row`.
  SeenKeys seen_keys(const DecodeStep& step, std::int64_t sequence, int mask_row) const {
    const std::int32_t length = step.lengths[sequence];
    if (!spec_.block_mask.any()) return {length, kNoTile, 0, nullptr};
    const std::int64_t number = sequence * spec_.block_mask.heads + mask_row;
    const std::int32_t* const blocks = step.block_mask.blocks + number * step.block_mask.stride;
    const MaskedKeys masked = masked_keys(length, step.rows, spec_.block_mask.key_block, step.block_mask.counts[number],
                                          [blocks](std::int32_t i) { return blocks[i]; });
    return {masked.keys, masked.selected, masked.gap(), blocks};
  }
  // Converts a tile index among the seen keys to one in the sequence.
  std::int64_t tile_in_sequence(const SeenKeys& seen, std::int64_t tile) const {
    if (seen.blocks == nullptr) return tile;
    const std::int64_t block_tiles = spec_.block_mask.key_block / kKeyTile;
    const std::int64_t block_index = tile / block_tiles;
    return tile + block_tiles * (block_index < seen.selected ? seen.blocks[block_index] - block_index : seen.gap);
  }

  // As many KV heads as leave each thread a few work tiles: one thread reads adjacent rows of several heads faster.
  int kv_heads_at_once(const DecodeStep& step, std::int64_t sequences) const {
    std::int64_t splits = 0;
    for (std::int64_t s = 0; s < sequences; ++s) {
      splits += kv_splits_of(rows_tiles(seen_keys(step, s, 0).length, step.rows)) / step.partition.stride;
    }
    const std::int64_t per_thread = decode_.format.is_plain() ? kWorkTilesPerThread : kQuantizedTilesPerThread;
    const std::int64_t work_tiles = threads_ > 1 ? per_thread * threads_ : 1;
    const std::int64_t heads = splits * spec_.kv_heads / work_tiles;
    return static_cast<int>(std::clamp<std::int64_t>(heads, 1, kMaxHeads));
  }

  std::size_t thread_bytes(const DecodeLimits& limits) const {
    DecodeScratch none;
    return DecodeScratch::layout(spec_, ops_, limits.rows, nullptr, none);
  }
  static std::int64_t max_splits(const DecodeLimits& limits) {
    return std::max<std::int64_t>(1, kv_splits_of({0, (limits.keys + kKeyTile - 1) / kKeyTile}));
  }
  // The tiles that some row of a step processes of a sequence.
  TileRange rows_tiles(std::int64_t length, int rows) const {
    return Visibility(spec_.mask, length).tiles(length - rows, rows, kSizes);
  }
  // One partial for each row, head and KV split of the step.
  std::size_t partial_bytes(const DecodeLimits& limits) const {
    return static_cast<std::size_t>(limits.sequences * limits.rows * spec_.heads * max_splits(limits) *
                                    partial_floats()) *
           sizeof(float);
  }
  // `kv_split` counts from the first KV split that some row of the step processes. Short sequences use the first ones
  // only, which are adjacent: the rest of the limits' memory is never touched.
  float* own_partial(std::int64_t row, std::int64_t head, std::int64_t kv_split) const {
    const std::int64_t rows = limits_.sequences * limits_.rows;
    return reinterpret_cast<float*>(partials_.data()) +
           ((kv_split * rows + row) * spec_.heads + head) * partial_floats();
  }

  // The page slot of a token of the step's cache.
  static PageSlot page_slot(const DecodeStep& step, std::int64_t page_size, std::int64_t sequence, std::int64_t token) {
    const std::int32_t* const table = step.block_table.pages;
    if (table == nullptr) return {sequence, token};
    const int log2 = std::countr_zero(static_cast<std::uint64_t>(page_size));  // is_page_size()
    return {table[sequence * step.block_table.stride + (token >> log2)], token & (page_size - 1)};
  }

  // The addresses of `keys` rows of one head in the cache, from key `first` of the sequence on: pages hold a tile in
  // whole page runs. `row_at(page, token)` is the address of a row, and rows of a page are `stride` bytes apart.
  template <class RowAt>
  static TileRows rows_in_place(const DecodeStep& step, std::int64_t page_size, std::int64_t stride,
                                std::int64_t sequence, std::int64_t first, int keys, const RowAt& row_at) {
    const std::int64_t begin = token_of_key(step.partition, kKeysPerKvSplit, first);  // a tile's tokens are consecutive
    TileRows rows;
    rows.stride = stride;
    const bool several = step.block_table.pages != nullptr && page_size < kKeyTile;
    if (several) rows.page_run_log2 = std::countr_zero(static_cast<std::uint64_t>(page_size));
    const int run_keys = several ? static_cast<int>(page_size) : kKeyTile;
    for (int run = 0; run * run_keys < keys; ++run) {
      const PageSlot place = page_slot(step, page_size, sequence, begin + run * run_keys);
      rows.page_runs[run] = row_at(place.page, place.token);
    }
    return rows;
  }

  // Decompresses the same rows of a compressed cache. A group of tokens never spans two tiles.
  static void decompress(const DecodeStep& step, const CompressedCache& cache, std::int64_t sequence, int kv_head,
                         const HeadTile& tile, std::byte* rows) {
    const std::int64_t begin = token_of_key(step.partition, kKeysPerKvSplit, tile.first_key);
    const StreamRowAt row_at = [&](int stream, std::int64_t position) -> const std::byte* {
      const auto& rows_of = cache.streams[static_cast<std::size_t>(stream)];
      const auto at = [&](std::int64_t key) {
        const PageSlot place = page_slot(step, cache.page_size, sequence, begin + key);
        return rows_of.at(place.page, place.token, kv_head);
      };
      const std::int64_t key = position - tile.first_key;
      if (key + kKeysAhead < tile.keys) {
        const std::byte* const ahead = at(key + kKeysAhead);
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + kCacheLine);
      }
      return at(key);
    };
    const std::int64_t stride = cache.shape.dim * static_cast<std::int64_t>(size_of(cache.shape.dtype));
    RowCodec(cache.format, cache.shape, cache.tables)
        .decompress(row_at, sequence, tile.first_key, tile.keys, step.lengths[sequence], kv_head, rows, stride);
  }

  // Tile number `tile` of the keys that the work tile's rows see, for its KV head `head`.
  HeadTile rows_of_tile(const DecodeStep& step, const DecodeWorkTile& work_tile, std::int64_t tile, int head) const {
    HeadTile rows{tile, head};
    rows.keys = static_cast<int>(std::min<std::int64_t>(kKeyTile, work_tile.seen.length - tile * kKeyTile));
    rows.first_key = tile_in_sequence(work_tile.seen, tile) * kKeyTile;
    const auto in_cache = [&](const CacheView& cache) {
      return rows_in_place(step, cache.page_size, cache.token_stride * static_cast<std::int64_t>(size_of(cache.dtype)),
                           work_tile.sequence, rows.first_key, rows.keys, [&](std::int64_t page, std::int64_t token) {
                             return cache.at(page, token, work_tile.kv_head + head);
                           });
    };
    if (decode_.format.k.is_plain()) rows.k = in_cache(step.k);
    if (decode_.values_in_keys) {
      rows.v = rows.k;
    } else if (decode_.format.v.is_plain()) {
      rows.v = in_cache(step.v);
    }
    const auto in_streams = [&](const CompressedCache& cache) {
      QuantizedTile tile_rows;
      TileRows* const streams[] = {&tile_rows.values, &tile_rows.scales};
      for (std::size_t i = 0; i < std::size(streams) && cache.streams[i].data != nullptr; ++i) {
        *streams[i] = rows_in_place(step, cache.page_size, cache.streams[i].token_stride, work_tile.sequence,
                                    rows.first_key, rows.keys, [&](std::int64_t page, std::int64_t token) {
                                      return cache.streams[i].at(page, token, work_tile.kv_head + head);
                                    });
      }
      if (cache.format.encoding == RowEncoding::kFp8 && cache.format.scales != ScaleGrain::kTokenHead) {
        const bool of_head = cache.format.scales == ScaleGrain::kHead;
        std::memcpy(&tile_rows.one_scale,
                    cache.tables[0] + (of_head ? work_tile.kv_head + head : 0) * std::int64_t{sizeof(float)},
                    sizeof(float));
      }
      tile_rows.keys = rows.keys;
      return tile_rows;
    };
    if (dequantizes_k_) rows.quantized_k = in_streams(step.quantized_k);
    if (dequantizes_v_) rows.quantized_v = in_streams(step.quantized_v);
    return rows;
  }

  // Whether all keys of a tile are quantized. With kInt4Channel a sequence's last tokens are not.
  static bool is_quantized(const DecodeStep& step, const RowFormat& format, std::int64_t sequence,
                           const HeadTile& tile) {
    return quantized_per_token(format) ||
           tile.first_key + tile.keys <= full_group_tokens(step.lengths[sequence], format.group);
  }

  // Attends the rows of one KV head to a tile directly in the cache. Returns false, and changes nothing, if that is not
  // possible.
  bool attend_in_place(const DecodeStep& step, const DecodeWorkTile& work_tile, const TileShape& shape,
                       const HeadTile& tile, const HeadTile* next, const float* queries, const RowBatch& batch,
                       float* scores) const {
    ChannelScales k_channels;
    ChannelScales v_channels;
    const auto quantized_rows = [&](const RowFormat& format, int dim, QuantizedTile HeadTile::*quantized,
                                    ChannelScales& channels) {
      return QuantizedRows{&format, dim, &(tile.*quantized), next != nullptr ? &(next->*quantized) : nullptr,
                           &channels};
    };
    const QuantizedRows k = quantized_rows(decode_.format.k, spec_.head_dim, &HeadTile::quantized_k, k_channels);
    const QuantizedRows v = quantized_rows(decode_.format.v, spec_.head_dim_v, &HeadTile::quantized_v, v_channels);
    TileInPlace rows;
    rows.keys = tile.keys;
    rows.k = tile.k;
    rows.v = tile.v;
    if (dequantizes_k_ && is_quantized(step, decode_.format.k, work_tile.sequence, tile)) {
      rows.load_k = {&load_quantized_rows, &k};
    } else if (!decode_.format.k.is_plain()) {
      return false;
    }
    if (dequantizes_v_ && is_quantized(step, decode_.format.v, work_tile.sequence, tile)) {
      rows.load_v = {&load_quantized_pairs, &v};
    } else if (!decode_.format.v.is_plain()) {
      return false;
    }
    if (next != nullptr) {
      rows.next_keys = next->keys;
      if (decode_.format.k.is_plain()) rows.next_k = &next->k;
      if (decode_.format.v.is_plain() && !decode_.values_in_keys) rows.next_v = &next->v;
    }
    return ops_.attend_in_place(shape, rows, queries, batch, scores);
  }

  // Packs a tile, after it is decompressed to the scratch if it must be.
  void pack(const DecodeStep& step, const DecodeWorkTile& work_tile, const TileShape& shape, const HeadTile& tile,
            DecodeScratch& scratch) const {
    const auto decompressed = [&](const CompressedCache& cache, std::byte* to) {
      decompress(step, cache, work_tile.sequence, work_tile.kv_head + tile.head, tile, to);
      return TileRows{{to}, cache.shape.dim * static_cast<std::int64_t>(size_of(cache.shape.dtype))};
    };
    const TileRows k = decode_.format.k.is_plain() ? tile.k : decompressed(step.quantized_k, scratch.k);
    const TileRows v = decode_.values_in_keys        ? k
                       : decode_.format.v.is_plain() ? tile.v
                                                     : decompressed(step.quantized_v, scratch.v);
    ops_.pack(shape, k, v, tile.keys, scratch.tile);
  }

  void decode_work_tile(const DecodeStep& step, const DecodeWorkTile& work_tile, DecodeScratch& scratch) const {
    const int ratio = spec_.heads / spec_.kv_heads;
    const Visibility visibility(spec_.mask, work_tile.seen.length);
    const std::int64_t position = work_tile.seen.length - step.rows;
    const auto o_stride = static_cast<std::size_t>(ops_.o_stride(spec_.head_dim_v));
    const auto q_stride = static_cast<std::size_t>(ops_.q_stride(spec_.head_dim));
    const auto stacked = static_cast<std::size_t>(step.rows * ratio);
    const std::size_t all_rows = stacked * static_cast<std::size_t>(work_tile.kv_heads);
    const auto row_of = [&](std::size_t at) {
      return work_tile.sequence * step.rows + static_cast<std::int64_t>(at % stacked) / ratio;
    };
    const auto head_of = [&](std::size_t at) {
      return (work_tile.kv_head + static_cast<std::int64_t>(at / stacked)) * ratio +
             static_cast<std::int64_t>(at % stacked) % ratio;
    };
    for (std::size_t at = 0; at < all_rows; ++at) {
      ops_.load_query(step.q.at(row_of(at), head_of(at)), spec_.dtype, spec_.head_dim, scratch.q + at * q_stride);
      scratch.offset[at] = -std::numeric_limits<float>::infinity();
      scratch.sum[at] = 0.0F;
      std::fill_n(scratch.acc + at * o_stride, o_stride, 0.0F);
    }

    const TileRange all = visibility.tiles(position, step.rows, kSizes);
    const std::int64_t begin = std::max(all.begin, work_tile.kv_split * kTilesPerKvSplit);
    const std::int64_t end = std::min(all.end, (work_tile.kv_split + 1) * kTilesPerKvSplit);
    const TileShape shape{spec_.dtype, spec_.head_dim, spec_.head_dim_v, spec_.softmax_scale, spec_.softcap};
    const bool queries_at_once =
        stacked <= static_cast<std::size_t>(ops_.few_rows) && spec_.head_dim % ops_.dim_multiple == 0;
    const std::size_t queries_floats = ops_.queries_floats(spec_.head_dim);
    for (std::size_t head = 0; queries_at_once && head < static_cast<std::size_t>(work_tile.kv_heads); ++head) {
      ops_.pack_queries(shape, scratch.q + head * stacked * q_stride, static_cast<int>(stacked),
                        scratch.queries + head * queries_floats);
    }
    std::optional<HeadTile> next;
    for (std::int64_t tile = begin; tile < end; ++tile) {
      // The rows that see the tile are consecutive, because both ends of their ranges ascend.
      int first = kNoTile;
      int last = 0;
      for (int i = 0; i < step.rows; ++i) {
        const TileRange tiles = visibility.tiles(position + i, kSizes);
        if (tile < tiles.begin || tile >= tiles.end) continue;
        first = std::min(first, i);
        last = i + 1;
        std::fill_n(scratch.visible + i * ratio, ratio,
                    columns_of(visibility.keys(position + i), tile * kKeyTile, kKeyTile));
      }
      if (first >= last) continue;
      for (int head = 0; head < work_tile.kv_heads; ++head) {
        if (!next || next->tile != tile || next->head != head) next = rows_of_tile(step, work_tile, tile, head);
        const HeadTile current = *next;
        next.reset();
        if (head + 1 < work_tile.kv_heads) {
          next = rows_of_tile(step, work_tile, tile, head + 1);
        } else if (tile + 1 < end) {
          next = rows_of_tile(step, work_tile, tile + 1, 0);
        }
        const auto visible = static_cast<std::size_t>(first * ratio);
        const std::size_t start = static_cast<std::size_t>(head) * stacked + visible;
        const RowBatch batch{scratch.q + start * q_stride,   scratch.offset + start,    scratch.sum + start,
                             scratch.acc + start * o_stride, scratch.visible + visible, (last - first) * ratio};
        if (queries_at_once && last - first == step.rows &&
            attend_in_place(step, work_tile, shape, current, next ? &*next : nullptr,
                            scratch.queries + static_cast<std::size_t>(head) * queries_floats, batch, scratch.scores)) {
          continue;
        }
        pack(step, work_tile, shape, current, scratch);
        ops_.attend(shape, scratch.tile, batch, scratch.scores);
      }
    }

    for (std::size_t at = 0; at < all_rows; ++at) {
      const std::int64_t row = row_of(at);
      const std::int64_t head = head_of(at);
      float* const partial_data =
          step.partials.data != nullptr
              ? step.partials.data +
                    ((row * step.partials.kv_splits + work_tile.kv_split / step.partition.stride) * spec_.heads +
                     head) *
                        partial_floats()
              : own_partial(row, head, work_tile.kv_split - all.begin / kTilesPerKvSplit);
      partial_data[0] = scratch.offset[at];
      partial_data[1] = scratch.sum[at];
      std::copy_n(scratch.acc + at * o_stride, spec_.head_dim_v, partial_data + kPartialAcc);
    }
  }

  // Merges the partials of the KV splits that the row attends to. `partial_of(kv_split)` returns the partial of a split
  // of the sequence.
  template <typename PartialOf>
  void finish(std::int64_t length, int rows, const AttentionOutput& output, std::int64_t row, int head,
              const PartialOf& partial_of) const {
    const TileRange tiles = Visibility(spec_.mask, length).tiles(length - rows + row % rows, kSizes);
    std::vector<float> memory(static_cast<std::size_t>(spec_.head_dim_v));
    std::vector<float> acc(static_cast<std::size_t>(spec_.head_dim_v));
    AttentionState merged;
    merged.current = {-std::numeric_limits<float>::infinity(), 0.0F, memory.data()};
    merged.merged = merged.current;
    for (std::int64_t g = 0; g < kv_splits_of(tiles); ++g) {
      const float* const partial_data = partial_of(tiles.begin / kTilesPerKvSplit + g);
      std::copy_n(partial_data + kPartialAcc, spec_.head_dim_v, acc.data());
      AttentionState partial;
      partial.flags = kHasCurrent;
      partial.current = {partial_data[0], partial_data[1], acc.data()};
      merge_row(spec_, ops_, partial, merged);
    }
    const float* const sink = spec_.sinks ? output.sinks + head : nullptr;
    const float lse = finish_row(spec_, merge_all(spec_, ops_, merged), sink, output.out.at(row, head));
    if (output.lse.data != nullptr) output.lse.at(row, head) = lse;
  }

  DecodeSpec decode_;
  AttentionSpec spec_;
  const TileOps& ops_;
  int threads_;
  bool dequantizes_k_, dequantizes_v_;  // by load_quantized_rows()
  DecodeLimits limits_;
  Buffer scratch_;   // [threads_, thread_bytes]
  Buffer partials_;  // [kv_splits, rows, heads, partial_floats]
};

}  // namespace

std::unique_ptr<DecodeKernel> make_cpu_decode(const DecodeSpec& spec, Backend& backend) {
  return std::make_unique<CpuDecode>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
