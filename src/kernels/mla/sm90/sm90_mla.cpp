// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla/sm90/sm90_mla.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/decode/sm90/decode_params.hpp"
#include "kernels/decode/sm90/sm90_decode.hpp"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/mla.hpp"

namespace ringattn::sm90 {

namespace {

class Sm90Mla final : public DecodeKernel {
 public:
  Sm90Mla(const DecodeSpec& spec, int device, const MlaVariant& variant)
      : spec_(spec), device_(device), variant_(variant) {}

  std::int64_t partial_floats() const override { return kLatentDimV + 4; }
  int key_tile() const override { return kMlaKeyTile; }
  int tiles_per_kv_split() const override { return variant_.tiles_per_kv_split; }

  // Partials of all KV splits, if a sequence may have more than one. A merge launch reads them, or finds all rows
  // finished.
  std::size_t scratch_bytes(const DecodeLimits& limits) const override {
    const std::int64_t splits = max_kv_splits(limits);
    if (splits <= 1) return 0;
    const std::int64_t rows = std::min<std::int64_t>(limits.sequences, kMaxMlaSequences) * limits.rows;
    return static_cast<std::size_t>(rows * splits * spec_.attention.heads * partial_floats()) * sizeof(float) +
           sizeof(std::int32_t);  // MlaParams::whole
  }

  void check(const DecodeLimits& limits, int shares) const override { check_limits(variant_.name, limits, shares); }

  void reserve(const DecodeLimits& limits) override {
    check(limits, 1);
    const DeviceGuard guard(device_);
    limits_ = limits;
    kv_splits_ = max_kv_splits(limits);
    const std::size_t bytes = scratch_bytes(limits);
    scratch_ = allocate_device(bytes, device_);
    whole_ = bytes == 0 ? nullptr : reinterpret_cast<std::int32_t*>(scratch_.data() + bytes) - 1;
    prepare_merge(spec_.attention.dtype);
    with_launcher([&](const auto& launcher) {
      launcher.prepare();
      max_ctas_ = launcher.max_active_clusters(1);
      max_clusters_ = launcher.max_active_clusters(2);
      for (ClusterShape& shape : cta_group_shapes_) shape.max_active = launcher.max_active_cta_groups(shape.ctas);
    });
  }

  void enqueue(const DecodeStep& step, Stream stream) override {
    check_decode_step(spec_, limits_, step);
    if (step.q.tokens == 0) return;
    const DeviceGuard guard(device_);
    for_each_sub_batch(spec_, step, kMaxMlaSequences, partial_floats(),
                       [&](const DecodeStep& part) { enqueue_launch(part, stream); });
  }

  void merge(const DecodeMerge& merge, Stream stream) override {
    check_decode_merge(spec_, merge);
    const DeviceGuard guard(device_);
    merge_partitions(variant_.name, spec_.attention, kv_split_keys(), merge, stream);
  }

 private:
  // One launch, for at most kMaxMlaSequences sequences.
  void enqueue_launch(const DecodeStep& step, Stream stream) const {
    MlaParams p{};
    set_step(spec_.attention, step, kQueryTile, p);
    p.split_tiles_log = std::countr_zero(static_cast<unsigned>(variant_.tiles_per_kv_split));
    const std::int64_t work_tiles =
        std::int64_t{p.blocks.sequences} * p.attention.kv_heads * p.blocks.count * kv_splits_;
    const bool merges = kv_splits_ > 1 && step.partials.data == nullptr;
    const ClusterShape shape = choose_shape(work_tiles, p.blocks.count % 2 == 0);
    if (merges) {
      p.partials = {reinterpret_cast<float*>(scratch_.data()), kv_splits_};
      if (shape.ctas == shape.blocks) p.whole = whole_;
    }
    const auto clusters = static_cast<int>(std::min(work_tiles / shape.blocks, shape.max_active));
    const auto launch = [&](const auto& launcher, const auto& params) {
      (shape.ctas > shape.blocks ? launcher.launch_cta_groups : launcher.launch)(params, shape.ctas, clusters, stream);
    };
    // At least one TMA box for each CTA that loads a part of the tile.
    const int box_rows = kMlaKeyTile / shape.blocks;
    if (spec_.format.is_plain()) {
      set_pages(step, kMlaKeyTile, box_rows, p);
      p.k = map_pages(mapped_pages(variant_.name, step.k), spec_.attention.dtype, p.boxes.rows, kPanelColumns);
      launch(spec_.attention.dtype == Dtype::kBf16 ? mla_bf16 : mla_fp16, p);
    } else {
      DecodeStep paged = step;
      paged.k.page_size = step.quantized_k.page_size;
      set_pages(paged, kMlaKeyTile, box_rows, p);
      launch(mla_fp8, fp8_params(step.quantized_k, p));
    }
    if (merges) finish(step, p, stream);
  }

  template <class With>
  void with_launcher(With with) const {
    if (!spec_.format.is_plain()) {
      with(mla_fp8);
    } else {
      with(spec_.attention.dtype == Dtype::kBf16 ? mla_bf16 : mla_fp16);
    }
  }

  // Describes where the fp8 values, the scales and the rotary keys of the FP8 latent cache are.
  MlaFp8Params fp8_params(const CompressedCache& cache, const MlaParams& params) const {
    MlaFp8Params p{params, {}, {}};
    const PagedStream& scales = cache.streams[1];
    // The tensor map has 16-bit elements: two fp8 values, or one element of a rotary key.
    const auto map = [&](const PagedStream& stream, std::int64_t columns) {
      const CacheView view{stream.data,
                           Dtype::kBf16,
                           cache.pages,
                           cache.page_size,
                           cache.shape.heads,
                           columns,
                           stream.page_stride / 2,
                           stream.token_stride / 2,
                           stream.head_stride / 2};
      return map_pages(mapped_pages(variant_.name, view), Dtype::kBf16, params.boxes.rows, kPanelColumns);
    };
    p.k = map(cache.streams[0], kLatentDimV / 2);
    p.rope = map(cache.streams[2], kLatentDim - kLatentDimV);
    p.scales = {scales.data, scales.page_stride, scales.token_stride, scales.head_stride};
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(scales.data));
    if ((address | scales.page_stride | scales.token_stride | scales.head_stride) % 16 != 0) {
      fail(ErrorCode::kUnsupported, fmt::format("{} can't read this compressed cache", variant_.name),
           "the start and the strides of its scales must be multiples of 16 bytes", "Use a cache with that alignment.");
    }
    return p;
  }

  // Merges the KV splits of a step. Their partials are in the scratch memory.
  void finish(const DecodeStep& step, const MlaParams& launched, Stream stream) const {
    const float* const partials = launched.partials.data;
    merge_partitions(variant_.name, spec_.attention, kv_split_keys(),
                     {.partitions = {&partials, 1},
                      .kv_splits = kv_splits_,
                      .rows = step.rows,
                      .lengths = step.lengths,
                      .output = step.output},
                     stream, launched.whole);
  }

  // Max. KV splits per sequence.
  std::int64_t max_kv_splits(const DecodeLimits& limits) const {
    return std::max<std::int64_t>(1, splits_per_partition(limits.keys, 1, kv_split_keys()));
  }
  // A cluster size: `ctas` CTAs process `blocks` row blocks. `max_active` clusters fit on the device at once.
  struct ClusterShape {
    int ctas, blocks;
    std::int64_t max_active;
  };
  // Chooses the largest CTA groups that can process all work tiles in one wave: more CTAs per work tile take less time,
  // but less than proportionally. With many work tiles, two row blocks share their tile loads. Groups of three are used
  // only in that case, where they are faster. `even`: the number of row blocks is even. All shapes give the same bits.
  ClusterShape choose_shape(std::int64_t work_tiles, bool even) const {
    const int slices = limits_.slices;
    for (const ClusterShape& shape : cta_group_shapes_) {
      if (shape.max_active == 0 || (shape.blocks == 2 && !even)) continue;
      const bool pays = shape.blocks == 2 ? work_tiles > kMaxCtaGroupWorkTiles : shape.ctas != 3;
      if (slices == 0 ? pays && work_tiles <= shape.blocks * shape.max_active : shape.ctas <= slices) return shape;
    }
    return even && max_clusters_ > 0 ? ClusterShape{2, 2, max_clusters_} : ClusterShape{1, 1, max_ctas_};
  }

  DecodeSpec spec_;
  int device_;
  MlaVariant variant_;
  DecodeLimits limits_;
  std::int64_t kv_splits_ = 0;  // max. per sequence
  // Max. co-resident single CTAs, and clusters of two CTAs with one row block each. A MIG slice may be too small for a
  // cluster.
  int max_ctas_ = 0;
  int max_clusters_ = 0;
  std::array<ClusterShape, 5> cta_group_shapes_ = {{{8, 2, 0}, {6, 2, 0}, {4, 1, 0}, {3, 1, 0}, {2, 1, 0}}};
  Buffer scratch_;
  std::int32_t* whole_ = nullptr;  // MlaParams::whole, in the scratch memory
};

}  // namespace

std::unique_ptr<DecodeKernel> make_mla_decode(const DecodeSpec& spec, Backend& backend, const MlaVariant& variant) {
  return std::make_unique<Sm90Mla>(spec, static_cast<const cuda::CudaBackend&>(backend).device(), variant);
}

}  // namespace ringattn::sm90
