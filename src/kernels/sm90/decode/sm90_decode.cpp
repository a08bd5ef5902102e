// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/decode/sm90_decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "kernels/cuda/cuda_backend.hpp"
#include "kernels/cuda/cuda_fold.hpp"
#include "kernels/merge.hpp"
#include "kernels/registry.hpp"
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

// What a step's units leave for each other, as it lies in scratch memory.
struct ScratchLayout {
  std::int64_t groups;  // of a sequence, at most
  std::size_t outputs, numbers, arrived, failed, bytes;
};

class Sm90Decode final : public DecodeKernel {
 public:
  Sm90Decode(const DecodeSpec& spec, int device)
      : spec_(spec), device_(device), config_(*choose_config(spec.fold)), launcher_(launcher_of(spec, true)) {}

  std::int64_t record_floats() const override { return spec_.fold.head_dim_v + 4; }
  int key_tile() const override { return config_.key_tile; }
  std::size_t scratch_bytes(const DecodeLimits& limits) const override { return lay_out(limits).bytes; }

  void check(const DecodeLimits& limits, int shares) const override {
    check_limits("sm90_fold", limits, kMostDecodeSequences, shares);
  }

  void reserve(const DecodeLimits& limits) override {
    check(limits, 1);
    const DeviceGuard guard(device_);
    limits_ = limits;
    layout_ = lay_out(limits);
    multiprocessors_ = cuda::multiprocessors_of(device_);
    scratch_ = allocate_device(layout_.bytes, device_);
    check_cuda(cudaMemset(scratch_.data(), 0, layout_.bytes), "cudaMemset");
    check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // steps may be in any stream
    launcher_.prepare();
    prepare_merge(spec_.fold.dtype);
    for (int slices = 1; slices <= kMostSlices; slices *= 2) {
      clusters_[std::countr_zero(static_cast<unsigned>(slices))] = launcher_.clusters_at_a_time(slices);
    }
  }

  void enqueue(const DecodeStep& step, Stream stream) override {
    check_decode_step(spec_, limits_, step);
    if (step.q.tokens == 0) return;
    const DeviceGuard guard(device_);
    DecodeParams p{};
    set_tensors(step, p);
    set_cache(step, p);
    p.outputs = reinterpret_cast<float*>(scratch_.data() + layout_.outputs);
    p.numbers = reinterpret_cast<float2*>(scratch_.data() + layout_.numbers);
    p.arrived = reinterpret_cast<std::int32_t*>(scratch_.data() + layout_.arrived);
    p.failed = reinterpret_cast<std::int32_t*>(scratch_.data() + layout_.failed);
    const std::int64_t units = std::int64_t{p.sequences} * spec_.fold.kv_heads * p.blocks * layout_.groups;
    if (p.block_rows == kSlicedRows) {
      launcher_.launch_sliced(p, static_cast<int>(std::min<std::int64_t>(units, clusters_of(p.slices))), stream);
    } else {
      launcher_.launch(p, static_cast<int>(std::min<std::int64_t>(units, multiprocessors_)), stream);
    }
  }

  void merge(const DecodeMerge& merge, Stream stream) override {
    check_decode_merge(spec_, merge);
    const DeviceGuard guard(device_);
    merge_shares("sm90_fold", spec_.fold, config_.key_tile, merge, stream);
  }

 private:
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
  // (bench/NOTES.md has the times of each).
  int slices_for(std::int64_t units) const {
    const int least = clusters_of(2) > 0 ? 2 : 1;
    const int clusters = clusters_of(kMostSlices);
    return clusters > 0 && (limits_.slices > 0 ? kMostSlices <= limits_.slices : units <= clusters) ? kMostSlices
                                                                                                    : least;
  }

  ScratchLayout lay_out(const DecodeLimits& limits) const {
    constexpr std::size_t kAlignment = 256;
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
    return layout;
  }

  void set_tensors(const DecodeStep& step, DecodeParams& p) const {
    set_step(spec_.fold, step, block_rows(step.rows), p);
    p.slices =
        p.block_rows == kSlicedRows ? slices_for(std::int64_t{p.sequences} * p.fold.kv_heads * layout_.groups) : 1;
  }

  void set_cache(const DecodeStep& step, DecodeParams& p) const {
    const FoldSpec& spec = spec_.fold;
    const MappedPages k = mapped_pages("sm90_fold", step.k);
    const MappedPages v = mapped_pages("sm90_fold", step.v);
    set_pages(step, config_.key_tile, config_.key_tile, p);
    // A box of several panels fills them one behind the other, so it must be a whole tile.
    const auto box_columns = [&](int dim) { return p.boxes == 1 ? FoldConfig::box_columns(dim) : kPanelColumns; };
    p.k_box_columns = box_columns(spec.head_dim);
    p.v_box_columns = box_columns(spec.head_dim_v);
    p.k = map_pages(k, spec.dtype, p.box_rows, p.k_box_columns);
    p.v = map_pages(v, spec.dtype, p.box_rows, p.v_box_columns);
    const int slice = spec.head_dim_v / p.slices;
    p.slice_box_columns = slice < kPanelColumns ? slice : box_columns(slice);
    p.v_slices = map_pages(v, spec.dtype, p.box_rows, p.slice_box_columns);
  }

  DecodeSpec spec_;
  int device_;
  FoldConfig config_;
  const DecodeLauncher& launcher_;
  DecodeLimits limits_;
  ScratchLayout layout_{};
  int multiprocessors_ = 0;
  int clusters_[4] = {};  // by log₂ of their CTAs, how many the device holds at a time
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
