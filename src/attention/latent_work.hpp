// SPDX-License-Identifier: Apache-2.0
// Latent attention in the words of the ring: its row streams, what its pairs, keys and queries cost, and the room that
// a form takes on a rank. Pure, so a plan can be asked for without ranks or devices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/forecast.hpp"
#include "attention/options.hpp"
#include "attention/ring/row_stream.hpp"
#include "attention/tokens/latent_job.hpp"
#include "kernels/fold.hpp"
#include "kernels/head_product.hpp"

namespace ringattn {

// The streams of a token: its latent and its rotary key, in this order.
RowStreams latent_streams(const LatentSpec& spec);

// How much of a block is gathered at a time.
struct LatentRoom {
  int heads = 1;                       // at a time; divides the job's. Absorbed: all
  std::int64_t most_block_tokens = 0;  // PlanOptions::most_block_tokens

  bool operator==(const LatentRoom&) const = default;
};
// `heads_at_a_time`: LatentOptions. Blocks are limited to 32,768 tokens expanded and to 131,072 absorbed, and to less
// where their rows would take more than a quarter of the memory budget; blocks that Options::block_tokens states are as
// large as it says. `job` has its form. Throws kUsage for a negative number of heads.
LatentRoom latent_room(const LatentJob& job, const Options& options, int heads_at_a_time);

// Bytes of one gathered row: expanded the keys and values of `heads` heads, absorbed [c, k_r].
std::int64_t gathered_row_bytes(const LatentSpec& spec, LatentForm form, int heads);

// Bytes of state for so many query rows: a part for each run of heads, each aligned to 256.
std::size_t latent_state_stride(const FoldKernel& fold, std::int64_t rows);

// The kernels of a form.
struct LatentKernels {
  const FoldKernel& fold;           // of form_spec() for LatentRoom::heads
  const HeadProductKernel& keys;    // expanded: key_expansion(); absorbed: query_absorption()
  const HeadProductKernel& values;  // value_expansion()
};
// What a forecast needs of a job that has its form. The kernels outlive what is returned.
RingJob ring_job(const LatentJob& job, const Options& options, const LatentRoom& room, const LatentKernels& kernels);

// Rows that reach the plan's rank from others in a run.
std::int64_t received_rows(const Plan& plan);

}  // namespace ringattn
