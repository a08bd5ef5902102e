// SPDX-License-Identifier: Apache-2.0
#include "attention/job/planned_job.hpp"

#include "attention/compressed_step.hpp"
#include "attention/latent_work.hpp"
#include "base/gpu.hpp"
#include "base/host.hpp"

namespace ringattn {

PlannedJob::PlannedJob(const JobInput& input, const Options& options, KernelPlace place, int heads_at_a_time)
    : input_(input), options_(options), heads_at_a_time_(heads_at_a_time) {
  if (input.op() == Op::kLatent) {
    choose_latent(place);
    return;
  }
  choice_ = choose_kernel(input.job().spec, options.kernel, place);
  backend_ = make_backend();
  const Job& job = input.job();
  fold_ = choice_.row->make_kernel(job.spec, *backend_);
  if (job.format.is_plain()) return;
  check_compressed(job, options, fold_->key_tile());
  product_bytes_ = make_rank_products(job, choice_.row->backend, *backend_).scratch_bytes(job);
}

std::unique_ptr<Backend> PlannedJob::make_backend() const {
  return choice_.row->make_backend({options_.threads > 0 ? options_.threads : usable_processors().count, kNoDevice});
}

void PlannedJob::choose_latent(KernelPlace place) {
  const LatentJob& job = input_.latent();
  const LatentChoice chosen = choose_latent_kernels(job.spec, *job.form, options_.kernel, place);
  choice_ = chosen.fold;
  backend_ = make_backend();
  fold_ = make_fold(job.spec.heads);
  if (const auto of_keys = key_product(job.spec, *job.form)) keys_ = chosen.keys->make_kernel(*of_keys, *backend_);
  if (const auto of_values = value_product(job.spec)) values_ = chosen.values->make_kernel(*of_values, *backend_);
}

std::unique_ptr<FoldKernel> PlannedJob::make_fold(int heads) const {
  const LatentJob& job = input_.latent();
  return choice_.row->make_kernel(form_spec(job.spec, *job.form, heads), *backend_);
}

RingJob PlannedJob::ring(int world) {
  if (input_.op() != Op::kLatent) return ring_job(input_.job(), options_, *fold_, world, product_bytes_);
  const LatentJob& job = input_.latent();
  const LatentRoom room = latent_room(job, options_, heads_at_a_time_, world,
                                      {[this](int heads) { return make_fold(heads); }, keys_.get(), values_.get()});
  fold_ = make_fold(room.heads);
  return ring_job(job, options_, room, {*fold_, keys_.get(), values_.get()});
}

}  // namespace ringattn
