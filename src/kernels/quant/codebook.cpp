// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/codebook.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"
#include "kernels/quant/quant_ops.hpp"
#include "kernels/quant/row_codec.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn {

namespace {

// k-means over points [count, width].
class Clusters {
 public:
  Clusters(std::vector<float> points, std::int64_t width, std::uint64_t seed, std::uint32_t stream)
      : points_(std::move(points)), width_(width), count_(static_cast<std::int64_t>(points_.size()) / width) {
    // The first 256 points in shuffled order, used cyclically if there are fewer.
    std::vector<std::int64_t> order(static_cast<std::size_t>(count_));
    std::iota(order.begin(), order.end(), 0);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(count_, kCodebookVectors); ++i) {
      const int other = codebook_draw(static_cast<int>(i), static_cast<int>(count_), stream, seed);
      std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(other)]);
    }
    vectors_.resize(static_cast<std::size_t>(kCodebookVectors * width_));
    for (std::int64_t v = 0; v < kCodebookVectors && count_ > 0; ++v) {
      const float* const start = point(order[static_cast<std::size_t>(v % count_)]);
      for (std::int64_t c = 0; c < width_; ++c) vectors_[vector_index(v, c)] = start[c];
    }
  }

  // One k-means iteration: each vector becomes the mean of the points nearest to it. A vector without points stays.
  void step() {
    std::vector<double> sums(vectors_.size());
    std::vector<std::int64_t> points(kCodebookVectors);
    for (std::int64_t i = 0; i < count_; ++i) {
      const int nearest = ops_.nearest(point(i), vectors_.data(), static_cast<int>(width_));
      ++points[static_cast<std::size_t>(nearest)];
      for (std::int64_t c = 0; c < width_; ++c) sums[vector_index(nearest, c)] += static_cast<double>(point(i)[c]);
    }
    for (std::size_t at = 0; at < sums.size(); ++at) {
      const std::int64_t of_vector = points[at % static_cast<std::size_t>(kCodebookVectors)];
      if (of_vector > 0) vectors_[at] = static_cast<float>(sums[at] / static_cast<double>(of_vector));
    }
  }

  float number(std::int64_t vector, std::int64_t channel) const { return vectors_[vector_index(vector, channel)]; }

 private:
  static std::size_t vector_index(std::int64_t vector, std::int64_t channel) {
    return static_cast<std::size_t>(channel * kCodebookVectors + vector);
  }
  const float* point(std::int64_t i) const { return points_.data() + i * width_; }

  std::vector<float> points_;
  std::vector<float> vectors_;  // [width, 256]
  std::int64_t width_;
  std::int64_t count_;
  const CodebookOps& ops_ = best_codebook_ops();
};

}  // namespace

void check_task(const CodebookTask& task) {
  const std::int64_t width = task.width;
  if ((width == 2 || width == 4 || width == 8) && task.rows.dim % width == 0 && task.rows.dtype != Dtype::kF32) return;
  fail(ErrorCode::kInternal,
       fmt::format("codebook indices of {} channels of rows of {} {}", width, dtype_name(task.rows.dtype),
                   task.rows.dim),
       "a codebook has 2, 4 or 8 channels, which divide rows of bf16 or fp16");
}

void find_codebook_on_host(const CodebookTask& task, int threads) {
  check_task(task);
  const TensorView& rows = task.rows;
  const std::int64_t width = task.width;
  const std::int64_t runs = rows.dim / width;
  const std::int64_t entries = kCodebookVectors * width;
  const auto element = static_cast<std::int64_t>(size_of(rows.dtype));
  const std::int64_t sampled = codebook_points(rows.tokens);
  for (std::int64_t head = 0; head < rows.heads; ++head) {
    heartbeat();
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (std::int64_t run = 0; run < runs; ++run) {
      std::vector<float> points(static_cast<std::size_t>(sampled * width));
      for (std::int64_t i = 0; i < sampled; ++i) {
        widen_row(rows.at(codebook_token(i, sampled, rows.tokens), head) + run * width * element, rows.dtype, width,
                  points.data() + i * width);
      }
      Clusters clusters(std::move(points), width, task.seed, static_cast<std::uint32_t>(head * runs + run));
      for (int round = 0; round < kKMeansIterations; ++round) clusters.step();
      std::byte* const out = task.codebook + (head * runs + run) * entries * element;
      for (std::int64_t i = 0; i < entries; ++i) {
        store_element(out + i * element, rows.dtype, clusters.number(i / width, i % width));
      }
    }
  }
  static_cast<void>(threads);
}

}  // namespace ringattn
