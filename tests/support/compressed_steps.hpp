// SPDX-License-Identifier: Apache-2.0
// Decode steps by the op class over a growing compressed cache, in the memory of the kernel that runs, and the expected
// results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/registry.hpp"
#include "ops/decode/decode.hpp"
#include "tests/support/compressed_tensors.hpp"

namespace ringattn::testing {

// Two sequences, in pages. KV splits have 8,192 keys: the steps cross from the first split, which belongs to one rank,
// into the second, which belongs to another.
class CompressedSteps {
 public:
  static constexpr std::int64_t kStart = 8174;  // keys of a sequence before the first step
  static constexpr int kSequences = 2;
  static constexpr int kRows = 3;  // of a step
  static constexpr std::int64_t kPage = 64;
  using Outputs = std::vector<std::vector<std::byte>>;  // O of each step, of all sequences

  // `steps` steps; neither format is plain. The spec has no sinks.
  CompressedSteps(const AttentionSpec& spec, const CacheFormat& format, int steps);

  int steps() const { return steps_; }
  Outputs no_outputs() const;
  // The result of a step over an unquantized cache of the decompressed rows, on one device.
  std::vector<std::byte> expected(int step, const KernelRequest& kernel) const;
  // A rank's part: its share of the cache, all steps, and its rows of them into `outputs`. Collective.
  void run(Transport& transport, const DecodeOptions& options, Outputs& outputs) const;

 private:
  std::size_t step_bytes() const;
  // The first tokens of each sequence, compressed. If the format has tables, they are those of the first step's cache.
  CompressedTensor compressed(const RowFormat& format, const RowShape& shape, const std::vector<std::byte>& rows,
                              std::int64_t length, const CompressedTensor* first) const;

  DecodeJob job_;
  int steps_;
  std::int64_t tokens_;  // of a sequence after the last step
  RowShape k_shape_, v_shape_;
  std::vector<std::byte> k_rows_, v_rows_, q_;
  CompressedTensor k_, v_;  // kStart tokens
};

}  // namespace ringattn::testing
