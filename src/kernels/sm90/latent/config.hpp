// SPDX-License-Identifier: Apache-2.0
// How `sm90_latent` and `sm90_latent_1k` decode over latents: rows [c, k_r] that all query heads share as their keys,
// and whose first columns are their values.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/decode.hpp"
#include "kernels/merge.hpp"
#include "kernels/sm90/decode/config.hpp"

namespace ringattn::sm90 {

inline constexpr int kLatentDim = 576;   // latent and rotary key
inline constexpr int kLatentDimV = 512;  // the latent
inline constexpr int kLatentTile = 64;   // keys of a tile
inline constexpr int kLatentStages = 2;  // tiles in shared memory
inline constexpr int kLatentParts = 5;   // of a tile that arrive by themselves: 128 columns each, and the rotary keys
inline constexpr int kLatentFoldThreads = 256;
inline constexpr int kLatentThreads = kLatentFoldThreads + 128;
// Registers of a thread that the three warpgroups have between them: what a CTA is launched with.
inline constexpr int kLatentRegisters = 3 * 168;
// Of more units than this, each folded by a team, those of two blocks of rows share what they read: else they might ask
// for nearly all that the L2 cache gives.
inline constexpr int kMostTeamUnits = 8;
inline constexpr int kMostLatentSequences = 256;  // of a launch: each CTA keeps a number for each

// How latents of 8 bits are stored.
inline constexpr RowFormat kLatentCodes{.coding = RowCoding::kLatent, .rope = kLatentDim - kLatentDimV};

// In powers of two. A tile's probabilities are at most 2^12, and the sum over a group stays far below fp32's end.
inline constexpr float kFarAbove = 12.0F;

// The rows of the table that the same compiled kernels are. Groups of fewer keys are more units, and other bits.
struct LatentRow {
  std::string_view name;
  int group_tiles;  // a power of two
};
inline constexpr LatentRow kLatentRow{"sm90_latent", kGroupTiles};  // groups of 4,096 keys
inline constexpr LatentRow kLatentShortRow{"sm90_latent_1k", 1024 / kLatentTile};

// See KernelRow::missing and KernelRow::configs.
std::vector<std::string> latent_missing(const DecodeSpec& spec);
std::vector<std::string> latent_configs(const LatentRow& row);

}  // namespace ringattn::sm90
