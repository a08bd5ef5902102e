// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/latent/sm90_latent.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/cuda/cuda_backend.hpp"
#include "kernels/cuda/cuda_fold.hpp"
#include "kernels/sm90/decode/merge.hpp"
#include "kernels/sm90/decode/step_params.hpp"
#include "kernels/sm90/fold/tensor_maps.hpp"
#include "kernels/sm90/latent/config.hpp"
#include "kernels/sm90/latent/latent.hpp"

namespace ringattn::sm90 {

namespace {

class Sm90Latent final : public DecodeKernel {
 public:
  Sm90Latent(const DecodeSpec& spec, int device, const LatentRow& row) : spec_(spec), device_(device), row_(row) {}

  std::int64_t record_floats() const override { return kLatentDimV + 4; }
  int key_tile() const override { return kLatentTile; }
  int group_tiles() const override { return row_.group_tiles; }

  // Records of all groups, where sequences may have several: a second launch merges them, or finds them merged.
  std::size_t scratch_bytes(const DecodeLimits& limits) const override {
    const std::int64_t groups = groups_of(limits);
    if (groups <= 1) return 0;
    const std::int64_t rows = std::min<std::int64_t>(limits.sequences, kMostLatentSequences) * limits.rows;
    return static_cast<std::size_t>(rows * groups * spec_.fold.heads * record_floats()) * sizeof(float) +
           sizeof(std::int32_t);  // DecodeParams::whole
  }

  void check(const DecodeLimits& limits, int shares) const override { check_limits(row_.name, limits, shares); }

  void reserve(const DecodeLimits& limits) override {
    check(limits, 1);
    const DeviceGuard guard(device_);
    limits_ = limits;
    groups_ = groups_of(limits);
    const std::size_t bytes = scratch_bytes(limits);
    scratch_ = allocate_device(bytes, device_);
    whole_ = bytes == 0 ? nullptr : reinterpret_cast<std::int32_t*>(scratch_.data() + bytes) - 1;
    prepare_merge(spec_.fold.dtype);
    with_launcher([&](const auto& launcher) {
      launcher.prepare();
      alone_ = launcher.clusters_at_a_time(1);
      clusters_ = launcher.clusters_at_a_time(2);
      for (Form& form : sharing_) form.at_a_time = launcher.sharing_at_a_time(form.ctas);
    });
  }

  void enqueue(const DecodeStep& step, Stream stream) override {
    check_decode_step(spec_, limits_, step);
    if (step.q.tokens == 0) return;
    const DeviceGuard guard(device_);
    for_parts_of_step(spec_, step, kMostLatentSequences, record_floats(),
                      [&](const DecodeStep& part) { enqueue_part(part, stream); });
  }

  void merge(const DecodeMerge& merge, Stream stream) override {
    check_decode_merge(spec_, merge);
    const DeviceGuard guard(device_);
    merge_shares(row_.name, spec_.fold, group_keys(), merge, stream);
  }

 private:
  // One launch: at most kMostLatentSequences sequences.
  void enqueue_part(const DecodeStep& step, Stream stream) const {
    DecodeParams p{};
    set_step(spec_.fold, step, kQueryTile, p);
    p.group_log = std::countr_zero(static_cast<unsigned>(row_.group_tiles));
    const std::int64_t units = std::int64_t{p.sequences} * p.fold.kv_heads * p.blocks * groups_;
    const bool merges = groups_ > 1 && step.partials.records == nullptr;
    p.slices = 1;
    const Form form = form_of(units, p.blocks % 2 == 0);
    if (merges) {
      p.records = reinterpret_cast<float*>(scratch_.data());
      p.record_groups = groups_;
      if (form.ctas == form.blocks) p.whole = whole_;
    }
    const auto at_a_time = static_cast<int>(std::min(units / form.blocks, form.at_a_time));
    const auto launch = [&](const auto& launcher, const auto& params) {
      (form.ctas > form.blocks ? launcher.launch_sharing : launcher.launch)(params, form.ctas, at_a_time, stream);
    };
    const int box_rows = kLatentTile / form.blocks;  // a box or more for each CTA that needs it
    if (spec_.format.is_plain()) {
      set_pages(step, kLatentTile, box_rows, p);
      p.k = map_pages(mapped_pages(row_.name, step.k), spec_.fold.dtype, p.box_rows, kPanelColumns);
      launch(spec_.fold.dtype == Dtype::kBf16 ? latent_bf16 : latent_fp16, p);
    } else {
      DecodeStep paged = step;
      paged.k.page_size = step.packed_k.page_size;
      set_pages(paged, kLatentTile, box_rows, p);
      launch(latent_codes, code_params(step.packed_k, p));
    }
    if (merges) finish(step, p, stream);
  }

  template <class With>
  void with_launcher(With with) const {
    if (!spec_.format.is_plain()) {
      with(latent_codes);
    } else {
      with(spec_.fold.dtype == Dtype::kBf16 ? latent_bf16 : latent_fp16);
    }
  }

  // Where codes, scales and rotary keys of rows of 8 bits lie.
  LatentCodeParams code_params(const CompressedCache& cache, const DecodeParams& step) const {
    LatentCodeParams p{step, {}};
    const PagedStream& scales = cache.streams[1];
    // The copy engine counts 16 bits: two codes, or an element.
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
      return map_pages(mapped_pages(row_.name, view), Dtype::kBf16, step.box_rows, kPanelColumns);
    };
    p.step.k = map(cache.streams[0], kLatentDimV / 2);
    p.step.v = map(cache.streams[2], kLatentDim - kLatentDimV);
    p.scales = {scales.data, scales.page_stride, scales.token_stride, scales.head_stride};
    const auto place = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(scales.data));
    if ((place | scales.page_stride | scales.token_stride | scales.head_stride) % 16 != 0) {
      fail(ErrorCode::kUnsupported, fmt::format("{} can't read this compressed cache", row_.name),
           "the start and the strides of its scales must be multiples of 16 bytes", "Lay it out so.");
    }
    return p;
  }

  // Merges a step's groups, which lie in the scratch memory.
  void finish(const DecodeStep& step, const DecodeParams& launched, Stream stream) const {
    const float* const records = launched.records;
    merge_shares(
        row_.name, spec_.fold, group_keys(),
        {.shares = {&records, 1}, .groups = groups_, .rows = step.rows, .lengths = step.lengths, .output = step.output},
        stream, launched.whole);
  }

  // Of a sequence, at most.
  std::int64_t groups_of(const DecodeLimits& limits) const {
    return std::max<std::int64_t>(1, share_groups(limits.keys, 1, group_keys()));
  }
  // Clusters of so many CTAs, which fold so many blocks of rows, and how many the device holds at a time.
  struct Form {
    int ctas, blocks;
    std::int64_t at_a_time;
  };
  // The more CTAs share a unit, the less time it takes, but no less than their share of it: so as many do as can take
  // all units at once. Of many units, those of two blocks of rows share what they read; so do teams of three, which
  // only pay where they do. `even`: blocks of rows. All forms have the same bits.
  Form form_of(std::int64_t units, bool even) const {
    const int slices = limits_.slices;
    for (const Form& form : sharing_) {
      if (form.at_a_time == 0 || (form.blocks == 2 && !even)) continue;
      const bool pays = form.blocks == 2 ? units > kMostTeamUnits : form.ctas != 3;
      if (slices == 0 ? pays && units <= form.blocks * form.at_a_time : form.ctas <= slices) return form;
    }
    return even && clusters_ > 0 ? Form{2, 2, clusters_} : Form{1, 1, alone_};
  }

  DecodeSpec spec_;
  int device_;
  LatentRow row_;
  DecodeLimits limits_;
  std::int64_t groups_ = 0;  // of a sequence, at most
  // That the device holds at a time: CTAs by themselves, and clusters of two that have a block of rows each. A part of
  // a device may hold no cluster.
  int alone_ = 0;
  int clusters_ = 0;
  std::array<Form, 5> sharing_ = {{{8, 2, 0}, {6, 2, 0}, {4, 1, 0}, {3, 1, 0}, {2, 1, 0}}};
  Buffer scratch_;
  std::int32_t* whole_ = nullptr;  // DecodeParams::whole, in the scratch memory
};

}  // namespace

std::unique_ptr<DecodeKernel> make_latent_decode(const DecodeSpec& spec, Backend& backend, const LatentRow& row) {
  return std::make_unique<Sm90Latent>(spec, static_cast<const cuda::CudaBackend&>(backend).device(), row);
}

}  // namespace ringattn::sm90
