// SPDX-License-Identifier: Apache-2.0
// The contributions of a segment's tokens to rows of one head, in fp64. They determine the allowed error of an SSM
// kernel that rounds factors (ssm_accuracy.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ringattn {

class SegmentTerms {
 public:
  // `decays`: number of log-decays per token: 1 or, with SsmDecay::kDim, state_dim.
  SegmentTerms(int head_dim, int state_dim, int decays)
      : head_dim_(static_cast<std::size_t>(head_dim)),
        state_dim_(static_cast<std::size_t>(state_dim)),
        decay_count_(static_cast<std::size_t>(decays)) {}

  // Called before each chunk of a sequence, with the state at that token, [head_dim, state_dim].
  void begin_chunk(std::span<const double> state);
  // Adds the next token: the natural logarithms of its decays, dt · x [head_dim] and B [state_dim].
  void add(std::span<const double> log_decays, std::span<const double> scaled, std::span<const double> b);
  // For each dim of the last token's row: the square root of the sum of squares of the rounded terms, each counted as
  // often as it is rounded. `c`: C of the row. `skip`: D, which is added to the token's own weight. `x`: its row.
  std::vector<double> spread(std::span<const double> c, double skip, std::span<const double> x) const;

 private:
  std::vector<double> squares_of_heads(std::span<const double> c, double skip, std::span<const double> x) const;
  std::vector<double> squares_of_dims(std::span<const double> c) const;

  std::size_t head_dim_, state_dim_, decay_count_;
  std::int64_t chunks_ = 0;
  std::size_t before_ = 0;      // tokens of the segment before the chunk
  std::vector<double> state_;   // before the chunk
  std::vector<double> decays_;  // logarithms, [tokens of the segment, decays]
  std::vector<double> scaled_;  // [tokens, head_dim]
  std::vector<double> b_;       // [tokens, state_dim]
};

}  // namespace ringattn
