// SPDX-License-Identifier: Apache-2.0
// SSD with one decay per head (Mamba-2). A segment is processed chunk by chunk with four products: C · Bᵀ, which the
// heads of a work tile share; C · S and (intra-chunk scores) · x, which give y; and (scaled B)ᵀ · x, which updates the
// state.
#include "kernels/ssm/cpu/cpu_ssd.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/ssm/cpu/ssm_levels.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kChunk = static_cast<int>(kChunkTokens);
constexpr int kMaxDim = 256;
constexpr int kHeadsPerTile = 4;    // heads whose states fit into the L2 cache
constexpr float kMinLog = -150.0F;  // log-decay of one token (ssm.hpp)

int padded(int count, int lanes) { return (count + lanes - 1) / lanes * lanes; }

// One thread's scratch for a work tile: views into one allocation. Widths are head_dim, padded to whole vectors.
struct SsmScratch {
  float* row = nullptr;      // [state_dim]
  float* b = nullptr;        // [state_dim, kChunk]: transposed
  float* c = nullptr;        // [kChunk, state_dim]
  float* scores = nullptr;   // [kChunk, kChunk]: C · Bᵀ
  float* weights = nullptr;  // [kChunk, kChunk]: intra-chunk scores
  float* scaled = nullptr;   // [state_dim, kChunk]: scaled B
  float* x = nullptr;        // [kChunk, width]
  float* z = nullptr;        // [width]
  float* y = nullptr;        // [kChunk, width]
  float* added = nullptr;    // [state_dim, width]: the chunk's contribution to the state
  float* dt = nullptr;       // [kChunk]
  float* sums = nullptr;     // [kChunk]: cumulative log-decays (dA_cumsum)
  float* decays = nullptr;   // [kChunk]
  float* d = nullptr;        // [kChannelBlock], all equal; also `bias`
  float* bias = nullptr;

  // Lays out the arrays from `base`, or nowhere if it is null. Returns the number of floats.
  static std::size_t layout(int state_dim, int width, float* base, SsmScratch& scratch) {
    std::size_t floats = 0;
    const auto take = [&](float*& array, int rows, int columns) {
      if (base != nullptr) array = base + floats;
      floats += static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
    };
    take(scratch.row, 1, state_dim);
    take(scratch.b, state_dim, kChunk);
    take(scratch.c, kChunk, state_dim);
    take(scratch.scores, kChunk, kChunk);
    take(scratch.weights, kChunk, kChunk);
    take(scratch.scaled, state_dim, kChunk);
    take(scratch.x, kChunk, width);
    take(scratch.z, 1, width);
    take(scratch.y, kChunk, width);
    take(scratch.added, state_dim, width);
    take(scratch.dt, 1, kChunk);
    take(scratch.sums, 1, kChunk);
    take(scratch.decays, 1, kChunk);
    take(scratch.d, 1, kChannelBlock);
    take(scratch.bias, 1, kChannelBlock);
    return floats;
  }
};

class CpuSsd final : public SsmLevels {
 public:
  CpuSsd(const SsmSpec& spec, const CpuBackend& backend)
      : SsmLevels(spec, backend, shape_of(spec)), width_(padded(spec.head_dim, ops().lanes)) {}

  int heads_together() const override { return 1; }
  double cost_of_two_ranges(double) const override { return 0.0; }

 private:
  static Shape shape_of(const SsmSpec& spec) {
    const int width = padded(spec.head_dim, best_ssm_ops().lanes);
    SsmScratch none;
    Shape shape;
    shape.blocks_per_tile = kHeadsPerTile;
    shape.block_floats = static_cast<std::size_t>(spec.state_dim) * static_cast<std::size_t>(width);
    shape.scratch_floats = SsmScratch::layout(spec.state_dim, width, nullptr, none);
    return shape;
  }

  void accumulate_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* scratch, float* states,
                       float* logs) const override {
    std::fill_n(states, static_cast<std::size_t>(work_tile.head_blocks) * block_floats(), 0.0F);
    std::fill_n(logs, work_tile.head_blocks, 0.0F);
    process(task, work_tile, scratch, states, logs);
  }

  void finish_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* scratch, float* states) const override {
    process(task, work_tile, scratch, states, nullptr);
  }

  void join(const SsmTask&, int, const float* logs, const float* before, const float* local,
            float* result) const override {
    float decay[kChannelBlock] = {*logs};
    ops().exp2(decay, kChannelBlock);
    ops().join(decay[0], before, local, static_cast<int>(block_floats()), result);
  }

  void load_state(const float* head, float* state) const override {
    for (int n = 0; n < spec().state_dim; ++n) {
      for (int p = 0; p < spec().head_dim; ++p) state[n * width_ + p] = head[p * spec().state_dim + n];
    }
  }
  void store_state(const float* state, float* head) const override {
    for (int n = 0; n < spec().state_dim; ++n) {
      for (int p = 0; p < spec().head_dim; ++p) head[p * spec().state_dim + n] = state[n * width_ + p];
    }
  }

  std::size_t block_floats() const { return static_cast<std::size_t>(spec().state_dim * width_); }

  // Processes a work tile chunk by chunk. With `logs` it computes the states and log-decays after the tile, without
  // `logs` its rows of y.
  void process(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* states, float* logs) const {
    const int state_dim = spec().state_dim;
    SsmScratch scratch;
    SsmScratch::layout(state_dim, width_, memory, scratch);
    std::fill_n(scratch.x, kChunk * width_, 0.0F);  // the padding stays zero
    const int group = work_tile.first_head_block / (spec().heads / spec().groups);
    for (int begin = 0; begin < work_tile.tokens; begin += kChunk) {
      const int tokens = std::min(kChunk, work_tile.tokens - begin);
      const bool is_last = begin + tokens == work_tile.tokens;
      load_b(task.b, work_tile.row + begin, tokens, group, scratch);
      if (logs == nullptr) {
        for (int i = 0; i < tokens; ++i) {
          widen_row(rows(), task.c, work_tile.row + begin + i, group, state_dim, scratch.c + i * state_dim);
        }
        ops().product(scratch.c, state_dim, tokens, state_dim, scratch.b, kChunk, scratch.scores);
      }
      for (int head_block = 0; head_block < work_tile.head_blocks; ++head_block) {
        const int head = work_tile.first_head_block + head_block;
        float* const state = states + static_cast<std::size_t>(head_block) * block_floats();
        load_head(task, work_tile.row + begin, tokens, head, scratch);
        if (logs == nullptr) write_rows(task, work_tile.row + begin, tokens, head, state, scratch);
        if (logs != nullptr || !is_last) accumulate_chunk(tokens, state, scratch);
        if (logs != nullptr) logs[head_block] += scratch.sums[tokens - 1];
      }
    }
  }

  void load_b(const TensorView& b, std::int64_t row, int tokens, int group, SsmScratch& scratch) const {
    for (int j = 0; j < kChunk; ++j) {
      if (j < tokens) {
        widen_row(rows(), b, row + j, group, spec().state_dim, scratch.row);
      } else {
        std::fill_n(scratch.row, spec().state_dim, 0.0F);
      }
      for (int n = 0; n < spec().state_dim; ++n) scratch.b[n * kChunk + j] = scratch.row[n];
    }
  }

  // Loads x and dt, and computes the cumulative log-decay of each token.
  void load_head(const SsmTask& task, std::int64_t row, int tokens, int head, SsmScratch& scratch) const {
    const float rate = task.a[head] * kLog2E;
    std::fill_n(scratch.dt, kChunk, 0.0F);
    for (int j = 0; j < tokens; ++j) {
      widen_row(rows(), task.x, row + j, head, spec().head_dim, scratch.x + j * width_);
      scratch.dt[j] = element_at(task.dt, row + j, head);
    }
    if (spec().dt_bias) std::fill_n(scratch.bias, kChannelBlock, task.dt_bias[head]);
    make_dt(scratch.dt, kChunk, spec().dt_bias ? scratch.bias : nullptr);
    float sum = 0.0F;
    for (int j = 0; j < kChunk; ++j) {  // entries after the chunk's last token are not used
      const float log = scratch.dt[j] * rate;
      sum += log < kMinLog ? kMinLog : log;
      scratch.sums[j] = sum;
    }
  }

  void write_rows(const SsmTask& task, std::int64_t row, int tokens, int head, const float* state,
                  SsmScratch& scratch) const {
    ops().product(scratch.c, spec().state_dim, tokens, spec().state_dim, state, width_, scratch.y);
    std::copy_n(scratch.sums, kChunk, scratch.decays);
    ops().exp2(scratch.decays, kChunk);
    ops().intra_chunk_scores(tokens, scratch.scores, scratch.sums, scratch.dt, scratch.weights);
    ops().add_lower(scratch.weights, kChunk, tokens, scratch.decays, scratch.x, width_, scratch.y);
    if (spec().skip) std::fill_n(scratch.d, kChannelBlock, task.d[head]);
    for (int i = 0; i < tokens; ++i) {
      float* const y = scratch.y + i * width_;
      if (spec().gate) widen_row(rows(), task.z, row + i, head, spec().head_dim, scratch.z);
      ops().finish(spec().head_dim, spec().skip ? scratch.d : nullptr, scratch.x + i * width_,
                   spec().gate ? scratch.z : nullptr, y);
      narrow_row(y, spec().head_dim, spec().dtype, task.y.at(row + i, head));
    }
  }

  void accumulate_chunk(int tokens, float* state, SsmScratch& scratch) const {
    const float last = scratch.sums[tokens - 1];
    for (int j = 0; j < kChunk; ++j) scratch.decays[j] = last - scratch.sums[j];
    ops().exp2(scratch.decays, kChunk);
    for (int j = 0; j < kChunk; ++j) scratch.decays[j] *= scratch.dt[j];
    ops().scale_columns(spec().state_dim, scratch.b, scratch.decays, scratch.scaled);
    ops().product(scratch.scaled, kChunk, spec().state_dim, tokens, scratch.x, width_, scratch.added);
    float decay[kChannelBlock] = {last};
    ops().exp2(decay, kChannelBlock);
    ops().join(decay[0], state, scratch.added, static_cast<int>(block_floats()), state);
  }

  int width_;
};

bool fits(int dim) { return dim >= 8 && dim <= kMaxDim && dim % 8 == 0; }

}  // namespace

std::vector<std::string> cpu_ssd_missing(const SsmSpec& spec) {
  std::vector<std::string> missing;
  if (spec.state_decays) missing.push_back("a decay for each state (supported: a decay per head)");
  const auto check = [&missing](const char* name, int dim) {
    if (!fits(dim)) missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, kMaxDim));
  };
  check("head_dim", spec.head_dim);
  check("state_dim", spec.state_dim);
  return missing;
}

double cpu_ssd_speed(const Backend& backend) {
  return best_ssm_ops().flops_per_second * static_cast<const CpuBackend&>(backend).threads();
}

std::unique_ptr<SsmKernel> make_cpu_ssd(const SsmSpec& spec, Backend& backend) {
  return std::make_unique<CpuSsd>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
