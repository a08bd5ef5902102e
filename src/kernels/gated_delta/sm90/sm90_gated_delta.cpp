// SPDX-License-Identifier: Apache-2.0
#include "kernels/gated_delta/sm90/sm90_gated_delta.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"
#include "kernels/gated_delta/sm90/delta_params.hpp"

namespace ringattn::sm90 {

namespace {

// Factors of at most this many bytes are kept from accumulate_states() to finish(). Longer tasks are computed in slices
// of segments, and the factors of all slices but one twice, a quarter of the time of GDN. Factors of 16/64 heads are
// 0.4 times the bytes of q, k, v and o, and those of KDA as many.
constexpr std::int64_t kFactorBytes = std::int64_t{2} << 30;

std::int64_t decayed_bytes_of_chunk(const GatedDeltaSpec& spec) {
  return spec.key_decays ? std::int64_t{DeltaDecayed::kBytes} : 0;
}

std::int64_t factor_bytes_of_segment(const GatedDeltaSpec& spec) {
  return std::int64_t{spec.value_heads} * kDeltaChunksOfSegment *
         (DeltaFactors::kBytes + kDeltaSquareBytes + decayed_bytes_of_chunk(spec));
}

std::int64_t state_bytes_of_segment(const GatedDeltaSpec& spec) {
  return std::int64_t{spec.value_heads} * kDeltaStateFloats * static_cast<std::int64_t>(sizeof(float));
}

// Segments of a slice: those whose factors are in memory at a time.
std::int64_t slice_segments(const GatedDeltaSpec& spec, const GatedDeltaLimits& limits) {
  return std::clamp<std::int64_t>(kFactorBytes / factor_bytes_of_segment(spec), 1,
                                  std::max<std::int64_t>(limits.segments, 1));
}

DeltaTensor delta_tensor_of(const TensorView& view) { return {view.data, view.token_stride, view.head_stride}; }

template <class Params, class Tensors>
void fill_params(Params& p, const GatedDeltaSpec& spec, const Tensors& tensors) {
  p.value_heads = spec.value_heads;
  p.heads_per_key = spec.heads_per_key();
  p.key_decays = spec.key_decays;
  p.qk_l2norm = spec.qk_l2norm;
  p.scale = scale_of(spec);
  p.q = delta_tensor_of(tensors.q);
  p.k = delta_tensor_of(tensors.k);
  p.v = delta_tensor_of(tensors.v);
  p.log_decay = delta_tensor_of(tensors.log_decay);
  p.beta = delta_tensor_of(tensors.beta);
  p.o = tensors.o.data;
  p.o_token_stride = tensors.o.token_stride;
  p.o_head_stride = tensors.o.head_stride;
}

class HopperGatedDelta final : public GatedDeltaKernel {
 public:
  HopperGatedDelta(const GatedDeltaSpec& spec, const cuda::CudaBackend& backend)
      : spec_(spec), device_(backend.device()), multiprocessors_(cuda::multiprocessors_of(device_)) {
    if (device_ == kNoDevice) return;
    const DeviceGuard guard(device_);
    launcher_.load();
  }

  int heads_together() const override { return 1; }
  // Partial last waves: 0.085 ms by the kernels' times for 32 and for 64 heads (bench/notes/gated_delta.md).
  double cost_of_two_ranges(double /*seconds*/) const override { return 1e-4; }
  double carry_seconds(std::int64_t runs, std::int64_t segments) const override {
    return static_cast<double>(segments) * choose_delta_carry(runs * spec_.value_heads, multiprocessors_).step_seconds;
  }

  std::size_t scratch_bytes(const GatedDeltaLimits& limits) const override {
    return static_cast<std::size_t>(2 * limits.segments * state_bytes_of_segment(spec_) +
                                    slice_segments(spec_, limits) * factor_bytes_of_segment(spec_));
  }

  void reserve(const GatedDeltaLimits& limits) override {
    limits_ = limits;
    const auto allocate = [this](std::int64_t bytes) {
      return allocate_device(static_cast<std::size_t>(bytes), device_);
    };
    const std::int64_t chunks = slice_segments(spec_, limits) * spec_.value_heads * kDeltaChunksOfSegment;
    factors_ = allocate(chunks * DeltaFactors::kBytes);
    scores_ = allocate(chunks * kDeltaSquareBytes);
    decayed_ = allocate(chunks * decayed_bytes_of_chunk(spec_));
    states_ = allocate(limits.segments * state_bytes_of_segment(spec_));
    transitions_ = allocate(limits.segments * state_bytes_of_segment(spec_));
  }

  void accumulate_states(const GatedDeltaTask& task, const HeadRange& heads, Stream stream,
                         const Progress& progress) override {
    check_gated_delta_task(spec_, limits_, task);
    if (heads.count == 0) return;
    const DeviceGuard guard(device_);
    // Backwards, so that the factors of the first slice remain for finish().
    const std::vector<DeltaParams> slices = slices_of(task, heads);
    for (std::size_t i = slices.size(); i-- > 0;) {
      if (progress) progress();
      DeltaParams p = slices[i];
      p.computes_scores = i == 0;
      launcher_.factors(p, cuda_stream(stream));
      launcher_.states(p, cuda_stream(stream));
    }
  }

  void carry(const GatedDeltaTask& task, const HeadRange& heads, int step, Stream stream) override {
    if (heads.count == 0) return;
    const DeviceGuard guard(device_);
    for_each_step_launch(task, heads, step, [&](const DeltaParams& p) {
      const std::int64_t states = std::int64_t{p.head_count} * p.run_count;
      launcher_.carry(p, choose_delta_carry(states, multiprocessors_).form, cuda_stream(stream));
    });
  }

  void finish(const GatedDeltaTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override {
    if (heads.count == 0) return;
    const DeviceGuard guard(device_);
    const std::vector<DeltaParams> slices = slices_of(task, heads);
    for (std::size_t i = 0; i < slices.size(); ++i) {
      if (progress) progress();
      DeltaParams p = slices[i];
      p.computes_scores = true;
      if (i > 0) launcher_.factors(p, cuda_stream(stream));
      launcher_.outputs(p, cuda_stream(stream));
    }
  }

  void update(const GatedDeltaUpdate& update, Stream stream) override {
    check_gated_delta_update(spec_, update);
    if (update.q.tokens == 0) return;
    const DeviceGuard guard(device_);
    DeltaUpdateParams p{};
    fill_params(p, spec_, update);
    p.sequences = update.q.tokens;
    p.states = update.states;
    p.slots = update.slots;
    launcher_.update(p, cuda_stream(stream));
  }

 private:
  DeltaParams params_of(const GatedDeltaTask& task, const HeadRange& heads) const {
    DeltaParams p{};
    fill_params(p, spec_, task);
    const auto addresses = reinterpret_cast<std::uint64_t>(task.o.data) |
                           static_cast<std::uint64_t>(2 * task.o.token_stride) |
                           static_cast<std::uint64_t>(2 * task.o.head_stride);
    p.o_aligned = addresses % 16 == 0;
    p.first_head = heads.first;
    p.head_count = heads.count;
    const auto bytes_of = [](const Buffer& buffer) { return reinterpret_cast<unsigned char*>(buffer.data()); };
    p.factors = bytes_of(factors_);
    p.scores = bytes_of(scores_);
    p.decayed = bytes_of(decayed_);
    p.states = reinterpret_cast<float*>(states_.data());
    p.transitions = reinterpret_cast<float*>(transitions_.data());
    return p;
  }

  // Slices of the task's segments, each with the runs that it touches.
  std::vector<DeltaParams> slices_of(const GatedDeltaTask& task, const HeadRange& heads) const {
    std::vector<DeltaParams> slices;
    DeltaParams p = params_of(task, heads);
    const std::int64_t capacity = slice_segments(spec_, limits_);
    const auto flush = [&] {
      if (p.segments > 0) slices.push_back(p);
      p.first_segment += p.segments;
      p.run_count = p.segments = 0;
    };
    std::int64_t segment = 0;  // the run's first one
    for (const GatedDeltaRun& run : task.runs) {
      for (std::int64_t left = run.segments(); left > 0;) {
        if (p.segments == capacity || p.run_count == kDeltaRunsPerLaunch) flush();
        const std::int64_t count = std::min(left, capacity - p.segments);
        p.runs[p.run_count++] = {run.row, run.tokens, segment, run.initial, run.final};
        p.segments += static_cast<std::int32_t>(count);
        left -= count;
      }
      segment += run.segments();
    }
    flush();
    return slices;
  }

  // Calls launch() for up to kDeltaRunsPerLaunch runs of a step at a time.
  void for_each_step_launch(const GatedDeltaTask& task, const HeadRange& heads, int step,
                            const std::function<void(const DeltaParams&)>& launch) const {
    DeltaParams p = params_of(task, heads);
    const auto flush = [&] {
      if (p.run_count > 0) launch(p);
      p.run_count = 0;
    };
    std::int64_t segment = 0;
    for (const GatedDeltaRun& run : task.runs) {
      if (run.step == step) p.runs[p.run_count++] = {run.row, run.tokens, segment, run.initial, run.final};
      if (p.run_count == kDeltaRunsPerLaunch) flush();
      segment += run.segments();
    }
    flush();
  }

  GatedDeltaSpec spec_;
  const GatedDeltaLauncher& launcher_ = gated_delta_bf16_128;
  int device_;
  int multiprocessors_;
  GatedDeltaLimits limits_;
  Buffer factors_;
  Buffer scores_;
  Buffer decayed_;
  Buffer states_;
  Buffer transitions_;
};

void require_delta_dim(std::string_view name, int dim, std::vector<std::string>& missing) {
  if (dim == kDeltaDim) return;
  missing.push_back(fmt::format("{} {} (supported: {})", name, dim, kDeltaDim));
}

}  // namespace

std::vector<std::string> gated_delta_missing(const GatedDeltaSpec& spec) {
  std::vector<std::string> missing;
  if (spec.dtype != Dtype::kBf16) missing.push_back(fmt::format("{} (supported: bf16)", dtype_name(spec.dtype)));
  require_delta_dim("key_dim", spec.key_dim, missing);
  require_delta_dim("value_dim", spec.value_dim, missing);
  return missing;
}

std::unique_ptr<GatedDeltaKernel> make_gated_delta(const GatedDeltaSpec& spec, Backend& backend) {
  return std::make_unique<HopperGatedDelta>(spec, static_cast<const cuda::CudaBackend&>(backend));
}

}  // namespace ringattn::sm90
