// SPDX-License-Identifier: Apache-2.0
// Parameters of launches over compressed rows. Plain data, filled by row_launch.cpp and read by the kernels of
// quant/cuda.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/decode/cache_update.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn::cuda {

// Rows [tokens, heads, row bytes]. Strides count bytes.
struct DeviceRows {
  std::byte* data = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

#ifdef __CUDACC__
  __device__ __forceinline__ std::byte* at(std::int64_t token, std::int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
  // The same rows from `token` on. near() takes 32-bit indices, whose products with strides are cheaper than those of
  // at().
  __device__ __forceinline__ DeviceRows from(std::int64_t token) const {
    return {at(token, 0), token_stride, head_stride};
  }
  __device__ __forceinline__ std::byte* near(std::uint32_t token, std::uint32_t head) const {
    return data + static_cast<std::int64_t>(token) * token_stride + static_cast<std::int64_t>(head) * head_stride;
  }
#endif
};

inline constexpr int kRunsOfLaunch = 64;  // passed in the launch parameters, so nothing is uploaded

struct RowParams {
  RowFormat format;
  bool bf16 = true;  // else fp16
  int heads = 0;
  int dim = 0;
  DeviceRows streams[kMaxStreams];
  std::byte* tables[kMaxTables] = {};
  DeviceRows plain;
  DeviceRows products;
  // All addresses and strides are aligned so that a lane can access four channels at once.
  bool by_four = false;
  InvalidElementCell* invalid = nullptr;
  int runs = 0;
  CompressedRun run[kRunsOfLaunch];
};

// Parameters of an append to a paged cache. The pages have streams[].
struct AppendParams {
  RowParams rows;  // `plain` has the new rows; no runs
  std::int64_t page_strides[kMaxStreams] = {};
  CacheUpdate update;
};

}  // namespace ringattn::cuda
