// SPDX-License-Identifier: Apache-2.0
// An input of attention, decode or MLA, and the op class that computes it.
#pragma once

#include <memory>
#include <optional>

#include "comm/collective.hpp"
#include "ops/attention/attention.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/attention_jobs/ring_op.hpp"
#include "ops/decode/decode.hpp"
#include "ops/decode/decode_plan_summary.hpp"
#include "ops/decode/loaded_decode.hpp"
#include "ops/mla/mla.hpp"
#include "ops/mla/mla_decode.hpp"

namespace ringattn {

// A job's options for Decode.
DecodeOptions decode_options(const Options& options);

// The decode step of `input` with the kernel that `request` chooses, on `ranks` ranks, each with `threads` threads of a
// host kernel (0: the processors that this process may use). Throws the errors of the kernel choice.
DecodePlanSummary summarize_decode_plan(const JobInput& input, const KernelRequest& request, int ranks, int threads,
                                        KernelScope scope = KernelScope::kThisMachine);

// Each call is collective. The transport outlives the object.
class PreparedJob {
 public:
  // Makes the op class for an input on which the ranks have agreed: kernel, plan, memory. `heads_at_a_time` is
  // MlaOptions' and is used only for MLA. Throws what the op classes throw.
  PreparedJob(JobInput input, Transport& transport, Options options, int heads_at_a_time = 0);

  const JobInput& input() const { return input_; }
  const Collective& collective() const { return collective_; }
  // The op that input().op() and input().decodes() select; for MLA that is decoded, decode() is in_latent().
  Attention& attention() { return *attention_; }
  Decode& decode() { return mla_decode_ ? mla_decode_->in_latent() : *decode_; }
  Mla& latent() { return *latent_; }
  // Plan of decode(), including the memory that its budget must hold.
  const DecodePlanSummary& step() const { return *step_; }

  // Kernel, plan and layout of attention() or latent().
  RingOp ring() { return latent_ ? ring_op(*latent_) : ring_op(*attention_); }

  // Backend and kernel of the op.
  Backend& backend() { return input_.decodes() ? decode().backend() : ring().backend; }
  const KernelEntry& kernel() {
    if (input_.decodes()) return *decode().kernel().row;
    return *ring().kernel.row;
  }
  int threads() { return input_.decodes() ? decode().options().threads : ring().options.threads; }
  // Loads the decode steps of input(). `caches`: as in LoadedDecode.
  std::unique_ptr<LoadedDecode> load_decode(const ProgressCallback& on_progress = {}, int caches = 1);

  // The tile sizes of the kernel.
  KernelShape tiles();

  // Loads the rows of attention() or latent(), to be computed any number of times.
  std::unique_ptr<LoadedJob> load(const ProgressCallback& on_progress = {});
  // Loads, computes and fetches.
  RankResult compute(const ProgressCallback& on_progress = {});

 private:
  Collective collective_;
  JobInput input_;
  std::optional<Attention> attention_;
  std::optional<Decode> decode_;
  std::optional<Mla> latent_;
  std::optional<MlaDecode> mla_decode_;
  std::optional<DecodePlanSummary> step_;
};

}  // namespace ringattn
