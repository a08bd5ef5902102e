// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/ssm/cpu/ssm_ops.hpp"

#include <algorithm>

#include "kernels/common/cpu/amx.hpp"

// As in tile_ops.cpp: a backend's identity is the name of one target.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ssm/cpu/ssm_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"
#include "kernels/common/cpu/math-inl.hpp"
#include "kernels/common/unroll.hpp"
#include "kernels/gated_delta/cpu/amx_delta-inl.hpp"
#include "kernels/ssm/cpu/amx_gla-inl.hpp"
#include "kernels/ssm/cpu/amx_ssd-inl.hpp"
#include "kernels/ssm/ssm.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Wide = hn::ScalableTag<float>;
using Eight = hn::CappedTag<float, kChannelBlock>;  // its lane count divides a block of channels
constexpr int kWideLanes = static_cast<int>(hn::MaxLanes(Wide()));
constexpr int kEightLanes = static_cast<int>(hn::MaxLanes(Eight()));
constexpr int kChunk = static_cast<int>(kChunkTokens);
constexpr float kLog2E = 1.44269504F;

// 2^x for every x: 0 below −126, ∞ from 128 on, NaN for NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp2_any(D d, V x) {
  const auto low = hn::Lt(x, hn::Set(d, -126.0F));
  const auto high = hn::Gt(x, hn::Set(d, 127.0F));
  // Above 127: 2^(x − 64) · 2^64, where x is limited to what gives ∞.
  const V most = hn::Set(d, 190.0F);
  const V lowered = hn::Sub(hn::IfThenElse(hn::Gt(x, most), most, x), hn::Set(d, 64.0F));
  const V bounded = hn::IfThenElse(low, hn::Zero(d), hn::IfThenElse(high, lowered, x));
  const V power = exp2_in_range(d, bounded);
  const V raised = hn::IfThenElse(high, hn::Mul(power, hn::Set(d, 0x1p64F)), power);
  return hn::IfThenZeroElse(low, raised);
}

// Calls work(tag, index) for `count` elements, a multiple of kChannelBlock, in whole vectors.
template <class Work>
HWY_INLINE void for_each_vector(int count, const Work& work) {
  int i = 0;
  for (; i + kWideLanes <= count; i += kWideLanes) work(Wide(), i);
  for (; i < count; i += kEightLanes) work(Eight(), i);
}

void exp2_of(float* values, int count) {
  for_each_vector(count,
                  [&](auto d, int i) HWY_ATTR { hn::StoreU(exp2_any(d, hn::LoadU(d, values + i)), d, values + i); });
}

// As float_to_bf16().
void round_rows_to_bf16(const float* values, int count, std::byte* target) {
  for_each_vector(count, [&](auto d, int i) HWY_ATTR {
    const hn::Rebind<std::uint32_t, decltype(d)> du;
    const hn::Rebind<std::int32_t, decltype(d)> di;
    const hn::Rebind<std::uint16_t, decltype(d)> d16;
    const auto value = hn::LoadU(d, values + i);
    const auto bits = hn::BitCast(du, value);
    const auto high = hn::ShiftRight<16>(bits);
    const auto even = hn::And(high, hn::Set(du, 1U));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(even, hn::Set(du, 0x7fffU))));
    const auto quiet = hn::Or(high, hn::Set(du, 0x40U));
    const auto result = hn::IfThenElse(hn::RebindMask(du, hn::Ne(value, value)), quiet, rounded);
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, result)), d16, reinterpret_cast<std::uint16_t*>(target) + i);
  });
}

// log(1 + e^x) = max(x, 0) + log(1 + t), t = e^−|x|; log(1 + t) = 2 atanh(s), s = t / (2 + t) ≤ 1/3, by its series.
void softplus(float* values, int count) {
  for_each_vector(count, [&](auto d, int i) HWY_ATTR {
    const auto x = hn::LoadU(d, values + i);
    const auto t = exp2_any(d, hn::Mul(hn::Abs(x), hn::Set(d, -kLog2E)));
    const auto s = hn::Div(t, hn::Add(t, hn::Set(d, 2.0F)));
    const auto square = hn::Mul(s, s);
    auto sum = hn::Set(d, 1.0F / 15.0F);
    for (const float term : {1.0F / 13.0F, 1.0F / 11.0F, 1.0F / 9.0F, 1.0F / 7.0F, 1.0F / 5.0F, 1.0F / 3.0F}) {
      sum = hn::MulAdd(sum, square, hn::Set(d, term));
    }
    sum = hn::MulAdd(sum, square, hn::Set(d, 1.0F));
    const auto positive = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x);  // NaN stays NaN
    hn::StoreU(hn::MulAdd(hn::Add(s, s), sum, positive), d, values + i);
  });
}

void logistic(float* values, int count) {
  const Eight d;
  const auto one = hn::Set(d, 1.0F);
  for (int i = 0; i < count; i += kEightLanes) {
    const auto power = exp2_any(d, hn::Mul(hn::LoadU(d, values + i), hn::Set(d, -kLog2E)));
    hn::StoreU(hn::Div(one, hn::Add(power, one)), d, values + i);
  }
}

// kRows rows of a product, kVectors vectors wide, accumulated in `sums`.
template <int kRows, int kVectors>
HWY_INLINE void product_block(const float* HWY_RESTRICT a, std::ptrdiff_t a_stride, int depth,
                              const float* HWY_RESTRICT m, int width, hn::Vec<Wide> (&sums)[kRows][kVectors]) {
  const Wide d;
  for (int k = 0; k < depth; ++k) {
    hn::Vec<Wide> columns[kVectors];
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(d, m + std::ptrdiff_t{k} * width + v * kWideLanes);
    RINGATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto factor = hn::Set(d, a[r * a_stride + k]);
      RINGATTN_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(factor, columns[v], sums[r][v]);
    }
  }
}

template <int kRows, int kVectors>
void product_rows(const float* a, std::ptrdiff_t a_stride, int depth, const float* m, int width, float* out) {
  const Wide d;
  hn::Vec<Wide> sums[kRows][kVectors];
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(d);
  }
  product_block<kRows, kVectors>(a, a_stride, depth, m, width, sums);
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, out + r * width + v * kWideLanes);
  }
}

template <int kVectors>
void product_columns(const float* a, std::ptrdiff_t a_stride, int rows, int depth, const float* m, int width,
                     float* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) product_rows<4, kVectors>(a + r * a_stride, a_stride, depth, m, width, out + r * width);
  for (; r < rows; ++r) product_rows<1, kVectors>(a + r * a_stride, a_stride, depth, m, width, out + r * width);
}

void product(const float* a, std::ptrdiff_t a_stride, int rows, int depth, const float* m, int width, float* out) {
  int column = 0;
  for (; column + 2 * kWideLanes <= width; column += 2 * kWideLanes) {
    product_columns<2>(a, a_stride, rows, depth, m + column, width, out + column);
  }
  if (column < width) product_columns<1>(a, a_stride, rows, depth, m + column, width, out + column);
}

// Rows r … r + kRows − 1 of add_lower(): first the terms that all rows have, in parallel, then each row's own.
template <int kRows, int kVectors>
void add_lower_rows(const float* a, std::ptrdiff_t a_stride, int r, const float* scale, const float* m, int width,
                    float* out) {
  const Wide d;
  hn::Vec<Wide> sums[kRows][kVectors];
  RINGATTN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v] = hn::Mul(hn::LoadU(d, out + (r + i) * width + v * kWideLanes), hn::Set(d, scale[r + i]));
    }
  }
  product_block<kRows, kVectors>(a + r * a_stride, a_stride, r + 1, m, width, sums);
  RINGATTN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    for (int k = r + 1; k <= r + i; ++k) {
      const auto factor = hn::Set(d, a[(r + i) * a_stride + k]);
      RINGATTN_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] = hn::MulAdd(factor, hn::LoadU(d, m + std::ptrdiff_t{k} * width + v * kWideLanes), sums[i][v]);
      }
    }
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[i][v], d, out + (r + i) * width + v * kWideLanes);
  }
}

template <int kVectors>
void add_lower_columns(const float* a, std::ptrdiff_t a_stride, int rows, const float* scale, const float* m, int width,
                       float* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) add_lower_rows<4, kVectors>(a, a_stride, r, scale, m, width, out);
  for (; r < rows; ++r) add_lower_rows<1, kVectors>(a, a_stride, r, scale, m, width, out);
}

void add_lower(const float* a, std::ptrdiff_t a_stride, int rows, const float* scale, const float* m, int width,
               float* out) {
  int column = 0;
  for (; column + 2 * kWideLanes <= width; column += 2 * kWideLanes) {
    add_lower_columns<2>(a, a_stride, rows, scale, m + column, width, out + column);
  }
  if (column < width) add_lower_columns<1>(a, a_stride, rows, scale, m + column, width, out + column);
}

void intra_chunk_scores(int rows, const float* scores, const float* sums, const float* dt, float* weights) {
  const Wide d;
  for (int i = 0; i < rows; ++i) {
    const auto sum = hn::Set(d, sums[i]);
    for (int j = 0; j <= i; j += kWideLanes) {
      const auto decay = exp2_any(d, hn::Sub(sum, hn::LoadU(d, sums + j)));
      const auto decayed = hn::Mul(hn::LoadU(d, scores + i * kChunk + j), decay);
      hn::StoreU(hn::Mul(decayed, hn::LoadU(d, dt + j)), d, weights + i * kChunk + j);
    }
  }
}

void scale_columns(int rows, const float* source, const float* scale, float* target) {
  const Wide d;
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < kChunk; j += kWideLanes) {
      const auto value = hn::LoadU(d, source + r * kChunk + j);
      hn::StoreU(hn::Mul(value, hn::LoadU(d, scale + j)), d, target + r * kChunk + j);
    }
  }
}

void join(float decay, const float* before, const float* local, int count, float* result) {
  const Eight d;
  const auto factor = hn::Set(d, decay);
  for (int i = 0; i < count; i += kEightLanes) {
    hn::StoreU(hn::MulAdd(factor, hn::LoadU(d, before + i), hn::LoadU(d, local + i)), d, result + i);
  }
}

void join_channels(int states, const float* rates, const float* times, const float* before, const float* local,
                   float* result) {
  const Eight d;
  for (int i = 0; i < states * kChannelBlock; i += kEightLanes) {
    const auto time = hn::LoadU(d, times + i % kChannelBlock);
    const auto decay = exp2_any(d, hn::Mul(hn::LoadU(d, rates + i), time));
    hn::StoreU(hn::MulAdd(decay, hn::LoadU(d, before + i), hn::LoadU(d, local + i)), d, result + i);
  }
}

// Two states of a block of channels in one vector, where it has 16 lanes.
using ScanVector = hn::CappedTag<float, 2 * kChannelBlock>;
constexpr int kScanLanes = static_cast<int>(hn::MaxLanes(ScanVector()));
constexpr int kScanStates = kScanLanes > kChannelBlock ? 2 : 1;
constexpr int kScanWidth = kScanStates * kChannelBlock;

// for_all_channels: the first kScanStates elements of `values`, each for all channels.
// add_states: y ← fma(c[0], state 0, y), then fma(c[1], state 1, y) if there are two.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
static_assert(kScanStates == 2);
using ScanHalf = hn::Half<ScanVector>;
HWY_INLINE hn::Vec<ScanVector> for_all_channels(const float* values) {
  return hn::Combine(ScanVector(), hn::Set(ScanHalf(), values[1]), hn::Set(ScanHalf(), values[0]));
}
HWY_INLINE void add_states(const float* c, hn::Vec<ScanVector> states, float* y) {
  const ScanHalf d;
  const auto first = hn::MulAdd(hn::Set(d, c[0]), hn::LowerHalf(d, states), hn::LoadU(d, y));
  hn::StoreU(hn::MulAdd(hn::Set(d, c[1]), hn::UpperHalf(d, states), first), d, y);
}
#else
static_assert(kScanStates == 1);
HWY_INLINE hn::Vec<ScanVector> for_all_channels(const float* values) { return hn::Set(ScanVector(), values[0]); }
HWY_INLINE void add_states(const float* c, hn::Vec<ScanVector> states, float* y) {
  const ScanVector d;
  hn::StoreU(hn::MulAdd(hn::Set(d, c[0]), states, hn::LoadU(d, y)), d, y);
}
#endif

// Whether dt · rate is within the range of exp2_in_range() for all tokens and states. Products are monotonic, so those
// of the least and the greatest rates of a channel are enough.
bool decays_in_range(const ChannelTokens& in) {
  const Eight d;
  for (int v = 0; v < kChannelBlock; v += kEightLanes) {
    auto least = hn::LoadU(d, in.rates + v);
    auto greatest = least;
    auto inside = hn::Eq(least, least);  // not NaN
    for (int n = 1; n < in.states; ++n) {
      const auto rate = hn::LoadU(d, in.rates + n * kChannelBlock + v);
      inside = hn::And(inside, hn::Eq(rate, rate));
      least = hn::Min(least, rate);
      greatest = hn::Max(greatest, rate);
    }
    const auto check = [&](hn::Vec<Eight> exponent) HWY_ATTR {
      return hn::And(hn::Ge(exponent, hn::Set(d, -126.0F)), hn::Le(exponent, hn::Set(d, 127.0F)));
    };
    for (int t = 0; t < in.tokens; ++t) {
      const auto dt = hn::LoadU(d, in.dt + t * kChannelBlock + v);
      inside = hn::And(inside, hn::And(check(hn::Mul(dt, least)), check(hn::Mul(dt, greatest))));
    }
    if (!hn::AllTrue(d, inside)) return false;
  }
  return true;
}

// A state stays in a register over the chunk, and y in memory is a sum over states in their order.
template <bool kInRange>
void scan_states(const ChannelTokens& in, float* state, float* y) {
  const ScanVector d;
  float dts[kChunk * kScanWidth];
  float inputs[kChunk * kScanWidth];
  for (int t = 0; t < in.tokens; ++t) {
    const Eight eight;
    for (int v = 0; v < kScanWidth; v += kEightLanes) {
      const int at = t * kChannelBlock + v % kChannelBlock;
      const auto dt = hn::LoadU(eight, in.dt + at);
      hn::StoreU(dt, eight, dts + t * kScanWidth + v);
      hn::StoreU(hn::Mul(dt, hn::LoadU(eight, in.x + at)), eight, inputs + t * kScanWidth + v);
    }
  }
  for (int n = 0; n < in.states; n += kScanStates) {
    for (int v = 0; v < kScanWidth; v += kScanLanes) {
      float* const at = state + n * kChannelBlock + v;
      const auto rates = hn::LoadU(d, in.rates + n * kChannelBlock + v);
      auto states = hn::LoadU(d, at);
      for (int t = 0; t < in.tokens; ++t) {
        const auto exponent = hn::Mul(hn::LoadU(d, dts + t * kScanWidth + v), rates);
        const auto decay = kInRange ? exp2_in_range(d, exponent) : exp2_any(d, exponent);
        const auto input = hn::LoadU(d, inputs + t * kScanWidth + v);
        states = hn::MulAdd(decay, states, hn::Mul(input, for_all_channels(in.b + t * in.states + n)));
        if (y != nullptr) add_states(in.c + t * in.states + n, states, y + t * kChannelBlock + v);
      }
      hn::StoreU(states, d, at);
    }
  }
}

void scan_channels(const ChannelTokens& in, float* state, float* y) {
  if (y != nullptr) std::fill_n(y, in.tokens * kChannelBlock, 0.0F);
  decays_in_range(in) ? scan_states<true>(in, state, y) : scan_states<false>(in, state, y);
}

// v / (1 + exp(−v))
template <class D, class V = hn::Vec<D>>
HWY_INLINE V silu_of(D d, V v) {
  const V power = exp2_any(d, hn::Mul(v, hn::Set(d, -kLog2E)));
  return hn::Div(v, hn::Add(power, hn::Set(d, 1.0F)));
}

void finish(int count, const float* d_skip, const float* x, const float* z, float* y) {
  const Eight d;
  for (int i = 0; i < count; i += kEightLanes) {
    auto value = hn::LoadU(d, y + i);
    if (d_skip != nullptr) {
      value = hn::MulAdd(hn::LoadU(d, d_skip + i % kChannelBlock), hn::LoadU(d, x + i), value);
    }
    if (z != nullptr) value = hn::Mul(value, silu_of(d, hn::LoadU(d, z + i)));
    hn::StoreU(value, d, y + i);
  }
}

float update(int states, const float* decays, float input, const float* b, const float* c, float* state) {
  const Eight d;
  const auto factor = hn::Set(d, input);
  float columns[kChannelBlock] = {};
  for (int n = 0; n < states; n += kEightLanes) {
    const auto added = hn::Mul(factor, hn::LoadU(d, b + n));
    const auto next = hn::MulAdd(hn::LoadU(d, decays + n), hn::LoadU(d, state + n), added);
    hn::StoreU(next, d, state + n);
    float* const sums = columns + n % kChannelBlock;
    hn::StoreU(hn::MulAdd(hn::LoadU(d, c + n), next, hn::LoadU(d, sums)), d, sums);
  }
  float sum = 0.0F;
  for (const float column : columns) sum += column;
  return sum;
}

void convolve(int channels, int width, const float* x, const float* weights, const float* bias, bool silu, float* y) {
  const Eight d;
  for (int i = 0; i < channels; i += kEightLanes) {
    auto sum = bias == nullptr ? hn::Zero(d) : hn::LoadU(d, bias + i);
    for (int k = 0; k < width; ++k) {
      const std::ptrdiff_t at = std::ptrdiff_t{k} * channels + i;
      sum = hn::MulAdd(hn::LoadU(d, weights + at), hn::LoadU(d, x + at), sum);
    }
    hn::StoreU(silu ? silu_of(d, sum) : sum, d, y + i);
  }
}

// dy · s · (1 + v · (1 − s)), s = 1 / (1 + exp(−v)); dy · s at infinite v, where the product would be ∞ · 0
void convolve_gradient(int channels, int width, const float* x, const float* weights, const float* bias,
                       const float* dy, float* g) {
  const Eight d;
  const auto one = hn::Set(d, 1.0F);
  for (int i = 0; i < channels; i += kEightLanes) {
    auto v = bias == nullptr ? hn::Zero(d) : hn::LoadU(d, bias + i);
    for (int k = 0; k < width; ++k) {
      const std::ptrdiff_t at = std::ptrdiff_t{k} * channels + i;
      v = hn::MulAdd(hn::LoadU(d, weights + at), hn::LoadU(d, x + at), v);
    }
    const auto s = hn::Div(one, hn::Add(exp2_any(d, hn::Mul(v, hn::Set(d, -kLog2E))), one));
    const auto slope = hn::IfThenElse(hn::IsInf(v), s, hn::Mul(s, hn::MulAdd(v, hn::Sub(one, s), one)));
    hn::StoreU(hn::Mul(hn::LoadU(d, dy + i), slope), d, g + i);
  }
}

float decayed_dot(int count, const float* a, const float* b, const float* to, const float* from) {
  const Eight d;
  float columns[kChannelBlock] = {};
  for (int n = 0; n < count; n += kEightLanes) {
    const auto decay = exp2_any(d, hn::Sub(hn::LoadU(d, to + n), hn::LoadU(d, from + n)));
    const auto product = hn::Mul(hn::LoadU(d, a + n), hn::LoadU(d, b + n));
    float* const sums = columns + n % kChannelBlock;
    hn::StoreU(hn::MulAdd(product, decay, hn::LoadU(d, sums)), d, sums);
  }
  float sum = 0.0F;
  for (const float column : columns) sum += column;
  return sum;
}

void add_product(int count, const float* a, const float* b, float* sums) {
  const Eight d;
  for (int i = 0; i < count; i += kEightLanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), hn::LoadU(d, sums + i)), d, sums + i);
  }
}

template <int kRows, int kVectors>
void product_onto_rows(const float* a, std::ptrdiff_t a_stride, int depth, const float* m, int width, float* out) {
  const Wide d;
  hn::Vec<Wide> sums[kRows][kVectors];
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::LoadU(d, out + r * width + v * kWideLanes);
  }
  product_block<kRows, kVectors>(a, a_stride, depth, m, width, sums);
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, out + r * width + v * kWideLanes);
  }
}

void product_onto(const float* a, std::ptrdiff_t a_stride, int rows, int depth, const float* m, int width, float* out) {
  for (int column = 0; column < width; column += kWideLanes) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) {
      product_onto_rows<4, 1>(a + r * a_stride, a_stride, depth, m + column, width, out + r * width + column);
    }
    for (; r < rows; ++r) {
      product_onto_rows<1, 1>(a + r * a_stride, a_stride, depth, m + column, width, out + r * width + column);
    }
  }
}

// kVectors vectors of columns of the rows from `first` on, of which the rows before have been solved.
template <int kRows, int kVectors>
void solve_rows(int first, const float* a, const float* beta, const float* x, int width, float* u) {
  const Wide d;
  hn::Vec<Wide> sums[kRows][kVectors];
  const auto subtract = [&](int r, int k) {
    const auto factor = hn::Set(d, a[(first + r) * kChunk + k]);
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = hn::NegMulAdd(factor, hn::LoadU(d, u + std::ptrdiff_t{k} * width + v * kWideLanes), sums[r][v]);
    }
  };
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::ptrdiff_t at = std::ptrdiff_t{first + r} * width + v * kWideLanes;
      sums[r][v] = hn::Sub(hn::LoadU(d, x + at), hn::LoadU(d, u + at));
    }
  }
  for (int k = 0; k < first; ++k) {
    RINGATTN_UNROLL
    for (int r = 0; r < kRows; ++r) subtract(r, k);
  }
  RINGATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    for (int k = first; k < first + r; ++k) subtract(r, k);
    const auto factor = hn::Set(d, beta[first + r]);
    RINGATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(hn::Mul(factor, sums[r][v]), d, u + std::ptrdiff_t{first + r} * width + v * kWideLanes);
    }
  }
}

template <int kVectors>
void solve_columns(int rows, const float* a, const float* beta, const float* x, int width, float* u) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) solve_rows<4, kVectors>(r, a, beta, x, width, u);
  for (; r < rows; ++r) solve_rows<1, kVectors>(r, a, beta, x, width, u);
}

void solve_lower(int rows, const float* a, const float* beta, const float* x, int width, float* u) {
  int column = 0;
  for (; column + 2 * kWideLanes <= width; column += 2 * kWideLanes) {
    solve_columns<2>(rows, a, beta, x + column, width, u + column);
  }
  if (column < width) solve_columns<1>(rows, a, beta, x + column, width, u + column);
}

void decayed_scores(int rows, int dims, const float* q, const float* k, const float* sums, float* kk, float* qk) {
  const Eight d;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j <= i; ++j) {
      float k_columns[kChannelBlock] = {};
      float q_columns[kChannelBlock] = {};
      for (int n = 0; n < dims; n += kEightLanes) {
        const int column = n % kChannelBlock;
        const auto exponent = hn::Sub(hn::LoadU(d, sums + i * dims + n), hn::LoadU(d, sums + j * dims + n));
        const auto decayed = hn::Mul(hn::LoadU(d, k + j * dims + n), exp2_any(d, exponent));
        const auto k_sum = hn::MulAdd(hn::LoadU(d, k + i * dims + n), decayed, hn::LoadU(d, k_columns + column));
        const auto q_sum = hn::MulAdd(hn::LoadU(d, q + i * dims + n), decayed, hn::LoadU(d, q_columns + column));
        hn::StoreU(k_sum, d, k_columns + column);
        hn::StoreU(q_sum, d, q_columns + column);
      }
      float k_sum = 0.0F;
      float q_sum = 0.0F;
      for (const float value : k_columns) k_sum += value;
      for (const float value : q_columns) q_sum += value;
      kk[i * kChunk + j] = k_sum;
      qk[i * kChunk + j] = q_sum;
    }
  }
}

// Measured on one core with cpu_ssd, rounded down. It depends on the vector length, so that unmeasured targets have an
// estimate too.
constexpr double kFlopsPerSecond = kWideLanes >= 16 ? 1.2e10 : kWideLanes >= 8 ? 7e9 : kWideLanes >= 4 ? 2.5e9 : 8e8;

const SsmOps& ssm_ops() {
  static const SsmOps ops{kWideLanes,          kFlopsPerSecond, &exp2_of,     &round_rows_to_bf16,
                          &softplus,           &logistic,       &product,     &add_lower,
                          &intra_chunk_scores, &scale_columns,  &join,        &join_channels,
                          &scan_channels,      &finish,         &update,      &convolve,
                          &convolve_gradient,  &decayed_dot,    &add_product, &product_onto,
                          &solve_lower,        &decayed_scores};
  return ops;
}

// The tables with AMX tiles, or null for a target without AVX-512.
const SsdTileOps* ssd_tile_table() {
#ifdef RINGATTN_HAVE_AMX_GEMM
  static const SsdTileOps ops{&load_ssd_group, &accumulate_ssd, &round_ssd_state, &finish_ssd};
  return &ops;
#else
  return nullptr;
#endif
}

const DeltaTileOps* delta_tile_table() {
#ifdef RINGATTN_HAVE_AMX_GEMM
  static const DeltaTileOps ops{&load_delta_keys, &load_decayed_delta_keys, &solve_delta, &round_delta_state,
                                &advance_delta};
  return &ops;
#else
  return nullptr;
#endif
}

const GlaTileOps* gla_tile_table() {
#ifdef RINGATTN_HAVE_AMX_GEMM
  static const GlaTileOps ops{&accumulate_gla, &round_gla_state, &finish_gla};
  return &ops;
#else
  return nullptr;
#endif
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::cpu {

HWY_EXPORT(ssm_ops);
HWY_EXPORT(ssd_tile_table);
HWY_EXPORT(delta_tile_table);
HWY_EXPORT(gla_tile_table);

const SsmOps& best_ssm_ops() { return HWY_DYNAMIC_DISPATCH(ssm_ops)(); }
const SsdTileOps* ssd_tile_ops() { return has_amx_bf16() ? HWY_DYNAMIC_DISPATCH(ssd_tile_table)() : nullptr; }
const DeltaTileOps* delta_tile_ops() { return has_amx_bf16() ? HWY_DYNAMIC_DISPATCH(delta_tile_table)() : nullptr; }
const GlaTileOps* gla_tile_ops() { return has_amx_bf16() ? HWY_DYNAMIC_DISPATCH(gla_tile_table)() : nullptr; }

}  // namespace ringattn::cpu
#endif  // HWY_ONCE
