// SPDX-License-Identifier: Apache-2.0
// Compiled once for every SIMD target: Highway includes this file again for each of them.
#include "kernels/linear/cpu/linear_ops.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// The same SIMD targets as in common/cpu/tile_ops.cpp.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/linear/cpu/linear_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway wants it.
#include "hwy/highway.h"
#include "kernels/common/cpu/amx.hpp"
#include "kernels/common/cpu/math-inl.hpp"
#include "kernels/common/cpu/pack-inl.hpp"
#include "kernels/gemm/cpu/amx_gemm-inl.hpp"
#include "kernels/gemm/cpu/gemm-inl.hpp"
#include "kernels/gemm/cpu/store-inl.hpp"
#include "kernels/linear/activation.hpp"

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

// Elements [k, k + count) of a row of weights in fp32, which is exact.
HWY_INLINE void widen_weights(const LinearPanelSource& source, std::int64_t row, std::int64_t k, std::int64_t count,
                              float* to) {
  const LinearMatrix& matrix = *source.matrix;
  const auto* const at = static_cast<const std::byte*>(matrix.data) + row * matrix.row_stride;
  if (source.format == WeightFormat::kInt8) {
    const auto* const values = reinterpret_cast<const std::int8_t*>(at) + k;
    for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(values[i]);
  } else if (source.format == WeightFormat::kInt4) {
    const std::int64_t group = row * matrix.group_stride + k / kInt4Group;
    const int zero = matrix.zeros == nullptr ? 8 : matrix.zeros[group];
    const auto* const values = reinterpret_cast<const std::uint8_t*>(at) + k / 2;
    for (std::int64_t i = 0; i < count; i += 2) {
      to[i] = static_cast<float>((values[i / 2] & 15) - zero);
      to[i + 1] = static_cast<float>((values[i / 2] >> 4) - zero);
    }
  } else {
    const std::byte* const values = at + k * static_cast<std::int64_t>(size_of(source.dtype));
    const std::int64_t whole = count / 8 * 8;
    widen(values, source.dtype, static_cast<int>(whole), to);
    for (std::int64_t i = whole; i < count; ++i) {
      to[i] = load_element(values + static_cast<std::size_t>(i) * size_of(source.dtype), source.dtype);
    }
  }
}

void pack_linear(const LinearPanelSource& source, float* panel) {
  constexpr std::int64_t kAtOnce = 512;  // elements of K that are widened before they are transposed; even
  constexpr auto kWidth = static_cast<std::int64_t>(kPanelWidth);
  HWY_ALIGN float rows[kKeysAtOnce][kAtOnce];
  for (std::int64_t column = 0; column < kWidth; column += kKeysAtOnce) {
    for (std::int64_t first = 0; first < source.depth; first += kAtOnce) {
      const std::int64_t count = std::min(kAtOnce, source.depth - first);
      const std::int64_t padded = (count + 3) / 4 * 4;
      const std::byte* at[kKeysAtOnce];
      for (std::int64_t i = 0; i < kKeysAtOnce; ++i) {
        const bool exists = column + i < source.rows;
        if (exists) widen_weights(source, source.row + column + i, source.k + first, count, rows[i]);
        std::fill(rows[i] + (exists ? count : 0), rows[i] + padded, 0.0F);
        at[i] = reinterpret_cast<const std::byte*>(rows[i]);
      }
      transpose<Dtype::kF32>(at, static_cast<std::size_t>(padded), kPanelWidth, panel + first * kWidth + column);
    }
  }
}

using Integers = hn::Rebind<std::int32_t, Floats>;

// kTiles: the integers are int32 already.
template <LinearSum kSum, bool kTiles = false>
struct AddChain {
  void* sums;
  std::size_t stride;
  const float* scales;

  HWY_INLINE void operator()(std::size_t row, std::size_t column, FloatVector chain) const {
    const Floats d;
    const std::size_t at = row * stride + column;
    if constexpr (kSum == LinearSum::kInteger) {
      const Integers di;
      auto* const to = static_cast<std::int32_t*>(sums) + at;
      const auto integers = kTiles ? hn::BitCast(di, chain) : hn::ConvertTo(di, chain);
      hn::Store(hn::Add(hn::Load(di, to), integers), di, to);
    } else {
      float* const to = static_cast<float*>(sums) + at;
      const auto before = hn::Load(d, to);
      if constexpr (kSum == LinearSum::kAdded) hn::Store(hn::Add(before, chain), d, to);
      if constexpr (kSum == LinearSum::kScaled)
        hn::Store(hn::MulAdd(hn::Load(d, scales + column), chain, before), d, to);
    }
  }
};

template <LinearSum kSum>
void multiply_as(const LinearPanelGemm& gemm) {
  multiply<kPanelVectors>(
      {gemm.x, static_cast<std::size_t>(gemm.x_stride), gemm.panel, static_cast<std::size_t>(gemm.depth)},
      static_cast<std::size_t>(gemm.rows), AddChain<kSum>{gemm.sums, kPanelWidth, gemm.scales});
}

void multiply_linear(const LinearPanelGemm& gemm) {
  switch (gemm.sum) {
    case LinearSum::kAdded:
      return multiply_as<LinearSum::kAdded>(gemm);
    case LinearSum::kScaled:
      return multiply_as<LinearSum::kScaled>(gemm);
    case LinearSum::kInteger:
      return multiply_as<LinearSum::kInteger>(gemm);
  }
}

#ifdef RINGATTN_HAVE_AMX_GEMM
// As in amx_pairs-inl.hpp.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

static_assert(kAmxColumns == kLinearTileColumns && kTileRows == kLinearTileRows);

// q − zero of a group, exact in bf16, as pack_amx_columns() lays out columns.
void pack_int4_columns(const LinearPanelSource& source, std::byte* tiles) {
  const LinearMatrix& matrix = *source.matrix;
  const __m512i low_bits = _mm512_set1_epi32(15);
  const __m512i upper_half = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  for (std::int64_t k = 0; k < source.depth; k += kTileDepth) {
    for (std::int64_t i = 0; i < kLinearTileColumns; ++i, tiles += kTileRowBytes) {
      if (i >= source.rows) {
        _mm512_store_si512(tiles, _mm512_setzero_si512());
        continue;
      }
      const std::int64_t row = source.row + i;
      const std::int64_t element = source.k + k;
      const int zero = matrix.zeros == nullptr ? 8 : matrix.zeros[row * matrix.group_stride + element / kInt4Group];
      const auto* const at = static_cast<const std::byte*>(matrix.data) + row * matrix.row_stride + element / 2;
      const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
      const __m512i zeros = _mm512_set1_epi32(zero);
      const auto bits = [&](__m512i values) HWY_ATTR {
        return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(values, zeros)));
      };
      const __m512i even = _mm512_srli_epi32(bits(_mm512_and_si512(pairs, low_bits)), 16);
      const __m512i odd = _mm512_and_si512(bits(_mm512_srli_epi32(pairs, 4)), upper_half);
      _mm512_store_si512(tiles, _mm512_or_si512(even, odd));
    }
  }
}

template <LinearSum kSum>
void multiply_tiles_as(const LinearTileGemm& gemm) {
  const LinearPanelSource& source = gemm.source;
  const std::int64_t element = source.format == WeightFormat::kInt8 ? 1 : 2;
  const std::int64_t bytes = source.depth * element;
  AmxColumns columns;
  if (source.format == WeightFormat::kInt4) {
    pack_int4_columns(source, gemm.scratch);
    columns = packed_columns(gemm.scratch, bytes);
  } else {
    const LinearMatrix& matrix = *source.matrix;
    columns = columns_in_place(
        static_cast<const std::byte*>(matrix.data) + source.row * matrix.row_stride + source.k * element,
        matrix.row_stride, source.rows, bytes, gemm.scratch);
  }
  multiply_amx<kSum == LinearSum::kInteger>(
      columns, {gemm.x, static_cast<std::size_t>(gemm.x_stride), gemm.rows},
      AddChain<kSum, true>{gemm.sums, static_cast<std::size_t>(gemm.sum_stride), gemm.scales});
}

void multiply_linear_tiles(const LinearTileGemm& gemm) {
  switch (gemm.sum) {
    case LinearSum::kAdded:
      return multiply_tiles_as<LinearSum::kAdded>(gemm);
    case LinearSum::kScaled:
      return multiply_tiles_as<LinearSum::kScaled>(gemm);
    case LinearSum::kInteger:
      return multiply_tiles_as<LinearSum::kInteger>(gemm);
  }
}

void narrow_linear(const float* values, std::int64_t count, std::int8_t* to) {
  for (std::int64_t i = 0; i < count; i += kTileColumns) {
    const auto kept = static_cast<__mmask16>((1U << std::min<std::int64_t>(kTileColumns, count - i)) - 1U);
    const __m512i integers = _mm512_cvtps_epi32(_mm512_maskz_loadu_ps(kept, values + i));
    _mm512_mask_cvtepi32_storeu_epi8(to + i, kept, integers);
  }
}
HWY_DIAGNOSTICS(pop)
#endif

void add_linear(const float* from, std::int64_t count, float* to) {
  const Floats d;
  for (std::int64_t i = 0; i < count; i += static_cast<std::int64_t>(kLanes)) {
    hn::Store(hn::Add(hn::Load(d, to + i), hn::Load(d, from + i)), d, to + i);
  }
}

// One vector of the columns from `column` on. Lanes after the last column are zero.
template <class D>
HWY_INLINE hn::Vec<D> load_columns(D d, const hn::TFromD<D>* from, std::int64_t columns) {
  if (columns >= static_cast<std::int64_t>(kLanes)) return hn::LoadU(d, from);
  HWY_ALIGN hn::TFromD<D> lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<std::size_t>(columns) * sizeof(lanes[0]));
  return hn::Load(d, lanes);
}

// The sum of a node: its own, or its children's sums added.
template <int kNode>
HWY_INLINE FloatVector node_sum(const LinearNodeSums& sums, int node, std::int64_t column) {
  const Floats d;
  const float* const at = sums.node[node];
  if (at != nullptr) return load_columns(d, at + sums.row * sums.row_stride + column, sums.columns - column);
  if constexpr (kNode < kLinearLeaves) {
    return hn::Add(node_sum<2 * kNode>(sums, 2 * node, column), node_sum<2 * kNode>(sums, 2 * node + 1, column));
  }
  return hn::Set(d, -0.0F);  // a leaf without tokens (LinearSumTask): x + (−0) is x
}

void join_linear(const LinearNodeSums& sums, int node, float* to) {
  const Floats d;
  for (std::int64_t column = 0; column < sums.columns; column += static_cast<std::int64_t>(kLanes)) {
    HWY_ALIGN float lanes[kLanes];
    hn::Store(node_sum<1>(sums, node, column), d, lanes);
    std::copy_n(lanes, std::min(static_cast<std::int64_t>(kLanes), sums.columns - column), to + column);
  }
}

// 1 / (1 + e^(−t))
HWY_INLINE FloatVector sigmoid(FloatVector t) {
  const Floats d;
  const auto one = hn::Set(d, 1.0F);
  return hn::Div(one, hn::Add(one, exp2(d, hn::Mul(t, hn::Set(d, -kLog2E)))));
}

// Φ(x)
HWY_INLINE FloatVector normal_cdf(FloatVector x) {
  const Floats d;
  const auto one = hn::Set(d, 1.0F);
  const auto t = hn::Div(one, hn::MulAdd(hn::Abs(x), hn::Set(d, kHalfSqrtHalf), one));
  auto p = hn::Set(d, kErfcCoefficients[0]);
  for (std::size_t i = 1; i < std::size(kErfcCoefficients); ++i) {
    p = hn::MulAdd(p, t, hn::Set(d, kErfcCoefficients[i]));
  }
  const auto exponent = hn::MulAdd(hn::Mul(x, hn::Set(d, -0.5F)), x, p);
  const auto tail = hn::Mul(hn::Mul(t, hn::Set(d, 0.5F)), exp2(d, hn::Mul(exponent, hn::Set(d, kLog2E))));
  return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(one, tail));
}

template <LinearActivation kActivation>
HWY_INLINE FloatVector activate(FloatVector x) {
  const Floats d;
  if constexpr (kActivation == LinearActivation::kSilu) return hn::Mul(x, sigmoid(x));
  if constexpr (kActivation == LinearActivation::kGeluTanh) {
    const auto slope = hn::MulAdd(hn::Mul(x, x), hn::Set(d, kGeluTanhCubed), hn::Set(d, kGeluTanh));
    return hn::Mul(x, sigmoid(hn::Mul(x, slope)));
  }
  if constexpr (kActivation == LinearActivation::kGelu) return hn::Mul(x, normal_cdf(x));
  return x;
}

// z of a column: sum and bias.
HWY_INLINE FloatVector biased(const LinearNodeSums& sums, const LinearEpilogue& e, int matrix, std::int64_t column) {
  const Floats d;
  const auto bias = hn::Load(d, e.bias[matrix] + column);
  if (e.scales[matrix] == nullptr) return hn::Add(node_sum<1>(sums, 1, column), bias);
  const Integers di;
  const auto* const integers = reinterpret_cast<const std::int32_t*>(sums.node[1]) + sums.row * sums.row_stride;
  const auto sum = hn::ConvertTo(d, load_columns(di, integers + column, sums.columns - column));
  return hn::MulAdd(hn::Mul(sum, hn::Set(d, e.x_scale)), hn::Load(d, e.scales[matrix] + column), bias);
}

template <Dtype kDtype, LinearActivation kActivation>
void finish_as(const LinearNodeSums* sums, const LinearEpilogue& e) {
  const auto columns = static_cast<std::size_t>(sums[0].columns);
  const StoreRounded<kDtype> store{e.out, 0, columns};
  for (std::size_t column = 0; column < columns; column += kLanes) {
    auto y = activate<kActivation>(biased(sums[0], e, 0, static_cast<std::int64_t>(column)));
    if (e.gated) y = hn::Mul(y, biased(sums[1], e, 1, static_cast<std::int64_t>(column)));
    store(0, column, y);
  }
}

template <Dtype kDtype>
void finish_of(const LinearNodeSums* sums, const LinearEpilogue& epilogue) {
  switch (epilogue.activation) {
    case LinearActivation::kNone:
      return finish_as<kDtype, LinearActivation::kNone>(sums, epilogue);
    case LinearActivation::kGelu:
      return finish_as<kDtype, LinearActivation::kGelu>(sums, epilogue);
    case LinearActivation::kGeluTanh:
      return finish_as<kDtype, LinearActivation::kGeluTanh>(sums, epilogue);
    case LinearActivation::kSilu:
      return finish_as<kDtype, LinearActivation::kSilu>(sums, epilogue);
  }
}

void finish_linear(const LinearNodeSums* sums, const LinearEpilogue& epilogue) {
  switch (epilogue.dtype) {
    case Dtype::kF32:
      return finish_of<Dtype::kF32>(sums, epilogue);
    case Dtype::kBf16:
      return finish_of<Dtype::kBf16>(sums, epilogue);
    case Dtype::kF16:
      return finish_of<Dtype::kF16>(sums, epilogue);
  }
}

float absmax_linear(const float* x, std::int64_t count) {
  const Floats d;
  auto most = hn::Zero(d);
  auto taint = hn::Zero(d);  // 0 · x is NaN for NaN and ∞
  for (std::int64_t i = 0; i < count; i += static_cast<std::int64_t>(kLanes)) {
    const auto values = load_columns(d, x + i, count - i);
    taint = hn::MulAdd(values, hn::Zero(d), taint);
    most = hn::Max(most, hn::Abs(values));
  }
  if (!hn::AllTrue(d, hn::Eq(taint, hn::Zero(d)))) return std::numeric_limits<float>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(d, most));
}

float quantize_linear(float absmax, std::int64_t count, float* x) {
  if (std::isnan(absmax)) {
    std::fill_n(x, count, 0.0F);
    return absmax;
  }
  const Floats d;
  const float scale = absmax / 127.0F > 0.0F ? absmax / 127.0F : 1.0F;
  for (std::int64_t i = 0; i < count; i += static_cast<std::int64_t>(kLanes)) {
    const auto value = hn::Round(hn::Div(load_columns(d, x + i, count - i), hn::Set(d, scale)));  // half to even
    HWY_ALIGN float lanes[kLanes];
    hn::Store(hn::Min(hn::Set(d, 127.0F), hn::Max(hn::Set(d, -127.0F), value)), d, lanes);
    std::copy_n(lanes, std::min(static_cast<std::int64_t>(kLanes), count - i), x + i);
  }
  return scale;
}

// a'(z)
template <LinearActivation kActivation>
HWY_INLINE FloatVector slope_of(FloatVector z) {
  const Floats d;
  const auto one = hn::Set(d, 1.0F);
  if constexpr (kActivation == LinearActivation::kSilu) {
    const auto r = sigmoid(z);
    return hn::Mul(r, hn::MulAdd(z, hn::Sub(one, r), one));
  }
  if constexpr (kActivation == LinearActivation::kGeluTanh) {
    const auto square = hn::Mul(z, z);
    const auto r = sigmoid(hn::Mul(z, hn::MulAdd(square, hn::Set(d, kGeluTanhCubed), hn::Set(d, kGeluTanh))));
    const auto inner = hn::MulAdd(square, hn::Set(d, 3.0F * kGeluTanhCubed), hn::Set(d, kGeluTanh));
    return hn::MulAdd(hn::Mul(hn::Mul(z, inner), r), hn::Sub(one, r), r);
  }
  if constexpr (kActivation == LinearActivation::kGelu) {
    const auto exponent = hn::Mul(hn::Mul(z, z), hn::Set(d, -0.5F * kLog2E));
    const auto density = hn::Mul(hn::Set(d, kNormalDensity), exp2(d, exponent));
    return hn::MulAdd(z, density, normal_cdf(z));
  }
  return one;
}

template <Dtype kDtype, LinearActivation kActivation>
void activation_gradient_as(const LinearRowGradient& row) {
  const Floats d;
  const auto columns = static_cast<std::size_t>(row.columns);
  const StoreRounded<kDtype> store_dz{row.dz, 0, columns}, store_du{row.du, 0, columns};
  for (std::size_t column = 0; column < columns; column += kLanes) {
    const auto left = static_cast<std::int64_t>(columns - column);
    const auto z = load_columns(d, row.z + column, left);
    auto dy = load_columns(d, row.dy + column, left);
    if (row.u != nullptr) {
      store_du(0, column, hn::Mul(dy, activate<kActivation>(z)));
      dy = hn::Mul(dy, load_columns(d, row.u + column, left));
    }
    store_dz(0, column, hn::Mul(dy, slope_of<kActivation>(z)));
  }
}

template <Dtype kDtype>
void activation_gradient_of(const LinearRowGradient& row) {
  switch (row.activation) {
    case LinearActivation::kNone:
      return activation_gradient_as<kDtype, LinearActivation::kNone>(row);
    case LinearActivation::kGelu:
      return activation_gradient_as<kDtype, LinearActivation::kGelu>(row);
    case LinearActivation::kGeluTanh:
      return activation_gradient_as<kDtype, LinearActivation::kGeluTanh>(row);
    case LinearActivation::kSilu:
      return activation_gradient_as<kDtype, LinearActivation::kSilu>(row);
  }
}

void activation_gradient_linear(const LinearRowGradient& row) {
  switch (row.dtype) {
    case Dtype::kF32:
      return activation_gradient_of<Dtype::kF32>(row);
    case Dtype::kBf16:
      return activation_gradient_of<Dtype::kBf16>(row);
    case Dtype::kF16:
      return activation_gradient_of<Dtype::kF16>(row);
  }
}

const LinearOps& linear_ops() {
  static const LinearOps ops{static_cast<int>(kPanelWidth),
                             &pack_linear,
                             &multiply_linear,
                             &add_linear,
                             &join_linear,
                             &finish_linear,
                             &absmax_linear,
                             &quantize_linear,
                             &activation_gradient_linear};
  return ops;
}

// The table with AMX tiles, or null for a target without AVX-512.
const LinearTileOps* tile_table() {
#ifdef RINGATTN_HAVE_AMX_GEMM
  static const LinearTileOps ops{&pack_amx_rows, &narrow_linear, &multiply_linear_tiles};
  return &ops;
#else
  return nullptr;
#endif
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringattn::cpu {

HWY_EXPORT(linear_ops);
HWY_EXPORT(tile_table);

const LinearOps& best_linear_ops() { return HWY_DYNAMIC_DISPATCH(linear_ops)(); }

const LinearTileOps* linear_tile_ops(Dtype dtype, WeightFormat format) {
  const bool has = format == WeightFormat::kInt8 ? has_amx_int8() : has_amx_bf16() && dtype == Dtype::kBf16;
  return has ? HWY_DYNAMIC_DISPATCH(tile_table)() : nullptr;
}

}  // namespace ringattn::cpu
#endif  // HWY_ONCE
