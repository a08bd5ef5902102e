// SPDX-License-Identifier: Apache-2.0
// Plans of gradients around the ring.
#include <fmt/format.h>

#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention/ring_plan.hpp"
#include "ops/attention/world_plan_summary.hpp"
#include "ops/attention_backward/backward_op_job.hpp"
#include "ops/attention_backward/backward_work.hpp"

namespace ringattn {

namespace {

class PlannedBackward final : public PlannedRing {
 public:
  PlannedBackward(const BackwardJob& job, const Options& options, KernelScope scope)
      : job_(job), options_(options), choice_(choose_kernel(backward_spec(job), options.kernel, scope)) {
    backend_ = choice_.row->make_backend({planned_threads(options), kNoDevice});
    kernel_ = choice_.row->make_kernel(backward_spec(job), *backend_);
  }

  const KernelEntry& kernel() const override { return *choice_.row; }
  const std::string& kernel_reason() const override { return choice_.reason; }
  const Backend& backend() const override { return *backend_; }
  MachineModel machine(const MachineModel& given, std::int64_t tokens) const override {
    return backward_machine(given, *choice_.row, job_, *backend_, tokens);
  }
  int key_tile() const override { return kernel_->key_tile(); }
  std::int64_t q_tokens() const override { return job_.forward.batch.q_tokens(); }
  RingJob ring(int) override { return backward_ring_job(job_, *kernel_, options_); }
  std::vector<std::string> world_lines(const WorldPlanSummary& summary) const override {
    if (summary.max_state == 0) return {"sums of dQ, dK and dV: none are kept, there is one block"};
    return {fmt::format("sums of dQ, dK and dV: {} of a rank are kept between blocks",
                        format_bytes(static_cast<double>(summary.max_state)))};
  }
  void write(JsonWriter& json, const WorldPlanSummary& summary) const override {
    json.member("state_per_rank", summary.max_state);
  }

 private:
  const BackwardJob& job_;
  Options options_;
  KernelChoice<AttentionBackwardSpec> choice_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<AttentionBackwardKernel> kernel_;
};

}  // namespace

std::unique_ptr<OpPlan> plan_backward(const BackwardInput& input, const PlanRequest& request) {
  const BackwardJob& job = input.job();
  const KernelScope scope = request.scope;
  return plan_ring(request, [&job, scope](const Options& options) {
    return std::make_unique<PlannedBackward>(job, options, scope);
  });
}

}  // namespace ringattn
