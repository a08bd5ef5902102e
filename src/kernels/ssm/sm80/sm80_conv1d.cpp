// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/sm80/sm80_conv1d.hpp"

#include <fmt/format.h>

#include "base/cuda.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/token_units.hpp"

namespace ringattn::sm80 {

namespace {

constexpr std::uint64_t kAlignment = 16;
static_assert(kMaxWidth == kMaxConv1dWidth);

std::uint64_t address_of(const void* data) { return reinterpret_cast<std::uint64_t>(data); }

class DeviceConv1d final : public CausalConv1dKernel {
 public:
  DeviceConv1d(const CausalConv1dSpec& spec, const cuda::CudaBackend& backend)
      : spec_(spec), device_(backend.device()) {
    if (device_ == kNoDevice) return;
    const DeviceGuard guard(device_);
    load_conv1d(spec.dtype, spec.width);
    load_conv1d_gradient(spec.dtype, spec.width);
  }

  void convolve(const CausalConv1dTask& task, Stream stream, const Progress& progress) override {
    check_causal_conv1d_task(spec_, task);
    if (progress) progress();
    const DeviceGuard guard(device_);
    // The halo after a run may overwrite one before a run, so the convolutions of all runs come first.
    for_each_launch(task, [&](const Conv1dParams& p) { conv1d_runs(p, spec_.dtype, cuda_stream(stream)); });
    for_each_launch(task, [&](const Conv1dParams& p) { store_halos(p, spec_.dtype, cuda_stream(stream)); });
  }

  void update(const CausalConv1dUpdate& update, Stream stream) override {
    check_causal_conv1d_update(spec_, update);
    if (update.x.tokens == 0) return;
    const DeviceGuard guard(device_);
    Conv1dParams p = params_of(update);
    p.aligned = p.aligned && address_of(update.halos) % kAlignment == 0;
    update_halos(p, {update.x.tokens, update.halos, update.slots}, spec_.dtype, cuda_stream(stream));
  }

  void differentiate(const CausalConv1dGradientTask& task, Stream stream, const Progress& progress) override {
    check_causal_conv1d_gradient(spec_, task);
    if (progress) progress();
    const DeviceGuard guard(device_);
    const Conv1dGradientParams empty = gradient_params_of(task);
    Conv1dGradientParams p = empty;
    const auto flush = [&] {
      if (p.run_count == 0) return;
      conv1d_gradient_runs(p, spec_.dtype, cuda_stream(stream));
      conv1d_halo_gradients(p, spec_.dtype, cuda_stream(stream));
      float* const next = p.sums + p.units * (spec_.width + 1) * spec_.channels;
      p = empty;
      p.sums = next;
    };
    for (const CausalConv1dGradientRun& run : task.runs) {
      p.runs[p.run_count++] = {run.row,    run.tokens,  run.next_tokens, p.units,          run.initial_halo,
                               run.next_x, run.next_dy, run.dfinal_halo, run.dinitial_halo};
      p.units += (run.tokens + kTokenUnit - 1) / kTokenUnit;
      const std::uint64_t halos = address_of(run.initial_halo) | address_of(run.next_x) | address_of(run.next_dy) |
                                  address_of(run.dfinal_halo) | address_of(run.dinitial_halo);
      p.aligned = p.aligned && halos % pair_bytes() == 0;
      if (p.run_count == kConv1dGradientRunsPerLaunch) flush();
    }
    flush();
  }

  void sum_units(const CausalConv1dUnitSum& sum, Stream stream) override {
    if (sum.channels == 0) return;
    const DeviceGuard guard(device_);
    conv1d_sum_units(sum, spec_.width, cuda_stream(stream));
  }

 private:
  std::uint64_t pair_bytes() const { return 2 * size_of(spec_.dtype); }

  // Parameters without runs.
  Conv1dGradientParams gradient_params_of(const CausalConv1dGradientTask& task) const {
    Conv1dGradientParams p{};
    p.width = spec_.width;
    p.channels = spec_.channels;
    p.x = task.x.data;
    p.dy = task.dy.data;
    p.dx = task.dx.data;
    p.x_stride = task.x.token_stride;
    p.dy_stride = task.dy.token_stride;
    p.dx_stride = task.dx.token_stride;
    p.weight = task.weight;
    p.bias = task.bias;
    p.sums = task.units;
    p.silu = spec_.silu;
    const auto strides = static_cast<std::uint64_t>(p.x_stride | p.dy_stride | p.dx_stride);
    p.aligned = (address_of(p.x) | address_of(p.dy) | address_of(p.dx)) % pair_bytes() == 0 && strides % 2 == 0;
    return p;
  }

  // Parameters without runs. `tensors`: a CausalConv1dTask or a CausalConv1dUpdate.
  template <class Tensors>
  Conv1dParams params_of(const Tensors& tensors) const {
    const auto bytes = static_cast<std::int64_t>(size_of(spec_.dtype));
    Conv1dParams p{};
    p.width = spec_.width;
    p.channels = spec_.channels;
    p.x = tensors.x.data;
    p.y = tensors.y.data;
    p.x_stride = tensors.x.token_stride;
    p.y_stride = tensors.y.token_stride;
    p.weight = tensors.weight;
    p.bias = tensors.bias;
    p.silu = spec_.silu;
    const auto strides = static_cast<std::uint64_t>((p.x_stride | p.y_stride) * bytes);
    p.aligned = (address_of(p.x) | address_of(p.y) | strides) % kAlignment == 0;
    p.filter_aligned = (address_of(p.weight) | address_of(p.bias)) % kAlignment == 0;
    return p;
  }

  template <class Launch>
  void for_each_launch(const CausalConv1dTask& task, Launch launch) const {
    const Conv1dParams empty = params_of(task);
    Conv1dParams p = empty;
    const auto flush = [&] {
      if (p.tiles > 0) launch(p);
      p = empty;
    };
    for (const CausalConv1dRun& run : task.runs) {
      p.runs[p.run_count++] = {run.row, run.tokens, p.tiles, run.initial_halo, run.final_halo};
      p.tiles += (run.tokens + kTileTokens - 1) / kTileTokens;
      p.aligned = p.aligned && (address_of(run.initial_halo) | address_of(run.final_halo)) % kAlignment == 0;
      if (p.run_count == kConv1dRunsPerLaunch) flush();
    }
    flush();
  }

  CausalConv1dSpec spec_;
  int device_;
};

}  // namespace

std::unique_ptr<CausalConv1dKernel> make_conv1d(const CausalConv1dSpec& spec, Backend& backend) {
  return std::make_unique<DeviceConv1d>(spec, static_cast<const cuda::CudaBackend&>(backend));
}

}  // namespace ringattn::sm80
