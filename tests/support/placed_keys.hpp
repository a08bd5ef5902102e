// SPDX-License-Identifier: Apache-2.0
// Where the key tiles of AttentionInputs lie for an Arrangement: in one array, scattered over sources, or in pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/attention_runner.hpp"
#include "tests/support/page_pool.hpp"

namespace ringattn::testing {

inline constexpr std::int64_t kMaxSourcesApart = 5;  // of a KV split that is computed separately

// 0 … count − 1 in an order of the seed; 0: ascending.
std::vector<std::size_t> shuffled(std::size_t count, std::uint64_t seed);

struct PlacedTile {
  std::int32_t sequence;
  std::int64_t tile;
  PageRun place;                       // of the first piece
  std::vector<PageRun> more_pieces{};  // of the others
};

// All tiles ascending by (sequence, tile), and the sources that hold them, as host bytes.
struct CachedKeyRun {
  std::vector<PlacedTile> tiles;
  std::vector<std::vector<std::byte>> k;
  std::vector<std::vector<std::byte>> v;
  std::optional<PagePool> pool;  // what the one source is, where keys lie in pages
  int pieces = 1;                // of a tile
};

CachedKeyRun place_keys(const AttentionInputs& inputs, const Arrangement& arrangement, int key_tile);

// All tiles by KV splits, each with sources of its own, which hold no other keys.
std::vector<CachedKeyRun> place_kv_splits(const AttentionInputs& inputs, const Arrangement& arrangement, int key_tile);

}  // namespace ringattn::testing
