// SPDX-License-Identifier: Apache-2.0
// Turns tasks over compressed rows into launches.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "base/cuda.hpp"
#include "base/memory.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/quant/cuda/row_params.hpp"
#include "kernels/quant/cuda/rows.hpp"

namespace ringattn::cuda {

// Throws kUnsupported for rows that are longer than a warp can quantize.
void check_quantizable(const RowShape& shape);

// Returns the launch parameters without runs.
RowParams row_params(const RowFormat& format, const RowShape& shape, const CompressedRows& rows,
                     const TensorView& plain, const TensorView& products, InvalidElementCell* invalid);
// Returns true if four channels of a row can be accessed at once, if pages have these strides in bytes.
bool allows_4_channels(const RowParams& params, std::span<const std::int64_t> page_strides);

// Returns true if a lane can access 16 channels at once, for fp8, int8 and int4_token, and 2ⁿ lanes cover a row.
bool allows_16_channels(const RowParams& params);

// Calls with.operator()<encoding>() for encodings that quantize each token's row separately. Kernels have the encoding
// as a template parameter, so that none pays for the others' addresses and branches.
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

// Maximum rows of a part of a run, so that row indices fit into 31 bits. A multiple of every group size.
inline constexpr std::int64_t kRowsOfRun = 1 << 18;
inline constexpr std::int64_t kMaxBlocks = 1 << 15;

// Calls launch(grid) with p.run filled, until all runs are launched. A thread block has `warps` warps.
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
    std::int64_t max_rows = 0;
    for (int i = 0; i < p.runs; ++i) {
      p.run[i] = parts[first + static_cast<std::size_t>(i)];
      max_rows = std::max(max_rows, p.run[i].rows * p.heads);
    }
    // Groups of tokens have fewer work items than rows, so some thread blocks may have no work.
    const std::int64_t each = p.format.encoding == RowEncoding::kInt4Channel ? p.format.group : 4;
    const std::int64_t work_items = (max_rows + each - 1) / each;
    const std::int64_t blocks = std::clamp<std::int64_t>((work_items + warps - 1) / warps, 1, kMaxBlocks);
    launch(dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.runs)));
  }
}

// Vector quantization of rows (vq). It has a kernel of its own, because a codebook is read once for many tokens.

// Enqueues compress() of kVector for the runs of a launch. The caller checks for launch errors.
void compress_vectors(const RowParams& params, Stream stream);

}  // namespace ringattn::cuda
