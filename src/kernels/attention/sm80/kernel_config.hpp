// SPDX-License-Identifier: Apache-2.0
// An AttentionConfig as the template parameter of the attention kernels.
#pragma once

#include "kernels/attention/sm80/config.hpp"

namespace ringattn::sm80 {

// kPositions_: keys have explicit positions (kernels/attention/key_positions.hpp).
template <class Element_, AttentionConfig kConfig, bool kPositions_ = false>
struct KernelConfig {
  using Element = Element_;
  static constexpr bool kPositions = kPositions_;
  static constexpr int kDim = kConfig.head_dim;
  static constexpr int kDimV = kConfig.head_dim_v;
  static constexpr int kKeyTile = kConfig.key_tile;
  static constexpr int kQueryTile = kConfig.query_tile();
  static constexpr int kRowBlocks = kConfig.rows_of_warp / 16;  // of 16 rows, per warp
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kStages = kConfig.stages;
  static constexpr int kCtas = kConfig.ctas;
  static constexpr int kColumnsAtOnce = kConfig.columns_at_once;
  static constexpr bool kEndBasicBlock = kConfig.end_basic_block;
  static constexpr int kSlices = kConfig.slices;
};

}  // namespace ringattn::sm80
