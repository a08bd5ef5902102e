// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of sm90_attention: the parameters of every CUDA attention kernel, and tensor maps for TMA.
#pragma once

#include <cuda.h>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/sm90/config.hpp"

namespace ringattn::sm90 {

struct HopperParams {
  cuda::AttentionParams attention;
  // Boxes of one head. Q: 64 rows and all columns if they fill panels of 64. K and V: AttentionConfig::key_box_rows() ×
  // key_box_columns() of a key tile, or a page run × one panel. Out: the 16 rows of a warp × one panel.
  CUtensorMap q;
  CUtensorMap out;
  CUtensorMap k[cuda::kInlineSources];
  CUtensorMap v[cuda::kInlineSources];
  std::int32_t page_run_keys;  // keys of a page run, for tiles of several page runs
  std::int32_t lanes_log;      // log2 of the lanes that share the page runs of a tile
  bool bulk_in;                // TMA can load q and every K/V source; otherwise threads copy
  bool bulk_out;               // TMA can store the output
  bool overlaps_epilogue;      // the first Q K of the next head work tile may run during the epilogue of this one
};

// Fills the tensor maps. Maps of tensors that TMA can't access stay empty, and the flags say so.
HopperParams hopper_params(const cuda::AttentionParams& attention, const AttentionConfig& config);

// Throws kUnsupported if the current device has a device_obstacle().
void check_device();

}  // namespace ringattn::sm90
