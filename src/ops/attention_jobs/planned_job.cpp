// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/planned_job.hpp"

#include "base/gpu.hpp"
#include "ops/attention/compressed_ring_step.hpp"
#include "ops/common/op_plan.hpp"
#include "ops/mla/mla_work.hpp"

namespace ringattn {

PlannedJob::PlannedJob(const JobInput& input, const Options& options, KernelScope scope, int heads_at_a_time)
    : input_(input), options_(options), heads_at_a_time_(heads_at_a_time) {
  if (input.mla() != nullptr) {
    choose_mla(scope);
    return;
  }
  spec_ = input.job().spec;
  choice_ = choose_kernel(spec_, options.kernel, scope);
  backend_ = make_backend();
  const Job& job = input.job();
  kernel_ = choice_.row->make_kernel(job.spec, *backend_);
  if (job.format.is_plain()) return;
  check_compressed(job, options, kernel_->key_tile());
  gemm_scratch_bytes_ = make_low_rank_gemms(job, choice_.row->backend, *backend_).scratch_bytes(job);
}

std::unique_ptr<Backend> PlannedJob::make_backend() const {
  return choice_.row->make_backend({planned_threads(options_), kNoDevice});
}

void PlannedJob::choose_mla(KernelScope scope) {
  const MlaJob& job = *input_.mla();
  const MlaChoice chosen = choose_mla_kernels(job.spec, *job.form, options_.kernel, scope);
  spec_ = form_spec(job.spec, *job.form, job.spec.heads);
  choice_ = chosen.attention;
  backend_ = make_backend();
  kernel_ = make_kernel(job.spec.heads);
  if (const auto of_keys = key_gemm(job.spec, *job.form)) keys_ = chosen.keys->make_kernel(*of_keys, *backend_);
  if (const auto of_values = value_gemm(job.spec)) values_ = chosen.values->make_kernel(*of_values, *backend_);
}

std::unique_ptr<AttentionKernel> PlannedJob::make_kernel(int heads) const {
  const MlaJob& job = *input_.mla();
  return choice_.row->make_kernel(form_spec(job.spec, *job.form, heads), *backend_);
}

RingJob PlannedJob::ring(int world) {
  if (input_.mla() == nullptr) return ring_job(input_.job(), options_, *kernel_, world, gemm_scratch_bytes_);
  const MlaJob& job = *input_.mla();
  const MlaBlockSize block_size =
      choose_mla_block_size(job, options_, heads_at_a_time_, world,
                            {[this](int heads) { return make_kernel(heads); }, keys_.get(), values_.get()});
  kernel_ = make_kernel(block_size.heads);
  return ring_job(job, options_, block_size, {*kernel_, keys_.get(), values_.get()});
}

}  // namespace ringattn
