// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them. All targets give the same
// bits, since no operation is fused.
#include "kernels/rope/cpu/cpu_rope.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cpu/thread_pool.hpp"
#include "kernels/rope/rope_angle.hpp"
#include "kernels/rope/token_rotation.hpp"

// The same SIMD targets as in common/cpu/tile_ops.cpp.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rope/cpu/cpu_rope.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"
#include "kernels/common/cpu/pack-inl.hpp"
#include "kernels/gemm/cpu/store-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

// Rotates `pairs` pairs with cos and sin of each. First and second elements, and cos and sin, are contiguous from x and
// from x + pairs (half-split), or adjacent (interleaved).
template <Dtype kDtype>
void rotate_half(const std::byte* x, std::size_t pairs, const float* cos, std::byte* y) {
  const Floats d;
  const float* const sin = cos + pairs;
  const std::size_t vectors = pairs / kLanes * kLanes;
  const std::size_t element = size_of(kDtype);
  for (std::size_t i = 0; i < vectors; i += kLanes) {
    const auto c = hn::LoadU(d, cos + i), s = hn::LoadU(d, sin + i);
    const auto a = load_wide<kDtype>(d, x, i), b = load_wide<kDtype>(d, x, pairs + i);
    StoreRounded<kDtype>{y + i * element, 0, kLanes}(0, 0, hn::Sub(hn::Mul(a, c), hn::Mul(b, s)));
    StoreRounded<kDtype>{y + (pairs + i) * element, 0, kLanes}(0, 0, hn::Add(hn::Mul(b, c), hn::Mul(a, s)));
  }
  // The rest has one vector's operations, too, so that all NaNs are the canonical one.
  HWY_ALIGN float a[kLanes] = {}, b[kLanes] = {}, c[kLanes] = {}, s[kLanes] = {};
  const std::size_t rest = pairs - vectors;
  if (rest == 0) return;
  for (std::size_t i = 0; i < rest; ++i) {
    a[i] = load_element(x + (vectors + i) * element, kDtype);
    b[i] = load_element(x + (pairs + vectors + i) * element, kDtype);
    c[i] = cos[vectors + i];
    s[i] = sin[vectors + i];
  }
  const auto va = hn::Load(d, a), vb = hn::Load(d, b), vc = hn::Load(d, c), vs = hn::Load(d, s);
  StoreRounded<kDtype>{y + vectors * element, 0, rest}(0, 0, hn::Sub(hn::Mul(va, vc), hn::Mul(vb, vs)));
  StoreRounded<kDtype>{y + (pairs + vectors) * element, 0, rest}(0, 0, hn::Add(hn::Mul(vb, vc), hn::Mul(va, vs)));
}

template <Dtype kDtype>
void rotate_interleaved(const std::byte* x, std::size_t pairs, const float* angles, std::byte* y) {
  const Floats d;
  const std::size_t dims = 2 * pairs;
  HWY_ALIGN float own[kLanes + 1] = {}, other[kLanes + 1] = {}, c[kLanes + 1] = {}, s[kLanes + 1] = {};
  constexpr std::size_t kStep = kLanes > 1 ? kLanes : 2;
  for (std::size_t i = 0; i < dims; i += kStep) {
    const std::size_t count = std::min(kStep, dims - i);
#if HWY_TARGET != HWY_SCALAR
    if (count == kLanes) {
      const auto v = load_wide<kDtype>(d, x, i);
      const auto angle = hn::LoadU(d, angles + i);
      const auto by_cos = hn::Mul(v, hn::DupEven(angle)), by_sin = hn::Mul(hn::Shuffle2301(v), hn::DupOdd(angle));
      // First elements are differences, second ones sums.
      const auto turned = hn::OddEven(hn::Add(by_cos, by_sin), hn::Sub(by_cos, by_sin));
      StoreRounded<kDtype>{y + i * size_of(kDtype), 0, kLanes}(0, 0, turned);
      continue;
    }
#endif
    for (std::size_t lane = 0; lane < count; ++lane) {
      own[lane] = load_element(x + (i + lane) * size_of(kDtype), kDtype);
      other[lane] = load_element(x + (i + (lane ^ 1U)) * size_of(kDtype), kDtype);
      c[lane] = angles[(i + lane) & ~std::size_t{1}];
      s[lane] = lane % 2 == 0 ? -angles[i + lane + 1] : angles[i + lane];
    }
    for (std::size_t lane = 0; lane < count; lane += kLanes) {
      const auto turned = hn::Add(hn::Mul(hn::LoadU(d, own + lane), hn::LoadU(d, c + lane)),
                                  hn::Mul(hn::LoadU(d, other + lane), hn::LoadU(d, s + lane)));
      StoreRounded<kDtype>{y + (i + lane) * size_of(kDtype), 0, std::min(kLanes, count - lane)}(0, 0, turned);
    }
  }
}

// sin and cos of `count` angles, by rope_angle.hpp.
void compute_angles(const std::int64_t* positions, const double* frequencies, std::size_t count, bool exact,
                    float factor, float* cos, float* sin) {
  for (std::size_t i = 0; i < count; ++i) {
    const SinCos value = sin_cos(rope_angle(positions[i], frequencies[i], exact));
    cos[i] = value.cos * factor;
    sin[i] = value.sin * factor;
  }
}

template <Dtype kDtype>
void rotate_pairs(RopePairs pairs, const std::byte* x, std::size_t count, const float* angles, std::byte* y) {
  if (pairs == RopePairs::kHalfSplit) return rotate_half<kDtype>(x, count, angles, y);
  rotate_interleaved<kDtype>(x, count, angles, y);
}

void rotate(Dtype dtype, RopePairs pairs, const std::byte* x, std::size_t count, const float* angles, std::byte* y) {
  switch (dtype) {
    case Dtype::kF32:
      return rotate_pairs<Dtype::kF32>(pairs, x, count, angles, y);
    case Dtype::kBf16:
      return rotate_pairs<Dtype::kBf16>(pairs, x, count, angles, y);
    case Dtype::kF16:
      return rotate_pairs<Dtype::kF16>(pairs, x, count, angles, y);
  }
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::cpu {

namespace {

HWY_EXPORT(rotate);
HWY_EXPORT(compute_angles);

class CpuRope final : public RopeKernel {
 public:
  CpuRope(const RopeSpec& spec, const CpuBackend& backend) : spec_(spec), threads_(backend.threads()) {}

  std::size_t memory_bytes() const override { return 0; }

  void rotate(const RopeTask& task, Stream, const Progress& progress) override {
    check_rope_task(spec_, task);
    constexpr std::int64_t kTokensAtOnce = 16;
    const std::int64_t tokens = task.tensors.front().x.tokens;
    ThreadPool pool((tokens + kTokensAtOnce - 1) / kTokensAtOnce);
    pool.run(threads_, progress, [&](int, const Checkpoint& checkpoint) {
      TokenRotation rotation(row_rotation(spec_, spec_.frequencies.data()));
      for (std::int64_t item; (item = pool.take()) >= 0;) {
        if (checkpoint.should_stop()) return;
        const std::int64_t end = std::min(tokens, (item + 1) * kTokensAtOnce);
        for (std::int64_t token = item * kTokensAtOnce; token < end; ++token) rotate_token(task, token, rotation);
      }
    });
  }

 private:
  static std::int64_t position_of(const RopePositions& positions, std::int64_t token, std::int64_t axis) {
    if (positions.values == nullptr) return positions.first + token;
    const std::int64_t at = axis * positions.axis_stride + token;
    if (positions.is_int64) return static_cast<const std::int64_t*>(positions.values)[at];
    return static_cast<const std::int32_t*>(positions.values)[at];
  }

  void rotate_token(const RopeTask& task, std::int64_t token, TokenRotation& rotation) const {
    std::int64_t positions[kMaxRopeAxes];
    const int axes = spec_.axis_count();
    for (int axis = 0; axis < axes; ++axis) positions[axis] = position_of(task.positions, token, axis);
    rotation.move_to({positions, static_cast<std::size_t>(axes)}, spec_.axes, task.inverse);
    for (const RopeTensor& tensor : task.tensors) {
      for (std::int64_t head = 0; head < tensor.x.heads; ++head) {
        rotation.rotate(tensor.x.at(token, head), tensor.y.at(token, head));
      }
    }
  }

  RopeSpec spec_;
  int threads_;
};

}  // namespace

std::unique_ptr<RopeKernel> make_cpu_rope(const RopeSpec& spec, Backend& backend) {
  return std::make_unique<CpuRope>(spec, static_cast<CpuBackend&>(backend));
}

}  // namespace ringattn::cpu

namespace ringattn {

TokenRotation::TokenRotation(const RowRotation& by)
    : by_(by),
      positions_(static_cast<std::size_t>(by.pairs)),
      angles_(2 * positions_.size()),
      halves_(2 * positions_.size()) {}

void TokenRotation::move_to(std::span<const std::int64_t> positions, std::span<const std::uint8_t> axes, bool inverse) {
  using namespace cpu;  // HWY_DYNAMIC_DISPATCH finds its table there
  const std::size_t pairs = positions_.size();
  for (std::size_t i = 0; i < pairs; ++i) positions_[i] = positions[axes.empty() ? 0 : axes[i]];
  HWY_DYNAMIC_DISPATCH(compute_angles)
  (positions_.data(), by_.frequencies, pairs, by_.exact, by_.factor, halves_.data(), halves_.data() + pairs);
  if (inverse) {
    for (std::size_t i = pairs; i < 2 * pairs; ++i) halves_[i] = -halves_[i];
  }
  if (by_.layout == RopePairs::kHalfSplit) return angles_.swap(halves_);
  for (std::size_t i = 0; i < pairs; ++i) {
    angles_[2 * i] = halves_[i];
    angles_[2 * i + 1] = halves_[pairs + i];
  }
}

void rotate_row(const RowRotation& by, const float* angles, const std::byte* x, std::byte* y) {
  using namespace cpu;
  const auto pairs = static_cast<std::size_t>(by.pairs);
  HWY_DYNAMIC_DISPATCH(rotate)(by.dtype, by.layout, x, pairs, angles, y);
  if (x == y) return;
  const std::size_t turned = 2 * pairs * size_of(by.dtype);
  const std::size_t row = static_cast<std::size_t>(by.head_dim) * size_of(by.dtype);
  if (turned < row) std::memcpy(y + turned, x + turned, row - turned);
}

}  // namespace ringattn
#endif  // HWY_ONCE
