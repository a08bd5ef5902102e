// SPDX-License-Identifier: Apache-2.0
// Tile sizes, limits and kernel-table rows of `sm90_mla` and `sm90_mla_split1k`. Both decode in the absorbed form of
// MLA: all query heads share the key rows [c, k_r], and the values are the first columns of these rows.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention/merge.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/sm90/config.hpp"

namespace ringattn::sm90 {

inline constexpr int kLatentDim = 576;   // columns of a key row: latent c and rotary key k_r
inline constexpr int kLatentDimV = 512;  // columns of a value row: the latent c
inline constexpr int kMlaKeyTile = 64;   // keys per tile
inline constexpr int kMlaStages = 2;     // pipeline stages, one tile each
// Column parts of a tile, each with its own full barrier: 4 of 128 latent columns, and the rotary keys.
inline constexpr int kMlaTileParts = 5;
inline constexpr int kMlaConsumerThreads = 256;
inline constexpr int kMlaThreads = kMlaConsumerThreads + 128;
// Sum of the registers per thread of the three warpgroups at launch. setmaxnreg redistributes them.
inline constexpr int kMlaRegisters = 3 * 168;
// With more work tiles than this, CTA groups share tiles between two row blocks. Otherwise the loads could need nearly
// all of the L2 bandwidth.
inline constexpr int kMaxCtaGroupWorkTiles = 8;
inline constexpr int kMaxMlaSequences = 256;  // per launch: each CTA keeps an int32 per sequence in shared memory

// Row format of the FP8 latent cache.
inline constexpr RowFormat kFp8LatentFormat{.encoding = RowEncoding::kLatent, .rope = kLatentDim - kLatentDimV};

// Rescale threshold in log2 units. Probabilities of a tile are at most 2^12, so the sum over a KV split cannot overflow
// fp32.
inline constexpr float kMlaRescaleThreshold = 12.0F;

// A row of the kernel table. Both rows use the same compiled kernels. Shorter KV splits give more work tiles, and other
// bits.
struct MlaVariant {
  std::string_view name;
  int tiles_per_kv_split;  // a power of two
};
inline constexpr MlaVariant kMlaVariant{"sm90_mla", kTilesPerKvSplit};  // KV splits of 4,096 keys
inline constexpr MlaVariant kMlaSplit1kVariant{"sm90_mla_split1k", 1024 / kMlaKeyTile};

// See KernelRow::missing and KernelRow::configs.
std::vector<std::string> mla_missing(const DecodeSpec& spec);
std::vector<std::string> mla_configs(const MlaVariant& variant);

}  // namespace ringattn::sm90
