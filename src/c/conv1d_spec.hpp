// SPDX-License-Identifier: Apache-2.0
// Reads the job of a convolution, and writes the facts of one and of its gradients.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "c/jobs.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "ops/conv1d/causal_conv1d.hpp"

namespace ringattn::c {

inline CausalConv1dSpec read_conv1d_spec(const ringattn_causal_conv1d_spec* given) {
  constexpr std::size_t kFirstSpec = 32;  // size of the struct in its first interface version
  const auto read = read_struct("ringattn_causal_conv1d_spec", given, kFirstSpec);
  CausalConv1dSpec spec;
  spec.dtype = read_dtype(read.dtype);
  spec.width = read.width;
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  spec.channels = static_cast<int>(std::clamp<std::int64_t>(read.channels, 0, kMax));
  spec.bias = read.bias != 0;
  spec.silu = read.silu != 0;
  return spec;
}

inline CausalConv1dJob read_conv1d_job(const ringattn_causal_conv1d_spec* spec, const ringattn_ssm_batch* batch) {
  const CausalConv1dSpec read_spec = read_conv1d_spec(spec);
  SsmBatch read = read_ssm_batch(batch);
  return {read_spec, std::move(read.lengths), read.initial, read.final, read.update};
}

// Op: CausalConv1d or CausalConv1dBackward. `tensors`: those with a row for each token.
template <class Op>
void write_conv1d_facts(const Op& op, int rank, std::int64_t tensors, ringattn_ssm_facts* facts) {
  constexpr std::size_t kFirstFacts = 48;
  const CausalConv1dSpec& spec = op.job().spec;
  const std::int64_t rows = op.layout().tokens(rank);
  const auto bytes = static_cast<std::uint64_t>(tensors * rows * spec.channels) * size_of(spec.dtype);
  write_struct("ringattn_ssm_facts",
               {0, rows, static_cast<std::int64_t>(op.beginning().size()),
                static_cast<std::int64_t>(op.ending().size()), bytes, op.kernel().row->name.data()},
               facts, kFirstFacts);
}

}  // namespace ringattn::c
