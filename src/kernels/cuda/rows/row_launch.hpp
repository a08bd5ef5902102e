// SPDX-License-Identifier: Apache-2.0
// From tasks over compressed rows to launches.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "base/cuda.hpp"
#include "kernels/cuda/rows/row_params.hpp"
#include "kernels/cuda/rows/rows.hpp"

namespace ringattn::cuda {

// All of a launch but its runs. Throws kUnsupported for a row that is too long.
// Throws kUnsupported for rows that are longer than those that a warp makes quantized of.
void check_quantizable(const RowShape& shape);

RowParams row_params(const RowFormat& format, const RowShape& shape, const CompressedRows& rows,
                     const TensorView& plain, const TensorView& products, InvalidElementCell* fault);
// Whether four channels of a row can be taken at once, in streams with such further strides.
bool takes_four(const RowParams& params, std::span<const std::int64_t> page_strides);

// Whether a lane can take 16 channels at once of rows and of quantized of fp8, int8 or int4_token, and 2ⁿ lanes have a
// row.
bool takes_sixteen(const RowParams& params);

// Loads the code of a kernel, which its first launch would do otherwise.
template <class Kernel>
void load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

// Calls with.operator()<encoding>() where quantized are a token's own and made by the row: kernels have a encoding for
// a constant, so that none pays for the others' addresses and branches.
template <class With>
void with_token_encoding(RowEncoding encoding, const With& with) {
  switch (encoding) {
    case RowEncoding::kPlain:
      return with.template operator()<RowEncoding::kPlain>();
    case RowEncoding::kFp8:
      return with.template operator()<RowEncoding::kFp8>();
    case RowEncoding::kInt8:
      return with.template operator()<RowEncoding::kInt8>();
    case RowEncoding::kInt4Token:
      return with.template operator()<RowEncoding::kInt4Token>();
    case RowEncoding::kVector:
      return with.template operator()<RowEncoding::kVector>();
    case RowEncoding::kHybrid:
      return with.template operator()<RowEncoding::kHybrid>();
    case RowEncoding::kLatent:
      return with.template operator()<RowEncoding::kLatent>();
    case RowEncoding::kInt4Channel:
    case RowEncoding::kLowRank:
      return;
  }
}

// Rows of a part of a run, whose items are then qparams of 31 bits: a multiple of every group.
inline constexpr std::int64_t kRowsOfRun = 1 << 18;
inline constexpr std::int64_t kMostBlocks = 1 << 15;

// Calls launch(grid) with p.run filled, until all of the runs have been there. A block has `warps` warps.
template <class Launch>
void for_launches(RowParams& p, std::span<const CompressedRun> runs, int warps, const Launch& launch) {
  std::vector<CompressedRun> parts;
  for (const CompressedRun& run : runs) {
    for (std::int64_t first = 0; first < run.rows; first += kRowsOfRun) {
      CompressedRun part = run;
      part.position += first;
      part.row += first;
      part.to += first;
      part.rows = std::min(kRowsOfRun, run.rows - first);
      parts.push_back(part);
    }
  }
  for (std::size_t first = 0; first < parts.size(); first += kRunsOfLaunch) {
    p.runs = static_cast<int>(std::min<std::size_t>(kRunsOfLaunch, parts.size() - first));
    std::int64_t most = 0;
    for (int i = 0; i < p.runs; ++i) {
      p.run[i] = parts[first + static_cast<std::size_t>(i)];
      most = std::max(most, p.run[i].rows * p.heads);
    }
    // Where quantized are made by groups there are fewer items than rows, and some blocks find nothing.
    const std::int64_t each = p.format.encoding == RowEncoding::kInt4Channel ? p.format.group : 4;
    const std::int64_t items = (most + each - 1) / each;
    const std::int64_t blocks = std::clamp<std::int64_t>((items + warps - 1) / warps, 1, kMostBlocks);
    launch(dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.runs)));
  }
}

}  // namespace ringattn::cuda
