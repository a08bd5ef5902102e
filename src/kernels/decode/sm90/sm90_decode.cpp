// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/sm90/sm90_decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention/merge.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/sm90/compressed.hpp"
#include "kernels/decode/sm90/config.hpp"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

namespace {

// Sets the parameters that a step and a merge share: `rows` query tokens of each sequence, `all` query tokens in total.
void set_shape(const AttentionSpec& spec, const AttentionOutput& output, int rows, std::int64_t all,
               const std::int32_t* lengths, cuda::AttentionParams& p, DecodeRows& query_rows) {
  p.mask = spec.mask;
  p.rows = all;
  p.heads = spec.heads;
  p.kv_heads = spec.kv_heads;
  p.head_dim = spec.head_dim;
  p.head_dim_v = spec.head_dim_v;
  p.dtype = static_cast<std::int32_t>(spec.dtype);
  p.softmax = cuda::softmax_of(spec);
  p.out = {output.out.data, output.out.token_stride, output.out.head_stride};
  p.lse = {output.lse.data, output.lse.token_stride, output.lse.head_stride};
  p.sinks = output.sinks;
  p.finish = true;
  const auto side = [](std::int64_t row_range) {  // no key is farther away
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(row_range, -1, kMaxDecodeKeys));
  };
  query_rows.left = side(spec.mask.left);
  query_rows.right = side(spec.mask.right);
  query_rows.per_sequence = rows;
  query_rows.lengths = lengths;
}

void check_partitions(std::string_view kernel, std::size_t shares) {
  if (shares <= kMaxPartitions) return;
  fail(ErrorCode::kUnsupported, fmt::format("a decode step whose keys are dealt to {} ranks", shares),
       fmt::format("{} merges the results of up to {}", kernel, kMaxPartitions), "Use fewer ranks.");
}

}  // namespace

void check_limits(std::string_view kernel, const DecodeLimits& limits, int shares) {
  check_partitions(kernel, static_cast<std::size_t>(shares));
  if (limits.keys > kMaxDecodeKeys) {
    fail(ErrorCode::kUnsupported, fmt::format("a decode step over {} keys", limits.keys),
         fmt::format("{} decodes sequences of up to {}", kernel, kMaxDecodeKeys), "Use shorter ones.");
  }
}

void set_step(const AttentionSpec& spec, const DecodeStep& step, int block_rows, WorkTileParams& p) {
  set_shape(spec, step.output, step.rows, step.q.tokens, step.lengths, p.attention, p.rows);
  p.attention.q = {step.q.data, step.q.token_stride, step.q.head_stride};
  const int masks = mask_heads_of(spec.block_mask);
  RowBlocks& blocks = p.blocks;
  blocks.sequences = static_cast<std::int32_t>(step.q.tokens / step.rows) * masks;
  blocks.kv_heads = spec.kv_heads / masks;
  blocks.ratio = spec.heads / spec.kv_heads;
  blocks.rows = block_rows;
  blocks.count = (step.rows * blocks.ratio + block_rows - 1) / block_rows;
  blocks.by_ratio = cuda::Divider(blocks.ratio);
  blocks.by_count = cuda::Divider(blocks.count);
  blocks.by_stride = cuda::Divider(std::int64_t{blocks.kv_heads} * blocks.count);
  p.splits = {step.partition.first, step.partition.stride};
  p.partials = {step.partials.data, step.partials.kv_splits};
}

void set_pages(const DecodeStep& step, int key_tile, int box_rows, WorkTileParams& p) {
  p.boxes.rows = box_rows;
  if (step.block_table.pages != nullptr) {
    p.table = {step.block_table.pages, step.block_table.stride,
               std::countr_zero(static_cast<std::uint64_t>(step.k.page_size))};
    // A box lies in one page. gcd() of the two is a power of two, as page sizes are.
    p.boxes.rows = static_cast<std::int32_t>(std::gcd(std::int64_t{box_rows}, step.k.page_size));
  }
  p.boxes.per_tile = key_tile / p.boxes.rows;
  p.boxes.by_per_tile = cuda::Divider(p.boxes.per_tile);
}

MappedPages mapped_pages(std::string_view kernel, const CacheView& view) {
  const MappedPages pages{{view.data, view.page_size, view.heads, view.dim, view.token_stride, view.head_stride},
                          view.pages,
                          view.page_stride};
  if (!can_map(pages)) {
    fail(ErrorCode::kUnsupported, fmt::format("{} can't read this cache", kernel),
         "its start and its strides must be multiples of 16 bytes, and it must have less than 2^31 pages and tokens",
         "Use a cache with such a layout.");
  }
  return pages;
}

void merge_partitions(std::string_view kernel, const AttentionSpec& spec, std::int64_t kv_split_keys,
                      const DecodeMerge& merge, Stream stream, const std::int32_t* whole) {
  check_partitions(kernel, merge.partitions.size());
  if (merge.output.out.tokens == 0) return;
  MergeParams p{};
  set_shape(spec, merge.output, merge.rows, merge.output.out.tokens, merge.lengths, p.attention, p.rows);
  p.partial_splits = merge.kv_splits;
  p.kv_split_keys = static_cast<std::int32_t>(kv_split_keys);
  p.partitions = static_cast<std::int32_t>(merge.partitions.size());
  std::ranges::copy(merge.partitions, p.partials);
  p.whole = whole;
  launch_merge(p, spec.dtype, stream);
}

namespace {

constexpr cuda::Compiled<DecodeLauncher> kCompiled[] = {
    {Dtype::kBf16, 64, &decode_bf16_64},   {Dtype::kBf16, 96, &decode_bf16_96},   {Dtype::kBf16, 128, &decode_bf16_128},
    {Dtype::kBf16, 192, &decode_bf16_192}, {Dtype::kBf16, 256, &decode_bf16_256}, {Dtype::kF16, 64, &decode_fp16_64},
    {Dtype::kF16, 96, &decode_fp16_96},    {Dtype::kF16, 128, &decode_fp16_128},  {Dtype::kF16, 192, &decode_fp16_192},
    {Dtype::kF16, 256, &decode_fp16_256},
};

const DecodeLauncher& launcher_of(const DecodeSpec& spec, bool configured) {
  return cuda::launcher_of("sm90_attention", kCompiled, spec.attention, configured);
}

// Minimum tiles of a partial split after whole ones for which its work tiles get CTAs of their own. With fewer they are
// computed after those of whole splits.
constexpr int kMinPartialSplitTiles = 8;

// Scratch memory for data that the work tiles of a step exchange, as byte offsets.
struct ScratchLayout {
  std::int64_t splits;  // maximum KV splits of a sequence
  std::size_t outputs, stats, arrived, failed, partials, states, bytes;
};

class Sm90Decode final : public DecodeKernel {
 public:
  Sm90Decode(const DecodeSpec& spec, int device)
      : spec_(spec),
        device_(device),
        config_(*choose_config(spec.attention)),
        launcher_(launcher_of(spec, true)),
        compressed_(spec.format.is_plain() ? nullptr : &compressed_launcher_of(spec, true)) {}

  std::int64_t partial_floats() const override { return spec_.attention.head_dim_v + 4; }
  int key_tile() const override { return config_.key_tile; }
  std::size_t scratch_bytes(const DecodeLimits& limits) const override { return lay_out(limits).bytes; }

  // over a quantized cache each sequence reads its own keys
  bool shares_prefixes() const override { return compressed_ == nullptr; }

  void check(const DecodeLimits& limits, int shares) const override {
    check_limits("sm90_attention", limits, shares);
    if (const int mask_heads = mask_heads_of(spec_.attention.block_mask); mask_heads > kMaxDecodeSequences) {
      fail(ErrorCode::kUnsupported, fmt::format("a decode step with {} block masks for each sequence", mask_heads),
           fmt::format("sm90_attention takes up to {}", kMaxDecodeSequences), "Use another kernel.");
    }
    if (limits.prefixes > kMaxPrefixes) {
      fail(ErrorCode::kUnsupported, fmt::format("a decode step with {} shared prefixes", limits.prefixes),
           fmt::format("sm90_attention takes up to {} in one step", kMaxPrefixes),
           "Use several steps, or another kernel.");
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
    prepare_merge(spec_.attention.dtype);
    for (int slices = 1; slices <= kMaxSlices; slices *= 2) {
      clusters_[std::countr_zero(static_cast<unsigned>(slices))] =
          compressed_ != nullptr ? compressed_->clusters_at_a_time(slices) : launcher_.clusters_at_a_time(slices);
    }
    prefix_cta_pairs_ = limits.prefixes > 0 && compressed_ == nullptr ? launcher_.prefix_cta_pairs_at_a_time() : 0;
  }

  void enqueue(const DecodeStep& step, Stream stream) override {
    check_decode_step(spec_, limits_, step);
    if (step.q.tokens == 0) return;
    const DeviceGuard guard(device_);
    for_each_sub_batch(spec_, step, max_sequences(), partial_floats(),
                       [&](const DecodeStep& part) { enqueue_launch(part, stream); });
  }

  void merge(const DecodeMerge& merge, Stream stream) override {
    check_decode_merge(spec_, merge);
    const DeviceGuard guard(device_);
    merge_partitions("sm90_attention", spec_.attention, kv_split_keys(), merge, stream);
  }

 private:
  // Maximum number of sequences of one launch.
  std::int64_t max_sequences() const { return kMaxDecodeSequences / mask_heads_of(spec_.attention.block_mask); }

  void enqueue_launch(const DecodeStep& step, Stream stream) const {
    if (compressed_ != nullptr) {
      enqueue_compressed(step, stream);
      return;
    }
    SlicedParams p{};
    set_work_tiles(step, p);
    set_cache(step, p);
    const bool shares = step.prefixes.count > 0;
    const int busy = shares ? enqueue_prefixes(step, p, stream) : 0;
    const std::int64_t work_tiles = max_work_tiles(step, p);
    if (p.blocks.rows == kColumnSliceRows) {
      set_value_slices(step, p);
      const int clusters = concurrent_ctas(clusters_of(p.slices), (busy + p.slices - 1) / p.slices, work_tiles, p);
      launcher_.launch_sliced(p, clusters, stream);
    } else {
      const int ctas = concurrent_ctas(multiprocessors_, busy, work_tiles, p);
      launcher_.launch(p, ctas, stream);
    }
    if (!shares || step.partials.data != nullptr) return;
    const float* const partials = p.partials.data;
    merge_partitions("sm90_attention", spec_.attention, kv_split_keys(),
                     {{&partials, 1}, p.partials.splits, step.rows, step.lengths, step.output}, stream);
  }

  // Enqueues the splits of shared prefixes. From here on the step stores partials, into scratch if the caller wants
  // none. Returns how many multiprocessors stay busy with prefixes while the rest of the step runs on the others.
  // Returns 0 if prefixes may need most of them, or if all of the rest continues from prefix states and so had better
  // wait.
  int enqueue_prefixes(const DecodeStep& step, DecodeParams& p, Stream stream) const {
    p.prefixes = {step.prefixes.of_sequence, step.prefixes.keys, step.prefixes.count,
                  reinterpret_cast<float*>(scratch_.data() + layout_.states)};
    if (p.partials.data == nullptr) {
      p.partials = {reinterpret_cast<float*>(scratch_.data() + layout_.partials), layout_.splits};
    }
    const std::int64_t sequence_rows = std::int64_t{p.rows.per_sequence} * p.blocks.ratio;
    PrefixParams prefix{p, p.cache, p.prefixes, cuda::Divider(sequence_rows)};
    // An upper bound: the last row block of each prefix may be partly filled, and a prefix may be as long as its
    // sequences.
    const std::int64_t blocks =
        (p.blocks.sequences * sequence_rows + kQueryTile - 1) / kQueryTile + p.prefixes.count - 1;
    const std::int64_t splits = splits_per_partition(may_have_partial_split() ? limits_.keys : whole_split_keys(),
                                                     p.splits.stride, kv_split_keys());
    const std::int64_t work_tiles = std::max<std::int64_t>(1, blocks * spec_.attention.kv_heads * splits);
    int ctas = static_cast<int>(std::min<std::int64_t>(work_tiles, multiprocessors_));
    if (cta_pairs_compute_prefixes(work_tiles)) {
      const int pairs = static_cast<int>(std::min<std::int64_t>(work_tiles, prefix_cta_pairs_));
      set_values_map(step, kPanelColumns, p.boxes.rows, prefix.cache);
      launcher_.launch_prefix_cta_pairs(prefix, pairs, stream);
      ctas = 2 * pairs;
    } else {
      launcher_.launch_prefixes(prefix, ctas, stream);
    }
    return whole_split_keys() > 0 && ctas <= multiprocessors_ / 2 ? ctas : 0;
  }
  // Keys of the longest sequence's whole splits, and whether prefixes may have a partial split that is worth CTAs.
  std::int64_t whole_split_keys() const {
    const std::int64_t split_keys = std::int64_t{kTilesPerKvSplit} * key_tile();
    return limits_.keys / split_keys * split_keys;
  }
  bool may_have_partial_split() const {
    return whole_split_keys() == 0 || limits_.keys - whole_split_keys() >= kMinPartialSplitTiles * key_tile();
  }
  // Number of CTAs or clusters, out of `resident`, for a launch of `work_tiles` that runs concurrently with one that
  // keeps `busy` of them. If its work tiles may wait for that launch, the CTAs that become free afterwards are added,
  // as p.late.
  int concurrent_ctas(int resident, int busy, std::int64_t work_tiles, DecodeParams& p) const {
    const auto at_once = static_cast<int>(std::clamp<std::int64_t>(resident - busy, 1, work_tiles));
    if (busy == 0 || !may_have_partial_split()) return at_once;
    p.late = static_cast<int>(std::min<std::int64_t>(resident, work_tiles)) - at_once;
    return at_once + p.late;
  }
  // A CTA pair computes a work tile in less time but takes two multiprocessors, so pairs are used if all work tiles run
  // at once anyway (bench/notes/block-sparse-and-prefixes.md has the times).
  bool cta_pairs_compute_prefixes(std::int64_t work_tiles) const {
    if (prefix_cta_pairs_ == 0) return false;
    return limits_.slices > 0 ? limits_.slices > 1 : work_tiles <= prefix_cta_pairs_;
  }

  // Rows of a row block: those of the sliced kernel if they suffice.
  int block_rows(int rows) const {
    return rows * (spec_.attention.heads / spec_.attention.kv_heads) <= kColumnSliceRows ? kColumnSliceRows
                                                                                         : kQueryTile;
  }
  // Row blocks of a sequence and KV head.
  std::int64_t blocks(int rows) const {
    return (std::int64_t{rows} * (spec_.attention.heads / spec_.attention.kv_heads) + block_rows(rows) - 1) /
           block_rows(rows);
  }

  int clusters_of(int slices) const { return clusters_[std::countr_zero(static_cast<unsigned>(slices))]; }
  // CTAs of a cluster: four if all work tiles are resident at once, else the fewest that kernels are compiled for
  // (bench/notes/decoding.md has the times).
  int slices_for(std::int64_t work_tiles) const {
    if (compressed_ != nullptr) return slices_of_quantized(work_tiles);
    const int min_slices = clusters_of(2) > 0 ? 2 : 1;
    const int clusters = clusters_of(kMaxSlices);
    return clusters > 0 && (limits_.slices > 0 ? kMaxSlices <= limits_.slices : work_tiles <= clusters) ? kMaxSlices
                                                                                                        : min_slices;
  }

  // The same for quantized caches: minimizes the total time, with work tiles processed in waves of clusters.
  // kWorkTileTime is the time of a work tile relative to one CTA (bench/notes/quantized-kv.md).
  int slices_of_quantized(std::int64_t work_tiles) const {
    constexpr double kWorkTileTime[] = {1.0, 0.7, 0.5};
    int best = 1;
    double min_time = std::numeric_limits<double>::infinity();
    for (int slices = 1; slices <= kMaxSlices; slices *= 2) {
      const std::int64_t clusters = clusters_of(slices);
      if (clusters == 0) continue;
      const double time = static_cast<double>((work_tiles + clusters - 1) / clusters) *
                          kWorkTileTime[std::countr_zero(static_cast<unsigned>(slices))];
      if (limits_.slices > 0 ? slices > limits_.slices : time >= min_time) continue;
      best = slices;
      min_time = time;
    }
    return best;
  }

  ScratchLayout lay_out(DecodeLimits limits) const {
    constexpr std::size_t kAlignment = 256;
    limits.sequences = std::min(limits.sequences, max_sequences());
    const std::int64_t tiles = (limits.keys + config_.key_tile - 1) / config_.key_tile;
    ScratchLayout layout{};
    layout.splits = std::max<std::int64_t>(1, (tiles + kTilesPerKvSplit - 1) / kTilesPerKvSplit);
    const auto blocks_in_all =
        static_cast<std::size_t>(limits.sequences * spec_.attention.kv_heads * blocks(limits.rows));
    const std::size_t work_tiles = blocks_in_all * static_cast<std::size_t>(layout.splits);
    // A row with one split is finished by its work tile and stores nothing.
    const std::size_t rows = layout.splits > 1 ? work_tiles * static_cast<std::size_t>(block_rows(limits.rows)) : 0;
    const auto allocate = [&layout](std::size_t bytes) {
      const std::size_t offset = layout.bytes;
      layout.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      return offset;
    };
    layout.outputs = allocate(rows * static_cast<std::size_t>(spec_.attention.head_dim_v) * sizeof(float));
    layout.stats = allocate(std::max(rows, work_tiles * kColumnSliceRows * kMaxSlices) * sizeof(float2));
    layout.arrived = allocate(blocks_in_all * kMaxSlices * sizeof(std::int32_t));
    layout.failed = allocate(work_tiles * sizeof(std::int32_t));
    const std::int64_t partials = limits.prefixes == 0 ? 0 : limits.sequences * limits.rows * layout.splits;
    layout.partials =
        allocate(static_cast<std::size_t>(partials * spec_.attention.heads * partial_floats()) * sizeof(float));
    const std::int64_t states = limits.prefixes == 0 ? 0 : limits.sequences * limits.rows;
    layout.states = allocate(
        static_cast<std::size_t>(states * spec_.attention.heads * (spec_.attention.head_dim_v + cuda::kStateStats)) *
        sizeof(float));
    return layout;
  }

  // Sets everything except the cache. Params: SlicedParams or CompressedParams.
  template <class Params>
  void set_work_tiles(const DecodeStep& step, Params& p) const {
    set_step(spec_.attention, step, block_rows(step.rows), p);
    if (const BlockMaskShape& shape = spec_.attention.block_mask; shape.any()) {
      const int block_tiles = shape.key_block / config_.key_tile;
      p.mask = {step.block_mask.blocks,     step.block_mask.counts,    step.block_mask.stride, block_tiles,
                cuda::Divider(shape.heads), cuda::Divider(block_tiles)};
    }
    p.slices = p.blocks.rows == kColumnSliceRows ? slices_for(max_work_tiles(step, p)) : 1;
    p.scratch = {reinterpret_cast<float*>(scratch_.data() + layout_.outputs),
                 reinterpret_cast<float2*>(scratch_.data() + layout_.stats),
                 reinterpret_cast<std::int32_t*>(scratch_.data() + layout_.arrived)};
    p.failed = reinterpret_cast<std::int32_t*>(scratch_.data() + layout_.failed);
  }

  // Upper bound of a step's work tiles, as far as the host knows.
  template <class Params>
  std::int64_t max_work_tiles(const DecodeStep& step, const Params& p) const {
    std::int64_t splits = layout_.splits;
    if (spec_.attention.block_mask.any()) {
      // Besides the selected blocks, the query rows lie in at most two.
      splits = std::min(splits,
                        ((step.block_mask.stride + 2) * p.mask.block_tiles + kTilesPerKvSplit - 1) / kTilesPerKvSplit);
    }
    return std::int64_t{p.blocks.sequences} * p.blocks.kv_heads * p.blocks.count * splits;
  }

  void enqueue_compressed(const DecodeStep& step, Stream stream) const {
    DecodeStep paged = step;
    paged.k.page_size = step.quantized_k.page_size;
    CompressedParams p{};
    set_work_tiles(step, p);
    set_pages(paged, config_.key_tile, config_.key_tile, p);
    set_compressed(step, p);
    const auto work_tiles = static_cast<int>(max_work_tiles(step, p));  // an upper bound
    if (p.blocks.rows == kColumnSliceRows && clusters_of(p.slices) > 0 && slices_formats(spec_.format)) {
      compressed_->launch_sliced(p, std::min(work_tiles, clusters_of(p.slices)), stream);
    } else {
      compressed_->launch(p, std::min(work_tiles, multiprocessors_), stream);
    }
  }

  void set_cache(const DecodeStep& step, DecodeParams& p) const {
    const AttentionSpec& spec = spec_.attention;
    const MappedPages k = mapped_pages("sm90_attention", step.k);
    set_pages(step, config_.key_tile, config_.key_tile, p);
    p.cache.k_columns = box_columns(spec.head_dim, p);
    p.cache.k = map_pages(k, spec.dtype, p.boxes.rows, p.cache.k_columns);
    set_values_map(step, box_columns(spec.head_dim_v, p), p.boxes.rows, p.cache);
  }
  void set_values_map(const DecodeStep& step, int columns, int box_rows, CacheMaps& cache) const {
    cache.v_columns = columns;
    cache.v = map_pages(mapped_pages("sm90_attention", step.v), spec_.attention.dtype, box_rows, columns);
  }
  // Called after set_cache().
  void set_value_slices(const DecodeStep& step, SlicedParams& p) const {
    const int slice = spec_.attention.head_dim_v / p.slices;
    ValueSlices& slices = p.v_slices;
    slices.box_columns = slice < kPanelColumns ? slice : box_columns(slice, p);
    slices.map =
        map_pages(mapped_pages("sm90_attention", step.v), spec_.attention.dtype, p.boxes.rows, slices.box_columns);
    slices.by_lanes = p.table.pages != nullptr && p.boxes.rows < kMinBoxRows;
    const auto element = static_cast<std::int64_t>(size_of(step.v.dtype));
    slices.rows = {static_cast<const std::byte*>(step.v.data), step.v.page_stride * element,
                   step.v.token_stride * element, step.v.head_stride * element};
    slices.pool_pages = static_cast<std::int32_t>(step.v.pages);
  }
  // Columns of the boxes of a tile of `dim` columns. A box of several panels fills them one after the other, so it must
  // be a whole tile.
  static int box_columns(int dim, const DecodeParams& p) {
    return p.boxes.per_tile == 1 ? AttentionConfig::box_columns(dim) : kPanelColumns;
  }

  DecodeSpec spec_;
  int device_;
  AttentionConfig config_;
  const DecodeLauncher& launcher_;
  const CompressedLauncher* const compressed_;  // null: the cache is not quantized
  DecodeLimits limits_;
  ScratchLayout layout_{};
  int multiprocessors_ = 0;
  int clusters_[4] = {};      // resident clusters, by log2 of their CTAs
  int prefix_cta_pairs_ = 0;  // resident CTA pairs of the prefix kernel
  Buffer scratch_;
};

}  // namespace

std::vector<std::string> decode_configs() {
  std::vector<std::string> lines;
  for (const AttentionConfig& config : kAttentionConfigs) {
    lines.push_back(cuda::config_line(
        config.head_dim, config.head_dim_v,
        fmt::format("tile {}x{}, {} stages of keys", kQueryTile, config.key_tile, decode_stages(config))));
  }
  return lines;
}

std::unique_ptr<DecodeKernel> make_decode(const DecodeSpec& spec, Backend& backend) {
  launcher_of(spec, choose_config(spec.attention).has_value());
  return std::make_unique<Sm90Decode>(spec, static_cast<const cuda::CudaBackend&>(backend).device());
}

}  // namespace ringattn::sm90
