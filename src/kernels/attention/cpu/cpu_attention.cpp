// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/cpu/cpu_attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "kernels/attention/attention_task.hpp"
#include "kernels/attention/cpu/attention_state.hpp"
#include "kernels/attention/cpu/work_tile.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cpu/thread_pool.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::cpu {

namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// With few rows work tiles are smaller, down to one score block, so that every thread has several.
std::int64_t work_tile_rows(const AttentionSpec& spec, const TileOps& ops, int threads, std::int64_t rows) {
  const std::int64_t max_rows = max_tile_rows(spec, ops);
  const std::int64_t min_rows =
      std::min<std::int64_t>(max_rows, std::max(1, ops.row_block * spec.kv_heads / spec.heads));
  const std::int64_t limit = std::clamp<std::int64_t>(rows * spec.kv_heads / (4 * threads), min_rows, max_rows);
  // Work tiles of equal size: as few as possible, or up to twice as many if the busiest thread then has a smaller
  // share. A multiple of the threads gives all threads the same, so there is no need to look further.
  const auto busiest = [&](std::int64_t tiles) { return ceil_div(tiles * spec.kv_heads, threads); };
  const std::int64_t fewest = ceil_div(rows, limit);
  std::int64_t tiles = fewest;
  for (std::int64_t more = fewest + 1; more <= fewest + std::min<std::int64_t>(fewest, threads); ++more) {
    if (busiest(more) * tiles < busiest(tiles) * more) tiles = more;
  }
  if (tiles <= 1) return limit;
  constexpr std::int64_t kStackedUnit = 16;  // a vector of AVX-512, or the rows of an AMX tile
  const std::int64_t unit = std::max<std::int64_t>(1, kStackedUnit * spec.kv_heads / spec.heads);
  return std::clamp(ceil_div(ceil_div(rows, tiles), unit) * unit, min_rows, limit);
}

class CpuAttention final : public AttentionKernel {
 public:
  CpuAttention(const AttentionSpec& spec, const CpuBackend& backend)
      : spec_(spec), ops_(backend.attention_ops(spec.dtype)), threads_(backend.threads()) {
    TileScratch none;
    thread_bytes_ = TileScratch::layout(spec_, ops_, nullptr, none);
  }

  int key_tile() const override { return kKeyTile; }
  int query_tile() const override { return 1; }
  std::size_t state_bytes(std::int64_t rows) const override {
    return static_cast<std::size_t>(rows * spec_.heads) * state_floats(spec_) * sizeof(float);
  }
  std::size_t scratch_bytes(const AttentionLimits& limits) const override {
    // At worst every row has its own work tile.
    return thread_bytes_ * static_cast<std::size_t>(threads_) + shared_bytes(limits) +
           static_cast<std::size_t>(limits.rows) * sizeof(WorkTile);
  }
  void reserve(const AttentionLimits& limits) override {
    scratch_ = allocate_host(thread_bytes_ * static_cast<std::size_t>(threads_));
    shared_ = allocate_host(shared_bytes(limits));
  }

  void attend(const AttentionTask& task, Stream, const Progress& progress) override {
    check_attention_task(spec_, kKeyTile, task);
    const std::vector<WorkTile> work_tiles = make_work_tiles(task.queries, tile_rows(task.q.tokens), spec_.block_mask);
    // Shared tiles pay if a head has more work tiles than sequences.
    const auto slots = work_tiles.size() > task.key_lengths.size()
                           ? static_cast<std::int64_t>(shared_.bytes() / SharedTiles::slot_bytes(spec_, ops_))
                           : 0;
    const auto tiles = static_cast<std::int64_t>(task.tiles.size()) / task.page_runs;
    if (slots == 0 || tiles == 0) return attend_heads(task, work_tiles, {}, 0, spec_.kv_heads, progress);
    const int heads = static_cast<int>(std::clamp<std::int64_t>(slots / tiles, 1, spec_.kv_heads));
    for (int head = 0; head < spec_.kv_heads; head += heads) {
      const int group = std::min(heads, spec_.kv_heads - head);
      const SharedTiles shared(spec_, ops_, shared_.data(), std::min(tiles, slots / group), head, group);
      pack_tiles(task, shared, progress);
      attend_heads(task, work_tiles, shared, head, group, progress);
    }
  }

  void merge_state(void* state, const void* partial, std::int64_t rows, Stream) override {
    std::vector<float> memory(state_floats(spec_));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < spec_.heads; ++head) {
        const AttentionState split = copy_state(partial, row, head, memory);
        float* const into = state_at(spec_, static_cast<float*>(state), row, head);
        AttentionState merged = read_state(spec_, into);
        merge_row(spec_, ops_, split, merged);
        write_state(spec_, merged, into);
      }
    }
  }

  void export_state(const void* state, std::int64_t rows, const AttentionStateView& view, Stream) override {
    std::vector<float> memory(state_floats(spec_));
    std::vector<float> zeros(static_cast<std::size_t>(spec_.head_dim_v));
    const Partial identity{-std::numeric_limits<float>::infinity(), 0.0F, zeros.data()};
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < spec_.heads; ++head) {
        AttentionState saved = copy_state(state, row, head, memory);
        const Partial all = saved.flags == 0 ? identity : merge_all(spec_, ops_, saved);
        view.m.at(row, head) = all.offset;
        view.l.at(row, head) = one_nan(all.sum);
        std::transform(all.acc, all.acc + spec_.head_dim_v, reinterpret_cast<float*>(view.o.at(row, head)), one_nan);
      }
    }
  }

 private:
  static constexpr std::size_t kMaxSharedBytes = std::size_t{64} << 20;
  static constexpr std::size_t kSharedPerState = 4;

  std::size_t shared_bytes(const AttentionLimits& limits) const {
    if (spec_.block_mask.any() || limits.rows <= tile_rows(limits.rows)) return 0;
    const std::size_t slot_bytes = SharedTiles::slot_bytes(spec_, ops_);
    const auto slots = static_cast<std::size_t>(limits.tiles * spec_.kv_heads);
    // A rank of few rows has few work tiles that share, and often little memory.
    const std::size_t most = std::min(kMaxSharedBytes, kSharedPerState * state_bytes(limits.rows));
    return std::min(slots, most / slot_bytes) * slot_bytes;
  }

  void pack_tiles(const AttentionTask& task, const SharedTiles& shared, const Progress& progress) {
    // A thread packs several heads of a tile if all threads still have enough to do.
    const std::int64_t count = std::clamp<std::int64_t>(shared.slots() / (8 * threads_), 1, shared.heads());
    ThreadPool thread_pool(ceil_div(shared.slots(), count));
    thread_pool.run(threads_, progress, [&](int, const Checkpoint& checkpoint) {
      for (std::int64_t first; (first = thread_pool.take() * count) >= 0 && !checkpoint.should_stop();) {
        const std::int64_t end = std::min(first + count, shared.slots());
        for (std::int64_t item = first; item < end; ++item) shared.pack(task, item);
      }
    });
  }

  // Attends to all keys with the query heads of KV heads [first_head, first_head + kv_heads).
  void attend_heads(const AttentionTask& task, const std::vector<WorkTile>& work_tiles, const SharedTiles& shared,
                    int first_head, int kv_heads, const Progress& progress) {
    const auto tile_count = static_cast<std::int64_t>(work_tiles.size());
    const int heads = heads_of_tile(spec_);
    const int ratio = spec_.heads / spec_.kv_heads;
    ThreadPool thread_pool(tile_count * (kv_heads * ratio / heads));
    thread_pool.run(threads_, progress, [&](int thread, const Checkpoint& checkpoint) {
      TileScratch scratch;
      TileScratch::layout(spec_, ops_, scratch_.data() + static_cast<std::size_t>(thread) * thread_bytes_, scratch);
      for (std::int64_t item; (item = thread_pool.take()) >= 0;) {
        // Head by head, so that the threads read the same key tiles. Under a causal mask the last rows take longest:
        // begin with them.
        const WorkTile& work_tile = work_tiles[static_cast<std::size_t>(tile_count - 1 - item % tile_count)];
        attend_work_tile(spec_, ops_, task, work_tile, first_head * ratio + static_cast<int>(item / tile_count) * heads,
                         shared, scratch, checkpoint);
      }
    });
  }

  // Copies one row's saved state to `memory`.
  AttentionState copy_state(const void* state, std::int64_t row, std::int64_t head, std::vector<float>& memory) const {
    std::copy_n(state_at(spec_, static_cast<const float*>(state), row, head), memory.size(), memory.begin());
    return read_state(spec_, memory.data());
  }

  std::int64_t tile_rows(std::int64_t rows) const { return work_tile_rows(spec_, ops_, threads_, rows); }

  AttentionSpec spec_;
  const TileOps& ops_;
  int threads_;
  std::size_t thread_bytes_ = 0;
  Buffer scratch_;  // [threads_, thread_bytes_]
  Buffer shared_;   // SharedTiles
};

void require_dim(std::string_view name, int dim, std::vector<std::string>& missing) {
  if (dim >= 8 && dim <= kMaxHeadDim && dim % 8 == 0) return;
  missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, kMaxHeadDim));
}

}  // namespace

std::vector<std::string> cpu_attention_missing(const AttentionSpec& spec) {
  std::vector<std::string> missing;
  require_dim("head_dim", spec.head_dim, missing);
  if (spec.head_dim_v != spec.head_dim) require_dim("head_dim_v", spec.head_dim_v, missing);
  const std::string block_mask = missing_for_block_mask(spec.block_mask, {/*query=*/1, kKeyTile});
  if (!block_mask.empty()) missing.push_back(block_mask);
  return missing;
}

double cpu_attention_speed(const Backend& backend) {
  AttentionSpec spec;  // bf16, 128 dims
  spec.heads = spec.kv_heads = 8;
  return host_speed(cpu_attention_work(spec, backend, kManyTokens), nullptr);
}

HostWork cpu_attention_work(const AttentionSpec& spec, const Backend& backend, std::int64_t tokens) {
  const auto& cpu = static_cast<const CpuBackend&>(backend);
  const TileOps& ops = cpu.attention_ops(spec.dtype);
  const bool amx = ops.q_per_float > 1;
  const double dims = spec.head_dim + spec.head_dim_v;
  const double queries = static_cast<double>(tokens);
  const double pairs = queries * (queries + 1.0) / 2.0 * spec.heads;
  const double element_bytes = 4.0 / ops.q_per_float;
  const std::int64_t tile_queries = work_tile_rows(spec, ops, cpu.threads(), tokens);
  const double tiles = static_cast<double>(ceil_div(tokens, tile_queries));

  // The softmax takes the same time whatever the dims, and a row computes whole key tiles: half a tile more than it
  // sees. Part of the softmax with 128 dims: fitted to 64 and 256 dims.
  const double softmax = amx ? 0.28 : 0.05;
  const double dim_factor = softmax + (1.0 - softmax) * dims / 256.0;
  const double core = 512.0 / ops.flops_per_second * dim_factor * (pairs + queries * kKeyTile / 2.0 * spec.heads);
  // Each work tile of a KV head reads the packed keys that it sees from the last-level cache: fitted to work tiles of
  // 128 to 1,024 stacked rows.
  constexpr double kCacheBytesPerSecond = 1.1e10;  // of one core
  const double cached = pairs / (static_cast<double>(tile_queries) * spec.heads / spec.kv_heads) * dims * element_bytes;
  const double attend = core + cached / kCacheBytesPerSecond;
  constexpr double kPackedElements = 3.3e9;  // of K and V a second by one core, measured
  const double elements = queries * spec.kv_heads * dims;
  return {cpu.threads(),
          pairs * 2.0 * dims,
          {{.tiles = std::ceil(queries / kKeyTile), .vector_seconds = elements / kPackedElements},
           {.tiles = tiles * spec.kv_heads,
            .vector_seconds = amx ? 0.0 : attend,
            .amx_seconds = amx ? attend : 0.0,
            .bytes = queries * dims * spec.heads * static_cast<double>(size_of(spec.dtype))}}};
}

std::unique_ptr<AttentionKernel> make_cpu_attention(const AttentionSpec& spec, Backend& backend) {
  return std::make_unique<CpuAttention>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
