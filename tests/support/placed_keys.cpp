// SPDX-License-Identifier: Apache-2.0
#include "tests/support/placed_keys.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace ringattn::testing {

namespace {

// In pages. The entries of pieces without keys are of no source.
CachedKeyRun place_in_pages(const AttentionInputs& inputs, const PageLayout& layout, int key_tile) {
  CachedKeyRun keys;
  keys.pool.emplace(inputs.sequences, layout);
  keys.k = {keys.pool->fill(inputs, inputs.k, inputs.spec.head_dim)};
  keys.v = {keys.pool->fill(inputs, inputs.v, inputs.spec.head_dim_v)};
  keys.pieces = page_runs_per_tile(key_tile, layout.page_size);
  const int piece_keys = key_tile / keys.pieces;
  const std::int64_t page_rows = pool_source(keys.pool->view(nullptr, inputs.spec, inputs.spec.head_dim),
                                             keys.pool->view(nullptr, inputs.spec, inputs.spec.head_dim_v))
                                     .page_rows;
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    const std::int64_t length = inputs.sequences[s].k_len;
    const auto place = [&](std::int64_t key) {
      if (key >= length) return PageRun{0x40000000, 0};
      return PageRun{0, keys.pool->page(s, key / layout.page_size) * page_rows + key % layout.page_size};
    };
    for (std::int64_t begin = 0; begin < length; begin += key_tile) {
      PlacedTile& tile =
          keys.tiles.emplace_back(PlacedTile{static_cast<std::int32_t>(s), begin / key_tile, place(begin)});
      for (int i = 1; i < keys.pieces; ++i) tile.more_pieces.push_back(place(begin + i * piece_keys));
    }
  }
  return keys;
}

// Places the keys of these tiles, whose places are those in `inputs`.
CachedKeyRun place_tiles(const AttentionInputs& inputs, const Arrangement& arrangement, int key_tile,
                         std::vector<PlacedTile> tiles) {
  CachedKeyRun keys;
  keys.tiles = std::move(tiles);
  if (arrangement.shuffle == 0) {
    keys.k = {inputs.k};
    keys.v = {inputs.v};
    return keys;
  }
  const Dtype dtype = inputs.spec.dtype;
  const auto k_row = static_cast<std::size_t>(inputs.spec.kv_heads * inputs.spec.head_dim) * size_of(dtype);
  const auto v_row = static_cast<std::size_t>(inputs.spec.kv_heads * inputs.spec.head_dim_v) * size_of(dtype);
  std::vector<std::byte> behind(static_cast<std::size_t>(key_tile) * std::max(k_row, v_row));
  for (std::size_t at = 0; at < behind.size(); at += size_of(dtype)) {
    store_element(behind.data() + at, dtype, arrangement.behind);
  }
  const auto append_after = [&](std::vector<std::byte>& rows, std::size_t row_bytes) {
    const std::size_t bytes = static_cast<std::size_t>(key_tile) * row_bytes;
    rows.insert(rows.end(), behind.begin(), behind.begin() + static_cast<std::ptrdiff_t>(bytes));
  };
  keys.k.resize(arrangement.sources);
  keys.v.resize(arrangement.sources);
  const std::size_t most_rows = (keys.tiles.size() / arrangement.sources + 1) * 2 * static_cast<std::size_t>(key_tile);
  for (std::vector<std::byte>& k : keys.k) k.reserve(most_rows * k_row);
  for (std::vector<std::byte>& v : keys.v) v.reserve(most_rows * v_row);
  const std::vector<std::size_t> order = shuffled(keys.tiles.size(), arrangement.shuffle + 1);
  for (std::size_t n = 0; n < order.size(); ++n) {
    PlacedTile& tile = keys.tiles[order[n]];
    const std::int64_t length = inputs.sequences[static_cast<std::size_t>(tile.sequence)].k_len;
    const auto rows = static_cast<std::size_t>(std::min<std::int64_t>(key_tile, length - tile.tile * key_tile));
    const auto from = static_cast<std::size_t>(tile.place.row);
    std::vector<std::byte>& k = keys.k[n % arrangement.sources];
    std::vector<std::byte>& v = keys.v[n % arrangement.sources];
    tile.place = {static_cast<std::int32_t>(n % arrangement.sources), static_cast<std::int64_t>(k.size() / k_row)};
    k.insert(k.end(), inputs.k.begin() + static_cast<std::ptrdiff_t>(from * k_row),
             inputs.k.begin() + static_cast<std::ptrdiff_t>((from + rows) * k_row));
    v.insert(v.end(), inputs.v.begin() + static_cast<std::ptrdiff_t>(from * v_row),
             inputs.v.begin() + static_cast<std::ptrdiff_t>((from + rows) * v_row));
    // A neighbour that must not be read.
    append_after(k, k_row);
    append_after(v, v_row);
  }
  return keys;
}

// All tiles, at their places in `inputs`.
std::vector<PlacedTile> tiles_of(const AttentionInputs& inputs, int key_tile) {
  std::vector<PlacedTile> tiles;
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    for (std::int64_t begin = 0; begin < inputs.sequences[s].k_len; begin += key_tile) {
      tiles.push_back({static_cast<std::int32_t>(s), begin / key_tile, {0, inputs.k_begin(s) + begin}});
    }
  }
  return tiles;
}

}  // namespace

std::vector<std::size_t> shuffled(std::size_t count, std::uint64_t seed) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937_64 generator(seed);
  if (seed != 0) std::shuffle(order.begin(), order.end(), generator);
  return order;
}

CachedKeyRun place_keys(const AttentionInputs& inputs, const Arrangement& arrangement, int key_tile) {
  if (arrangement.pages.page_size > 0) return place_in_pages(inputs, arrangement.pages, key_tile);
  return place_tiles(inputs, arrangement, key_tile, tiles_of(inputs, key_tile));
}

std::vector<CachedKeyRun> place_kv_splits(const AttentionInputs& inputs, const Arrangement& arrangement, int key_tile) {
  std::vector<CachedKeyRun> kv_splits;
  for (std::uint64_t number = 0;; ++number) {
    std::vector<PlacedTile> tiles = tiles_of(inputs, key_tile);
    std::erase_if(tiles, [&](const PlacedTile& tile) {
      return tile.tile / kTilesPerKvSplit != static_cast<std::int64_t>(number);
    });
    if (tiles.empty()) return kv_splits;
    const std::size_t sources = std::min<std::size_t>(1 + number % kMaxSourcesApart, tiles.size());
    kv_splits.push_back(
        place_tiles(inputs, {.shuffle = arrangement.apart + number, .sources = sources}, key_tile, std::move(tiles)));
  }
}

}  // namespace ringattn::testing
