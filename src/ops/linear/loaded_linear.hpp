// SPDX-License-Identifier: Apache-2.0
// A linear layer's weights in memory, and the layer prepared on a rank with its part of them.
#pragma once

#include <cstdint>

#include "comm/timeouts.hpp"
#include "ops/jobs/row_op.hpp"
#include "ops/linear/linear.hpp"
#include "ops/linear/linear_input.hpp"

namespace ringattn {

// A part of a layer's weights in a backend's memory.
class LoadedWeights {
 public:
  // Reads the given rows of each of the layer's matrices, and the given features of these rows. Throws kFile.
  LoadedWeights(Backend& backend, const Timeouts& timeouts, const LinearInput& input, const LinearSpec& spec,
                FeatureRange rows, FeatureRange features);

  const LinearWeights& weights() const { return weights_; }
  std::int64_t non_finite() const { return non_finite_; }  // non-finite floating-point values and biases

 private:
  struct Memory {
    Buffer data, scales, zeros, bias;
  };

  LinearMatrix load(Backend& backend, const Timeouts& timeouts, const LinearInput& input, const LinearSpec& spec,
                    int matrix, FeatureRange rows, FeatureRange features, Memory& memory);

  Memory memory_[2];
  LinearWeights weights_;
  std::int64_t non_finite_ = 0;
};

// Reads the rank's rows of x and its part of the weights. `input` outlives the object.
class LoadedLinear final : public RowKernel {
 public:
  LoadedLinear(const LinearJob& job, const LinearInput& input, Transport& world, const KernelRequest& kernel,
               const Options& options)
      : layer_(job, world, {kernel, options.threads, options.timeout_seconds}),
        timeouts_(options.timeout_seconds),
        input_(input),
        counts_(world.rank() == 0 || job.spec.parallel != LinearParallel::kNone) {}

  Backend& backend() override { return layer_.backend(); }
  void load(const RowInput& input, const Layout& layout, int rank, int threads) override;
  double run() override;
  void fetch(std::span<std::byte> out) override;
  std::int64_t non_finite() const override { return counts_ && weights_ ? weights_->non_finite() : 0; }

 private:
  std::size_t bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * size_of(layer_.job().spec.dtype);
  }

  Linear layer_;
  Timeouts timeouts_;
  const LinearInput& input_;
  bool counts_;              // this rank counts non-finite weights, which several ranks may have
  std::int64_t tokens_ = 0;  // of x
  std::optional<LoadedWeights> weights_;
  Buffer x_, out_;
};

}  // namespace ringattn
