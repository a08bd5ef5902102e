// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/cpu/cpu_conv1d.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/rank_liveness.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/common/token_units.hpp"
#include "kernels/ssm/cpu/ssm_ops.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr std::int64_t kBlockRows = 64;           // rows of a run per work item
constexpr std::int64_t kRowsInFp32 = 16;          // rows that a thread has in fp32 at once: in its L2 cache
constexpr std::int64_t kBlocksPerHeartbeat = 64;  // per thread, between heartbeats

class CpuConv1d final : public CausalConv1dKernel {
 public:
  CpuConv1d(const CausalConv1dSpec& spec, const CpuBackend& backend)
      : spec_(spec), tile_ops_(backend.tile_ops()), ops_(best_ssm_ops()), threads_(backend.threads()) {}

  void convolve(const CausalConv1dTask& task, Stream, const Progress& progress) override {
    check_causal_conv1d_task(spec_, task);
    const std::vector<float> weights = by_width(task.weight);
    struct RowBlock {
      const CausalConv1dRun* run;
      std::int64_t begin;  // of the run
    };
    std::vector<RowBlock> blocks;
    for (const CausalConv1dRun& run : task.runs) {
      for (std::int64_t begin = 0; begin < run.tokens; begin += kBlockRows) blocks.push_back({&run, begin});
    }
    const auto count = static_cast<std::int64_t>(blocks.size());
    const std::int64_t at_once = kBlocksPerHeartbeat * threads_;
    for (std::int64_t first = 0; first < count; first += at_once) {
      heartbeat();
      if (progress) progress();
      const std::int64_t end = std::min(count, first + at_once);
#pragma omp parallel num_threads(threads_)
      {
        // Once for a thread, not for each block: the allocator returns large memory to the system, and new pages took
        // half of the time.
        std::vector<float> x(static_cast<std::size_t>((kRowsInFp32 + spec_.halo_tokens()) * spec_.channels));
        std::vector<float> y(static_cast<std::size_t>(spec_.channels));
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = first; i < end; ++i) {
          const RowBlock& block = blocks[static_cast<std::size_t>(i)];
          const std::int64_t block_end = std::min(block.run->tokens, block.begin + kBlockRows);
          for (std::int64_t token = block.begin; token < block_end; token += kRowsInFp32) {
            convolve_rows(task, *block.run, token, std::min(kRowsInFp32, block_end - token), weights, x.data(),
                          y.data());
          }
        }
      }
    }
    for (const CausalConv1dRun& run : task.runs) keep_halo(task.x, run);
  }

  void update(const CausalConv1dUpdate& update, Stream) override {
    check_causal_conv1d_update(spec_, update);
    const std::vector<float> weights = by_width(update.weight);
    const auto row_bytes = static_cast<std::size_t>(spec_.channels) * size_of(spec_.dtype);
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t s = 0; s < update.x.tokens; ++s) {
      const std::int64_t slot = update.slots == nullptr ? s : update.slots[s];
      if (slot < 0) {
        std::memset(update.y.at(s, 0), 0, row_bytes);
        continue;
      }
      auto* const halo = static_cast<std::byte*>(update.halos) + slot * spec_.halo_bytes();
      std::vector<float> x(static_cast<std::size_t>(spec_.width * spec_.channels));
      tile_ops_.widen(halo, spec_.dtype, spec_.halo_tokens() * spec_.channels, x.data());
      widen_row(tile_ops_, update.x, s, 0, spec_.channels, x.data() + spec_.halo_tokens() * spec_.channels);
      std::memmove(halo, halo + row_bytes, static_cast<std::size_t>(spec_.halo_tokens() - 1) * row_bytes);
      std::memcpy(halo + static_cast<std::size_t>(spec_.halo_tokens() - 1) * row_bytes, update.x.at(s, 0), row_bytes);
      std::vector<float> y(static_cast<std::size_t>(spec_.channels));
      ops_.convolve(spec_.channels, spec_.width, x.data(), weights.data(), update.bias, spec_.silu, y.data());
      narrow_row(ops_, y.data(), spec_.channels, spec_.dtype, update.y.at(s, 0));
    }
  }

  void differentiate(const CausalConv1dGradientTask& task, Stream, const Progress& progress) override {
    check_causal_conv1d_gradient(spec_, task);
    const std::vector<float> weights = by_width(task.weight);
    struct Unit {
      const CausalConv1dGradientRun* run;
      std::int64_t begin;  // of the run
    };
    std::vector<Unit> units;
    for (const CausalConv1dGradientRun& run : task.runs) {
      for (std::int64_t begin = 0; begin < run.tokens; begin += kTokenUnit) units.push_back({&run, begin});
    }
    const auto count = static_cast<std::int64_t>(units.size());
    for (std::int64_t first = 0; first < count; first += threads_) {
      heartbeat();
      if (progress) progress();
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
      for (std::int64_t i = first; i < std::min(count, first + threads_); ++i) {
        const Unit& unit = units[static_cast<std::size_t>(i)];
        float* const sums = task.units + i * (spec_.width + 1) * spec_.channels;
        GradientTile tile(spec_);
        const std::int64_t end = std::min(unit.run->tokens, unit.begin + kTokenUnit);
        for (std::int64_t begin = unit.begin; begin < end; begin += kConv1dGradientTile) {
          differentiate_tile(task, *unit.run, begin, std::min(end, begin + kConv1dGradientTile), weights, tile);
          add_tile(tile, begin == unit.begin, sums);
        }
      }
    }
    for (const CausalConv1dGradientRun& run : task.runs) differentiate_halo(task, run, weights);
  }

  void sum_units(const CausalConv1dUnitSum& sum, Stream) override {
    const auto sum_of = [&](std::int64_t row, std::int64_t channel) {
      float total = 0.0F;
      for (std::int64_t unit = 0; unit < sum.count; ++unit) {
        const float value = sum.units[(unit * (spec_.width + 1) + row) * sum.channels + channel];
        total = unit == 0 ? value : total + value;
      }
      return total;
    };
    for (std::int64_t channel = 0; channel < sum.channels; ++channel) {
      for (int k = 0; k < spec_.width; ++k) sum.dweight[channel * spec_.width + k] = sum_of(k, channel);
      if (sum.dbias != nullptr) sum.dbias[channel] = sum_of(spec_.width, channel);
    }
  }

 private:
  // Tokens [begin − halo, end + halo) of a tile in fp32.
  struct GradientTile {
    explicit GradientTile(const CausalConv1dSpec& spec)
        : x(static_cast<std::size_t>((kConv1dGradientTile + 2 * spec.halo_tokens()) * spec.channels)),
          g(static_cast<std::size_t>((kConv1dGradientTile + spec.halo_tokens()) * spec.channels)),
          row(static_cast<std::size_t>(spec.channels)),
          sums(static_cast<std::size_t>((spec.width + 1) * spec.channels)) {}

    std::vector<float> x;     // from begin − halo
    std::vector<float> g;     // from begin
    std::vector<float> row;   // of dx
    std::vector<float> sums;  // [width + 1, channels]
  };

  // g of tokens [begin, end) of a run, of which [begin − halo, end) are in `x`. `end` may be after the run.
  void load_gradients(const CausalConv1dGradientTask& task, const CausalConv1dGradientRun& run, std::int64_t begin,
                      std::int64_t end, const std::vector<float>& weights, GradientTile& tile) const {
    const auto row_bytes = static_cast<std::int64_t>(size_of(spec_.dtype)) * spec_.channels;
    const auto after = [&](const void* next, std::int64_t token) {
      return static_cast<const std::byte*>(next) + (token - run.tokens) * row_bytes;
    };
    for (std::int64_t t = begin - spec_.halo_tokens(); t < end; ++t) {
      float* const x = tile.x.data() + (t - begin + spec_.halo_tokens()) * spec_.channels;
      const std::byte* const source =
          t < run.tokens ? token_at(task.x, {run.row, run.tokens, run.initial_halo}, t) : after(run.next_x, t);
      if (source == nullptr) {
        std::fill_n(x, spec_.channels, 0.0F);
      } else {
        tile_ops_.widen(source, spec_.dtype, spec_.channels, x);
      }
    }
    for (std::int64_t t = begin; t < end; ++t) {
      float* const g = tile.g.data() + (t - begin) * spec_.channels;
      tile_ops_.widen(t < run.tokens ? task.dy.at(run.row + t, 0) : after(run.next_dy, t), spec_.dtype, spec_.channels,
                      g);
      if (!spec_.silu) continue;
      ops_.convolve_gradient(spec_.channels, spec_.width, tile.x.data() + (t - begin) * spec_.channels, weights.data(),
                             task.bias, g, g);
    }
  }

  // The gradient of token `s`, from g of tokens [begin, end) of the run.
  void token_gradient(const CausalConv1dGradientRun& run, std::int64_t s, std::int64_t begin, std::int64_t end,
                      const std::vector<float>& weights, GradientTile& tile, std::byte* to) const {
    const std::int64_t in_final = s - (run.tokens + run.next_tokens - spec_.halo_tokens());
    if (run.dfinal_halo != nullptr && in_final >= 0) {
      const std::int64_t bytes = in_final * spec_.channels * static_cast<std::int64_t>(size_of(spec_.dtype));
      tile_ops_.widen(static_cast<const std::byte*>(run.dfinal_halo) + bytes, spec_.dtype, spec_.channels,
                      tile.row.data());
    } else {
      std::ranges::fill(tile.row, 0.0F);
    }
    for (std::int64_t t = std::max(begin, s); t < std::min(end, s + spec_.width); ++t) {
      const float* const g = tile.g.data() + (t - begin) * spec_.channels;
      ops_.add_product(spec_.channels, weights.data() + (spec_.width - 1 - (t - s)) * spec_.channels, g,
                       tile.row.data());
    }
    narrow_row(ops_, tile.row.data(), spec_.channels, spec_.dtype, to);
  }

  void differentiate_tile(const CausalConv1dGradientTask& task, const CausalConv1dGradientRun& run, std::int64_t begin,
                          std::int64_t end, const std::vector<float>& weights, GradientTile& tile) const {
    const std::int64_t last = std::min(end + spec_.halo_tokens(), run.tokens + run.next_tokens);
    load_gradients(task, run, begin, last, weights, tile);
    std::ranges::fill(tile.sums, 0.0F);
    for (std::int64_t t = begin; t < end; ++t) {
      const float* const g = tile.g.data() + (t - begin) * spec_.channels;
      for (int k = 0; k < spec_.width; ++k) {
        ops_.add_product(spec_.channels, tile.x.data() + (t - begin + k) * spec_.channels, g,
                         tile.sums.data() + k * spec_.channels);
      }
      float* const dbias = tile.sums.data() + spec_.width * spec_.channels;
      for (int c = 0; c < spec_.channels; ++c) dbias[c] += g[c];
      token_gradient(run, t, begin, last, weights, tile, task.dx.at(run.row + t, 0));
    }
  }

  void add_tile(const GradientTile& tile, bool first, float* sums) const {
    if (first) {
      std::ranges::copy(tile.sums, sums);
    } else {
      for (std::size_t i = 0; i < tile.sums.size(); ++i) sums[i] += tile.sums[i];
    }
  }

  void differentiate_halo(const CausalConv1dGradientTask& task, const CausalConv1dGradientRun& run,
                          const std::vector<float>& weights) const {
    if (run.dinitial_halo == nullptr) return;
    GradientTile tile(spec_);
    const std::int64_t last = std::min<std::int64_t>(spec_.halo_tokens(), run.tokens + run.next_tokens);
    load_gradients(task, run, 0, last, weights, tile);
    auto* to = static_cast<std::byte*>(run.dinitial_halo);
    for (std::int64_t s = -spec_.halo_tokens(); s < 0; ++s) {
      token_gradient(run, s, 0, last, weights, tile, to);
      to += static_cast<std::size_t>(spec_.channels) * size_of(spec_.dtype);
    }
  }

  // Rows [begin, begin + tokens) of a run. `x`: [tokens + halo, channels], `y`: [channels].
  void convolve_rows(const CausalConv1dTask& task, const CausalConv1dRun& run, std::int64_t begin, std::int64_t tokens,
                     const std::vector<float>& weights, float* x, float* y) const {
    for (std::int64_t t = -spec_.halo_tokens(); t < tokens; ++t) {
      load(task.x, run, begin + t, x + (t + spec_.halo_tokens()) * spec_.channels);
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      ops_.convolve(spec_.channels, spec_.width, x + t * spec_.channels, weights.data(), task.bias, spec_.silu, y);
      narrow_row(ops_, y, spec_.channels, spec_.dtype, task.y.at(run.row + begin + t, 0));
    }
  }

  // [width, channels]
  std::vector<float> by_width(const float* weight) const {
    std::vector<float> turned(static_cast<std::size_t>(spec_.channels * spec_.width));
    for (int c = 0; c < spec_.channels; ++c) {
      for (int k = 0; k < spec_.width; ++k) {
        turned[static_cast<std::size_t>(k * spec_.channels + c)] = weight[c * spec_.width + k];
      }
    }
    return turned;
  }

  // Address of token `token` of a run, which may be in its halo. Null: the token is zero.
  const std::byte* token_at(const TensorView& x, const CausalConv1dRun& run, std::int64_t token) const {
    if (token >= 0) return x.at(run.row + token, 0);
    if (run.initial_halo == nullptr) return nullptr;
    const auto row_bytes = static_cast<std::int64_t>(size_of(spec_.dtype)) * spec_.channels;
    return static_cast<const std::byte*>(run.initial_halo) + (token + spec_.halo_tokens()) * row_bytes;
  }

  void load(const TensorView& x, const CausalConv1dRun& run, std::int64_t token, float* target) const {
    const std::byte* const source = token_at(x, run, token);
    if (source == nullptr) {
      std::fill_n(target, spec_.channels, 0.0F);
    } else {
      tile_ops_.widen(source, spec_.dtype, spec_.channels, target);
    }
  }

  void keep_halo(const TensorView& x, const CausalConv1dRun& run) const {
    if (run.final_halo == nullptr) return;
    const auto row_bytes = static_cast<std::size_t>(spec_.channels) * size_of(spec_.dtype);
    std::vector<std::byte> halo(
        static_cast<std::size_t>(spec_.halo_bytes()));  // run.final_halo may alias run.initial_halo
    for (int i = 0; i < spec_.halo_tokens(); ++i) {
      const std::byte* const source = token_at(x, run, run.tokens - spec_.halo_tokens() + i);
      if (source != nullptr) std::memcpy(halo.data() + static_cast<std::size_t>(i) * row_bytes, source, row_bytes);
    }
    std::memcpy(run.final_halo, halo.data(), halo.size());
  }

  CausalConv1dSpec spec_;
  const TileOps& tile_ops_;
  const SsmOps& ops_;
  int threads_;
};

}  // namespace

double cpu_conv1d_speed(const Backend& backend) {
  CausalConv1dSpec any;
  any.channels = 4096;
  any.width = 4;
  return host_speed(cpu_conv1d_work(any, backend, kManyTokens), nullptr);
}

HostWork cpu_conv1d_work(const CausalConv1dSpec& spec, const Backend& backend, std::int64_t tokens) {
  const int threads = static_cast<const CpuBackend&>(backend).threads();
  const double elements = static_cast<double>(tokens) * spec.channels;
  // Elements a second by one core, which converts them to fp32 and back: measured with 4,096 channels in bf16.
  constexpr double kElements = 6e8;
  const double bytes = 3.0 * elements * static_cast<double>(size_of(spec.dtype));  // x, and y twice
  const double blocks = std::ceil(static_cast<double>(tokens) / static_cast<double>(kBlockRows));
  return {threads,
          2.0 * elements * spec.width,
          {{.tiles = blocks, .vector_seconds = elements / kElements, .bytes = bytes}}};
}

std::unique_ptr<CausalConv1dKernel> make_cpu_conv1d(const CausalConv1dSpec& spec, Backend& backend) {
  return std::make_unique<CpuConv1d>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
