// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/cpu/cpu_conv1d.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/rank_liveness.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/ssm/cpu/ssm_ops.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr std::int64_t kBlockRows = 64;           // rows of a run per work item
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
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
      for (std::int64_t i = first; i < end; ++i) {
        const RowBlock& block = blocks[static_cast<std::size_t>(i)];
        const CausalConv1dRun& run = *block.run;
        const std::int64_t tokens = std::min(kBlockRows, run.tokens - block.begin);
        std::vector<float> x(static_cast<std::size_t>((tokens + spec_.halo_tokens()) * spec_.channels));
        for (std::int64_t t = -spec_.halo_tokens(); t < tokens; ++t) {
          load(task.x, run, block.begin + t, x.data() + (t + spec_.halo_tokens()) * spec_.channels);
        }
        std::vector<float> y(static_cast<std::size_t>(spec_.channels));
        for (std::int64_t t = 0; t < tokens; ++t) {
          ops_.convolve(spec_.channels, spec_.width, x.data() + t * spec_.channels, weights.data(), task.bias,
                        spec_.silu, y.data());
          narrow_row(y.data(), spec_.channels, spec_.dtype, task.y.at(run.row + block.begin + t, 0));
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
      narrow_row(y.data(), spec_.channels, spec_.dtype, update.y.at(s, 0));
    }
  }

 private:
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
  return 2e9 * static_cast<const CpuBackend&>(backend).threads();  // limited by memory bandwidth on all SIMD targets
}

std::unique_ptr<CausalConv1dKernel> make_cpu_conv1d(const CausalConv1dSpec& spec, Backend& backend) {
  return std::make_unique<CpuConv1d>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
