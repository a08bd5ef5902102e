// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ssm_files.hpp"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "ops/ssm/ssm_input.hpp"

namespace ringattn::testing {

NamedTensor float_list(const std::vector<float>& values, std::vector<std::int64_t> shape) {
  if (shape.empty()) shape = {static_cast<std::int64_t>(values.size())};
  const auto bytes = std::as_bytes(std::span(values));
  return {FileDtype::kF32, std::move(shape), {bytes.begin(), bytes.end()}};
}

NamedTensors ssm_tensors(const SsmFile& shape) {
  const std::int64_t tokens = std::accumulate(shape.lengths.begin(), shape.lengths.end(), std::int64_t{0});
  SyntheticSsmInput made;
  made.selective = shape.selective;
  made.seed = shape.seed;
  made.tokens = std::max<std::int64_t>(1, tokens);  // of no tokens no row is read
  made.heads = shape.heads;
  made.head_dim = shape.head_dim;
  made.groups = shape.groups;
  made.state_dim = shape.state_dim;
  made.dtype = shape.dtype;
  const SsmInput input(made, {});
  NamedTensors tensors;
  const auto add = [&](const char* name, SsmTensorKind which, std::vector<std::int64_t> dims) {
    const SsmInput::RowShape row = input.row_shape(which);
    NamedTensor tensor{file_dtype(shape.dtype), std::move(dims), {}};
    tensor.bytes.resize(static_cast<std::size_t>(tokens * row.heads * row.dim) * size_of(shape.dtype));
    const PackedRun all[] = {{0, tokens}};
    input.read(which, all, dense_view(static_cast<void*>(tensor.bytes.data()), shape.dtype, tokens, row.heads, row.dim),
               1);
    tensors[name] = std::move(tensor);
  };
  const std::int64_t heads = shape.heads;
  const std::int64_t dim = shape.head_dim;
  const std::int64_t state = shape.state_dim;
  if (shape.selective) {
    add("u", SsmTensorKind::kX, {tokens, heads});
    add("delta", SsmTensorKind::kDt, {tokens, heads});
    add("z", SsmTensorKind::kZ, {tokens, heads});
    tensors["A"] = float_list(input.a(), {heads, state});
    tensors["delta_bias"] = float_list(input.dt_bias());
  } else {
    add("x", SsmTensorKind::kX, {tokens, heads, dim});
    add("dt", SsmTensorKind::kDt, {tokens, heads});
    add("z", SsmTensorKind::kZ, {tokens, heads, dim});
    tensors["A"] = float_list(input.a());
    tensors["dt_bias"] = float_list(input.dt_bias());
  }
  const bool grouped = !shape.selective || shape.groups > 1;
  const std::vector<std::int64_t> rows =
      grouped ? std::vector<std::int64_t>{tokens, shape.groups, state} : std::vector<std::int64_t>{tokens, state};
  add("B", SsmTensorKind::kB, rows);
  add("C", SsmTensorKind::kC, rows);
  tensors["D"] = float_list(input.d());
  if (shape.lengths.size() > 1) {
    std::vector<std::int64_t> ends{0};
    for (const std::int64_t length : shape.lengths) ends.push_back(ends.back() + length);
    tensors["cu_seqlens"] = long_list(ends);
  }
  return tensors;
}

}  // namespace ringattn::testing
