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
  // Chooses as the front door of the input's op does, attention's or that of latents. `heads_at_a_time`: of latents
  // (LatentOptions). `input` and `options` outlive the object. Throws what choosing throws.
  PlannedJob(const JobInput& input, const Options& options, KernelPlace place, int heads_at_a_time = 0);

  const FoldChoice& kernel() const { return choice_; }
  const Backend& backend() const { return *backend_; }
  int key_tile() const { return fold_->key_tile(); }
  // In a world of `world` ranks. Refers to the object's kernels, until the next call. Throws what latent_room() throws.
  RingJob ring(int world);

 private:
  std::unique_ptr<Backend> make_backend() const;
  void choose_latent(KernelPlace place);
  std::unique_ptr<FoldKernel> make_fold(int heads) const;  // of latents: of so many heads

  const JobInput& input_;
  const Options& options_;
  int heads_at_a_time_;
  FoldChoice choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<FoldKernel> fold_;
  std::size_t product_bytes_ = 0;              // of compressed keys and values: what decompressing them takes
  std::unique_ptr<HeadProductKernel> keys_;    // of latents, where they have that product
  std::unique_ptr<HeadProductKernel> values_;  // likewise
};

}  // namespace ringattn
