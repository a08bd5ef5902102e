// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/sm90/sm90_quantized_linear.hpp"

#include <algorithm>

#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/linear/cuda/quantized_linear.hpp"
#include "kernels/linear/sm90/int4.hpp"
#include "kernels/linear/sm90/int8.hpp"

namespace ringattn::sm90 {

namespace {

constexpr int kMatrixSums = 64;  // rows of W of one warpgroup

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

MappedTensor mapped_x(const cuda::Int4Gemm& p) {
  // A single row's stride has no meaning, but must be valid.
  const std::int64_t stride = p.out.rows == 1 ? p.chains.features : p.x.stride / 2;
  return {p.x.data, p.out.rows, 1, p.chains.features, stride, stride};
}

constexpr cuda::QuantizedLauncher<cuda::Int8Gemm> kInt8Wgmma{
    [](Dtype) {
      cuda::prepare_int8_mma();
      prepare_int8_wgmma();
    },
    [](const LinearSpec&, std::int64_t rows, int multiprocessors) {
      return int8_tile_sums(rows, multiprocessors) * std::int64_t{sizeof(std::int32_t)};
    },
    [](const LinearSpec&, std::int64_t, int multiprocessors) { return int8_counters(multiprocessors); },
    [](const cuda::Int8Gemm& p, Stream stream) {
      if (!can_map_int8(p)) return cuda::launch_int8_mma(p, stream);
      launch_int8_wgmma(p, choose_int8_form(p.out.rows, p.out.columns, p.out.matrices, p.features, p.multiprocessors),
                        stream);
    }};

constexpr cuda::QuantizedLauncher<cuda::Int4Gemm> kInt4Wgmma{
    [](Dtype dtype) {
      cuda::prepare_int4_mma();
      (dtype == Dtype::kBf16 ? int4_bf16 : int4_fp16).prepare();
    },
    [](const LinearSpec& spec, std::int64_t rows, int multiprocessors) {
      return int4_partial_bytes(rows, spec.out_features, spec.gated ? 2 : 1, spec.in_features,
                                spec.parallel == LinearParallel::kRow, multiprocessors);
    },
    [](const LinearSpec& spec, std::int64_t rows, int) { return int4_counters(rows, spec.out_features); },
    [](const cuda::Int4Gemm& p, Stream stream) {
      if (!can_map_int4(p)) return cuda::launch_int4_mma(p, stream);
      const int groups = p.chains.features / static_cast<int>(kInt4Group);
      (p.out.dtype == Dtype::kBf16 ? int4_bf16 : int4_fp16)
          .launch(p, choose_int4_rows(p.out.rows, p.out.columns, p.out.matrices, groups, p.multiprocessors), stream);
    }};

// Rows of a tile of the few-rows kernel.
int few_rows_tile(std::int64_t rows) {
  int tile_rows = 8;
  while (tile_rows < rows && tile_rows < kInt4MaxFewRows) tile_rows *= 2;
  return tile_rows;
}
// Tiles of rows in the largest task, of up to `rows` rows, that the few-rows kernel may compute.
std::int64_t few_rows_tiles(std::int64_t rows) {
  return ceil_div(std::min<std::int64_t>(rows, kInt4FewRows), few_rows_tile(rows));
}

}  // namespace

int choose_int4_rows(int rows, int columns, int matrices, int groups, int multiprocessors) {
  const int tile_rows = few_rows_tile(rows);
  if (rows <= tile_rows) return tile_rows;
  if (rows > kInt4FewRows) return kInt4ManyRows;
  // Clocks of an SM for a group: of 64 × 64 results, with two CTAs an SM; of a pair's 128 × 128 each.
  constexpr double kFewClocks = 300.0;
  constexpr double kManyClocks = 1050.0;
  const double few =
      static_cast<double>(ceil_div(rows, tile_rows) * ceil_div(columns, kMatrixSums) * matrices * groups) * kFewClocks /
      multiprocessors;
  const std::int64_t pairs = ceil_div(rows, kInt4ManyRows) * ceil_div(columns * matrices, 4 * kMatrixSums);
  const double many = static_cast<double>(ceil_div(pairs, multiprocessors / 2) * groups) * kManyClocks;
  return few < many ? tile_rows : kInt4ManyRows;
}

std::int64_t int4_partial_bytes(std::int64_t rows, std::int64_t columns, int matrices, std::int64_t features,
                                bool leaves, int multiprocessors) {
  const std::int64_t chains = leaves ? kLinearLeaves : ceil_div(features, kLinearSplit);
  const std::int64_t few =
      few_rows_tiles(rows) * few_rows_tile(rows) * cuda::int4_row_tiles(columns) * kMatrixSums * matrices * chains;
  // Subtrees of two and of four leaves.
  const std::int64_t many =
      leaves && rows > kInt4MaxFewRows ? std::int64_t{2} * multiprocessors * kInt4ManyRows * 2 * kMatrixSums : 0;
  return std::max(few, many) * std::int64_t{sizeof(float)};
}

std::int64_t int4_counters(std::int64_t rows, std::int64_t columns) {
  return few_rows_tiles(rows) * cuda::int4_row_tiles(columns);
}

bool can_map_int4(const cuda::Int4Gemm& params) {
  return params.chains.features > 0 && params.x.aligned && can_map(mapped_x(params));
}

HopperInt4 map_int4(const cuda::Int4Gemm& params, int tile_rows, int box_rows, int tile_columns) {
  return {params, map_tensor(mapped_x(params), params.out.dtype, box_rows, kInt4PanelColumns),
          static_cast<std::int32_t>(ceil_div(params.out.rows, tile_rows)),
          static_cast<std::int32_t>(ceil_div(params.out.columns, tile_columns))};
}

std::vector<std::string> int8_linear_configs() {
  return {"few rows: 128 of W x 8 to 128 rows, 2 warpgroups, K shared by up to 16 CTAs",
          "more rows: 128 of W x 256 rows, 2 warpgroups, CTA pairs",
          "weights not aligned to 16 bytes: mma.sync, tile 32x64"};
}
std::vector<std::string> int4_linear_configs() {
  return {"few rows: 64 of W x 8 to 64 rows, 1 warpgroup, a CTA for each split",
          "more rows: 128 of W x 128 rows, 2 warpgroups, CTA pairs", "x not aligned to 16 bytes: mma.sync, tile 32x64"};
}

std::unique_ptr<LinearKernel> make_int8_linear(const LinearSpec& spec, Backend& backend) {
  return cuda::make_int8_linear(spec, kInt8Wgmma, backend);
}
std::unique_ptr<LinearKernel> make_int4_linear(const LinearSpec& spec, Backend& backend) {
  return cuda::make_int4_linear(spec, kInt4Wgmma, backend);
}

}  // namespace ringattn::sm90
