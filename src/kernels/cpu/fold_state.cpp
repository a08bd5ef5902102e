// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/fold_state.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ringattn::cpu {

namespace {

// `partial` joins the closed groups.
void append(const FoldSpec& spec, const TileOps& ops, const Partial& partial, RowState& row) {
  if ((row.parts & kHasClosed) != 0) {
    ops.merge(spec.head_dim_v, partial, row.closed);
    return;
  }
  row.closed.m = partial.m;
  row.closed.l = partial.l;
  std::copy_n(partial.o, spec.head_dim_v, row.closed.o);
  row.parts |= kHasClosed;
}

void write_partial(const FoldSpec& spec, const Partial& partial, float* at) {
  at[0] = partial.m;
  at[1] = partial.l;
  if (partial.o != at + 2) std::copy_n(partial.o, spec.head_dim_v, at + 2);
}

// out ← o · scale / l, one rounding to the element's type.
template <typename Element, typename Round>
void write_row(const float* o, int count, float scale, float l, std::byte* out, Round round) {
  auto* elements = reinterpret_cast<Element*>(out);
  for (int i = 0; i < count; ++i) elements[i] = round(one_nan(o[i] * scale / l));
}

}  // namespace

RowState read_state(const FoldSpec& spec, float* state) {
  float* const open = state + 1;
  float* const closed = open + 2 + spec.head_dim_v;
  return {static_cast<int>(state[0]), {open[0], open[1], open + 2}, {closed[0], closed[1], closed + 2}};
}

void write_state(const FoldSpec& spec, const RowState& row, float* state) {
  state[0] = static_cast<float>(row.parts);
  if ((row.parts & kHasOpen) != 0) write_partial(spec, row.open, state + 1);
  if ((row.parts & kHasClosed) != 0) write_partial(spec, row.closed, state + 3 + spec.head_dim_v);
}

void close_group(const FoldSpec& spec, const TileOps& ops, RowState& row) {
  if ((row.parts & kHasOpen) == 0) return;
  append(spec, ops, row.open, row);
  row.parts &= ~kHasOpen;
}

void merge_row(const FoldSpec& spec, const TileOps& ops, const RowState& partial, RowState& row) {
  close_group(spec, ops, row);
  // A group that was folded to its end may have been closed or not.
  if ((partial.parts & kHasClosed) != 0) append(spec, ops, partial.closed, row);
  if ((partial.parts & kHasOpen) != 0) append(spec, ops, partial.open, row);
}

Partial merge_all(const FoldSpec& spec, const TileOps& ops, RowState& row) {
  if ((row.parts & kHasClosed) == 0) return row.open;  // the only group, or the identity
  close_group(spec, ops, row);
  return row.closed;
}

float one_nan(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }

float finish_row(const FoldSpec& spec, const Partial& row, const float* sink, std::byte* out) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double reference = row.m;
  double sum = row.l;
  float scale = 1.0F;
  if (sink != nullptr) {
    // The sink is one more score, without a value.
    const double logit = *sink;
    reference = logit > reference || std::isnan(logit) ? logit : reference;
    const double finite = reference == -kInfinity ? 0.0 : reference;
    const double weight = std::exp(static_cast<double>(row.m) - finite);
    sum = sum * weight + std::exp(logit - finite);
    scale = static_cast<float>(weight);
  }
  // Nothing was seen: O is 0, and log 0 is −∞.
  const float divisor = sum == 0.0 ? 1.0F : static_cast<float>(sum);
  switch (spec.dtype) {
    case Dtype::kF32:
      write_row<float>(row.o, spec.head_dim_v, scale, divisor, out, [](float x) { return x; });
      break;
    case Dtype::kBf16:
      write_row<std::uint16_t>(row.o, spec.head_dim_v, scale, divisor, out, float_to_bf16);
      break;
    case Dtype::kF16:
      write_row<std::uint16_t>(row.o, spec.head_dim_v, scale, divisor, out, float_to_f16);
      break;
  }
  return one_nan(static_cast<float>(reference + std::log(sum)));
}

}  // namespace ringattn::cpu
