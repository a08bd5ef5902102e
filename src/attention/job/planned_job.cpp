// SPDX-License-Identifier: Apache-2.0
#include "attention/job/planned_job.hpp"

#include <string>

#include "attention/compressed_step.hpp"
#include "attention/latent_work.hpp"
#include "base/gpu.hpp"
#include "base/host.hpp"

namespace ringattn {

PlannedJob::PlannedJob(const JobInput& input, const Options& options, KernelPlace place) {
  const auto choose_fold = [&](const FoldSpec& spec) {
    choice_ = choose_kernel(spec, options.kernel, place);
    backend_ =
        choice_.row->make_backend({options.threads > 0 ? options.threads : usable_processors().count, kNoDevice});
    fold_ = choice_.row->make_kernel(spec, *backend_);
  };
  if (input.op() != Op::kLatent) {
    choose_fold(input.job().spec);
    const Job& job = input.job();
    std::size_t product_bytes = 0;
    if (!job.format.is_plain()) {
      check_compressed(job, options, fold_->key_tile());
      product_bytes = make_rank_products(job, choice_.row->backend, *backend_).scratch_bytes(job);
    }
    ring_ = ring_job(job, options, *fold_, product_bytes);
    return;
  }
  const LatentJob& job = input.latent();
  const LatentRoom room = latent_room(job, options, 0);
  choose_fold(form_spec(job.spec, *job.form, room.heads));
  const KernelRequest beside{std::string(choice_.row->backend), "auto"};
  const auto product = [&](const HeadProductSpec& spec) {
    return choose_kernel(spec, beside, place).row->make_kernel(spec, *backend_);
  };
  keys_ = product(*job.form == LatentForm::kAbsorbed ? query_absorption(job.spec) : key_expansion(job.spec));
  values_ = product(value_expansion(job.spec));
  ring_ = ring_job(job, options, room, {*fold_, *keys_, *values_});
}

}  // namespace ringattn
