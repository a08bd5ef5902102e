// SPDX-License-Identifier: Apache-2.0
#include "attention/job/planned_job.hpp"

#include <string>

#include "attention/latent_work.hpp"
#include "base/gpu.hpp"
#include "base/host.hpp"

namespace ringattn {

PlannedJob::PlannedJob(const JobInput& input, const Options& options, KernelPlace place, int heads_at_a_time)
    : input_(input), options_(options), heads_at_a_time_(heads_at_a_time) {
  const bool latent = input.op() == Op::kLatent;
  const FoldSpec spec =
      latent ? form_spec(input.latent().spec, *input.latent().form, input.latent().spec.heads) : input.job().spec;
  choice_ = choose_kernel(spec, options.kernel, place);
  backend_ = choice_.row->make_backend({options.threads > 0 ? options.threads : usable_processors().count, kNoDevice});
  fold_ = choice_.row->make_kernel(spec, *backend_);
  if (!latent) return;
  const LatentJob& job = input.latent();
  const KernelRequest beside{std::string(choice_.row->backend), "auto"};
  const auto product = [&](const HeadProductSpec& of) {
    return choose_kernel(of, beside, place).row->make_kernel(of, *backend_);
  };
  keys_ = product(*job.form == LatentForm::kAbsorbed ? query_absorption(job.spec) : key_expansion(job.spec));
  values_ = product(value_expansion(job.spec));
}

std::unique_ptr<FoldKernel> PlannedJob::make_fold(int heads) const {
  const LatentJob& job = input_.latent();
  return choice_.row->make_kernel(form_spec(job.spec, *job.form, heads), *backend_);
}

RingJob PlannedJob::ring(int world) {
  if (input_.op() != Op::kLatent) return ring_job(input_.job(), *fold_);
  const LatentJob& job = input_.latent();
  const LatentRoom room = latent_room(job, options_, heads_at_a_time_, world,
                                      {[this](int heads) { return make_fold(heads); }, *keys_, *values_});
  fold_ = make_fold(room.heads);
  return ring_job(job, options_, room, {*fold_, *keys_, *values_});
}

}  // namespace ringattn
