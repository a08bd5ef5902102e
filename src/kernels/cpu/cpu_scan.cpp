// SPDX-License-Identifier: Apache-2.0
// The scan with one decay a head. A segment goes chunk by chunk through four products: C · Bᵀ, which the heads of a
// piece share, C · S and (C · Bᵀ, weighed) · x, which give y, and (B, weighed)ᵀ · x, which goes into the state.
#include "kernels/cpu/cpu_scan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/cpu/scan_levels.hpp"
#include "kernels/cpu/scan_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kChunk = static_cast<int>(kChunkTokens);
constexpr int kMostDim = 256;
constexpr int kHeadsTogether = 4;     // whose states fit into the second-level cache
constexpr float kLeastLog = -150.0F;  // of one token (scan.hpp)

int padded(int count, int lanes) { return (count + lanes - 1) / lanes * lanes; }

// What one thread needs for a piece: views into one allocation. Widths are head_dim, padded to whole vectors.
struct Room {
  float* row = nullptr;      // [state_dim]
  float* b = nullptr;        // [state_dim, kChunk]: transposed
  float* c = nullptr;        // [kChunk, state_dim]
  float* scores = nullptr;   // [kChunk, kChunk]: C · Bᵀ
  float* weights = nullptr;  // [kChunk, kChunk]
  float* scaled = nullptr;   // [state_dim, kChunk]: B, weighed
  float* x = nullptr;        // [kChunk, width]
  float* z = nullptr;        // [width]
  float* y = nullptr;        // [kChunk, width]
  float* added = nullptr;    // [state_dim, width]: what a chunk adds to the state
  float* dt = nullptr;       // [kChunk]
  float* sums = nullptr;     // [kChunk]: of logarithms
  float* decays = nullptr;   // [kChunk]
  float* d = nullptr;        // [kChannelBlock], all the same, and so is this
  float* bias = nullptr;

  // Places the arrays from `base` on, or nowhere where it is null; returns their floats.
  static std::size_t layout(int state_dim, int width, float* base, Room& room) {
    std::size_t floats = 0;
    const auto take = [&](float*& array, int rows, int columns) {
      if (base != nullptr) array = base + floats;
      floats += static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
    };
    take(room.row, 1, state_dim);
    take(room.b, state_dim, kChunk);
    take(room.c, kChunk, state_dim);
    take(room.scores, kChunk, kChunk);
    take(room.weights, kChunk, kChunk);
    take(room.scaled, state_dim, kChunk);
    take(room.x, kChunk, width);
    take(room.z, 1, width);
    take(room.y, kChunk, width);
    take(room.added, state_dim, width);
    take(room.dt, 1, kChunk);
    take(room.sums, 1, kChunk);
    take(room.decays, 1, kChunk);
    take(room.d, 1, kChannelBlock);
    take(room.bias, 1, kChannelBlock);
    return floats;
  }
};

class CpuScan final : public ScanLevels {
 public:
  CpuScan(const ScanSpec& scan, const CpuBackend& backend)
      : ScanLevels(scan, backend, shape_of(scan)), width_(padded(scan.head_dim, ops().lanes)) {}

  int heads_together() const override { return 1; }
  double cost_of_two_ranges(double) const override { return 0.0; }

 private:
  static Shape shape_of(const ScanSpec& scan) {
    const int width = padded(scan.head_dim, best_scan_ops().lanes);
    Room none;
    Shape shape;
    shape.cells_together = kHeadsTogether;
    shape.cell_floats = static_cast<std::size_t>(scan.state_dim) * static_cast<std::size_t>(width);
    shape.room_floats = Room::layout(scan.state_dim, width, nullptr, none);
    return shape;
  }

  void fold_piece(const ScanTask& task, const ScanPiece& piece, float* room, float* states,
                  float* logs) const override {
    std::fill_n(states, static_cast<std::size_t>(piece.cells) * cell_floats(), 0.0F);
    std::fill_n(logs, piece.cells, 0.0F);
    walk(task, piece, room, states, logs);
  }

  void finish_piece(const ScanTask& task, const ScanPiece& piece, float* room, float* states) const override {
    walk(task, piece, room, states, nullptr);
  }

  void join(const ScanTask&, int, const float* logs, const float* before, const float* local,
            float* result) const override {
    float decay[kChannelBlock] = {*logs};
    ops().exp2(decay, kChannelBlock);
    ops().join(decay[0], before, local, static_cast<int>(cell_floats()), result);
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

  std::size_t cell_floats() const { return static_cast<std::size_t>(spec().state_dim * width_); }

  // Chunk by chunk. With `logs` the states and decays behind the piece are wanted, without them its rows of y.
  void walk(const ScanTask& task, const ScanPiece& piece, float* memory, float* states, float* logs) const {
    const int state_dim = spec().state_dim;
    Room room;
    Room::layout(state_dim, width_, memory, room);
    std::fill_n(room.x, kChunk * width_, 0.0F);  // the padding stays zero
    const int group = piece.first_cell / (spec().heads / spec().groups);
    for (int begin = 0; begin < piece.tokens; begin += kChunk) {
      const int tokens = std::min(kChunk, piece.tokens - begin);
      const bool is_last = begin + tokens == piece.tokens;
      load_b(task.b, piece.row + begin, tokens, group, room);
      if (logs == nullptr) {
        for (int i = 0; i < tokens; ++i) {
          widen_row(rows(), task.c, piece.row + begin + i, group, state_dim, room.c + i * state_dim);
        }
        ops().product(room.c, state_dim, tokens, state_dim, room.b, kChunk, room.scores);
      }
      for (int cell = 0; cell < piece.cells; ++cell) {
        const int head = piece.first_cell + cell;
        float* const state = states + static_cast<std::size_t>(cell) * cell_floats();
        load_head(task, piece.row + begin, tokens, head, room);
        if (logs == nullptr) write_rows(task, piece.row + begin, tokens, head, state, room);
        if (logs != nullptr || !is_last) fold_chunk(tokens, state, room);
        if (logs != nullptr) logs[cell] += room.sums[tokens - 1];
      }
    }
  }

  void load_b(const TensorView& b, std::int64_t row, int tokens, int group, Room& room) const {
    for (int j = 0; j < kChunk; ++j) {
      if (j < tokens) {
        widen_row(rows(), b, row + j, group, spec().state_dim, room.row);
      } else {
        std::fill_n(room.row, spec().state_dim, 0.0F);
      }
      for (int n = 0; n < spec().state_dim; ++n) room.b[n * kChunk + j] = room.row[n];
    }
  }

  // x, dt, and the sums of the logarithms up to each token.
  void load_head(const ScanTask& task, std::int64_t row, int tokens, int head, Room& room) const {
    const float rate = task.a[head] * kLog2E;
    std::fill_n(room.dt, kChunk, 0.0F);
    for (int j = 0; j < tokens; ++j) {
      widen_row(rows(), task.x, row + j, head, spec().head_dim, room.x + j * width_);
      room.dt[j] = element_at(task.dt, row + j, head);
    }
    if (spec().dt_bias) std::fill_n(room.bias, kChannelBlock, task.dt_bias[head]);
    make_dt(room.dt, kChunk, spec().dt_bias ? room.bias : nullptr);
    float sum = 0.0F;
    for (int j = 0; j < kChunk; ++j) {  // nobody reads those behind the chunk's last token
      const float log = room.dt[j] * rate;
      sum += log < kLeastLog ? kLeastLog : log;
      room.sums[j] = sum;
    }
  }

  void write_rows(const ScanTask& task, std::int64_t row, int tokens, int head, const float* state, Room& room) const {
    ops().product(room.c, spec().state_dim, tokens, spec().state_dim, state, width_, room.y);
    std::copy_n(room.sums, kChunk, room.decays);
    ops().exp2(room.decays, kChunk);
    ops().weigh(tokens, room.scores, room.sums, room.dt, room.weights);
    ops().add_lower(room.weights, kChunk, tokens, room.decays, room.x, width_, room.y);
    if (spec().skip) std::fill_n(room.d, kChannelBlock, task.d[head]);
    for (int i = 0; i < tokens; ++i) {
      float* const y = room.y + i * width_;
      if (spec().gate) widen_row(rows(), task.z, row + i, head, spec().head_dim, room.z);
      ops().finish(spec().head_dim, spec().skip ? room.d : nullptr, room.x + i * width_, spec().gate ? room.z : nullptr,
                   y);
      narrow_row(y, spec().head_dim, spec().dtype, task.y.at(row + i, head));
    }
  }

  void fold_chunk(int tokens, float* state, Room& room) const {
    const float last = room.sums[tokens - 1];
    for (int j = 0; j < kChunk; ++j) room.decays[j] = last - room.sums[j];
    ops().exp2(room.decays, kChunk);
    for (int j = 0; j < kChunk; ++j) room.decays[j] *= room.dt[j];
    ops().scale_columns(spec().state_dim, room.b, room.decays, room.scaled);
    ops().product(room.scaled, kChunk, spec().state_dim, tokens, room.x, width_, room.added);
    float decay[kChannelBlock] = {last};
    ops().exp2(decay, kChannelBlock);
    ops().join(decay[0], state, room.added, static_cast<int>(cell_floats()), state);
  }

  int width_;
};

bool fits(int dim) { return dim >= 8 && dim <= kMostDim && dim % 8 == 0; }

}  // namespace

std::vector<std::string> cpu_scan_missing(const ScanSpec& spec) {
  std::vector<std::string> missing;
  if (spec.state_decays) missing.push_back("a decay for each state (supported: one a head)");
  const auto check = [&missing](const char* name, int dim) {
    if (!fits(dim)) missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, kMostDim));
  };
  check("head_dim", spec.head_dim);
  check("state_dim", spec.state_dim);
  return missing;
}

double cpu_scan_speed(const Backend& backend) {
  return best_scan_ops().flops_per_second * static_cast<const CpuBackend&>(backend).threads();
}

std::unique_ptr<ScanKernel> make_cpu_scan(const ScanSpec& spec, Backend& backend) {
  return std::make_unique<CpuScan>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
