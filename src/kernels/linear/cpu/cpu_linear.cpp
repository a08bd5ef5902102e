// SPDX-License-Identifier: Apache-2.0
// A work item is a panel of columns for a block of rows. With vectors, the weights of the panel are packed one chain of
// multiply-adds at a time, and multiplied by all rows of the block. With AMX tiles (linear_ops.hpp), the rows of
// several blocks are packed once for all panels, and weights are read without packing.
#include "kernels/linear/cpu/cpu_linear.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cpu/thread_pool.hpp"
#include "kernels/linear/cpu/linear_ops.hpp"

namespace ringattn::cpu {

namespace {

constexpr std::int64_t kBlockRows = 128;
// With AMX tiles: a split of this many rows takes half of an L2 cache of 2 MiB, and a panel's weights are read from the
// cache.
constexpr std::int64_t kTileBlockRows = 256;
constexpr std::int64_t kTileBlocks = 4;         // packed at once: few barriers, and several work items for each thread
constexpr std::int64_t kTilePanel = 256;        // maximum columns
constexpr std::int64_t kTilePanelFewRows = 32;  // up to kFewRows: then a panel's rows stay in the cache anyway
constexpr std::int64_t kFewRows = 64;
// So many elements that their products, at most 127 · 128, add up to less than 2^24: fp32 multiply-adds are exact.
constexpr std::int64_t kInt8Chain = 1024;
static_assert(kInt8Chain * 127 * 128 < 1 << 24);

class CpuLinear final : public LinearKernel {
 public:
  CpuLinear(const LinearSpec& spec, const CpuBackend& backend)
      : spec_(spec),
        ops_(best_linear_ops()),
        tiles_(linear_tile_ops(spec.dtype, spec.weights)),
        widen_(backend.tile_ops().widen),
        threads_(backend.threads()),
        matrices_(spec.gated ? 2 : 1),
        sums_(spec.parallel == LinearParallel::kRow && spec.weights != WeightFormat::kInt8 ? kLinearLeaves : 1),
        block_rows_(tiles_ != nullptr ? kTileBlockRows : kBlockRows),
        max_width_(tiles_ != nullptr
                       ? std::max(kLinearTileColumns, std::min<std::int64_t>(1024 / (matrices_ * sums_), kTilePanel))
                       : ops_.panel_width),
        width_(max_width_) {
    std::int64_t chain = 0;  // the longest
    std::int64_t tiles = 0;  // of 16 rows
    for (const Chain& each : chains(LeafRange{})) {
      chain = std::max(chain, each.end - each.begin);
      tiles += tiles_of(each.end - each.begin);
    }
    const std::int64_t block = block_rows_ * max_width_;
    std::int64_t floats = 0;
    const auto take = [&](std::int64_t count) {
      const std::int64_t at = floats;
      constexpr auto kAligned = static_cast<std::int64_t>(kVectorAlignment / sizeof(float));
      floats += (count + kAligned - 1) / kAligned * kAligned;
      return at;
    };
    panel_at_ = take(tiles_ != nullptr ? 2 * tiles_of(chain) * kTileFloats : (chain + 3) * max_width_);
    sums_at_ = take(matrices_ * sums_ * block);
    current_at_ = take(spec.weights == WeightFormat::kInt4 ? block : 0);
    columns_at_ = take(4 * max_width_);
    const bool quantizes = tiles_ != nullptr && spec.weights == WeightFormat::kInt8;
    wide_row_at_ = take(quantizes ? spec.in_features : 0);
    int8_rows_at_ = take(quantizes ? kLinearTileRows * int8_stride() / static_cast<std::int64_t>(sizeof(float)) : 0);
    thread_floats_ = floats;
    row_floats_ = tiles_ != nullptr ? tiles * kTileFloats / kLinearTileRows : spec.in_features;
  }

  std::size_t packed_bytes(LeafRange) const override { return 0; }
  void pack(const LinearWeights&, LeafRange, void*, Stream) override {}

  std::size_t scratch_bytes(std::int64_t rows) const override {
    return sizeof(float) * static_cast<std::size_t>(threads_ * thread_floats_ + rows_at_once(rows) * (row_floats_ + 1));
  }
  void reserve(std::int64_t rows) override {
    packed_rows_ = rows_at_once(rows);
    scratch_ = allocate_host(scratch_bytes(rows));
  }

  void multiply(const LinearTask& task, Stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    for_each_block(task.x, LeafRange{}, {}, progress, [&](const Thread& thread, const Block& block) {
      if (!add_panel(thread, task.weights.weights, LeafRange{}, block)) return;
      LinearNodeSums sums[2];
      for (int m = 0; m < matrices_; ++m) sums[m] = sums_of(thread, m, LeafRange{}, block.columns);
      finish_rows(thread, task.weights.weights, sums, x_scales() + block.packed_row,
                  {&task.y, block.row, block.rows, block.column, block.columns});
    });
  }

  void find_absmax(const TensorView& x, float* absmax, Stream, const Progress& progress) override {
    ThreadPool pool(x.tokens);
    pool.run(threads_, progress, [&](int index, const Checkpoint& checkpoint) {
      std::vector<float> row(static_cast<std::size_t>(x.dim));
      for (std::int64_t i; (i = pool.take()) >= 0;) {
        if (checkpoint.should_stop()) return;
        widen_row(x, i, row.data());
        absmax[i] = ops_.absmax(row.data(), x.dim);
      }
      static_cast<void>(index);
    });
  }

  void add_leaves(const LinearPartialTask& task, Stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    const std::vector<int> nodes = aligned_nodes(task.leaves);
    const std::int64_t row_columns = spec_.sum_columns();
    for_each_block(task.x, task.leaves, task.absmax, progress, [&](const Thread& thread, const Block& block) {
      if (!add_panel(thread, task.weights.weights, task.leaves, block)) return;
      for (int m = 0; m < matrices_; ++m) {
        LinearNodeSums sums = sums_of(thread, m, task.leaves, block.columns);
        const std::int64_t first = m * spec_.out_features + block.column;
        for (sums.row = 0; sums.row < block.rows; ++sums.row) {
          const std::int64_t at = (block.row + sums.row) * row_columns + first;
          if (spec_.weights == WeightFormat::kInt8) {
            std::copy_n(reinterpret_cast<const std::int32_t*>(sums.node[1]) + sums.row * width_, block.columns,
                        static_cast<std::int32_t*>(task.sums) + at);
            continue;
          }
          for (std::size_t n = 0; n < nodes.size(); ++n) {
            ops_.join(sums, nodes[n],
                      static_cast<float*>(task.sums) + static_cast<std::int64_t>(n) * task.x.tokens * row_columns + at);
          }
        }
      }
    });
  }

  void finish(const LinearFinishTask& task, Stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    const std::int64_t row_columns = spec_.sum_columns();
    std::vector<float> scales;  // of the rows of x
    for (std::int64_t i = 0; task.absmax.values != nullptr && i < task.y.tokens; ++i) {
      scales.push_back(ops_.quantize(absmax_of(task.absmax, i), 0, nullptr));
    }
    choose_width(task.y.tokens);
    for_each_panel(progress, [&](const Thread& thread, std::int64_t column, std::int64_t columns) {
      for (std::int64_t row = 0; row < task.y.tokens; row += block_rows_) {
        if (thread.checkpoint.should_stop()) return;
        const std::int64_t rows = std::min(block_rows_, task.y.tokens - row);
        LinearNodeSums sums[2];
        for (int m = 0; m < matrices_; ++m) {
          const std::int64_t at = row * row_columns + m * spec_.out_features + column;
          if (spec_.weights == WeightFormat::kInt8) {
            sums[m] = sums_of(thread, m, LeafRange{}, columns);
            add_integers(task.partials, at, rows, columns, sums_of_thread<std::int32_t>(thread, m));
            continue;
          }
          sums[m].row_stride = row_columns;
          sums[m].columns = columns;
          for (const LinearPartial& partial : task.partials) {
            const auto* from = static_cast<const float*>(partial.sums) + at;
            for (const int node : aligned_nodes(partial.leaves)) {
              sums[m].node[node] = from;
              from += partial.node_stride;
            }
          }
        }
        finish_rows(thread, task.weights, sums, scales.empty() ? nullptr : scales.data() + row,
                    {&task.y, row, rows, column, columns});
      }
    });
  }

  void add_nodes(const LinearSumTask& task, Stream, const Progress& progress) override {
    constexpr std::int64_t kAtOnce = 4096;
    ThreadPool pool((task.count + kAtOnce - 1) / kAtOnce);
    pool.run(threads_, progress, [&](int, const Checkpoint& checkpoint) {
      for (std::int64_t item; (item = pool.take()) >= 0;) {
        if (checkpoint.should_stop()) return;
        const std::int64_t first = item * kAtOnce;
        LinearNodeSums sums{.columns = std::min(kAtOnce, task.count - first)};
        for (int node = 1; node < kLinearNodes; ++node) {
          if (task.nodes[node] != nullptr) sums.node[node] = task.nodes[node] + first;
        }
        ops_.join(sums, 1, task.sum + first);
      }
    });
  }

  void activation_gradient(const LinearGradientTask& task, Stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    const std::int64_t n = spec_.out_features;
    ThreadPool pool(task.dy.tokens);
    pool.run(threads_, progress, [&](int, const Checkpoint& checkpoint) {
      std::vector<float> dy(static_cast<std::size_t>(n)), z(static_cast<std::size_t>(spec_.sum_columns()));
      for (std::int64_t i; (i = pool.take()) >= 0;) {
        if (checkpoint.should_stop()) return;
        widen_row(task.dy, i, dy.data());
        widen_row(task.z, i, z.data());
        std::byte* const dz = task.dz.at(i, 0);
        ops_.activation_gradient({spec_.dtype, spec_.activation, dy.data(), z.data(),
                                  spec_.gated ? z.data() + n : nullptr, n, dz,
                                  dz + n * static_cast<std::int64_t>(size_of(spec_.dtype))});
      }
    });
  }

 private:
  static constexpr std::int64_t kTileBytes = 1024;
  static constexpr std::int64_t kTileFloats = kTileBytes / static_cast<std::int64_t>(sizeof(float));

  // A run of K that is summed from zero: [begin, end) of the task's x, for sum `index`.
  struct Chain {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    int sum = 0;
  };
  struct Thread {
    float* scratch;
    const Checkpoint& checkpoint;
  };
  // A work item: a block of rows of x, and a panel of columns.
  struct Block {
    std::int64_t row, rows;
    std::int64_t packed_row;  // the first row among those that are packed
    std::int64_t column, columns;
  };
  // The part of y that finish_rows() writes.
  struct Outputs {
    const MutableTensorView* y;
    std::int64_t row, rows, column, columns;
  };

  std::vector<Chain> chains(LeafRange leaves) const {
    std::vector<Chain> found;
    const auto cut = [&](std::int64_t begin, std::int64_t end, std::int64_t length, int sum) {
      for (; begin < end; begin += length) found.push_back({begin, std::min(end, begin + length), sum});
    };
    if (spec_.parallel != LinearParallel::kRow || spec_.weights == WeightFormat::kInt8) {
      const std::int64_t features =
          spec_.parallel == LinearParallel::kRow ? features_of(spec_, leaves) : spec_.in_features;
      const bool int8 = spec_.weights == WeightFormat::kInt8;
      cut(0, features, !int8 ? kLinearSplit : tiles_ != nullptr ? kMaxInt8K : kInt8Chain, 0);
      return found;
    }
    for (int leaf = leaves.begin; leaf < leaves.end; ++leaf) {
      const std::int64_t begin = features_of(spec_, {leaves.begin, leaf});
      const std::int64_t end = features_of(spec_, {leaves.begin, leaf + 1});
      cut(begin, end, std::max<std::int64_t>(1, end - begin), leaf);
    }
    return found;
  }

  // Elements of K in a tile of x or weights, and tiles for `count` of them.
  std::int64_t tile_depth() const { return spec_.weights == WeightFormat::kInt8 ? 64 : 32; }
  std::int64_t tiles_of(std::int64_t count) const { return (count + tile_depth() - 1) / tile_depth(); }
  std::int64_t int8_stride() const { return (spec_.in_features + 63) / 64 * 64; }

  // [packed_rows_, K of the task] in fp32, quantized for kInt8. With AMX tiles: [packed_rows_ / 16, tiles of all
  // chains]. The scales of the rows follow.
  float* x_rows() const { return reinterpret_cast<float*>(scratch_.data()) + threads_ * thread_floats_; }
  float* x_scales() const { return x_rows() + packed_rows_ * row_floats_; }
  // Rows that are packed at once, of a task of `rows` rows.
  std::int64_t rows_at_once(std::int64_t rows) const {
    const std::int64_t whole = (rows + block_rows_ - 1) / block_rows_ * block_rows_;
    return std::clamp(whole, block_rows_, tiles_ != nullptr ? kTileBlocks * kTileBlockRows : block_rows_);
  }

  void widen_row(const TensorView& x, std::int64_t row, float* to) const {
    const std::int64_t whole = x.dim / 8 * 8;
    const std::byte* const from = x.at(row, 0);
    widen_(from, x.dtype, static_cast<int>(whole), to);
    for (std::int64_t i = whole; i < x.dim; ++i) {
      to[i] = load_element(from + static_cast<std::size_t>(i) * size_of(x.dtype), x.dtype);
    }
  }

  static float absmax_of(const LinearAbsmax& absmax, std::int64_t row) {
    float most = 0.0F;
    for (int part = 0; part < absmax.parts; ++part) {
      const float value = absmax.values[part * absmax.stride + row];
      most = std::isnan(value) || std::isnan(most) ? std::numeric_limits<float>::quiet_NaN() : std::max(most, value);
    }
    return most;
  }

  // Prepares blocks of rows of x, and calls work(thread, block) for each of them and each panel.
  template <class Work>
  void for_each_block(const TensorView& x, LeafRange leaves, const LinearAbsmax& absmax, const Progress& progress,
                      const Work& work) {
    x_features_ = x.dim;
    const std::vector<Chain> runs = chains(leaves);
    x_tiles_ = 0;
    for (const Chain& run : runs) x_tiles_ += tiles_of(run.end - run.begin);
    const std::int64_t rows_at_once = tiles_ != nullptr ? kLinearTileRows : 1;
    for (std::int64_t row = 0; row < x.tokens; row += packed_rows_) {
      const std::int64_t rows = std::min(packed_rows_, x.tokens - row);
      ThreadPool packing((rows + rows_at_once - 1) / rows_at_once);
      packing.run(threads_, progress, [&](int index, const Checkpoint& checkpoint) {
        for (std::int64_t i; (i = packing.take()) >= 0;) {
          if (checkpoint.should_stop()) return;
          if (tiles_ != nullptr) {
            pack_rows(x, absmax, row, i, std::min(kLinearTileRows, rows - i * kLinearTileRows), runs, index);
            continue;
          }
          float* const to = x_rows() + i * x.dim;
          widen_row(x, row + i, to);
          if (spec_.weights == WeightFormat::kInt8) quantize_row(absmax, row, i, x.dim, to);
        }
      });
      choose_width(rows);
      // The blocks of a panel follow each other, so that threads read its weights at about the same time.
      const std::int64_t blocks = (rows + block_rows_ - 1) / block_rows_;
      ThreadPool pool(blocks * ((spec_.out_features + width_ - 1) / width_));
      pool.run(threads_, progress, [&](int index, const Checkpoint& checkpoint) {
        const Thread thread = thread_of(index, checkpoint);
        for (std::int64_t item; (item = pool.take()) >= 0;) {
          const std::int64_t packed_row = item % blocks * block_rows_;
          const std::int64_t column = item / blocks * width_;
          work(thread, Block{row + packed_row, std::min(block_rows_, rows - packed_row), packed_row, column,
                             std::min(width_, spec_.out_features - column)});
        }
      });
    }
  }

  // Row i of the packed rows, which begin at `row`.
  void quantize_row(const LinearAbsmax& absmax, std::int64_t row, std::int64_t i, std::int64_t count, float* x) const {
    const float most = absmax.values != nullptr ? absmax_of(absmax, row + i) : ops_.absmax(x, count);
    x_scales()[i] = ops_.quantize(most, count, x);
  }

  // Packs up to 16 rows of those that begin at `row`: those with index `group`.
  void pack_rows(const TensorView& x, const LinearAbsmax& absmax, std::int64_t row, std::int64_t group,
                 std::int64_t rows, const std::vector<Chain>& runs, int thread) const {
    const bool int8 = spec_.weights == WeightFormat::kInt8;
    float* const scratch = reinterpret_cast<float*>(scratch_.data()) + thread * thread_floats_;
    const std::byte* source[kLinearTileRows] = {};
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t in_block = group * kLinearTileRows + i;
      source[i] = x.at(row + in_block, 0);
      if (!int8) continue;
      float* const wide = scratch + wide_row_at_;
      widen_row(x, row + in_block, wide);
      quantize_row(absmax, row, in_block, x.dim, wide);
      auto* const narrow = reinterpret_cast<std::int8_t*>(scratch + int8_rows_at_) + i * int8_stride();
      tiles_->narrow(wide, x.dim, narrow);
      source[i] = reinterpret_cast<const std::byte*>(narrow);
    }
    const std::int64_t element = int8 ? 1 : 2;
    auto* to = reinterpret_cast<std::byte*>(x_rows()) + group * x_tiles_ * kTileBytes;
    for (const Chain& run : runs) {
      const std::byte* at[kLinearTileRows] = {};
      for (std::int64_t i = 0; i < rows; ++i) at[i] = source[i] + run.begin * element;
      tiles_->pack_rows(at, (run.end - run.begin) * element, to);
      to += tiles_of(run.end - run.begin) * kTileBytes;
    }
  }

  void choose_width(std::int64_t rows) {
    if (tiles_ == nullptr) return;
    const std::int64_t even = (spec_.out_features / threads_ + kLinearTileColumns - 1) / kLinearTileColumns;
    const std::int64_t most = rows <= kFewRows ? kTilePanelFewRows : max_width_;
    width_ = std::clamp(even * kLinearTileColumns, kLinearTileColumns, most);
  }
  Thread thread_of(int index, const Checkpoint& checkpoint) const {
    return {reinterpret_cast<float*>(scratch_.data()) + index * thread_floats_, checkpoint};
  }

  // Calls work(thread, first column, columns) for each panel of y.
  template <class Work>
  void for_each_panel(const Progress& progress, const Work& work) {
    ThreadPool pool((spec_.out_features + width_ - 1) / width_);
    pool.run(threads_, progress, [&](int index, const Checkpoint& checkpoint) {
      const Thread thread = thread_of(index, checkpoint);
      for (std::int64_t item; (item = pool.take()) >= 0;) {
        const std::int64_t column = item * width_;
        work(thread, column, std::min(width_, spec_.out_features - column));
      }
    });
  }

  // [sums_, block_rows_, width_]
  template <class Sum = float>
  Sum* sums_of_thread(const Thread& thread, int matrix) const {
    return reinterpret_cast<Sum*>(thread.scratch + sums_at_ + matrix * sums_ * block_rows_ * width_);
  }

  // Computes the sums of a panel. Returns false if the task stops before they are complete.
  bool add_panel(const Thread& thread, const LinearWeights& weights, LeafRange leaves, const Block& block) const {
    const std::int64_t rows = block.rows;
    for (int m = 0; m < matrices_; ++m) {
      float* const sums = sums_of_thread(thread, m);
      // −0 + x is x, so adding an empty sum changes nothing, and neither does adding a sum to the initial value.
      for (int i = 0; i < sums_; ++i) {
        std::fill_n(sums + i * block_rows_ * width_, rows * width_,
                    spec_.weights == WeightFormat::kInt8 ? 0.0F : -0.0F);
      }
      LinearPanelSource source{m == 0 ? &weights.matrix : &weights.up, spec_.weights, spec_.dtype, block.column,
                               block.columns};
      const auto* x_tiles =
          reinterpret_cast<const std::byte*>(x_rows()) + block.packed_row / kLinearTileRows * x_tiles_ * kTileBytes;
      for (const Chain& chain : chains(leaves)) {
        if (thread.checkpoint.should_stop()) return false;
        source.k = chain.begin;
        float* const to = sums + chain.sum * block_rows_ * width_;
        const LinearSum sum = spec_.weights == WeightFormat::kInt8 ? LinearSum::kInteger : LinearSum::kAdded;
        if (spec_.weights != WeightFormat::kInt4) {
          source.depth = chain.end - chain.begin;
          multiply(thread, source, x_tiles, rows, sum, to);
        } else {
          add_groups(thread, source, x_tiles, rows, chain.end, to);
        }
        x_tiles += tiles_of(chain.end - chain.begin) * kTileBytes;
      }
    }
    return true;
  }

  // The sums of int4 groups from source.k to `end`, scaled, then added to `sums`.
  void add_groups(const Thread& thread, LinearPanelSource source, const std::byte* x_tiles, std::int64_t rows,
                  std::int64_t end, float* sums) const {
    float* const current = thread.scratch + current_at_;
    float* const scales = thread.scratch + columns_at_;
    std::fill_n(current, rows * width_, 0.0F);
    source.depth = kInt4Group;
    for (; source.k < end; source.k += kInt4Group, x_tiles += tiles_of(kInt4Group) * kTileBytes) {
      std::fill_n(scales, width_, 0.0F);
      for (std::int64_t i = 0; i < source.rows; ++i) {
        scales[i] = source.matrix->scales[(source.row + i) * source.matrix->group_stride + source.k / kInt4Group];
      }
      multiply(thread, source, x_tiles, rows, LinearSum::kScaled, current);
    }
    ops_.add(current, rows * width_, sums);
  }

  // One chain: x_tiles is at its first element.
  void multiply(const Thread& thread, LinearPanelSource source, const std::byte* x_tiles, std::int64_t rows,
                LinearSum sum, float* sums) const {
    float* const packed = thread.scratch + panel_at_;
    const float* const scales = thread.scratch + columns_at_;
    if (tiles_ == nullptr) {
      ops_.pack(source, packed);
      ops_.multiply({x_rows() + source.k, x_features_, rows, packed, source.depth, sum, scales, sums});
      return;
    }
    const std::int64_t end = source.row + source.rows;
    for (std::int64_t i = 0; source.row < end; i += kLinearTileColumns, source.row += kLinearTileColumns) {
      source.rows = std::min(kLinearTileColumns, end - source.row);
      tiles_->multiply({source, x_tiles, x_tiles_ * kTileBytes, rows, sum, scales + i, sums + i, width_,
                        reinterpret_cast<std::byte*>(packed)});
    }
  }

  LinearNodeSums sums_of(const Thread& thread, int matrix, LeafRange leaves, std::int64_t columns) const {
    LinearNodeSums sums{.row_stride = width_, .columns = columns};
    const float* const first = sums_of_thread(thread, matrix);
    if (sums_ == 1) {
      sums.node[1] = first;
    } else {
      for (int leaf = leaves.begin; leaf < leaves.end; ++leaf) {
        sums.node[kLinearLeaves + leaf] = first + leaf * block_rows_ * width_;
      }
    }
    return sums;
  }

  void add_integers(std::span<const LinearPartial> partials, std::int64_t at, std::int64_t rows, std::int64_t columns,
                    std::int32_t* sums) const {
    std::fill_n(sums, rows * width_, 0);
    for (const LinearPartial& partial : partials) {
      const auto* const from = static_cast<const std::int32_t*>(partial.sums) + at;
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t i = 0; i < columns; ++i) sums[row * width_ + i] += from[row * spec_.sum_columns() + i];
      }
    }
  }

  void finish_rows(const Thread& thread, const LinearWeights& weights, LinearNodeSums* sums, const float* x_scales,
                   const Outputs& outputs) const {
    LinearEpilogue epilogue{.dtype = spec_.dtype, .activation = spec_.activation, .gated = spec_.gated};
    for (int m = 0; m < matrices_; ++m) {
      const LinearMatrix& matrix = m == 0 ? weights.matrix : weights.up;
      float* const bias = thread.scratch + columns_at_ + 2 * m * width_;
      std::fill_n(bias, width_, -0.0F);
      for (std::int64_t i = 0; spec_.bias && i < outputs.columns; ++i) {
        bias[i] = load_element(static_cast<const std::byte*>(matrix.bias) +
                                   static_cast<std::size_t>(outputs.column + i) * size_of(spec_.dtype),
                               spec_.dtype);
      }
      epilogue.bias[m] = bias;
      if (spec_.weights != WeightFormat::kInt8) continue;
      float* const scales = bias + width_;
      std::fill_n(scales, width_, 0.0F);
      std::copy_n(matrix.scales + outputs.column, outputs.columns, scales);
      epilogue.scales[m] = scales;
    }
    for (std::int64_t row = 0; row < outputs.rows; ++row) {
      sums[0].row = sums[1].row = row;
      if (x_scales != nullptr) epilogue.x_scale = x_scales[row];
      epilogue.out =
          outputs.y->at(outputs.row + row, 0) + outputs.column * static_cast<std::int64_t>(size_of(spec_.dtype));
      ops_.finish(sums, epilogue);
    }
  }

  LinearSpec spec_;
  const LinearOps& ops_;
  const LinearTileOps* tiles_;  // null: vectors
  decltype(TileOps::widen) widen_;
  int threads_;
  int matrices_;  // 2 if gated
  int sums_;      // of a matrix and column: one, or one for each leaf
  std::int64_t block_rows_, max_width_;
  // Per thread, in floats: the packed panel, sums of the matrices, the current split (kInt4), columns' scales and
  // biases, a row of x and 16 quantized ones (kInt8 with tiles).
  std::int64_t panel_at_ = 0, sums_at_ = 0, current_at_ = 0, columns_at_ = 0, wide_row_at_ = 0, int8_rows_at_ = 0;
  std::int64_t thread_floats_ = 0, row_floats_ = 0;
  std::int64_t packed_rows_ = 0;  // of x, at once
  // For the task: columns of a panel, K, and tiles in a row of x.
  std::int64_t width_, x_features_ = 0, x_tiles_ = 0;
  Buffer scratch_;
};

}  // namespace

std::unique_ptr<LinearKernel> make_cpu_linear(const LinearSpec& spec, Backend& backend) {
  return std::make_unique<CpuLinear>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
