// SPDX-License-Identifier: Apache-2.0
// What a launch of sm90_attention is given: the tables of every CUDA fold kernel, and tensor maps for the copy engine.
#pragma once

#include <cuda.h>

#include "kernels/cuda/attention_params.hpp"
#include "kernels/sm90/fold/config.hpp"

namespace ringattn::sm90 {

struct HopperParams {
  cuda::AttentionParams attention;
  // Boxes of one head: query tiles of 64 rows, with all columns where those fill panels of 64;
  // AttentionConfig::key_box_rows() × key_box_columns() of key tiles, or a page_run × a panel; a warp's 16 rows of the
  // output by panels.
  CUtensorMap q;
  CUtensorMap out;
  CUtensorMap k[cuda::kNearSources];
  CUtensorMap v[cuda::kNearSources];
  std::int32_t page_run_keys;  // keys of a page_run, where tiles lie in several
  std::int32_t lanes_log;      // of 2: lanes that share out a tile's page_runs
  bool bulk_in;                // q and every source can be fetched by the copy engine; else threads copy
  bool bulk_out;               // so can the output be written
  bool chains;                 // the next head_tile's first product may run while a head_tile's rows are finished
};

// Fills the tensor maps. Those of what the copy engine can't reach stay empty, and the flags say so.
HopperParams hopper_params(const cuda::AttentionParams& attention, const AttentionConfig& config);

// Throws kUnsupported where the current device has a device_obstacle().
void check_device();

}  // namespace ringattn::sm90
