// SPDX-License-Identifier: Apache-2.0
// Public API of linear layers over ranks: y = activation(x · Wᵀ + b) (kernels/linear/linear.hpp).
//
//   const LinearSpec wide{.in_features = 4096, .out_features = 14336, .parallel = LinearParallel::kColumn};
//   const LinearSpec narrow{.in_features = 14336, .out_features = 4096, .parallel = LinearParallel::kRow};
//   Linear up({wide, tokens}, world, options), down({narrow, tokens}, world, options);
//   up.load(up_shard, stream);         // rows up.columns() of W
//   down.load(down_shard, stream);     // columns down.features() of W
//   up.enqueue(x, hidden, stream);     // all tokens, this rank's columns; no communication
//   down.enqueue(hidden, y, stream);   // y: this rank's tokens, all columns
//
// - kNone: each rank has the whole layer, and any tokens. No communication.
// - kColumn: each rank has some rows of W, and all tokens.
// - kRow: each rank has some columns of W and of x, whole leaves of K. Ranks exchange fp32 sums (kInt8: int32), and for
//   kInt8 row maxima before that.
// Up to kLinearLeaves ranks share a layer. Rank r of P has leaves [8r/P, 8(r+1)/P). A column-parallel layer's N rows
// are dealt by the same rule, so that its outputs are the inputs that the next, row-parallel layer has on the same
// rank.
//
// The bits of a row of y depend on the row, the weights, the spec, the kernel, the device model and the build. They are
// the same for every number of ranks and tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn {

using LinearChoice = KernelChoice<LinearSpec>;

// What a rank gets of y.
enum class LinearOutput : std::uint8_t {
  kShard,       // kNone: the tokens of its x. kColumn: its columns of all tokens. kRow: its tokens, all columns
  kTokens,      // its tokens, all columns
  kReplicated,  // all tokens and columns; not with kNone on several ranks
};

// The same on every rank.
struct LinearJob {
  LinearSpec spec;              // of the whole layer
  std::int64_t max_tokens = 0;  // of a call; buffers are made for it
  LinearOutput output = LinearOutput::kShard;
  // kColumn: number of adjacent columns that are never divided between ranks: leaf_unit() of the layer that reads y. 0:
  // that of this layer.
  std::int64_t column_unit = 0;
  // Number of tokens of each rank's output that are computed and exchanged at a time (token_blocks.hpp). 0: blocks that
  // are large enough for the kernels. Bits do not depend on it.
  std::int64_t token_block = 0;
};

// Only the kernel may change bits of the result.
struct LinearOptions {
  KernelRequest kernel;
  int threads = 0;                // of a host kernel; 0: this rank's share
  double timeout_seconds = 60.0;  // of a wait for a peer that should be ready and sends no heartbeats
};

// Elements [begin, end).
struct FeatureRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
  bool operator==(const FeatureRange&) const = default;
};

// Pure functions of the job: leaves, features of K, columns of N and tokens of a rank.
LeafRange linear_leaves(int ranks, int rank);
FeatureRange linear_features(const LinearJob& job, int ranks, int rank);
FeatureRange linear_columns(const LinearJob& job, int ranks, int rank);
FeatureRange linear_tokens(std::int64_t tokens, int ranks, int rank);

// Throws kUsage if this number of ranks can't share the layer, or if the job contradicts itself.
void check_linear_job(const LinearJob& job, int ranks);

// Bytes of a rank besides x and y: its part of the weights (kInt4: with zeros), the kernel's own copy of it, the
// kernel's scratch, and buffers for exchanged sums and rows. `backend`: of the kernel, perhaps without a device.
std::size_t linear_rank_bytes(const LinearJob& job, const LinearChoice& choice, Backend& backend, int ranks, int rank);

class Linear {
 public:
  // Chooses the kernel and allocates. Collective. `transport` outlives the object. Throws Error: kUsage (the job
  // contradicts itself, or there are more than kLinearLeaves ranks), kUnsupported (no kernel, or ranks differ),
  // kMemory, kPeer (deadline).
  Linear(LinearJob job, Transport& transport, LinearOptions options);
  // Abandons work that was not waited for. With several ranks the transport is then unusable.
  ~Linear();
  Linear(Linear&&) noexcept;
  Linear& operator=(Linear&&) = delete;

  const LinearJob& job() const;
  const LinearChoice& kernel() const;
  Backend& backend();
  std::size_t memory_bytes() const;  // allocated by the object
  std::size_t packed_bytes() const;  // the kernel's own copy of the weights; 0: it reads the caller's

  FeatureRange features() const;                           // of K, this rank's
  FeatureRange columns() const;                            // of N, this rank's
  FeatureRange tokens_of_rank(std::int64_t tokens) const;  // of y, this rank's of `tokens`

  // Packs this rank's weights, [columns(), features()]. Call it before the first run, and whenever the weights change.
  // If the kernel reads the caller's weights, their memory is in use as long as the object; scales and biases always
  // are. Not collective. Throws kUsage, as does check_weights(), which only checks them.
  void check_weights(const LinearWeights& weights) const;
  void load(const LinearWeights& weights, Stream stream = {});

  // Collective if the layer is shared: all ranks have the same number of tokens, at most max_tokens.
  // x: [tokens, 1, features()]. y: [tokens or tokens_of_rank(), 1, columns() or N] by LinearJob::output.
  // run() validates on all ranks, the number of tokens too, and waits.
  // enqueue() only enqueues on a device, and computes on a host.
  void run(const TensorView& x, const MutableTensorView& y, Stream stream = {});
  void enqueue(const TensorView& x, const MutableTensorView& y, Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
