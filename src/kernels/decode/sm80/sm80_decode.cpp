// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/sm80/sm80_decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <string_view>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention/merge.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::sm80 {

namespace {

constexpr cuda::Compiled<DecodeLauncher> kCompiled[] = {
    {Dtype::kBf16, 64, &decode_bf16_64},   {Dtype::kBf16, 96, &decode_bf16_96},   {Dtype::kBf16, 128, &decode_bf16_128},
    {Dtype::kBf16, 192, &decode_bf16_192}, {Dtype::kBf16, 256, &decode_bf16_256}, {Dtype::kF16, 64, &decode_fp16_64},
    {Dtype::kF16, 96, &decode_fp16_96},    {Dtype::kF16, 128, &decode_fp16_128},  {Dtype::kF16, 192, &decode_fp16_192},
    {Dtype::kF16, 256, &decode_fp16_256},  {Dtype::kBf16, 512, &decode_bf16_512}, {Dtype::kF16, 512, &decode_fp16_512},
    {Dtype::kBf16, 576, &decode_bf16_576}, {Dtype::kF16, 576, &decode_fp16_576},
};

const DecodeLauncher& launcher_of(const DecodeSpec& spec, bool configured) {
  return cuda::launcher_of("sm80_attention", kCompiled, spec.attention, configured);
}

bool aligned(const void* data, std::initializer_list<std::int64_t> strides) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         std::ranges::all_of(strides, [](std::int64_t stride) { return stride * 2 % 16 == 0; });
}

// Page numbers and token offsets are 32-bit.
bool can_read(const CacheView& view) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  return aligned(view.data, {view.page_stride, view.token_stride, view.head_stride}) && view.pages <= kMax &&
         view.page_size <= kMax;
}

DecodeCache cache_of(const CacheView& view) {
  return {static_cast<const char*>(view.data), 2 * view.page_stride, 2 * view.token_stride, 2 * view.head_stride};
}

// Layout of the partials and counters in scratch memory.
struct ScratchLayout {
  std::int64_t splits;  // per row
  std::size_t counters, bytes;
};

class Sm80Decode final : public DecodeKernel {
 public:
  Sm80Decode(const DecodeSpec& spec, int device)
      : spec_(spec),
        device_(device),
        config_(*choose_config(spec.attention)),
        launcher_(launcher_of(spec, true)),
        compressed_(spec.format.is_plain() ? nullptr : &compressed_launcher_of(spec, true)),
        merge_(spec.attention.dtype == Dtype::kBf16 ? merge_bf16 : merge_fp16) {
    if (device_ == kNoDevice) return;
    const DeviceGuard guard(device_);
    merge_.prepare();
  }

  int key_tile() const override { return config_.key_tile; }
  std::int64_t partial_floats() const override { return sm80::partial_floats(spec_.attention.head_dim_v); }
  std::size_t scratch_bytes(const DecodeLimits& limits) const override { return lay_out(limits).bytes; }

  void check(const DecodeLimits&, int partitions) const override {
    check_partitions(static_cast<std::size_t>(partitions));
  }

  void reserve(const DecodeLimits& limits) override {
    const DeviceGuard guard(device_);
    limits_ = limits;
    layout_ = lay_out(limits);
    scratch_ = allocate_cleared_device(layout_.bytes, device_);
    ctas_ = (compressed_ != nullptr ? compressed_->prepare() : launcher_.prepare()) * cuda::multiprocessors_of(device_);
  }

  void enqueue(const DecodeStep& step, Stream stream) override {
    check_decode_step(spec_, limits_, step);
    if (step.q.tokens == 0) return;
    const DeviceGuard guard(device_);
    if (compressed_ == nullptr) {
      DecodeParams p{};
      set_cache(step, p);
      const std::int64_t work_tiles = set_work_tiles(step, p);
      launcher_.launch(p, ctas_for(work_tiles), stream);
    } else {
      CompressedParams p{};
      set_compressed(spec_, step, p);
      const std::int64_t work_tiles = set_work_tiles(step, p);
      compressed_->launch(p, ctas_for(work_tiles), stream);
    }
  }

  void merge(const DecodeMerge& merge, Stream stream) override {
    check_decode_merge(spec_, merge);
    const std::int64_t rows = merge.output.out.tokens;
    check_partitions(merge.partitions.size());
    if (rows == 0) return;
    const DeviceGuard guard(device_);
    DecodeMergeParams p{};
    p.attention = attention_params(rows, merge.output);
    std::ranges::copy(merge.partitions, p.partitions);
    p.partition_count = static_cast<std::int32_t>(merge.partitions.size());
    p.partial_splits = merge.kv_splits;
    p.lengths = merge.lengths;
    p.rows = merge.rows;
    p.tiles = {config_.query_tile(), config_.key_tile};
    merge_.launch(p, stream);
  }

 private:
  static void check_partitions(std::size_t partitions) {
    if (partitions <= kMaxPartitions) return;
    fail(ErrorCode::kUnsupported, fmt::format("a decode step whose keys are dealt to {} ranks", partitions),
         fmt::format("sm80_attention merges up to {} partitions", kMaxPartitions), "Use fewer ranks.");
  }

  // Maximum row blocks of a sequence and KV head. Rows of two query tiles are in separate blocks.
  std::int64_t blocks(int rows) const {
    const int stacked = rows * (spec_.attention.heads / spec_.attention.kv_heads);
    return (stacked + decode_rows(config_) - 1) / decode_rows(config_) + (rows > 1 ? 1 : 0);
  }

  ScratchLayout lay_out(const DecodeLimits& limits) const {
    constexpr std::size_t kAlignment = 256;
    ScratchLayout layout{};
    layout.splits = std::max<std::int64_t>(1, splits_per_partition(limits.keys, 1, kv_split_keys()));
    const std::int64_t partials = limits.sequences * limits.rows * spec_.attention.heads * layout.splits;
    const std::size_t bytes = static_cast<std::size_t>(partials * partial_floats()) * sizeof(float);
    layout.counters = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    layout.bytes =
        layout.counters + static_cast<std::size_t>(limits.sequences * spec_.attention.kv_heads * blocks(limits.rows)) *
                              sizeof(std::int32_t);
    return layout;
  }

  cuda::AttentionParams attention_params(std::int64_t rows, const AttentionOutput& output) const {
    const AttentionSpec& spec = spec_.attention;
    cuda::AttentionParams p{};
    p.mask = spec.mask;
    p.rows = rows;
    p.heads = spec.heads;
    p.kv_heads = spec.kv_heads;
    p.head_dim = spec.head_dim;
    p.head_dim_v = spec.head_dim_v;
    p.dtype = static_cast<std::int32_t>(spec.dtype);
    p.softmax = cuda::softmax_of(spec);
    p.out = {output.out.data, output.out.token_stride, output.out.head_stride};
    p.lse = {output.lse.data, output.lse.token_stride, output.lse.head_stride};
    p.sinks = output.sinks;
    return p;
  }

  // Sets everything except the cache. Returns an upper bound of the work tiles.
  std::int64_t set_work_tiles(const DecodeStep& step, WorkTileParams& p) const {
    p.attention = attention_params(step.q.tokens, step.output);
    p.attention.q = {step.q.data, step.q.token_stride, step.q.head_stride};
    p.q_aligned = aligned(step.q.data, {step.q.token_stride, step.q.head_stride});
    set_pages(step, p);
    set_block_mask(step, p);
    p.lengths = step.lengths;
    p.sequences = static_cast<std::int32_t>(step.q.tokens / step.rows) * mask_heads_of(spec_.attention.block_mask);
    p.rows = step.rows;
    p.ratio = spec_.attention.heads / spec_.attention.kv_heads;
    p.blocks = static_cast<std::int32_t>(blocks(step.rows));
    p.finish = step.partials.data == nullptr;
    p.partials.data = p.finish ? reinterpret_cast<float*>(scratch_.data()) : step.partials.data;
    p.partials.splits = p.finish ? layout_.splits : step.partials.kv_splits;
    p.arrived = reinterpret_cast<std::int32_t*>(scratch_.data() + layout_.counters);
    return p.sequences * p.mask.kv_heads * blocks(step.rows) * layout_.splits;
  }
  int ctas_for(std::int64_t work_tiles) const { return static_cast<int>(std::min<std::int64_t>(work_tiles, ctas_)); }

  static void set_cache(const DecodeStep& step, DecodeParams& p) {
    if (!can_read(step.k) || !can_read(step.v)) {
      fail(ErrorCode::kUnsupported, "sm80_attention can't read this cache",
           "its start and its strides must be multiples of 16 bytes, and it must have less than 2^31 pages and tokens",
           "Change its layout.");
    }
    p.k = cache_of(step.k);
    p.v = cache_of(step.v);
  }

  void set_pages(const DecodeStep& step, WorkTileParams& p) const {
    p.partition.first = step.partition.first;
    p.partition.stride = step.partition.stride;
    p.table.page_log = 31;
    if (step.block_table.pages == nullptr) return;
    p.table.pages = step.block_table.pages;
    p.table.stride = step.block_table.stride;
    const std::int64_t page_size = spec_.format.k.is_plain() ? step.k.page_size : step.quantized_k.page_size;
    p.table.page_log = std::countr_zero(static_cast<std::uint64_t>(page_size));
  }

  // Called after set_pages().
  void set_block_mask(const DecodeStep& step, WorkTileParams& p) const {
    const BlockMaskShape& shape = spec_.attention.block_mask;
    p.mask.kv_heads = spec_.attention.kv_heads / mask_heads_of(shape);
    p.table.page_run_log2 = p.table.page_log;
    if (!shape.any()) return;
    p.mask.indices = step.block_mask.blocks;
    p.mask.counts = step.block_mask.counts;
    p.mask.row_stride = step.block_mask.stride;
    p.mask.rows = shape.heads;
    p.mask.block_keys = shape.key_block;
    p.table.page_run_log2 = std::min(p.table.page_log, std::countr_zero(static_cast<unsigned>(config_.key_tile)));
  }

  DecodeSpec spec_;
  int device_;
  AttentionConfig config_;
  const DecodeLauncher& launcher_;
  const CompressedLauncher* const compressed_;  // null: caches are plain
  const MergeLauncher& merge_;
  DecodeLimits limits_;
  ScratchLayout layout_{};
  int ctas_ = 0;    // CTAs that the device runs at a time
  Buffer scratch_;  // partials, then counters
};

}  // namespace

std::vector<std::string> decode_configs() {
  std::vector<std::string> lines;
  for (const AttentionConfig& config : kAttentionConfigs) {
    const int stages = decode_stages(config);
    const std::string_view unit = config.slices > 1 ? "strips" : stages == 1 ? "stage" : "stages";
    lines.push_back(cuda::config_line(
        config.head_dim, config.head_dim_v,
        fmt::format("tile {}x{}, {} {} of keys", decode_rows(config), config.key_tile, stages, unit)));
  }
  return lines;
}

std::unique_ptr<DecodeKernel> make_decode(const DecodeSpec& spec, Backend& backend) {
  launcher_of(spec, choose_config(spec.attention).has_value());
  return std::make_unique<Sm80Decode>(spec, static_cast<const cuda::CudaBackend&>(backend).device());
}

}  // namespace ringattn::sm80
