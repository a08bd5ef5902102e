// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/cuda/device_ssm.hpp"

#include <functional>
#include <optional>
#include <utility>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::uint64_t kAlignment = 16;

// True if every row of every head is aligned to `to` bytes.
bool is_aligned(const TensorView& view, std::uint64_t to) {
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype));
  const auto addresses = reinterpret_cast<std::uint64_t>(view.data) |
                         static_cast<std::uint64_t>(view.token_stride * bytes) |
                         static_cast<std::uint64_t>(view.head_stride * bytes);
  return addresses % to == 0;
}

SsmTensor tensor_of(const TensorView& view) {
  return {view.data, view.token_stride, view.head_stride, is_aligned(view, kAlignment)};
}

// Cost of splitting the heads into two ranges: partial last waves, and B and C read twice. Measured on an H100
// (bench/notes/ssm.md, "One range of heads or two").
constexpr double kLastWavesSeconds = 1e-4;
constexpr double kReadTwiceFraction = 0.02;

float* floats_of(const Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

std::size_t bytes_of(std::int64_t count, std::size_t floats) {
  return static_cast<std::size_t>(count) * floats * sizeof(float);
}

class DeviceSsm final : public SsmKernel {
 public:
  DeviceSsm(const SsmSpec& spec, std::unique_ptr<SegmentKernels> kernels, const CudaBackend& backend)
      : spec_(spec), kernels_(std::move(kernels)), device_(backend.device()) {
    if (device_ == kNoDevice) return;
    const DeviceGuard guard(device_);
    kernels_->load();
    load_state_passing(logs());
    update_ctas_ = load_update(spec_.dtype, spec_.state_decays, spec_.decay, spec_.state_dim);
  }

  // Rotating in the load takes longer than rotating before it (bench/notes/rope.md).
  bool rotates_rows() const override { return false; }
  int heads_together() const override { return spec_.state_decays ? kChannelsTogether : 1; }
  double cost_of_two_ranges(double seconds) const override { return kLastWavesSeconds + kReadTwiceFraction * seconds; }

  std::size_t scratch_bytes(const SsmLimits& limits) const override {
    return bytes_of(limits.segments, all_heads(state_floats() + kernels_->da_cumsum_floats() + 2 * log_floats())) +
           bytes_of(limits.super_segments, all_heads(state_floats() + log_floats()));
  }

  void reserve(const SsmLimits& limits) override {
    limits_ = limits;
    const auto allocate = [&](std::int64_t count, std::size_t floats) {
      return allocate_device(bytes_of(count, all_heads(floats)), device_);
    };
    states_ = allocate(limits.segments, state_floats());
    da_cumsum_ = allocate(limits.segments, kernels_->da_cumsum_floats());
    logs_ = allocate(limits.segments, log_floats());
    logs_before_ = allocate(limits.segments, log_floats());
    super_states_ = allocate(limits.super_segments, state_floats());
    super_logs_ = allocate(limits.super_segments, log_floats());
  }

  void accumulate_states(const SsmTask& task, const HeadRange& heads, Stream stream,
                         const Progress& progress) override {
    check_ssm_task(spec_, limits_, task, rotates_rows());
    if (progress) progress();
    for_each_launch(task, heads, std::nullopt, [&](const SsmParams& params) {
      kernels_->accumulate_states(params, cuda_stream(stream));
      pass_segments(params, logs(), cuda_stream(stream));
    });
  }

  void carry(const SsmTask& task, const HeadRange& heads, int step, Stream stream) override {
    for_each_launch(task, heads, step,
                    [&](const SsmParams& params) { pass_super_segments(params, logs(), cuda_stream(stream)); });
  }

  void finish(const SsmTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override {
    if (progress) progress();
    for_each_launch(task, heads, std::nullopt,
                    [&](const SsmParams& params) { kernels_->finish(params, cuda_stream(stream)); });
  }

  void update(const SsmUpdate& update, Stream stream) override {
    check_ssm_update(spec_, update, rotates_rows());
    if (update.x.tokens == 0) return;
    const DeviceGuard guard(device_);
    UpdateParams p{};
    fill_spec(p);
    p.by_head_dim = Divider(spec_.head_dim);
    p.by_group_heads = Divider(spec_.heads / spec_.groups);
    p.sequences = update.x.tokens;
    fill_tensors(p, update);
    p.states = update.states;
    p.slots = update.slots;
    const std::uint64_t vector_bytes = kUpdateWidth * size_of(spec_.dtype);
    p.b.aligned = is_aligned(update.b, vector_bytes);
    p.c.aligned = is_aligned(update.c, vector_bytes);
    p.states_aligned = reinterpret_cast<std::uint64_t>(update.states) % kAlignment == 0;
    p.rates_aligned = reinterpret_cast<std::uint64_t>(update.a) % kAlignment == 0;
    update_states(p, spec_.dtype, spec_.state_decays, update_ctas_, cuda_stream(stream));
  }

 private:
  static constexpr int kChannelsTogether = 8;  // channels that a lane group updates together

  std::size_t state_floats() const {
    return static_cast<std::size_t>(spec_.head_dim) * static_cast<std::size_t>(spec_.state_dim);
  }
  SsmLogs logs() const {
    if (spec_.state_decays) return SsmLogs::kHeadTimesA;
    return spec_.decay == SsmDecay::kDim ? SsmLogs::kState : SsmLogs::kHead;
  }
  std::size_t log_floats() const {
    return logs() == SsmLogs::kState ? static_cast<std::size_t>(spec_.state_dim) : std::size_t{1};
  }
  std::size_t all_heads(std::size_t floats) const { return static_cast<std::size_t>(spec_.heads) * floats; }

  template <class Params>
  void fill_spec(Params& p) const {
    p.heads = spec_.heads;
    p.head_dim = spec_.head_dim;
    p.state_dim = spec_.state_dim;
    p.decay = spec_.decay;
    p.scale = spec_.scale;
    p.softplus = spec_.dt_softplus;
    p.dt_min = spec_.dt_min;
    p.dt_max = spec_.dt_max;
  }

  // `tensors` is a task or an update.
  template <class Params, class Tensors>
  void fill_tensors(Params& p, const Tensors& tensors) const {
    p.x = tensor_of(tensors.x);
    p.dt = tensor_of(tensors.dt);
    p.b = tensor_of(tensors.b);
    p.c = tensor_of(tensors.c);
    if (spec_.gate) p.z = tensor_of(tensors.z);
    p.y = tensors.y.data;
    p.y_token_stride = tensors.y.token_stride;
    p.y_head_stride = tensors.y.head_stride;
    p.a = tensors.a;
    p.d = tensors.d;
    p.dt_bias = tensors.dt_bias;
  }

  // Calls launch() for up to kSsmRunsPerLaunch runs at a time. With `step`, only for runs of that step.
  void for_each_launch(const SsmTask& task, const HeadRange& heads, std::optional<int> step,
                       const std::function<void(const SsmParams&)>& launch) const {
    if (heads.count == 0) return;
    const DeviceGuard guard(device_);
    SsmParams p{};
    fill_spec(p);
    p.group_heads = spec_.heads / spec_.groups;
    fill_tensors(p, task);
    p.y_aligned = tensor_of(task.y).aligned;
    p.first_head = heads.first;
    p.head_count = heads.count;
    p.da_cumsum = floats_of(da_cumsum_);
    p.states = floats_of(states_);
    p.logs = floats_of(logs_);
    p.logs_before = floats_of(logs_before_);
    p.super_states = floats_of(super_states_);
    p.super_logs = floats_of(super_logs_);
    const auto flush = [&] {
      if (p.run_count > 0) launch(p);
      p.run_count = p.segments = p.super_segments = 0;
    };
    std::int64_t segment = 0;
    std::int64_t super_segment = 0;
    for (const SsmRun& run : task.runs) {
      const SsmLimits own = limits_of({&run, 1});
      if (!step || run.step == *step) {
        p.runs[p.run_count++] = {run.row, run.tokens, segment, super_segment, run.initial, run.final};
        p.segments += static_cast<std::int32_t>(own.segments);
        p.super_segments += static_cast<std::int32_t>(own.super_segments);
        if (p.run_count == kSsmRunsPerLaunch) flush();
      }
      segment += own.segments;
      super_segment += own.super_segments;
    }
    flush();
  }

  SsmSpec spec_;
  std::unique_ptr<SegmentKernels> kernels_;
  int device_;
  SsmLimits limits_;
  Buffer states_;
  Buffer da_cumsum_;
  Buffer logs_;
  Buffer logs_before_;
  Buffer super_states_;
  Buffer super_logs_;
  int update_ctas_ = 0;  // max. resident CTAs of the persistent update kernel
};

}  // namespace

std::unique_ptr<SsmKernel> make_device_ssm(const SsmSpec& spec, std::unique_ptr<SegmentKernels> kernels,
                                           Backend& backend) {
  return std::make_unique<DeviceSsm>(spec, std::move(kernels), static_cast<const CudaBackend&>(backend));
}

}  // namespace ringattn::cuda
