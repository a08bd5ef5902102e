// SPDX-License-Identifier: Apache-2.0
// The selective spec with a decay for each state of each channel (Mamba-1): token by token, in parallel over blocks of
// channels.
#include <fmt/format.h>

#include <algorithm>

#include "kernels/ssm/cpu/cpu_ssd.hpp"
#include "kernels/ssm/cpu/ssm_levels.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kChunk = static_cast<int>(kChunkTokens);
constexpr int kMaxStates = 256;
constexpr int kBlocksPerTile = 8;  // channel blocks that share the widened B and C, and whose rows are widened together
constexpr int kTileChannels = kBlocksPerTile * kChannelBlock;
constexpr int kBlockRows = kChunk * kChannelBlock;  // elements of a block's rows

struct SsmScratch {
  float* b = nullptr;      // [kChunk, state_dim]
  float* c = nullptr;      // [kChunk, state_dim]
  float* rates = nullptr;  // [head_blocks, state_dim, kChannelBlock]: A · log2 e
  float* row = nullptr;    // [kTileChannels]
  float* dt = nullptr;     // [kBlocksPerTile, kChunk, kChannelBlock], also the next ones
  float* x = nullptr;
  float* z = nullptr;
  float* y = nullptr;

  // As in cpu_ssd.cpp.
  static std::size_t layout(int state_dim, float* base, SsmScratch& scratch) {
    std::size_t floats = 0;
    const auto take = [&](float*& array, int rows, int columns) {
      if (base != nullptr) array = base + floats;
      floats += static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
    };
    take(scratch.b, kChunk, state_dim);
    take(scratch.c, kChunk, state_dim);
    take(scratch.rates, kBlocksPerTile * state_dim, kChannelBlock);
    take(scratch.row, 1, kTileChannels);
    for (float** array : {&scratch.dt, &scratch.x, &scratch.z, &scratch.y}) take(*array, kChunk, kTileChannels);
    return floats;
  }
};

class CpuSelectiveScan final : public SsmLevels {
 public:
  CpuSelectiveScan(const SsmSpec& spec, const CpuBackend& backend) : SsmLevels(spec, backend, shape_of(spec)) {}

  int heads_together() const override { return kChannelBlock; }
  double cost_of_two_ranges(double) const override { return 0.0; }

 private:
  static Shape shape_of(const SsmSpec& spec) {
    SsmScratch none;
    Shape shape;
    shape.heads_per_block = kChannelBlock;
    shape.blocks_per_tile = kBlocksPerTile;
    shape.block_floats = static_cast<std::size_t>(spec.state_dim) * kChannelBlock;
    shape.block_logs = kChannelBlock;  // sums of dt, which A turns into log-decays
    shape.scratch_floats = SsmScratch::layout(spec.state_dim, nullptr, none);
    return shape;
  }

  std::size_t block_floats() const { return static_cast<std::size_t>(spec().state_dim) * kChannelBlock; }

  void accumulate_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* scratch, float* states,
                       float* logs) const override {
    std::fill_n(states, static_cast<std::size_t>(work_tile.head_blocks) * block_floats(), 0.0F);
    std::fill_n(logs, work_tile.head_blocks * kChannelBlock, 0.0F);
    process(task, work_tile, scratch, states, logs);
  }

  void finish_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* scratch, float* states) const override {
    process(task, work_tile, scratch, states, nullptr);
  }

  void join(const SsmTask& task, int head_block, const float* times, const float* before, const float* local,
            float* result) const override {
    float rates[kMaxStates * kChannelBlock];
    load_rates(task, head_block, rates);
    ops().join_channels(spec().state_dim, rates, times, before, local, result);
  }

  void load_state(const float* channels, float* state) const override {
    for (int n = 0; n < spec().state_dim; ++n) {
      for (int i = 0; i < kChannelBlock; ++i) state[n * kChannelBlock + i] = channels[i * spec().state_dim + n];
    }
  }
  void store_state(const float* state, float* channels) const override {
    for (int n = 0; n < spec().state_dim; ++n) {
      for (int i = 0; i < kChannelBlock; ++i) channels[i * spec().state_dim + n] = state[n * kChannelBlock + i];
    }
  }

  void load_rates(const SsmTask& task, int head_block, float* rates) const {
    const float* const a = task.a + std::int64_t{head_block} * kChannelBlock * spec().state_dim;
    load_state(a, rates);
    for (int i = 0; i < spec().state_dim * kChannelBlock; ++i) rates[i] *= kLog2E;
  }

  // Processes a work tile token by token. With `logs` it computes the states and sums of dt after the tile, without
  // `logs` its rows of y.
  void process(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* states, float* logs) const {
    const int state_dim = spec().state_dim;
    SsmScratch scratch;
    SsmScratch::layout(state_dim, memory, scratch);
    const auto rates_of = [&](int head_block) {
      return scratch.rates + static_cast<std::size_t>(head_block) * block_floats();
    };
    for (int head_block = 0; head_block < work_tile.head_blocks; ++head_block)
      load_rates(task, work_tile.first_head_block + head_block, rates_of(head_block));
    const int group = work_tile.first_head_block * kChannelBlock / (spec().heads / spec().groups);
    for (int begin = 0; begin < work_tile.tokens; begin += kChunk) {
      const int tokens = std::min(kChunk, work_tile.tokens - begin);
      const std::int64_t row = work_tile.row + begin;
      for (int t = 0; t < tokens; ++t) {
        widen_row(rows(), task.b, row + t, group, state_dim, scratch.b + t * state_dim);
        if (logs == nullptr) widen_row(rows(), task.c, row + t, group, state_dim, scratch.c + t * state_dim);
      }
      for (int t = 0; t < std::min(kChunk, work_tile.tokens - begin - tokens); ++t) {
        prefetch_row(task, row + tokens + t, work_tile.first_head_block * kChannelBlock, logs == nullptr);
      }
      load_tokens(task, row, tokens, work_tile, scratch);
      for (int head_block = 0; head_block < work_tile.head_blocks; ++head_block) {
        const int at = head_block * kBlockRows;
        const ChannelTokens in{tokens,    state_dim, rates_of(head_block), scratch.dt + at, scratch.x + at,
                               scratch.b, scratch.c};
        float* const state = states + static_cast<std::size_t>(head_block) * block_floats();
        ops().scan_channels(in, state, logs == nullptr ? scratch.y + at : nullptr);
        if (logs == nullptr) continue;
        for (int t = 0; t < tokens; ++t) {
          for (int i = 0; i < kChannelBlock; ++i)
            logs[head_block * kChannelBlock + i] += scratch.dt[at + t * kChannelBlock + i];
        }
      }
      if (logs == nullptr) write_rows(task, row, tokens, work_tile, scratch);
    }
  }

  // Rows of a work tile lie a page apart, so each costs a TLB miss. Its channels are at most four lines of a cache.
  // Always inlined: g++ 12 drops calls of a function that only prefetches.
  [[gnu::always_inline]] void prefetch_row(const SsmTask& task, std::int64_t row, int channel, bool finishes) const {
    for (int i = 0; i < kBlocksPerTile * kChannelBlock; i += 2 * kChannelBlock) {
      const int at = std::min(channel + i, spec().heads - 1);
      __builtin_prefetch(task.x.at(row, at));
      __builtin_prefetch(task.dt.at(row, at));
      if (finishes && spec().gate) __builtin_prefetch(task.z.at(row, at));
      if (finishes) __builtin_prefetch(task.y.at(row, at), 1);
    }
  }

  // Rows of the work tile's channels, block by block: [head_blocks, kChunk, kChannelBlock].
  void load_channels(const TensorView& view, std::int64_t row, int tokens, const SsmWorkTile& work_tile, float* memory,
                     float* target) const {
    const int first = work_tile.first_head_block * kChannelBlock;
    const int channels = work_tile.head_blocks * kChannelBlock;
    for (int t = 0; t < tokens; ++t) {
      if (view.head_stride == 1) {
        widen_row(rows(), view, row + t, first, channels, memory);
      } else {
        for (int i = 0; i < channels; ++i) memory[i] = element_at(view, row + t, first + i);
      }
      for (int block = 0; block < work_tile.head_blocks; ++block) {
        std::copy_n(memory + block * kChannelBlock, kChannelBlock, target + block * kBlockRows + t * kChannelBlock);
      }
    }
  }

  void load_tokens(const SsmTask& task, std::int64_t row, int tokens, const SsmWorkTile& work_tile,
                   const SsmScratch& scratch) const {
    load_channels(task.x, row, tokens, work_tile, scratch.row, scratch.x);
    load_channels(task.dt, row, tokens, work_tile, scratch.row, scratch.dt);
    for (int block = 0; block < work_tile.head_blocks; ++block) {
      const int channel = (work_tile.first_head_block + block) * kChannelBlock;
      make_dt(scratch.dt + block * kBlockRows, tokens * kChannelBlock,
              spec().dt_bias ? task.dt_bias + channel : nullptr);
    }
  }

  void write_rows(const SsmTask& task, std::int64_t row, int tokens, const SsmWorkTile& work_tile,
                  const SsmScratch& scratch) const {
    if (spec().gate) load_channels(task.z, row, tokens, work_tile, scratch.row, scratch.z);
    const int first = work_tile.first_head_block * kChannelBlock;
    for (int block = 0; block < work_tile.head_blocks; ++block) {
      const int at = block * kBlockRows;
      ops().finish(tokens * kChannelBlock, spec().skip ? task.d + first + block * kChannelBlock : nullptr,
                   scratch.x + at, spec().gate ? scratch.z + at : nullptr, scratch.y + at);
    }
    const int channels = work_tile.head_blocks * kChannelBlock;
    for (int t = 0; t < tokens; ++t) {
      for (int block = 0; block < work_tile.head_blocks; ++block) {
        std::copy_n(scratch.y + block * kBlockRows + t * kChannelBlock, kChannelBlock,
                    scratch.row + block * kChannelBlock);
      }
      if (task.y.head_stride == 1) {
        narrow_row(ops(), scratch.row, channels, spec().dtype, task.y.at(row + t, first));
        continue;
      }
      for (int i = 0; i < channels; ++i) store_element(task.y.at(row + t, first + i), spec().dtype, scratch.row[i]);
    }
  }
};

}  // namespace

std::vector<std::string> cpu_selective_scan_missing(const SsmSpec& spec) {
  std::vector<std::string> missing;
  if (!spec.state_decays) missing.push_back("a decay per head (supported: a decay for each state)");
  if (spec.heads % spec.groups != 0 || spec.heads / spec.groups % kChannelBlock != 0) {
    missing.push_back(fmt::format("{} channels in {} groups (supported: multiples of {} in each)", spec.heads,
                                  spec.groups, kChannelBlock));
  }
  if (spec.state_dim < 8 || spec.state_dim > kMaxStates || spec.state_dim % 8 != 0) {
    missing.push_back(fmt::format("state_dim {} (supported: multiples of 8 up to {})", spec.state_dim, kMaxStates));
  }
  return missing;
}

// A decay for each state requires an exponential for each multiply-add.
HostWork cpu_selective_scan_work(const SsmSpec& spec, const Backend& backend, std::int64_t tokens) {
  return run_work(spec, kBlocksPerTile * kChannelBlock, backend, tokens, 0.27 * best_ssm_ops().flops_per_second);
}

std::unique_ptr<SsmKernel> make_cpu_selective_scan(const SsmSpec& spec, Backend& backend) {
  return std::make_unique<CpuSelectiveScan>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
