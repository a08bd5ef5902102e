// SPDX-License-Identifier: Apache-2.0
// Attention in the words of the ring: its row streams and its pairs.
#pragma once

#include "attention/ring/ring_work.hpp"
#include "attention/tokens/cost.hpp"
#include "attention/tokens/job.hpp"

namespace ringattn {

// The streams of a token: its rows of K and of V, in this order.
inline RowStreams kv_streams(const FoldSpec& spec) { return {{"k", k_token_bytes(spec)}, {"v", v_token_bytes(spec)}}; }

inline RingWork attention_work(const Job& job) {
  return {job.batch, job.spec.mask, kv_streams(job.spec), pair_flops(job.spec), job.lists};
}

}  // namespace ringattn
