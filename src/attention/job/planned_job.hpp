// SPDX-License-Identifier: Apache-2.0
// What a job that goes around the ring would run on, without ranks and devices: its kernels, and the job in the words
// of a forecast.
#pragma once

#include <memory>

#include "attention/files/job_input.hpp"
#include "attention/forecast.hpp"
#include "attention/options.hpp"
#include "kernels/head_product.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

class PlannedJob {
 public:
  // Chooses as the front door of the input's op does, attention's or that of latents. Throws what choosing throws.
  PlannedJob(const JobInput& input, const Options& options, KernelPlace place);

  const FoldChoice& kernel() const { return choice_; }
  const Backend& backend() const { return *backend_; }
  int key_tile() const { return fold_->key_tile(); }
  // Refers to the object's kernels.
  const RingJob& ring() const { return ring_; }

 private:
  FoldChoice choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<FoldKernel> fold_;
  std::unique_ptr<HeadProductKernel> keys_;    // of latents
  std::unique_ptr<HeadProductKernel> values_;  // likewise
  RingJob ring_;
};

}  // namespace ringattn
