// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/latent/sm90_latent.hpp"

#include <algorithm>

#include "base/cuda.hpp"
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
  Sm90Latent(const DecodeSpec& spec, int device)
      : spec_(spec), device_(device), launcher_(spec.fold.dtype == Dtype::kBf16 ? latent_bf16 : latent_fp16) {}

  std::int64_t record_floats() const override { return kLatentDimV + 4; }
  int key_tile() const override { return kLatentTile; }

  // Records of all groups, where sequences may have several: a second launch merges them.
  std::size_t scratch_bytes(const DecodeLimits& limits) const override {
    const std::int64_t groups = groups_of(limits);
    if (groups <= 1) return 0;
    return static_cast<std::size_t>(limits.sequences * limits.rows * groups * spec_.fold.heads * record_floats()) *
           sizeof(float);
  }

  void check(const DecodeLimits& limits, int shares) const override {
    check_limits("sm90_latent", limits, kMostLatentSequences, shares);
  }

  void reserve(const DecodeLimits& limits) override {
    check(limits, 1);
    const DeviceGuard guard(device_);
    limits_ = limits;
    groups_ = groups_of(limits);
    scratch_ = allocate_device(scratch_bytes(limits), device_);
    launcher_.prepare();
    prepare_merge(spec_.fold.dtype);
    alone_ = launcher_.clusters_at_a_time(1);
    clusters_ = launcher_.clusters_at_a_time(2);
    pairs_ = launcher_.pairs_at_a_time();
  }

  void enqueue(const DecodeStep& step, Stream stream) override {
    check_decode_step(spec_, limits_, step);
    if (step.q.tokens == 0) return;
    const DeviceGuard guard(device_);
    DecodeParams p{};
    set_step(spec_.fold, step, kQueryTile, p);
    const std::int64_t units = std::int64_t{p.sequences} * p.fold.kv_heads * p.blocks * groups_;
    const bool merges = groups_ > 1 && step.partials.records == nullptr;
    if (merges) {
      p.records = reinterpret_cast<float*>(scratch_.data());
      p.record_groups = groups_;
    }
    p.slices = 1;
    if (in_pairs(units)) {
      set_pages(step, kLatentTile, kLatentTile, p);
      p.k = map_pages(mapped_pages("sm90_latent", step.k), spec_.fold.dtype, p.box_rows, kPanelColumns);
      launcher_.launch_pairs(p, static_cast<int>(std::min<std::int64_t>(units, pairs_)), stream);
      if (merges) finish(step, p.records, stream);
      return;
    }
    const int ctas = p.blocks % 2 == 0 && clusters_ > 0 ? 2 : 1;  // a part of a device may hold no cluster
    set_pages(step, kLatentTile, kLatentTile / ctas, p);          // a box or more for each CTA of a cluster
    p.k = map_pages(mapped_pages("sm90_latent", step.k), spec_.fold.dtype, p.box_rows, kPanelColumns);
    const std::int64_t most = ctas == 2 ? clusters_ : alone_;
    launcher_.launch(p, ctas, static_cast<int>(std::min(units / ctas, most)), stream);
    if (merges) finish(step, p.records, stream);
  }

  void merge(const DecodeMerge& merge, Stream stream) override {
    check_decode_merge(spec_, merge);
    const DeviceGuard guard(device_);
    merge_shares("sm90_latent", spec_.fold, kLatentTile, merge, stream);
  }

 private:
  // Merges a step's groups, which lie in the scratch memory.
  void finish(const DecodeStep& step, const float* records, Stream stream) const {
    merge_shares(
        "sm90_latent", spec_.fold, kLatentTile,
        {.shares = {&records, 1}, .groups = groups_, .rows = step.rows, .lengths = step.lengths, .output = step.output},
        stream);
  }

  // Of a sequence, at most.
  static std::int64_t groups_of(const DecodeLimits& limits) {
    return std::max<std::int64_t>(1, share_groups(limits.keys, 1, kLatentTile));
  }
  // A pair takes less time for a unit than a CTA by itself, but no less than half of it: so pairs fold where they can
  // take all units at once. Both ways have the same bits.
  bool in_pairs(std::int64_t units) const {
    return pairs_ > 0 && (limits_.slices == 0 ? units <= pairs_ : limits_.slices > 1);
  }

  DecodeSpec spec_;
  int device_;
  const LatentLauncher& launcher_;
  DecodeLimits limits_;
  std::int64_t groups_ = 0;  // of a sequence, at most
  // That the device holds at a time: CTAs by themselves, clusters of two blocks of rows, pairs for one block.
  int alone_ = 0;
  int clusters_ = 0;
  int pairs_ = 0;
  Buffer scratch_;
};

}  // namespace

std::unique_ptr<DecodeKernel> make_latent_decode(const DecodeSpec& spec, Backend& backend) {
  return std::make_unique<Sm90Latent>(spec, static_cast<const cuda::CudaBackend&>(backend).device());
}

}  // namespace ringattn::sm90
