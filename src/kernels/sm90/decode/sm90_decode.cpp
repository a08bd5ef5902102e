// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/decode/sm90_decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "base/cuda.hpp"
#include "kernels/cuda/cuda_backend.hpp"
#include "kernels/cuda/cuda_fold.hpp"
#include "kernels/merge.hpp"
#include "kernels/registry.hpp"
#include "kernels/sm90/decode/compressed.hpp"
#include "kernels/sm90/decode/decode.hpp"
#include "kernels/sm90/decode/merge.hpp"
#include "kernels/sm90/decode/step_params.hpp"

namespace ringattn::sm90 {

namespace {

constexpr cuda::Compiled<DecodeLauncher> kCompiled[] = {
    {Dtype::kBf16, 64, &decode_bf16_64},   {Dtype::kBf16, 96, &decode_bf16_96},   {Dtype::kBf16, 128, &decode_bf16_128},
    {Dtype::kBf16, 192, &decode_bf16_192}, {Dtype::kBf16, 256, &decode_bf16_256}, {Dtype::kF16, 64, &decode_fp16_64},
    {Dtype::kF16, 96, &decode_fp16_96},    {Dtype::kF16, 128, &decode_fp16_128},  {Dtype::kF16, 192, &decode_fp16_192},
    {Dtype::kF16, 256, &decode_fp16_256},
};

const DecodeLauncher& launcher_of(const DecodeSpec& spec, bool configured) {
  return cuda::launcher_of("sm90_fold", kCompiled, spec.fold, configured);
}

// Of an open group behind whole ones, as many tiles as make units of it worth multiprocessors of their own: fewer are
// folded behind those of whole groups.
constexpr int kLeastOpenTiles = 8;

// What a step's units leave for each other, as it lies in scratch memory.
struct ScratchLayout {
  std::int64_t groups;  // of a sequence, at most
  std::size_t outputs, numbers, arrived, failed, records, states, bytes;
};

class Sm90Decode final : public DecodeKernel {
 public:
  Sm90Decode(const DecodeSpec& spec, int device)
      : spec_(spec),
        device_(device),
        config_(*choose_config(spec.fold)),
        launcher_(launcher_of(spec, true)),
        compressed_(spec.format.is_plain() ? nullptr : &compressed_launcher_of(spec, true)) {}

  std::int64_t record_floats() const override { return spec_.fold.head_dim_v + 4; }
  int key_tile() const override { return config_.key_tile; }
  std::size_t scratch_bytes(const DecodeLimits& limits) const override { return lay_out(limits).bytes; }

  bool shares_prefixes() const override { return compressed_ == nullptr; }  // over codes each sequence reads its own

  void check(const DecodeLimits& limits, int shares) const override {
    check_limits("sm90_fold", limits, shares);
    if (const int lists = lists_of(spec_.fold.lists); lists > kMostDecodeSequences) {
      fail(ErrorCode::kUnsupported, fmt::format("a decode step with {} lists a sequence", lists),
           fmt::format("sm90_fold takes up to {}", kMostDecodeSequences), "Use another kernel.");
    }
    if (limits.prefixes > kMostPrefixes) {
      fail(ErrorCode::kUnsupported, fmt::format("a decode step with {} shared prefixes", limits.prefixes),
           fmt::format("sm90_fold takes up to {} in one step", kMostPrefixes), "Use several steps, or another kernel.");
    }
  }

  void reserve(const DecodeLimits& limits) override {
    check(limits, 1);
    const DeviceGuard guard(device_);
    limits_ = limits;
    layout_ = lay_out(limits);
    multiprocessors_ = cuda::multiprocessors_of(device_);
    scratch_ = allocate_cleared_device(layout_.bytes, device_);
    compressed_ != nullptr ? compressed_->prepare() : launcher_.prepare();
    prepare_merge(spec_.fold.dtype);
    for (int slices = 1; slices <= kMostSlices; slices *= 2) {
      clusters_[std::countr_zero(static_cast<unsigned>(slices))] =
          compressed_ != nullptr ? compressed_->clusters_at_a_time(slices) : launcher_.clusters_at_a_time(slices);
    }
    prefix_pairs_ = limits.prefixes > 0 && compressed_ == nullptr ? launcher_.prefix_pairs_at_a_time() : 0;
  }

  void enqueue(const DecodeStep& step, Stream stream) override {
    check_decode_step(spec_, limits_, step);
    if (step.q.tokens == 0) return;
    const DeviceGuard guard(device_);
    for_parts_of_step(spec_, step, most_sequences(), record_floats(),
                      [&](const DecodeStep& part) { enqueue_part(part, stream); });
  }

  void merge(const DecodeMerge& merge, Stream stream) override {
    check_decode_merge(spec_, merge);
    const DeviceGuard guard(device_);
    merge_shares("sm90_fold", spec_.fold, group_keys(), merge, stream);
  }

 private:
  // The most sequences that one launch takes.
  std::int64_t most_sequences() const { return kMostDecodeSequences / lists_of(spec_.fold.lists); }

  void enqueue_part(const DecodeStep& step, Stream stream) const {
    DecodeParams p{};
    set_tensors(step, p);
    if (compressed_ == nullptr) set_cache(step, p);
    p.outputs = reinterpret_cast<float*>(scratch_.data() + layout_.outputs);
    p.numbers = reinterpret_cast<float2*>(scratch_.data() + layout_.numbers);
    p.arrived = reinterpret_cast<std::int32_t*>(scratch_.data() + layout_.arrived);
    p.failed = reinterpret_cast<std::int32_t*>(scratch_.data() + layout_.failed);
    const bool shares = step.prefixes.count > 0 && shares_prefixes();
    const int busy = shares ? enqueue_prefixes(step, p, stream) : 0;
    const std::int64_t units = most_units(step, p);
    if (compressed_ != nullptr) {
      enqueue_compressed(step, p, static_cast<int>(units), stream);
    } else if (p.block_rows == kSlicedRows) {
      const int clusters = beside(clusters_of(p.slices), (busy + p.slices - 1) / p.slices, units, p);
      launcher_.launch_sliced(p, clusters, stream);
    } else {
      const int ctas = beside(multiprocessors_, busy, units, p);
      launcher_.launch(p, ctas, stream);
    }
    if (!shares || step.partials.records != nullptr) return;
    const float* const records = p.records;
    merge_shares("sm90_fold", spec_.fold, group_keys(),
                 {{&records, 1}, p.record_groups, step.rows, step.lengths, step.output}, stream);
  }

  // Enqueues the groups of shared prefixes. From here on the step leaves records: its own, where it has none to give.
  // Returns how many multiprocessors that keeps busy while the rest of the step runs, which gets the others; 0 where
  // prefixes may need most of them, or all of the rest goes on from states of theirs, and so better waits.
  int enqueue_prefixes(const DecodeStep& step, DecodeParams& p, Stream stream) const {
    p.prefix_of = step.prefixes.of_sequence;
    p.prefix_keys = step.prefixes.keys;
    p.prefixes = step.prefixes.count;
    p.by_sequence_rows = cuda::Divider(std::int64_t{p.rows} * p.ratio);
    p.states = reinterpret_cast<float*>(scratch_.data() + layout_.states);
    if (p.records == nullptr) {
      p.records = reinterpret_cast<float*>(scratch_.data() + layout_.records);
      p.record_groups = layout_.groups;
    }
    // At most: each prefix's last block may be filled in part, and a prefix as long as its sequences.
    const std::int64_t blocks =
        (std::int64_t{p.sequences} * p.rows * p.ratio + kQueryTile - 1) / kQueryTile + p.prefixes - 1;
    const std::int64_t groups = share_groups(may_be_open() ? limits_.keys : whole_keys(), p.every_group, group_keys());
    const std::int64_t units = std::max<std::int64_t>(1, blocks * spec_.fold.kv_heads * groups);
    int ctas = static_cast<int>(std::min<std::int64_t>(units, multiprocessors_));
    if (pairs_fold_prefixes(units)) {
      const int pairs = static_cast<int>(std::min<std::int64_t>(units, prefix_pairs_));
      DecodeParams by_panels = p;
      set_values_map(step, kPanelColumns, by_panels);
      launcher_.launch_prefix_pairs(by_panels, pairs, stream);
      ctas = 2 * pairs;
    } else {
      launcher_.launch_prefixes(p, ctas, stream);
    }
    return whole_keys() > 0 && ctas <= multiprocessors_ / 2 ? ctas : 0;
  }
  // Keys of the longest sequence's whole groups, and whether prefixes may have an open one that counts.
  std::int64_t whole_keys() const {
    const std::int64_t group = std::int64_t{kGroupTiles} * key_tile();
    return limits_.keys / group * group;
  }
  bool may_be_open() const { return whole_keys() == 0 || limits_.keys - whole_keys() >= kLeastOpenTiles * key_tile(); }
  // How many of `most` CTAs, or clusters, a launch of so many units has beside one that keeps `busy` of them; and where
  // its units may wait for that one, as many more as come then.
  int beside(int most, int busy, std::int64_t units, DecodeParams& p) const {
    const auto at_once = static_cast<int>(std::clamp<std::int64_t>(most - busy, 1, units));
    if (busy == 0 || !may_be_open()) return at_once;
    p.late = static_cast<int>(std::min<std::int64_t>(most, units)) - at_once;
    return at_once + p.late;
  }
  // A pair folds a unit in less time, but takes two multiprocessors: where all units are folded at a time all the same
  // (bench/notes/block-sparse-and-prefixes.md has the times).
  bool pairs_fold_prefixes(std::int64_t units) const {
    if (prefix_pairs_ == 0) return false;
    return limits_.slices > 0 ? limits_.slices > 1 : units <= prefix_pairs_;
  }

  // Of a block of products: as few as the sliced kernel has, where that is enough.
  int block_rows(int rows) const {
    return rows * (spec_.fold.heads / spec_.fold.kv_heads) <= kSlicedRows ? kSlicedRows : kQueryTile;
  }
  // Of a sequence and KV head.
  std::int64_t blocks(int rows) const {
    return (std::int64_t{rows} * (spec_.fold.heads / spec_.fold.kv_heads) + block_rows(rows) - 1) / block_rows(rows);
  }

  int clusters_of(int slices) const { return clusters_[std::countr_zero(static_cast<unsigned>(slices))]; }
  // CTAs of a cluster. Four where that leaves no unit waiting for another, else as few as there are kernels for
  // (bench/notes/decoding.md has the times of each).
  int slices_for(std::int64_t units) const {
    if (compressed_ != nullptr) return slices_of_codes(units);
    const int least = clusters_of(2) > 0 ? 2 : 1;
    const int clusters = clusters_of(kMostSlices);
    return clusters > 0 && (limits_.slices > 0 ? kMostSlices <= limits_.slices : units <= clusters) ? kMostSlices
                                                                                                    : least;
  }

  // The same over codes: what takes the least time in all, where clusters take units in turns. A unit takes about so
  // much of the time that one CTA takes (bench/notes/quantized-kv.md).
  int slices_of_codes(std::int64_t units) const {
    constexpr double kUnitTime[] = {1.0, 0.7, 0.5};
    int best = 1;
    double least = std::numeric_limits<double>::infinity();
    for (int slices = 1; slices <= kMostSlices; slices *= 2) {
      const std::int64_t clusters = clusters_of(slices);
      if (clusters == 0) continue;
      const double time = static_cast<double>((units + clusters - 1) / clusters) *
                          kUnitTime[std::countr_zero(static_cast<unsigned>(slices))];
      if (limits_.slices > 0 ? slices > limits_.slices : time >= least) continue;
      best = slices;
      least = time;
    }
    return best;
  }

  ScratchLayout lay_out(DecodeLimits limits) const {
    constexpr std::size_t kAlignment = 256;
    limits.sequences = std::min(limits.sequences, most_sequences());
    const std::int64_t tiles = (limits.keys + config_.key_tile - 1) / config_.key_tile;
    ScratchLayout layout{};
    layout.groups = std::max<std::int64_t>(1, (tiles + kGroupTiles - 1) / kGroupTiles);
    const auto blocks_in_all = static_cast<std::size_t>(limits.sequences * spec_.fold.kv_heads * blocks(limits.rows));
    const std::size_t units = blocks_in_all * static_cast<std::size_t>(layout.groups);
    // One group is a row's whole result, and leaves nothing.
    const std::size_t rows = layout.groups > 1 ? units * static_cast<std::size_t>(block_rows(limits.rows)) : 0;
    const auto place = [&layout](std::size_t bytes) {
      const std::size_t offset = layout.bytes;
      layout.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      return offset;
    };
    layout.outputs = place(rows * static_cast<std::size_t>(spec_.fold.head_dim_v) * sizeof(float));
    layout.numbers = place(std::max(rows, units * kSlicedRows * kMostSlices) * sizeof(float2));
    layout.arrived = place(blocks_in_all * kMostSlices * sizeof(std::int32_t));
    layout.failed = place(units * sizeof(std::int32_t));
    const std::int64_t records = limits.prefixes == 0 ? 0 : limits.sequences * limits.rows * layout.groups;
    layout.records = place(static_cast<std::size_t>(records * spec_.fold.heads * record_floats()) * sizeof(float));
    const std::int64_t states = limits.prefixes == 0 ? 0 : limits.sequences * limits.rows;
    layout.states =
        place(static_cast<std::size_t>(states * spec_.fold.heads * (spec_.fold.head_dim_v + cuda::kStateNumbers)) *
              sizeof(float));
    return layout;
  }

  void set_tensors(const DecodeStep& step, DecodeParams& p) const {
    set_step(spec_.fold, step, block_rows(step.rows), p);
    if (spec_.fold.lists.any()) {
      p.list_tiles = spec_.fold.lists.key_block / config_.key_tile;
      p.by_list_tiles = cuda::Divider(p.list_tiles);
    }
    p.slices = p.block_rows == kSlicedRows ? slices_for(most_units(step, p)) : 1;
  }

  // That a step has, as far as the host knows.
  std::int64_t most_units(const DecodeStep& step, const DecodeParams& p) const {
    std::int64_t groups = layout_.groups;
    if (spec_.fold.lists.any()) {
      // Beside those that are listed, rows stand in two blocks at most.
      groups = std::min(groups, ((step.lists.stride + 2) * p.list_tiles + kGroupTiles - 1) / kGroupTiles);
    }
    return std::int64_t{p.sequences} * p.list_kv_heads * p.blocks * groups;
  }

  // Of up to so many units.
  void enqueue_compressed(const DecodeStep& step, const DecodeParams& shape, int units, Stream stream) const {
    DecodeStep paged = step;
    paged.k.page_size = step.packed_k.page_size;
    CompressedParams p{};
    p.step = shape;
    set_pages(paged, config_.key_tile, config_.key_tile, p.step);
    set_compressed(step, p);
    if (shape.block_rows == kSlicedRows && clusters_of(shape.slices) > 0 && slices_formats(spec_.format)) {
      compressed_->launch_sliced(p, std::min(units, clusters_of(shape.slices)), stream);
    } else {
      compressed_->launch(p, std::min(units, multiprocessors_), stream);
    }
  }

  void set_cache(const DecodeStep& step, DecodeParams& p) const {
    const FoldSpec& spec = spec_.fold;
    const MappedPages k = mapped_pages("sm90_fold", step.k);
    set_pages(step, config_.key_tile, config_.key_tile, p);
    // A box of several panels fills them one behind the other, so it must be a whole tile.
    const auto box_columns = [&](int dim) { return p.boxes == 1 ? FoldConfig::box_columns(dim) : kPanelColumns; };
    p.k_box_columns = box_columns(spec.head_dim);
    p.k = map_pages(k, spec.dtype, p.box_rows, p.k_box_columns);
    set_values_map(step, box_columns(spec.head_dim_v), p);
    const int slice = spec.head_dim_v / p.slices;
    p.slice_box_columns = slice < kPanelColumns ? slice : box_columns(slice);
    p.v_slices = map_pages(mapped_pages("sm90_fold", step.v), spec.dtype, p.box_rows, p.slice_box_columns);
    p.values_by_lanes = p.pages != nullptr && p.box_rows < kLeastBoxRows;
    const auto element = static_cast<std::int64_t>(size_of(step.v.dtype));
    p.v_rows = {static_cast<const std::byte*>(step.v.data), step.v.page_stride * element, step.v.token_stride * element,
                step.v.head_stride * element};
    p.pool_pages = static_cast<std::int32_t>(step.v.pages);
  }
  void set_values_map(const DecodeStep& step, int box_columns, DecodeParams& p) const {
    p.v_box_columns = box_columns;
    p.v = map_pages(mapped_pages("sm90_fold", step.v), spec_.fold.dtype, p.box_rows, box_columns);
  }

  DecodeSpec spec_;
  int device_;
  FoldConfig config_;
  const DecodeLauncher& launcher_;
  const CompressedLauncher* const compressed_;  // null: caches are plain
  DecodeLimits limits_;
  ScratchLayout layout_{};
  int multiprocessors_ = 0;
  int clusters_[4] = {};  // by log₂ of their CTAs, how many the device holds at a time
  int prefix_pairs_ = 0;  // the same of pairs that fold prefixes
  Buffer scratch_;
};

}  // namespace

std::vector<std::string> decode_configs() {
  std::vector<std::string> lines;
  for (const FoldConfig& config : kFoldConfigs) {
    lines.push_back(cuda::config_line(
        config.head_dim, config.head_dim_v,
        fmt::format("tile {}x{}, {} stages of keys", kQueryTile, config.key_tile, decode_stages(config))));
  }
  return lines;
}

std::unique_ptr<DecodeKernel> make_decode(const DecodeSpec& spec, Backend& backend) {
  launcher_of(spec, choose_config(spec.fold).has_value());
  return std::make_unique<Sm90Decode>(spec, static_cast<const cuda::CudaBackend&>(backend).device());
}

}  // namespace ringattn::sm90
