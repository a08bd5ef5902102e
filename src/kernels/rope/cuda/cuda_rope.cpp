// SPDX-License-Identifier: Apache-2.0
#include "kernels/rope/cuda/cuda_rope.hpp"

#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::uint64_t kRopeAlignment = 16;

class CudaRope final : public RopeKernel {
 public:
  CudaRope(const RopeSpec& spec, const CudaBackend& backend)
      : spec_(spec), device_(backend.device()), multiprocessors_(multiprocessors_of(backend.device())) {
    if (device_ == kNoDevice) return;
    const DeviceGuard guard(device_);
    load_rope(spec.dtype, spec.pairs);
  }

  std::size_t memory_bytes() const override { return 0; }

  void rotate(const RopeTask& task, Stream stream, const Progress& progress) override {
    check_rope_task(spec_, task);
    if (progress) progress();
    RopeParams p{};
    std::ranges::copy(spec_.frequencies, p.frequencies);
    std::ranges::copy(spec_.axes, p.axes);
    p.tokens = task.tensors.front().x.tokens;
    p.positions = task.positions.values;
    p.axis_stride = task.positions.axis_stride;
    p.first = task.positions.first;
    p.pairs = spec_.pair_count();
    p.rotary_dim = spec_.rotary_dim;
    p.factor = spec_.attention_factor;
    p.is_int64 = task.positions.is_int64;
    p.exact = spec_.exact;
    p.inverse = task.inverse;
    bool in_place = true;
    const auto vector = static_cast<std::int64_t>(kRopeAlignment / size_of(spec_.dtype));
    // A rotating unit has 16 bytes of first elements of pairs and 16 bytes of second ones, or 32 with both.
    bool aligned = spec_.pair_count() % vector == 0 && spec_.head_dim % vector == 0;
    for (std::size_t i = 0; i < task.tensors.size(); ++i) {
      const auto& [x, y] = task.tensors[i];
      p.rows[i] = {x.data, y.data, x.token_stride, x.head_stride, y.token_stride, y.head_stride};
      p.heads += static_cast<std::int32_t>(x.heads);
      if (i == 0) p.first_heads = p.heads;
      in_place = in_place && x.data == y.data;
      const std::uint64_t addresses = reinterpret_cast<std::uint64_t>(x.data) | reinterpret_cast<std::uint64_t>(y.data);
      const std::int64_t strides = x.token_stride | x.head_stride | y.token_stride | y.head_stride;
      aligned = aligned && addresses % kRopeAlignment == 0 && strides % vector == 0;
    }
    if (p.tokens == 0 || p.heads == 0) return;
    const auto unit = static_cast<std::int32_t>(aligned ? vector : 1);
    p.turned = p.pairs / unit;
    p.units = p.turned + (in_place ? 0 : (spec_.head_dim - spec_.rotary_dim) / unit);
    p.by_pairs = Divider(p.pairs);
    p.by_units = Divider(p.units);
    p.by_heads = Divider(p.heads);
    // Several tokens a CTA share its launch, as long as there are CTAs for all multiprocessors.
    p.tile_tokens = kRopeTileTokens;
    while (p.tile_tokens > 1 && p.tokens < std::int64_t{4} * multiprocessors_ * p.tile_tokens) p.tile_tokens /= 2;
    const DeviceGuard guard(device_);
    launch_rope(p, spec_.dtype, spec_.pairs, aligned, cuda_stream(stream));
  }

 private:
  RopeSpec spec_;
  int device_;
  int multiprocessors_;
};

}  // namespace

std::unique_ptr<RopeKernel> make_cuda_rope(const RopeSpec& spec, Backend& backend) {
  return std::make_unique<CudaRope>(spec, static_cast<CudaBackend&>(backend));
}

}  // namespace ringattn::cuda
