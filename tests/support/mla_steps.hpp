// SPDX-License-Identifier: Apache-2.0
// A rank's side of an MlaDecode whose sequences grow step by step: its share of the latents in a cache, the rows of a
// step and the results, in the memory of the kernel. Unowned entries are NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/mla/mla_decode.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {

// Absorbed, sequences of these lengths whose last `steps` · `rows` tokens are queries.
MlaJob stepwise_job(const MlaSpec& spec, const std::vector<std::int64_t>& lengths, int rows, int steps);

// The limits of an MlaDecode of such a job.
MlaDecodeJob mla_decode_job(const MlaJob& job, int rows, std::int64_t page_size, const RowFormat& format = {});

class MlaSteps {
 public:
  // `job`: a stepwise_job(). The cache holds the tokens before the first step, in pages that are dealt at random, and
  // in FP8 rows where `decode` has them.
  MlaSteps(MlaDecode& decode, const MlaJob& job, const MlaTensors& tensors);

  // The rows of this step.
  void load(int step);
  // Inputs of the step that was loaded: its rows are appended to the cache.
  MlaDecodeInputs inputs() const;
  MlaOutputs outputs() const;
  Stream stream() const { return backend_.stream(); }

  // These wait. Compares this rank's rows of the step with the reference by memcmp. Returns which rows differ, or an
  // empty string.
  std::string difference(const JobResult& reference, int step) const;
  // Puts this rank's rows of the step into `result`, whose arrays have their full size.
  void take(JobResult& result, int step) const;
  std::int64_t own_rows() const { return mine_.count * rows_; }

 private:
  void fill(MlaTensors tensors);
  // `rows` rows of each sequence, from the packed row first[sequence] on.
  std::vector<std::byte> rows_of(const std::vector<std::byte>& packed, std::int64_t row_bytes,
                                 const std::vector<std::int64_t>& first) const;
  std::vector<std::int64_t> first_queries(int step) const;
  std::int64_t element() const { return static_cast<std::int64_t>(size_of(job_.spec.dtype)); }
  std::int64_t out_bytes() const { return job_.spec.heads * job_.spec.head_dim_v * element(); }
  std::int64_t lse_bytes() const { return job_.spec.heads * static_cast<std::int64_t>(sizeof(float)); }

  MlaDecode& decode_;
  Backend& backend_;
  MlaJob job_;
  MlaTensors tensors_;
  int rows_;
  SequenceRange mine_;
  std::int64_t table_pages_ = 1, page_tokens_ = 0;
  std::vector<std::int32_t> table_;  // [sequences, table_pages]
  std::int64_t row_bytes_ = 0;       // of the cache
  DeviceArray cache_, table_there_, lengths_, q_, latent_, k_rope_, w_uk_, w_uv_, sinks_, out_, lse_;
};

}  // namespace ringattn::testing
