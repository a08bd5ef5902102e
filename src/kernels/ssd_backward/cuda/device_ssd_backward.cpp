// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssd_backward/cuda/device_ssd_backward.hpp"

#include <algorithm>
#include <functional>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"

namespace ringattn::cuda {

namespace {

// Approximate number of heads in a set. With fewer sets, fewer bytes are moved. With more, more multiprocessors are
// busy for short sequences.
constexpr int kSetHeads = 40;
// (Segment, head) pairs of a batch, per multiprocessor. The states of the chunks of one pair take 1 MiB with head_dim
// 64 and state_dim 128.
constexpr int kPairsPerMultiprocessor = 8;
constexpr std::uint64_t kAlignment = 16;
// The same as in ssm/cuda/device_ssm.cpp, whose launches take a third of the time.
constexpr double kLastWavesSeconds = 2e-4;
constexpr double kReadTwiceFraction = 0.02;

// True if every row of every head is aligned.
bool is_aligned(const TensorView& view) {
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype));
  const auto addresses = reinterpret_cast<std::uint64_t>(view.data) |
                         static_cast<std::uint64_t>(view.token_stride * bytes) |
                         static_cast<std::uint64_t>(view.head_stride * bytes);
  return addresses % kAlignment == 0;
}
SsmTensor tensor_of(const TensorView& view) {
  return {view.data, view.token_stride, view.head_stride, is_aligned(view)};
}
SsdGradientRows rows_of(const MutableTensorView& view) {
  return {view.data, view.token_stride, view.head_stride, is_aligned(view), view.dtype == Dtype::kF32};
}

class DeviceSsdBackward final : public SsdBackwardKernel {
 public:
  DeviceSsdBackward(const SsdBackwardSpec& spec, const SsdBackwardLauncher& launcher, int head_dim, int state_dim,
                    const CudaBackend& backend)
      : spec_(spec),
        launcher_(launcher),
        head_dim_(head_dim),
        state_dim_(state_dim),
        device_(backend.device()),
        multiprocessors_(multiprocessors_of(backend.device())) {
    if (device_ == kNoDevice) return;
    const DeviceGuard guard(device_);
    load_da_cumsum(spec_.forward.dtype);
    load_state_passing(SsmLogs::kHead);
    load_state_passing(SsmLogs::kHead, /*reversed=*/true);
    load_ssd_sums(spec_.forward.dtype);
    launcher_.load();
  }

  int heads_together() const override {
    const int group_heads = spec_.forward.heads / spec_.forward.groups;
    const int sets = (group_heads + kSetHeads - 1) / kSetHeads;
    return (group_heads + sets - 1) / sets;
  }
  double cost_of_two_ranges(double seconds) const override { return kLastWavesSeconds + kReadTwiceFraction * seconds; }

  std::size_t scratch_bytes(const SsdBackwardLimits& limits) const override {
    std::size_t bytes = 0;
    for_each_array(limits, [&bytes](Buffer DeviceSsdBackward::*, std::size_t of_array) { bytes += of_array; });
    return bytes;
  }
  void reserve(const SsdBackwardLimits& limits) override {
    limits_ = limits;
    for_each_array(limits, [this](Buffer DeviceSsdBackward::*array, std::size_t bytes) {
      this->*array = allocate_device(bytes, device_);
    });
  }

  void accumulate_states(const SsdBackwardTask& task, const HeadRange& heads, Stream stream,
                         const Progress& progress) override {
    check_ssd_backward_task(spec_, limits_, task);
    if (progress) progress();
    for_each_launch(task, heads, [&](const Launch& launch) {
      compute_da_cumsum(launch.states, spec_.forward.dtype, cuda_stream(stream));
      launcher_.accumulate({launch.states, 0, 0, nullptr}, false, multiprocessors_, cuda_stream(stream));
      pass_segments(launch.states, SsmLogs::kHead, cuda_stream(stream));
    });
  }

  void carry_states(const SsdBackwardTask& task, const HeadRange& heads, int step, Stream stream) override {
    for_each_launch(
        task, heads,
        [&](const Launch& launch) { pass_super_segments(launch.states, SsmLogs::kHead, cuda_stream(stream)); },
        [step](const SsdBackwardRun& run) { return run.step == step; });
  }

  void accumulate_gradients(const SsdBackwardTask& task, const HeadRange& heads, Stream stream,
                            const Progress& progress) override {
    if (progress) progress();
    for_each_launch(task, heads, [&](const Launch& launch) {
      const SsdStatesParams params{launch.gradients, 0, 0, nullptr};
      const bool gate = spec_.forward.gate;
      const SsmTensor dy = tensor_of(task.dy);
      if (!gate || !launcher_.accumulate_gated(params, dy, multiprocessors_, cuda_stream(stream))) {
        if (gate) {
          SsmParams rows = launch.states;
          rows.x = dy;
          gate_gradients(rows, launch.gradients.x, spec_.forward.dtype, cuda_stream(stream));
        }
        launcher_.accumulate(params, true, multiprocessors_, cuda_stream(stream));
      }
      pass_segments(launch.gradients, SsmLogs::kHead, cuda_stream(stream), /*reversed=*/true);
    });
  }

  void carry_gradients(const SsdBackwardTask& task, const HeadRange& heads, int step, Stream stream) override {
    for_each_launch(
        task, heads,
        [&](const Launch& launch) {
          pass_super_segments(launch.gradients, SsmLogs::kHead, cuda_stream(stream), /*reversed=*/true);
        },
        [step](const SsdBackwardRun& run) { return run.gradient_step == step; });
  }

  void finish(const SsdBackwardTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override {
    for_each_launch(task, heads, [&](const Launch& launch) {
      auto* const states = reinterpret_cast<__nv_bfloat16*>(chunk_states_.data());
      auto* const gradients = reinterpret_cast<__nv_bfloat16*>(chunk_gradients_.data());
      const int all = launch.states.segments;
      const int batch = batch_segments(launch.states);
      for (int first = 0; first < all; first += batch) {
        if (progress) progress();
        const int segments = std::min(batch, all - first);
        launcher_.expand({launch.states, first, 0, states}, false, segments, multiprocessors_, cuda_stream(stream));
        launcher_.expand({launch.gradients, first, 0, gradients}, true, segments, multiprocessors_,
                         cuda_stream(stream));
        SsdRowsParams rows{};
        rows.scan = launch.states;
        rows.first_segment = first;
        rows.set_heads = heads_together();
        rows.g = launch.gradients.x;
        rows.dx = rows_of(task.dx);
        rows.ddt = rows_of(task.ddt);
        rows.states = states;
        rows.gradients = gradients;
        rows.set_db = floats_of(sets_);
        rows.rows = limits_.rows;
        rows.chunk_terms = reinterpret_cast<float4*>(chunk_terms_.data());
        launcher_.rows(rows, segments, cuda_stream(stream));
        // This launch is the last one, because dz overwrites g.
        if (spec_.forward.gate) {
          launcher_.gate({launch.states, first, 0, heads_together(), tensor_of(task.dy), rows_of(task.dz), states},
                         segments, multiprocessors_, cuda_stream(stream));
        }
      }
      sum_chunk_terms(launch.states, reinterpret_cast<const float4*>(chunk_terms_.data()), &task.terms->a,
                      cuda_stream(stream));
    });
  }

  void sum_sets(const SsdBackwardTask& task, Stream stream, const Progress& progress) override {
    if (progress) progress();
    for_each_launch(task, {0, spec_.forward.heads}, [&](const Launch& launch) {
      sum_head_sets({launch.states, floats_of(sets_), limits_.rows, group_sets(), spec_.forward.groups,
                     rows_of(task.db), rows_of(task.dc)},
                    spec_.forward.dtype, cuda_stream(stream));
    });
  }

 private:
  // Parameters of the same runs, for states (ascending in time) and for gradients (descending).
  struct Launch {
    SsmParams states;
    SsmParams gradients;
  };

  static float* floats_of(const Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

  int group_sets() const {
    return (spec_.forward.heads / spec_.forward.groups + heads_together() - 1) / heads_together();
  }

  // (Segment, head) pairs of a batch of finish(): their states of chunks are in memory at a time.
  std::int64_t batch_pairs(const SsdBackwardLimits& limits) const {
    const std::int64_t all = limits.runs.segments * spec_.forward.heads;
    const std::int64_t some = std::int64_t{kPairsPerMultiprocessor} * multiprocessors_;
    return std::min(all, std::max<std::int64_t>(some, spec_.forward.heads));
  }

  // Segments of a batch: as many as memory allows, except those that would begin a wave of the rows kernel's CTAs
  // without filling it.
  int batch_segments(const SsmParams& states) const {
    const std::int64_t all = std::max<std::int64_t>(1, batch_pairs(limits_) / states.head_count);
    const std::int64_t ctas = std::int64_t{kChunksOfSegment} * head_blocks(states, heads_together());  // of a segment
    const std::int64_t in_waves = all * ctas / multiprocessors_ * multiprocessors_ / ctas;
    return static_cast<int>(in_waves > 0 ? in_waves : all);
  }

  // Calls visit(buffer, bytes) for each array of the scratch memory.
  template <class Visit>
  void for_each_array(const SsdBackwardLimits& limits, Visit visit) const {
    const SsmSpec& s = spec_.forward;
    const auto bytes = [](std::int64_t count, std::int64_t floats) {
      return static_cast<std::size_t>(count * floats) * sizeof(float);
    };
    const std::int64_t state_floats = std::int64_t{s.head_dim} * s.state_dim;
    const std::int64_t segments = limits.runs.segments * s.heads;
    const std::int64_t super_segments = limits.runs.super_segments * s.heads;
    visit(&DeviceSsdBackward::da_cumsum_, bytes(segments, kChunksOfSegment * kChunkDaCumsumFloats));
    visit(&DeviceSsdBackward::logs_, bytes(segments, 1));
    visit(&DeviceSsdBackward::logs_before_, bytes(segments, 1));
    visit(&DeviceSsdBackward::logs_after_, bytes(segments, 1));
    visit(&DeviceSsdBackward::super_logs_, bytes(super_segments, 1));
    visit(&DeviceSsdBackward::states_, bytes(segments, state_floats));
    visit(&DeviceSsdBackward::gradients_, bytes(segments, state_floats));
    visit(&DeviceSsdBackward::super_states_, bytes(super_segments, state_floats));
    visit(&DeviceSsdBackward::super_gradients_, bytes(super_segments, state_floats));
    visit(&DeviceSsdBackward::chunk_terms_, bytes(segments, kChunksOfSegment * 4));
    const std::int64_t chunk_floats = std::int64_t{kChunksOfSegment} * head_dim_ * state_dim_ / 2;
    visit(&DeviceSsdBackward::chunk_states_, bytes(batch_pairs(limits), chunk_floats));
    visit(&DeviceSsdBackward::chunk_gradients_, bytes(batch_pairs(limits), chunk_floats));
    visit(&DeviceSsdBackward::sets_, bytes(2 * group_sets() * limits.rows, std::int64_t{s.groups} * s.state_dim));
  }

  // g, the gradient of S_t · C_t + D · x_t. With a gate it is stored in dz until dz is computed.
  SsmTensor g_of(const SsdBackwardTask& task) const {
    if (!spec_.forward.gate) return tensor_of(task.dy);
    TensorView g = task.dz;
    const std::int64_t elements = static_cast<std::int64_t>(size_of(g.dtype) / size_of(spec_.forward.dtype));
    g.dtype = spec_.forward.dtype;
    g.token_stride *= elements;
    g.head_stride *= elements;
    return tensor_of(g);
  }

  // Calls launch() for up to kSsmRunsPerLaunch runs at a time, of those that are chosen.
  void for_each_launch(const SsdBackwardTask& task, const HeadRange& heads,
                       const std::function<void(const Launch&)>& launch,
                       const std::function<bool(const SsdBackwardRun&)>& chosen = {}) const {
    if (heads.count == 0) return;
    const DeviceGuard guard(device_);
    const SsmSpec& s = spec_.forward;
    SsmParams p{};
    p.heads = s.heads;
    p.head_dim = s.head_dim;
    p.state_dim = s.state_dim;
    p.group_heads = s.heads / s.groups;
    p.first_head = heads.first;
    p.head_count = heads.count;
    p.softplus = s.dt_softplus;
    p.dt_min = s.dt_min;
    p.dt_max = s.dt_max;
    p.x = tensor_of(task.x);
    p.dt = tensor_of(task.dt);
    p.b = tensor_of(task.b);
    p.c = tensor_of(task.c);
    if (s.gate) p.z = tensor_of(task.z);
    p.a = task.a;
    p.d = task.d;
    p.dt_bias = task.dt_bias;
    p.da_cumsum = floats_of(da_cumsum_);
    p.states = floats_of(states_);
    p.logs = floats_of(logs_);
    p.logs_before = floats_of(logs_before_);
    p.super_states = floats_of(super_states_);
    p.super_logs = floats_of(super_logs_);
    Launch both{p, p};
    both.gradients.x = g_of(task);
    both.gradients.b = p.c;
    both.gradients.states = floats_of(gradients_);
    both.gradients.logs_before = floats_of(logs_after_);
    both.gradients.super_states = floats_of(super_gradients_);
    const auto flush = [&] {
      if (both.states.run_count > 0) launch(both);
      for (SsmParams* params : {&both.states, &both.gradients}) {
        params->run_count = params->segments = params->super_segments = 0;
      }
    };
    std::int64_t segment = 0;
    std::int64_t super_segment = 0;
    for (const SsdBackwardRun& run : task.runs) {
      const SsmLimits own = limits_of({&run, 1}, 0).runs;
      if (!chosen || chosen(run)) {
        const int at = both.states.run_count;
        both.states.runs[at] = {run.row, run.tokens, segment, super_segment, run.initial, run.final};
        both.gradients.runs[at] = {run.row,       run.tokens,         segment,
                                   super_segment, run.final_gradient, run.initial_gradient};
        for (SsmParams* params : {&both.states, &both.gradients}) {
          ++params->run_count;
          params->segments += static_cast<std::int32_t>(own.segments);
          params->super_segments += static_cast<std::int32_t>(own.super_segments);
        }
        if (both.states.run_count == kSsmRunsPerLaunch) flush();
      }
      segment += own.segments;
      super_segment += own.super_segments;
    }
    flush();
  }

  SsdBackwardSpec spec_;
  const SsdBackwardLauncher& launcher_;
  int head_dim_, state_dim_;  // of states of chunks in memory
  int device_;
  int multiprocessors_;
  SsdBackwardLimits limits_;
  Buffer da_cumsum_, logs_, logs_before_, logs_after_, super_logs_;
  Buffer states_, gradients_, super_states_, super_gradients_;
  Buffer chunk_states_, chunk_gradients_;  // of a batch
  Buffer chunk_terms_, sets_;
};

}  // namespace

std::unique_ptr<SsdBackwardKernel> make_device_ssd_backward(const SsdBackwardSpec& spec,
                                                            const SsdBackwardLauncher& launcher, int head_dim,
                                                            int state_dim, Backend& backend) {
  return std::make_unique<DeviceSsdBackward>(spec, launcher, head_dim, state_dim,
                                             static_cast<const CudaBackend&>(backend));
}

}  // namespace ringattn::cuda
