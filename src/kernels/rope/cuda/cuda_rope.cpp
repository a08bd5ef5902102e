// SPDX-License-Identifier: Apache-2.0
#include "kernels/rope/cuda/cuda_rope.hpp"

#include <algorithm>

#include "base/cuda.hpp"
#include "base/device_timeouts.hpp"
#include "base/memory.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::uint64_t kRopeAlignment = 16;

// Tokens of a CTA, which share its launch, angles and rows. There are as many as give each thread a full batch of units
// to load, provided that cos and sin fit into shared memory (32 KiB) and that there are CTAs for all multiprocessors.
constexpr int kMinTileTokens = 8, kMaxTileTokens = 32;
constexpr int kTileUnits = 2 * kRopeThreads;
constexpr int kTilePairs = 4096;

class CudaRope final : public RopeKernel {
 public:
  CudaRope(const RopeSpec& spec, CudaBackend& backend)
      : spec_(spec), device_(backend.device()), multiprocessors_(multiprocessors_of(backend.device())) {
    if (device_ == kNoDevice) return;
    const DeviceGuard guard(device_);
    load_rope(spec.dtype, spec.pairs);
    frequencies_ = uploaded(backend, spec_.frequencies.data(), spec_.frequencies.size() * sizeof(double));
    if (!spec_.axes.empty()) axes_ = uploaded(backend, spec_.axes.data(), spec_.axes.size());
    backend.synchronize(backend.stream(), DeviceTimeouts::for_short_work(), {});
  }

  std::size_t memory_bytes() const override { return frequencies_.bytes() + axes_.bytes(); }

  void rotate(const RopeTask& task, Stream stream, const Progress& progress) override {
    check_rope_task(spec_, task);
    if (progress) progress();
    RopeParams p{};
    p.by = row_rotation(spec_, reinterpret_cast<const double*>(frequencies_.data()));
    p.axes = spec_.axes.empty() ? nullptr : reinterpret_cast<const std::uint8_t*>(axes_.data());
    p.tokens = task.tensors.front().x.tokens;
    p.positions = task.positions.values;
    p.axis_stride = task.positions.axis_stride;
    p.first = task.positions.first;
    p.is_int64 = task.positions.is_int64;
    p.inverse = task.inverse;
    bool in_place = true;
    // Two vectors if they fit, because that was faster (bench/notes/rope.md).
    RopeVectors vectors = RopeVectors::kTwo;
    RopeUnit unit = rope_unit(spec_.dtype, spec_.pairs, vectors);
    if (spec_.pair_count() % unit.pairs != 0) {
      vectors = RopeVectors::kOne;
      unit = rope_unit(spec_.dtype, spec_.pairs, vectors);
    }
    bool aligned = spec_.pair_count() % unit.pairs == 0 && (spec_.head_dim - spec_.rotary_dim) % unit.elements == 0;
    for (std::size_t i = 0; i < task.tensors.size(); ++i) {
      const auto& [x, y] = task.tensors[i];
      p.rows[i] = {x.data, y.data, x.token_stride, x.head_stride, y.token_stride, y.head_stride};
      p.heads += static_cast<std::int32_t>(x.heads);
      if (i == 0) p.first_heads = p.heads;
      in_place = in_place && x.data == y.data;
      const std::uint64_t addresses = reinterpret_cast<std::uint64_t>(x.data) | reinterpret_cast<std::uint64_t>(y.data);
      const std::int64_t strides = x.token_stride | x.head_stride | y.token_stride | y.head_stride;
      aligned = aligned && addresses % kRopeAlignment == 0 && strides % unit.elements == 0;
    }
    if (p.tokens == 0 || p.heads == 0) return;
    if (!aligned) {
      vectors = RopeVectors::kElements;
      unit = rope_unit(spec_.dtype, spec_.pairs, vectors);
    }
    p.turned = p.by.pairs / unit.pairs;
    p.units = p.turned + (in_place ? 0 : (spec_.head_dim - spec_.rotary_dim) / unit.elements);
    p.by_pairs = Divider(p.by.pairs);
    p.by_units = Divider(p.units);
    p.by_heads = Divider(p.heads);
    p.tile_tokens = kMinTileTokens;
    while (p.tile_tokens < kMaxTileTokens && p.tile_tokens * p.heads * p.units < kTileUnits &&
           2 * p.tile_tokens * p.by.pairs <= kTilePairs) {
      p.tile_tokens *= 2;
    }
    while (p.tile_tokens > 1 && p.tokens < std::int64_t{4} * multiprocessors_ * p.tile_tokens) p.tile_tokens /= 2;
    const DeviceGuard guard(device_);
    launch_rope(p, spec_.dtype, spec_.pairs, vectors, cuda_stream(stream));
  }

 private:
  static Buffer uploaded(CudaBackend& backend, const void* from, std::size_t bytes) {
    Buffer buffer = backend.allocate(bytes);
    const auto count = static_cast<std::int64_t>(bytes);
    backend.copy_rows(buffer.data(), count, from, count, count, 1, backend.stream());
    return buffer;
  }

  RopeSpec spec_;
  int device_;
  int multiprocessors_;
  Buffer frequencies_, axes_;
};

}  // namespace

std::unique_ptr<RopeKernel> make_cuda_rope(const RopeSpec& spec, Backend& backend) {
  return std::make_unique<CudaRope>(spec, static_cast<CudaBackend&>(backend));
}

}  // namespace ringattn::cuda
