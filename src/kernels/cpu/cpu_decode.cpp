// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_decode.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/pulse.hpp"
#include "kernels/cache_share.hpp"
#include "kernels/cache_update.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/fold_state.hpp"
#include "kernels/registry.hpp"
#include "kernels/row_coder.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kNoTile = std::numeric_limits<int>::max();

std::int64_t groups_of(const TileRange& tiles) {
  return tiles.empty() ? 0 : (tiles.end - 1) / kGroupTiles + 1 - tiles.begin / kGroupTiles;
}

int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// One thread's scratch: views into one allocation.
struct DecodeScratch {
  std::byte* k = nullptr;  // [kKeyTile, head_dim], the rows of a tile, wherever their pages lie
  std::byte* v = nullptr;  // [kKeyTile, head_dim_v]
  PackedTile tile;
  float* q = nullptr;              // [rows · ratio, head_dim]
  float* scores = nullptr;         // [row_block, kKeyTile]
  float* m = nullptr;              // [rows · ratio]
  float* l = nullptr;              // [rows · ratio]
  float* o = nullptr;              // [rows · ratio, o_stride]
  ColumnRange* visible = nullptr;  // [rows · ratio]

  // As GroupScratch::layout().
  static std::size_t layout(const FoldSpec& spec, const TileOps& ops, int rows, std::byte* base,
                            DecodeScratch& scratch) {
    std::size_t bytes = 0;
    const auto take = [&]<typename T>(T*& array, std::size_t count) {
      if (base != nullptr) array = reinterpret_cast<T*>(base + bytes);
      bytes += (count * sizeof(T) + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
    };
    const auto count = [](int n) { return static_cast<std::size_t>(n); };
    const std::size_t stacked = count(rows) * count(spec.heads / spec.kv_heads);
    take(scratch.k, kKeyTile * count(spec.head_dim) * size_of(spec.dtype));
    take(scratch.v, kKeyTile * count(spec.head_dim_v) * size_of(spec.dtype));
    take(scratch.tile.k, ops.k_floats(spec.head_dim));
    take(scratch.tile.v, ops.v_floats(spec.head_dim_v));
    take(scratch.q, stacked * count(spec.head_dim));
    take(scratch.scores, count(ops.row_block) * kKeyTile);
    take(scratch.m, stacked);
    take(scratch.l, stacked);
    take(scratch.o, stacked * count(ops.o_stride(spec.head_dim_v)));
    take(scratch.visible, stacked);
    return bytes;
  }
};

// A sequence's keys as rows see them: all of them, or those of listed blocks side by side (kernels/decode_lists.hpp).
struct SeenKeys {
  std::int64_t length;  // keys
  int listed;           // blocks of the list
  std::int64_t gap;     // blocks that are left out, of all those in front of the last ones
  const std::int32_t* blocks;
};

// A group of one sequence, for the rows of all query heads of one KV head.
struct DecodeUnit {
  std::int64_t sequence;
  int kv_head;
  std::int64_t group;  // of the sequence
  SeenKeys seen;
};

class CpuDecode final : public DecodeKernel {
 public:
  CpuDecode(const DecodeSpec& spec, const CpuBackend& backend)
      : decode_(spec), spec_(spec.fold), ops_(backend.tile_ops()), threads_(backend.threads()) {}

  // m and l, then O after a gap, so that records and their O are aligned alike.
  std::int64_t record_floats() const override { return kRecordO + spec_.head_dim_v; }
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
    std::vector<DecodeUnit> units;
    const std::int64_t sequences = step.q.tokens / step.rows;
    const int lists = lists_of(spec_.lists);
    for (std::int64_t s = 0; s < sequences; ++s) {
      for (int list = 0; list < lists; ++list) {
        const SeenKeys seen = seen_keys(step, s, list);
        const TileRange tiles = rows_tiles(seen.length, step.rows);
        for (std::int64_t g = 0; g < groups_of(tiles); ++g) {
          const std::int64_t group = tiles.begin / kGroupTiles + g;
          if (group % step.share.every != step.share.first) continue;
          for (int head = list * spec_.kv_heads / lists; head < (list + 1) * spec_.kv_heads / lists; ++head) {
            units.push_back({s, head, group, seen});
          }
        }
      }
    }
    const auto unit_count = static_cast<std::int64_t>(units.size());
    const auto bytes = static_cast<std::int64_t>(thread_bytes(limits_));
    const std::int64_t at_once = std::int64_t{kUnitsAtOnce} * threads_;
    for (std::int64_t begin = 0; begin < unit_count; begin += at_once) {
      beat();
      const std::int64_t end = std::min(unit_count, begin + at_once);
#pragma omp parallel num_threads(threads_)
      {
        DecodeScratch scratch;
        DecodeScratch::layout(spec_, ops_, limits_.rows, scratch_.data() + thread_number() * bytes, scratch);
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = begin; i < end; ++i) fold_unit(step, units[static_cast<std::size_t>(i)], scratch);
      }
    }
    if (step.partials.records != nullptr) return;
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t row = 0; row < step.q.tokens; ++row) {
      const std::int64_t s = row / step.rows;
      for (int head = 0; head < spec_.heads; ++head) {
        const std::int64_t length = seen_keys(step, s, head / (spec_.heads / lists)).length;
        const std::int64_t first = rows_tiles(length, step.rows).begin / kGroupTiles;
        finish(length, step.rows, step.output, row, head,
               [&](std::int64_t group) { return own_record(row, head, group - first); });
      }
    }
  }

  void merge(const DecodeMerge& merge, Stream) override {
    check_decode_merge(decode_, merge);
    const auto every = static_cast<std::int64_t>(merge.shares.size());
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t row = 0; row < merge.output.out.tokens; ++row) {
      for (int head = 0; head < spec_.heads; ++head) {
        finish(merge.lengths[row / merge.rows], merge.rows, merge.output, row, head, [&](std::int64_t group) {
          return merge.shares[static_cast<std::size_t>(group % every)] +
                 ((row * merge.groups + group / every) * spec_.heads + head) * record_floats();
        });
      }
    }
  }

 private:
  static constexpr TileSizes kSizes{/*query=*/1, kKeyTile};
  static constexpr std::int64_t kGroupKeys = std::int64_t{kGroupTiles} * kKeyTile;
  static constexpr int kUnitsAtOnce = 32;  // of a thread, between which the rank shows that it works

  static constexpr std::int64_t kRecordO = 4;  // where O begins in a record

  // The keys of a sequence as the rows with its list `list` see them.
  SeenKeys seen_keys(const DecodeStep& step, std::int64_t sequence, int list) const {
    const std::int32_t length = step.lengths[sequence];
    if (!spec_.lists.any()) return {length, kNoTile, 0, nullptr};
    const std::int64_t number = sequence * spec_.lists.heads + list;
    const std::int32_t* const blocks = step.lists.blocks + number * step.lists.stride;
    const KeysByList of = keys_by_list(length, step.rows, spec_.lists.key_block, step.lists.counts[number],
                                       [blocks](std::int32_t i) { return blocks[i]; });
    return {of.keys, of.listed, of.gap(), blocks};
  }
  // Where a tile lies among all of its sequence.
  std::int64_t tile_in_sequence(const SeenKeys& seen, std::int64_t tile) const {
    if (seen.blocks == nullptr) return tile;
    const std::int64_t each = spec_.lists.key_block / kKeyTile;
    const std::int64_t place = tile / each;
    return tile + each * (place < seen.listed ? seen.blocks[place] - place : seen.gap);
  }

  std::size_t thread_bytes(const DecodeLimits& limits) const {
    DecodeScratch none;
    return DecodeScratch::layout(spec_, ops_, limits.rows, nullptr, none);
  }
  static std::int64_t most_groups(const DecodeLimits& limits) {
    return std::max<std::int64_t>(1, groups_of({0, (limits.keys + kKeyTile - 1) / kKeyTile}));
  }
  // The tiles that some row of a step folds of a sequence.
  TileRange rows_tiles(std::int64_t length, int rows) const {
    return Visibility(spec_.mask, length).tiles(length - rows, rows, kSizes);
  }
  // Each row, head and group that the step folds has a record.
  std::size_t partial_bytes(const DecodeLimits& limits) const {
    return static_cast<std::size_t>(limits.sequences * limits.rows * spec_.heads * most_groups(limits) *
                                    record_floats()) *
           sizeof(float);
  }
  // `group` counts from the first that some row of the step folds.
  float* own_record(std::int64_t row, std::int64_t head, std::int64_t group) const {
    return reinterpret_cast<float*>(partials_.data()) +
           ((row * spec_.heads + head) * most_groups(limits_) + group) * record_floats();
  }

  // Where a token of what the step's cache holds of a sequence lies, in pages of so many tokens.
  static CachePlace place_of(const DecodeStep& step, std::int64_t page_size, std::int64_t sequence,
                             std::int64_t token) {
    const std::int32_t* const table = step.block_table.pages;
    if (table == nullptr) return {sequence, token};
    return {table[sequence * step.block_table.stride + token / page_size], token % page_size};
  }

  // Copies `keys` rows of one head, from key `first` of the sequence on, to where they lie side by side.
  static void gather(const DecodeStep& step, const CacheView& cache, const DecodeUnit& unit, std::int64_t first,
                     int keys, std::byte* rows) {
    const std::size_t row_bytes = static_cast<std::size_t>(cache.dim) * size_of(cache.dtype);
    const std::int64_t begin = token_of_key(step.share, kGroupKeys, first);  // and its tile's others follow
    for (int i = 0; i < keys; ++i) {
      const CachePlace place = place_of(step, cache.page_size, unit.sequence, begin + i);
      std::memcpy(rows + static_cast<std::size_t>(i) * row_bytes, cache.at(place.page, place.token, unit.kv_head),
                  row_bytes);
    }
  }

  // The same of a compressed cache. Groups of tokens lie in one tile.
  static void gather(const DecodeStep& step, const CompressedCache& cache, const DecodeUnit& unit, std::int64_t first,
                     int keys, std::byte* rows) {
    const StreamRowAt row_at = [&](int stream, std::int64_t position) -> const std::byte* {
      const std::int64_t token = token_of_key(step.share, kGroupKeys, position);
      const CachePlace place = place_of(step, cache.page_size, unit.sequence, token);
      return cache.streams[static_cast<std::size_t>(stream)].at(place.page, place.token, unit.kv_head);
    };
    RowCoder(cache.format, cache.shape, cache.tables)
        .decompress(row_at, unit.sequence, first, keys, step.lengths[unit.sequence], unit.kv_head, rows,
                    cache.shape.dim * static_cast<std::int64_t>(size_of(cache.shape.dtype)));
  }

  void fold_unit(const DecodeStep& step, const DecodeUnit& unit, DecodeScratch& scratch) const {
    const int ratio = spec_.heads / spec_.kv_heads;
    const Visibility visibility(spec_.mask, unit.seen.length);
    const std::int64_t position = unit.seen.length - step.rows;
    const auto o_stride = static_cast<std::size_t>(ops_.o_stride(spec_.head_dim_v));
    const auto dim = static_cast<std::size_t>(spec_.head_dim);
    const auto stacked = static_cast<std::size_t>(step.rows * ratio);
    for (std::size_t at = 0; at < stacked; ++at) {
      const std::int64_t row = unit.sequence * step.rows + static_cast<std::int64_t>(at) / ratio;
      const std::int64_t head = std::int64_t{unit.kv_head} * ratio + static_cast<std::int64_t>(at) % ratio;
      ops_.widen(step.q.at(row, head), spec_.dtype, spec_.head_dim, scratch.q + at * dim);
      scratch.m[at] = -std::numeric_limits<float>::infinity();
      scratch.l[at] = 0.0F;
      std::fill_n(scratch.o + at * o_stride, o_stride, 0.0F);
    }

    const TileRange all = visibility.tiles(position, step.rows, kSizes);
    const std::int64_t begin = std::max(all.begin, unit.group * kGroupTiles);
    const std::int64_t end = std::min(all.end, (unit.group + 1) * kGroupTiles);
    const TileShape shape{spec_.dtype, spec_.head_dim, spec_.head_dim_v, spec_.softmax_scale, spec_.softcap};
    for (std::int64_t tile = begin; tile < end; ++tile) {
      // The rows that fold it are neighbours, as the ends of their ranges ascend.
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
      const auto keys = static_cast<int>(std::min<std::int64_t>(kKeyTile, unit.seen.length - tile * kKeyTile));
      const std::int64_t first_key = tile_in_sequence(unit.seen, tile) * kKeyTile;
      if (decode_.format.k.is_plain()) {
        gather(step, step.k, unit, first_key, keys, scratch.k);
      } else {
        gather(step, step.packed_k, unit, first_key, keys, scratch.k);
      }
      if (decode_.values_in_keys) {
        // They are the same rows.
      } else if (decode_.format.v.is_plain()) {
        gather(step, step.v, unit, first_key, keys, scratch.v);
      } else {
        gather(step, step.packed_v, unit, first_key, keys, scratch.v);
      }
      const auto element = static_cast<std::int64_t>(size_of(spec_.dtype));
      const TileRows k_rows{{scratch.k}, spec_.head_dim * element};
      ops_.pack(shape, k_rows, decode_.values_in_keys ? k_rows : TileRows{{scratch.v}, spec_.head_dim_v * element},
                keys, scratch.tile);
      const auto start = static_cast<std::size_t>(first * ratio);
      ops_.fold(shape, scratch.tile,
                {scratch.q + start * dim, scratch.m + start, scratch.l + start, scratch.o + start * o_stride,
                 scratch.visible + start, (last - first) * ratio},
                scratch.scores);
    }

    for (std::size_t at = 0; at < stacked; ++at) {
      const std::int64_t row = unit.sequence * step.rows + static_cast<std::int64_t>(at) / ratio;
      const std::int64_t head = std::int64_t{unit.kv_head} * ratio + static_cast<std::int64_t>(at) % ratio;
      float* const record =
          step.partials.records != nullptr
              ? step.partials.records +
                    ((row * step.partials.groups + unit.group / step.share.every) * spec_.heads + head) *
                        record_floats()
              : own_record(row, head, unit.group - all.begin / kGroupTiles);
      record[0] = scratch.m[at];
      record[1] = scratch.l[at];
      std::copy_n(scratch.o + at * o_stride, spec_.head_dim_v, record + kRecordO);
    }
  }

  // Merges the records of the groups that the row folds. `record_of(group)` has that of a group of the sequence.
  template <typename RecordOf>
  void finish(std::int64_t length, int rows, const FoldOutput& output, std::int64_t row, int head,
              const RecordOf& record_of) const {
    const TileRange tiles = Visibility(spec_.mask, length).tiles(length - rows + row % rows, kSizes);
    std::vector<float> memory(static_cast<std::size_t>(spec_.head_dim_v));
    std::vector<float> group(static_cast<std::size_t>(spec_.head_dim_v));
    RowState merged;
    merged.open = {-std::numeric_limits<float>::infinity(), 0.0F, memory.data()};
    merged.closed = merged.open;
    for (std::int64_t g = 0; g < groups_of(tiles); ++g) {
      const float* const record = record_of(tiles.begin / kGroupTiles + g);
      std::copy_n(record + kRecordO, spec_.head_dim_v, group.data());
      RowState partial;
      partial.parts = kHasOpen;
      partial.open = {record[0], record[1], group.data()};
      merge_row(spec_, ops_, partial, merged);
    }
    const float* const sink = spec_.sinks ? output.sinks + head : nullptr;
    const float lse = finish_row(spec_, merge_all(spec_, ops_, merged), sink, output.out.at(row, head));
    if (output.lse.data != nullptr) output.lse.at(row, head) = lse;
  }

  DecodeSpec decode_;
  FoldSpec spec_;
  const TileOps& ops_;
  int threads_;
  DecodeLimits limits_;
  Buffer scratch_;   // [threads_, thread_bytes]
  Buffer partials_;  // [rows, heads, groups, record_floats]
};

}  // namespace

std::unique_ptr<DecodeKernel> make_cpu_decode(const DecodeSpec& spec, Backend& backend) {
  return std::make_unique<CpuDecode>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
