// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/sm90/sm90_linear.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/linear/cuda/cuda_linear.hpp"
#include "kernels/linear/sm90/linear_kernels.hpp"

namespace ringattn::sm90 {

namespace {

using cuda::LinearGemm;

constexpr std::int64_t kLinearElementBytes = 2;
constexpr int kPrefetchedBytes = 80 * 1024;  // of weights by a CTA, which it loads next
constexpr std::int32_t kSwizzlePairs = 8;    // bench/notes/linear.md: 4 to 16 are alike

MappedTensor mapped_matrix(const char* data, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  // The stride of a single row has no meaning, but a tensor map needs a valid one.
  const std::int64_t elements = rows == 1 ? (columns + 7) / 8 * 8 : stride / kLinearElementBytes;
  return {data, rows, 1, columns, elements, elements};
}
MappedTensor mapped_x(const LinearGemm& gemm) {
  return mapped_matrix(gemm.x, gemm.rows, gemm.chains.features, gemm.x_stride);
}
MappedTensor mapped_weights(const LinearGemm& gemm, int matrix) {
  return mapped_matrix(gemm.weights[matrix], gemm.columns, gemm.chains.features, gemm.weight_strides[matrix]);
}

bool can_read_by_tma(const LinearGemm& gemm) {
  return gemm.chains.features > 0 && can_map(mapped_x(gemm)) && can_map(mapped_weights(gemm, 0)) &&
         (!gemm.gated || can_map(mapped_weights(gemm, 1)));
}

bool has_few_rows(const LinearGemm& gemm, std::int64_t rows) {
  return rows <= kFewRows && gemm.chains.count <= kMaxFewRowsChains && !(gemm.gated && gemm.chains.leaves);
}

const HopperLinearLauncher& launcher_of(Dtype dtype) { return dtype == Dtype::kBf16 ? linear_bf16 : linear_fp16; }

FewRowsConfig choose_few_rows(const LinearGemm& gemm, std::int64_t rows) {
  FewRowsConfig config{8, gemm.gated, gemm.chains.leaves};
  while (config.rows < rows) config.rows *= 2;
  return config;
}

// How tiles of columns divide over CTAs.
struct FewRowsGrid {
  int tile_columns;
  int tiles;  // or pairs, of a cluster
  int ctas;
  bool shares_tiles;

  int slots(const FewRowsConfig& config) const { return shares_tiles ? std::min(tiles * config.cluster(), ctas) : 0; }
};
FewRowsGrid few_rows_grid(const LinearGemm& gemm, const FewRowsConfig& config) {
  const int clusters = std::max(1, gemm.multiprocessors / config.cluster());
  const auto divide_up = [](std::int64_t whole, std::int64_t part) { return (whole + part - 1) / part; };
  const std::int64_t ctas = std::int64_t{clusters} * config.cluster();
  // Each CTA has the same number of tiles if the tiles then have enough columns, since x is loaded once per tile.
  // Otherwise CTAs share tiles of kSharedColumns.
  constexpr std::int64_t kSharedColumns = 64, kMinColumns = 16;
  const std::int64_t tiles_of_cta = divide_up(gemm.columns, ctas * FewRowsConfig::kMaxColumns);
  const std::int64_t even = divide_up(divide_up(gemm.columns, ctas * tiles_of_cta), 8) * 8;
  FewRowsGrid grid{};
  grid.shares_tiles = even < kSharedColumns && gemm.chains.count > 1;
  grid.tile_columns = static_cast<int>(grid.shares_tiles ? kSharedColumns : std::max(even, kMinColumns));
  grid.tiles = static_cast<int>(divide_up(gemm.columns, std::int64_t{grid.tile_columns} * config.cluster()));
  const std::int64_t parts =
      grid.shares_tiles ? std::int64_t{grid.tiles} * gemm.chains.count : divide_up(grid.tiles, tiles_of_cta);
  grid.ctas = static_cast<int>(std::min<std::int64_t>(clusters, parts)) * config.cluster();
  return grid;
}

void enqueue_few_rows(const LinearGemm& gemm, const FewRowsConfig& config, Stream stream) {
  FewRowsParams p{};
  p.gemm = gemm;
  const FewRowsGrid grid = few_rows_grid(gemm, config);
  p.tile_columns = grid.tile_columns;
  p.warpgroups = (grid.tile_columns + 63) / 64;
  p.stages = config.stages(grid.tile_columns);
  p.prefetched_blocks =
      std::min(p.stages, kPrefetchedBytes / (config.stage_bytes(grid.tile_columns) - config.row_bytes()));
  p.tiles = grid.tiles;
  p.shares_tiles = grid.shares_tiles;
  for (int chain = 0; chain < gemm.chains.count; ++chain) {
    p.tile_blocks +=
        (gemm.chains.end(chain) - gemm.chains.begin(chain) + cuda::kPanelColumns - 1) / cuda::kPanelColumns;
  }
  p.x = map_matrix(mapped_x(gemm), gemm.dtype, config.rows / config.cluster());
  for (int m = 0; m < config.matrices(); ++m) {
    p.weights[m] = map_matrix(mapped_weights(gemm, m), gemm.dtype, grid.tile_columns);
  }
  p.counters = reinterpret_cast<std::uint32_t*>(gemm.scratch);
  p.sums = reinterpret_cast<float4*>(gemm.scratch + kCounterBytes);
  launcher_of(gemm.dtype).few_rows(p, config, grid.ctas, stream);
}

// Pairs of CTAs. Each pair computes two tiles at a time.
std::int64_t tile_pairs(const LinearGemm& gemm, const ManyRowsConfig& config, bool shares_weights) {
  const std::int64_t pair_rows = shares_weights ? 2 * ManyRowsConfig::kRows : ManyRowsConfig::kRows;
  const std::int64_t pair_columns = shares_weights ? config.columns() : 2 * config.columns();
  return (gemm.rows + pair_rows - 1) / pair_rows * ((gemm.columns + pair_columns - 1) / pair_columns);
}

// A tile, and its time relative to that of the narrowest one (bench/notes/linear.md).
struct TimedTile {
  const ManyRowsConfig& config;
  std::int64_t time;
};
constexpr TimedTile kTimedTiles[] = {{kNarrowTiles, 100}, {kWideTiles, 142}, {kWidestTiles, 192}};
constexpr TimedTile kTimedGatedTiles[] = {{kGatedTiles, 100}, {kWideGatedTiles, 183}};

// The tile whose waves take the least time. If several do, the narrowest of them.
const ManyRowsConfig& choose_many_rows(const LinearGemm& gemm, bool shares_weights) {
  if (gemm.chains.leaves) return gemm.gated ? kGatedLeafTiles : kLeafTiles;
  const std::int64_t pairs = gemm.multiprocessors / 2;
  const auto time = [&](const TimedTile& tile) {
    return (tile_pairs(gemm, tile.config, shares_weights) + pairs - 1) / pairs * tile.time;
  };
  const std::span<const TimedTile> tiles = gemm.gated ? std::span<const TimedTile>(kTimedGatedTiles) : kTimedTiles;
  return std::ranges::min_element(tiles, {}, time)->config;
}

void enqueue_many_rows(const LinearGemm& gemm, const ManyRowsConfig& config, bool shares_weights, Stream stream) {
  ManyRowsParams p{};
  p.gemm = gemm;
  p.shares_weights = shares_weights;
  p.swizzle = kSwizzlePairs;
  p.x = map_matrix(mapped_x(gemm), gemm.dtype, shares_weights ? ManyRowsConfig::kRows : ManyRowsConfig::kRows / 2);
  for (int m = 0; m < (gemm.gated ? 2 : 1); ++m) {
    p.weights[m] = map_matrix(mapped_weights(gemm, m), gemm.dtype, config.sums / 2);
  }
  const MappedTensor y = mapped_matrix(gemm.out, gemm.rows, gemm.columns, gemm.out_stride);
  // TMA stores units of 16 bytes. If a row ends within one, TMA would overwrite the bytes after the row.
  p.stores_by_tma = !gemm.writes_sums && gemm.columns * kLinearElementBytes % 16 == 0 && can_map(y);
  if (p.stores_by_tma) p.y = map_matrix(y, gemm.dtype, 64);
  const std::int64_t pairs = std::min<std::int64_t>(tile_pairs(gemm, config, shares_weights), gemm.multiprocessors / 2);
  launcher_of(gemm.dtype).many_rows(p, config, static_cast<int>(2 * pairs), stream);
}

std::size_t hopper_scratch_bytes(const LinearGemm& gemm, std::int64_t rows) {
  std::size_t bytes = 0;
  for (int few = 8; few <= kFewRows; few *= 2) {
    if (few / 2 >= rows && few > 8) break;
    if (!has_few_rows(gemm, few)) continue;
    const FewRowsConfig config = choose_few_rows(gemm, few);
    const FewRowsGrid grid = few_rows_grid(gemm, config);
    if (!grid.shares_tiles) continue;
    bytes = std::max(bytes, kCounterBytes + static_cast<std::size_t>(grid.slots(config)) *
                                                static_cast<std::size_t>(gemm.chains.count) *
                                                static_cast<std::size_t>(config.sums_bytes(grid.tile_columns)));
  }
  return bytes;
}

void enqueue_linear(const LinearGemm& gemm, Stream stream) {
  if (!can_read_by_tma(gemm)) return cuda::mma_linear.launch(gemm, stream);
  if (has_few_rows(gemm, gemm.rows)) return enqueue_few_rows(gemm, choose_few_rows(gemm, gemm.rows), stream);
  const bool shares_weights = gemm.rows > ManyRowsConfig::kRows;
  enqueue_many_rows(gemm, choose_many_rows(gemm, shares_weights), shares_weights, stream);
}

constinit const cuda::LinearLauncher kHopperLinear = {[](Dtype dtype) {
                                                        launcher_of(dtype).prepare();
                                                        cuda::mma_linear.prepare(dtype);
                                                      },
                                                      hopper_scratch_bytes, enqueue_linear};

std::string describe(const ManyRowsConfig& config) {
  return fmt::format("tile {}x{}, 2 warpgroups, {} stages, {:.1f} KiB, CTAs in pairs", ManyRowsConfig::kRows,
                     config.columns(), config.stages, static_cast<double>(config.shared_bytes()) / 1024.0);
}

}  // namespace

std::vector<std::string> linear_configs() {
  return {fmt::format("up to {} rows: tiles of up to {} columns, divided evenly over CTAs", kFewRows,
                      FewRowsConfig::kMaxColumns),
          fmt::format("more rows: {}; {}; or {}", describe(kNarrowTiles), describe(kWideTiles), describe(kWidestTiles)),
          fmt::format("gated: {}; or {}", describe(kGatedTiles), describe(kWideGatedTiles)),
          fmt::format("row-parallel: {}", describe(kLeafTiles)), "rows not aligned to 16 bytes: as sm80_linear"};
}

std::unique_ptr<LinearKernel> make_linear(const LinearSpec& spec, Backend& backend) {
  return cuda::make_cuda_linear(spec, kHopperLinear, backend);
}

}  // namespace ringattn::sm90
