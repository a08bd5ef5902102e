// SPDX-License-Identifier: Apache-2.0
// The promised accuracy of gradients, checked against the fp64 oracle on sampled rows of dQ and of dK and dV, which are
// computed from the job's own O and LSE. The greatest error is at most twice that of a same-precision reference, plus
// twice the greatest error of (g + 0.3) − 0.3 in the dtype of the gradients, plus 2⁻²⁰ · softmax_scale · ‖dO‖ ‖V‖ ‖K‖
// for dQ (‖Q‖ for dK), because dP − delta may cancel. The sinks' gradient is compared whole.
#pragma once

#include <cstdint>

#include "comm/collective.hpp"
#include "ops/attention_backward/backward_input.hpp"
#include "ops/attention_backward/loaded_backward.hpp"
#include "ops/attention_jobs/accuracy.hpp"

namespace ringattn {

// The accuracy of one gradient. Trivially copyable, because ranks exchange it.
struct AttentionGradientAccuracy {
  std::int64_t compared = 0;  // values that are finite here and in fp64
  double error = 0.0;         // the greatest error of these values
  RowSample worst;
  double same_precision_error = 0.0;
  double rounding = 0.0;
  double cancellation = 0.0;   // error that dP − delta may have by cancellation
  std::int64_t misplaced = 0;  // values that are NaN or infinite where the oracle's are not, or the other way round
  RowSample first_misplaced;

  double allowed() const { return 2.0 * same_precision_error + 2.0 * rounding + cancellation; }
  // A gradient without a finite value was not compared, and does not pass.
  bool passes() const { return compared > 0 && misplaced == 0 && error <= allowed(); }
};

// The accuracy of the sinks' gradient, at the head whose error is the largest share of its allowed error.
struct SinkAccuracy {
  double error = 0.0;
  double allowed = 0.0;
  int head = 0;
  bool misplaced = false;

  bool passes() const { return !misplaced && error <= allowed; }
};

struct BackwardAccuracy {
  std::int64_t q_rows = 0;  // compared rows of dQ
  std::int64_t k_rows = 0;  // compared rows of dK and dV
  AttentionGradientAccuracy dq, dk, dv;
  bool has_sinks = false;
  SinkAccuracy dsinks;

  bool passes() const {
    return (q_rows == 0 || dq.passes()) && (k_rows == 0 || (dk.passes() && dv.passes())) &&
           (!has_sinks || dsinks.passes());
  }
};

// Collective. Checks `count` rows of dQ, and as many of dK and dV, always the same ones. `key_tile`: of the kernel; a
// NaN in K, Q or dO may reach all rows of its tile. `threads`: CPU threads of this rank.
BackwardAccuracy check_gradients(const Collective& collective, const BackwardInput& input, int key_tile,
                                 std::int64_t count, const BackwardRankResult& result, int threads);

}  // namespace ringattn
