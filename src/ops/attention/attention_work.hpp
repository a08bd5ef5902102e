// SPDX-License-Identifier: Apache-2.0
// Describes an attention job to the ring: its row streams and its cost per (query, key) pair.
#pragma once

#include <string>
#include <utility>

#include "attention/ring/ring_work.hpp"
#include "attention/tokens/cost.hpp"
#include "attention/tokens/job.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

// The row streams of a token: K, then V. A compressed tensor has the streams of its format.
inline RowStreams kv_streams(const Job& job) {
  const AttentionSpec& spec = job.spec;
  RowStreams streams;
  const auto add = [&](const char* name, const RowFormat& format, int dim) {
    for (const FormatStream& stream : format_streams(format, {spec.dtype, spec.kv_heads, dim})) {
      std::string whole(name);
      if (!format.is_plain()) whole.append("_").append(stream.name);
      streams.push_back({std::move(whole), stream.token_bytes(spec.dtype)});
    }
  };
  add("k", job.format.k, spec.head_dim);
  add("v", job.format.v, spec.head_dim_v);
  return streams;
}

inline RingWork attention_work(const Job& job) {
  return {job.batch, job.spec.mask, kv_streams(job), pair_flops(job.spec), job.block_mask, 0.0, 0.0, job.positions};
}

}  // namespace ringattn
