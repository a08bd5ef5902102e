// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/sm90/sm90_linear.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/linear/cuda/cuda_linear.hpp"
#include "kernels/linear/sm90/linear_kernels.hpp"

namespace ringattn::sm90 {

namespace {

using cuda::LinearGemm;

constexpr std::int64_t kLinearElementBytes = 2;
constexpr std::int32_t kSwizzlePairs = 8;  // bench/notes/linear.md: 4 to 16 are alike

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
  FewRowsConfig config;
  while (config.rows < rows) config.rows *= 2;
  config.gated = gemm.gated;
  // Tiles of 128 columns load x half as often. Tiles of 64 divide better over CTAs if there are few of them.
  const std::int64_t chains = (gemm.columns + 127) / 128 * gemm.chains.count;
  config.warpgroups = !gemm.gated && chains >= 2 * gemm.multiprocessors ? 2 : 1;
  return config;
}

// Tiles of columns, and CTAs that share them.
struct FewRowsGrid {
  std::int32_t tiles;
  int ctas;
};
FewRowsGrid few_rows_grid(const LinearGemm& gemm, const FewRowsConfig& config) {
  const std::int32_t tiles = (gemm.columns + config.columns() - 1) / config.columns();
  return {tiles,
          static_cast<int>(std::min<std::int64_t>(gemm.multiprocessors, std::int64_t{tiles} * gemm.chains.count))};
}

void enqueue_few_rows(const LinearGemm& gemm, const FewRowsConfig& config, Stream stream) {
  FewRowsParams p{};
  p.gemm = gemm;
  const FewRowsGrid grid = few_rows_grid(gemm, config);
  p.tiles = grid.tiles;
  for (int chain = 0; chain < gemm.chains.count; ++chain) {
    p.tile_blocks +=
        (gemm.chains.end(chain) - gemm.chains.begin(chain) + cuda::kPanelColumns - 1) / cuda::kPanelColumns;
  }
  p.x = map_tensor(mapped_x(gemm), gemm.dtype, config.rows, cuda::kPanelColumns);
  for (int m = 0; m < config.matrices(); ++m) {
    p.weights[m] = map_tensor(mapped_weights(gemm, m), gemm.dtype, 64, cuda::kPanelColumns);
  }
  p.counters = reinterpret_cast<std::uint32_t*>(gemm.scratch);
  p.sums = reinterpret_cast<float4*>(gemm.scratch + kCounterBytes);
  launcher_of(gemm.dtype).few_rows(p, config, grid.ctas, stream);
}

// Pairs of CTAs, of which each computes two tiles at a time.
std::int64_t tile_pairs(const LinearGemm& gemm, const ManyRowsConfig& config, bool shares_weights) {
  const std::int64_t pair_rows = shares_weights ? 2 * ManyRowsConfig::kRows : ManyRowsConfig::kRows;
  const std::int64_t pair_columns = shares_weights ? config.columns() : 2 * config.columns();
  return (gemm.rows + pair_rows - 1) / pair_rows * ((gemm.columns + pair_columns - 1) / pair_columns);
}

const ManyRowsConfig& choose_many_rows(const LinearGemm& gemm, bool shares_weights) {
  if (gemm.chains.leaves) return gemm.gated ? kGatedLeafTiles : kLeafTiles;
  if (gemm.gated) return kGatedTiles;
  // The slower of the two has more waves of tiles. A wide tile takes 1.45 times as long as a narrow one.
  const std::int64_t pairs = gemm.multiprocessors / 2;
  const auto waves = [&](const ManyRowsConfig& config) {
    return (tile_pairs(gemm, config, shares_weights) + pairs - 1) / pairs;
  };
  return waves(kNarrowTiles) * 100 <= waves(kWideTiles) * 145 ? kNarrowTiles : kWideTiles;
}

void enqueue_many_rows(const LinearGemm& gemm, const ManyRowsConfig& config, bool shares_weights, Stream stream) {
  ManyRowsParams p{};
  p.gemm = gemm;
  p.shares_weights = shares_weights;
  p.swizzle = kSwizzlePairs;
  p.x = map_tensor(mapped_x(gemm), gemm.dtype, ManyRowsConfig::kRows / 2, cuda::kPanelColumns);
  for (int m = 0; m < (gemm.gated ? 2 : 1); ++m) {
    p.weights[m] = map_tensor(mapped_weights(gemm, m), gemm.dtype, config.sums / 2, cuda::kPanelColumns);
  }
  const MappedTensor y = mapped_matrix(gemm.out, gemm.rows, gemm.columns, gemm.out_stride);
  p.stores_by_tma = !gemm.writes_sums && can_map(y);
  if (p.stores_by_tma) p.y = map_tensor(y, gemm.dtype, 64, cuda::kPanelColumns);
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
    bytes = std::max(bytes, kCounterBytes + static_cast<std::size_t>(std::min(grid.ctas, grid.tiles)) *
                                                static_cast<std::size_t>(gemm.chains.count * config.sums_bytes()));
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
  return {fmt::format("up to {} rows: tiles of 64 or 128 columns, chains of K divided over CTAs", kFewRows),
          fmt::format("more rows: {}; or {}", describe(kNarrowTiles), describe(kWideTiles)),
          fmt::format("gated: {}", describe(kGatedTiles)), fmt::format("row-parallel: {}", describe(kLeafTiles)),
          "rows not aligned to 16 bytes: as sm80_linear"};
}

std::unique_ptr<LinearKernel> make_linear(const LinearSpec& spec, Backend& backend) {
  return cuda::make_cuda_linear(spec, kHopperLinear, backend);
}

}  // namespace ringattn::sm90
