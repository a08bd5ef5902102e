// SPDX-License-Identifier: Apache-2.0
// The kernels and the plan input of a ring job, without ranks and devices.
#pragma once

#include <memory>

#include "attention/options.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "ops/attention/plan_summary.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

class PlannedJob {
 public:
  // Chooses kernels as the op of the input (attention or MLA) does. `heads_at_a_time`: for MLA (MlaOptions). `input`
  // and `options` outlive the object. Throws the errors of the kernel choice.
  PlannedJob(const JobInput& input, const Options& options, KernelScope scope, int heads_at_a_time = 0);

  const AttentionChoice& kernel() const { return choice_; }
  const AttentionSpec& spec() const { return spec_; }  // for all heads
  const Backend& backend() const { return *backend_; }
  int key_tile() const { return kernel_->key_tile(); }
  // The job in a world of `world` ranks. Refers to the object's kernels, and is valid until the next call. Throws the
  // errors of choose_mla_block_size().
  RingJob ring(int world);

 private:
  std::unique_ptr<Backend> make_backend() const;
  void choose_mla(KernelScope scope);
  std::unique_ptr<AttentionKernel> make_kernel(int heads) const;  // MLA: for `heads` heads

  const JobInput& input_;
  const Options& options_;
  int heads_at_a_time_;
  AttentionSpec spec_;
  AttentionChoice choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<AttentionKernel> kernel_;
  std::size_t gemm_scratch_bytes_ = 0;         // for decompressing keys and values
  std::unique_ptr<BatchedGemmKernel> keys_;    // MLA, if it has this GEMM
  std::unique_ptr<BatchedGemmKernel> values_;  // likewise
};

}  // namespace ringattn
