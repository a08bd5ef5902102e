// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/decode/sm80_decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <string_view>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/cuda/cuda_backend.hpp"
#include "kernels/cuda/cuda_fold.hpp"
#include "kernels/merge.hpp"
#include "kernels/registry.hpp"
#include "kernels/sm80/decode/compressed.hpp"
#include "kernels/sm80/decode/decode.hpp"

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
  return cuda::launcher_of("sm80_fold", kCompiled, spec.fold, configured);
}

bool aligned(const void* data, std::initializer_list<std::int64_t> strides) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         std::ranges::all_of(strides, [](std::int64_t stride) { return stride * 2 % 16 == 0; });
}

// Places of keys are numbers of 32 bits.
bool can_read(const CacheView& view) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  return aligned(view.data, {view.page_stride, view.token_stride, view.head_stride}) && view.pages <= kMost &&
         view.page_size <= kMost;
}

DecodeCache cache_of(const CacheView& view) {
  return {static_cast<const char*>(view.data), 2 * view.page_stride, 2 * view.token_stride, 2 * view.head_stride};
}

// What a step's units leave for each other, as it lies in scratch memory.
struct ScratchLayout {
  std::int64_t groups;  // of a row
  std::size_t counters, bytes;
};

class Sm80Decode final : public DecodeKernel {
 public:
  Sm80Decode(const DecodeSpec& spec, int device)
      : spec_(spec),
        device_(device),
        config_(*choose_config(spec.fold)),
        launcher_(launcher_of(spec, true)),
        compressed_(spec.format.is_plain() ? nullptr : &compressed_launcher_of(spec, true)),
        merge_(spec.fold.dtype == Dtype::kBf16 ? merge_bf16 : merge_fp16) {
    if (device_ == kNoDevice) return;
    const DeviceGuard guard(device_);
    merge_.prepare();
  }

  int key_tile() const override { return config_.key_tile; }
  std::int64_t record_floats() const override { return sm80::record_floats(spec_.fold.head_dim_v); }
  std::size_t scratch_bytes(const DecodeLimits& limits) const override { return lay_out(limits).bytes; }

  void check(const DecodeLimits&, int shares) const override { check_shares(static_cast<std::size_t>(shares)); }

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
    DecodeParams p{};
    p.fold = fold_params(step.q.tokens, step.output);
    p.fold.q = {step.q.data, step.q.token_stride, step.q.head_stride};
    p.q_aligned = aligned(step.q.data, {step.q.token_stride, step.q.head_stride});
    if (compressed_ == nullptr) set_cache(step, p);
    set_pages(step, p);
    set_lists(step, p);
    p.lengths = step.lengths;
    p.sequences = static_cast<std::int32_t>(step.q.tokens / step.rows) * lists_of(spec_.fold.lists);
    p.rows = step.rows;
    p.ratio = spec_.fold.heads / spec_.fold.kv_heads;
    p.blocks = static_cast<std::int32_t>(blocks(step.rows));
    p.finish = step.partials.records == nullptr;
    p.records = p.finish ? reinterpret_cast<float*>(scratch_.data()) : step.partials.records;
    p.record_groups = p.finish ? layout_.groups : step.partials.groups;
    p.arrived = reinterpret_cast<std::int32_t*>(scratch_.data() + layout_.counters);
    const std::int64_t units = p.sequences * p.list_kv_heads * blocks(step.rows) * layout_.groups;
    const int ctas = static_cast<int>(std::min<std::int64_t>(units, ctas_));
    if (compressed_ == nullptr) {
      launcher_.launch(p, ctas, stream);
      return;
    }
    CompressedParams compressed{};
    compressed.step = p;
    set_compressed(spec_, step, compressed);
    compressed_->launch(compressed, ctas, stream);
  }

  void merge(const DecodeMerge& merge, Stream stream) override {
    check_decode_merge(spec_, merge);
    const std::int64_t rows = merge.output.out.tokens;
    check_shares(merge.shares.size());
    if (rows == 0) return;
    const DeviceGuard guard(device_);
    DecodeMergeParams p{};
    p.fold = fold_params(rows, merge.output);
    std::ranges::copy(merge.shares, p.shares);
    p.share_count = static_cast<std::int32_t>(merge.shares.size());
    p.record_groups = merge.groups;
    p.lengths = merge.lengths;
    p.rows = merge.rows;
    p.tiles = {config_.query_tile(), config_.key_tile};
    merge_.launch(p, stream);
  }

 private:
  static void check_shares(std::size_t shares) {
    if (shares <= kMostShares) return;
    fail(ErrorCode::kUnsupported, fmt::format("a decode step whose keys are dealt to {} ranks", shares),
         fmt::format("sm80_fold merges the results of up to {}", kMostShares), "Use fewer ranks.");
  }

  // Blocks of rows of a sequence and KV head, at most: rows of two query tiles lie in blocks of their own.
  std::int64_t blocks(int rows) const {
    const int stacked = rows * (spec_.fold.heads / spec_.fold.kv_heads);
    return (stacked + decode_rows(config_) - 1) / decode_rows(config_) + (rows > 1 ? 1 : 0);
  }

  ScratchLayout lay_out(const DecodeLimits& limits) const {
    constexpr std::size_t kAlignment = 256;
    ScratchLayout layout{};
    layout.groups = std::max<std::int64_t>(1, share_groups(limits.keys, 1, group_keys()));
    const std::int64_t records = limits.sequences * limits.rows * spec_.fold.heads * layout.groups;
    const std::size_t bytes = static_cast<std::size_t>(records * record_floats()) * sizeof(float);
    layout.counters = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    layout.bytes =
        layout.counters +
        static_cast<std::size_t>(limits.sequences * spec_.fold.kv_heads * blocks(limits.rows)) * sizeof(std::int32_t);
    return layout;
  }

  cuda::FoldParams fold_params(std::int64_t rows, const FoldOutput& output) const {
    const FoldSpec& spec = spec_.fold;
    cuda::FoldParams p{};
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

  static void set_cache(const DecodeStep& step, DecodeParams& p) {
    if (!can_read(step.k) || !can_read(step.v)) {
      fail(ErrorCode::kUnsupported, "sm80_fold can't read this cache",
           "its start and its strides must be multiples of 16 bytes, and it must have less than 2^31 pages and tokens",
           "Lay it out so.");
    }
    p.k = cache_of(step.k);
    p.v = cache_of(step.v);
  }

  void set_pages(const DecodeStep& step, DecodeParams& p) const {
    p.share_first = step.share.first;
    p.every = step.share.every;
    p.page_log = 31;
    if (step.block_table.pages == nullptr) return;
    p.pages = step.block_table.pages;
    p.table_stride = step.block_table.stride;
    const std::int64_t page_size = spec_.format.k.is_plain() ? step.k.page_size : step.packed_k.page_size;
    p.page_log = std::countr_zero(static_cast<std::uint64_t>(page_size));
  }

  // Behind set_pages().
  void set_lists(const DecodeStep& step, DecodeParams& p) const {
    const ListShape& shape = spec_.fold.lists;
    p.list_kv_heads = spec_.fold.kv_heads / lists_of(shape);
    p.piece_log = p.page_log;
    if (!shape.any()) return;
    p.list_blocks = step.lists.blocks;
    p.list_counts = step.lists.counts;
    p.list_stride = step.lists.stride;
    p.lists = shape.heads;
    p.list_keys = shape.key_block;
    p.piece_log = std::min(p.page_log, std::countr_zero(static_cast<unsigned>(config_.key_tile)));
  }

  DecodeSpec spec_;
  int device_;
  FoldConfig config_;
  const DecodeLauncher& launcher_;
  const CompressedLauncher* const compressed_;  // null: caches are plain
  const MergeLauncher& merge_;
  DecodeLimits limits_;
  ScratchLayout layout_{};
  int ctas_ = 0;    // that the device runs at a time
  Buffer scratch_;  // records, then counters
};

}  // namespace

std::vector<std::string> decode_configs() {
  std::vector<std::string> lines;
  for (const FoldConfig& config : kFoldConfigs) {
    const int stages = decode_stages(config);
    const std::string_view room = config.slices > 1 ? "strips" : stages == 1 ? "stage" : "stages";
    lines.push_back(cuda::config_line(
        config.head_dim, config.head_dim_v,
        fmt::format("tile {}x{}, {} {} of keys", decode_rows(config), config.key_tile, stages, room)));
  }
  return lines;
}

std::unique_ptr<DecodeKernel> make_decode(const DecodeSpec& spec, Backend& backend) {
  launcher_of(spec, choose_config(spec.fold).has_value());
  return std::make_unique<Sm80Decode>(spec, static_cast<const cuda::CudaBackend&>(backend).device());
}

}  // namespace ringattn::sm80
