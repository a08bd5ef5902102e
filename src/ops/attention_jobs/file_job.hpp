// SPDX-License-Identifier: Apache-2.0
// The op class to whole jobs: q, k and v, or a cache, or latents, from a file or a seed; attention, a decode step
// or latent attention over the ranks of a world; O and LSE to a file.
//
//   FileJob job;
//   job.input = FileInput{"qkv.safetensors"};
//   job.output = "out.safetensors";
//   const FileJobResult result = run_file_job(job, *transport, options);  // collective
//
// Each rank reads and writes its own rows. The output file is the same byte for byte for any number of ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/collective.hpp"
#include "io/safetensors_writer.hpp"
#include "ops/attention/attention.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/attention_jobs/ring_op.hpp"
#include "ops/decode/decode.hpp"
#include "ops/decode/decode_plan_summary.hpp"
#include "ops/decode/loaded_decode.hpp"
#include "ops/mla/mla.hpp"
#include "ops/mla/mla_decode.hpp"

namespace ringattn {

struct FileJob {
  InputRequest input;
  Numerics numerics;
  std::string output;     // empty: no file is written
  bool replace = false;   // an output file that exists
  FileMetadata metadata;  // of the output, beside what output_metadata() says
  // MLA only, for latents in rows that could be a decode step: why they are computed around the ring. Empty: they are
  // decoded, over a cache that is made of the rows.
  std::string not_decoded_reason;
};

struct FileJobResult {
  RankResult rank;  // this rank's rows, in host memory
  Digests digests;
};

// A job's options for Decode.
DecodeOptions decode_options(const Options& options);

// The step of `input` with the kernel that `request` chooses, on `ranks` ranks, each with `threads` threads of a host
// kernel (0: the processors that this process may use). Throws what choosing throws.
DecodePlanSummary summarize_decode_plan(const JobInput& input, const KernelRequest& request, int ranks, int threads,
                                        KernelScope scope = KernelScope::kThisMachine);

// A file job in steps, for callers that show what they are about to do. Each call is collective; the transport outlives
// the object.
class PreparedFileJob {
 public:
  // Opens the input, checks that all ranks have the same one and that the output can be written, and prepares the op:
  // kernel, plan, memory. Caches and latents in rows that no kernel decodes are computed as rows (decode_or_attend()).
  // Reads samples of the rows. Throws kFile, and what JobInput and the ops throw.
  PreparedFileJob(FileJob job, Transport& transport, Options options);
  // For an input that the caller has opened, on which the ranks have agreed; nothing is written. `heads_at_a_time` is
  // MlaOptions' and is used only for MLA.
  PreparedFileJob(JobInput input, Transport& transport, Options options, int heads_at_a_time = 0);

  const JobInput& input() const { return *input_; }
  // The one that input().op() says is there, and input().decodes(): for MLA that is decoded, decode() is in_latent().
  Attention& attention() { return *attention_; }
  Decode& decode() { return mla_decode_ ? mla_decode_->in_latent() : *decode_; }
  Mla& latent() { return *latent_; }
  // Plan of decode(), with the memory that its budget has to hold.
  const DecodePlanSummary& step() const { return *step_; }

  // Kernel, plan and layout of attention() or latent().
  RingOp ring() { return latent_ ? ring_op(*latent_) : ring_op(*attention_); }

  // Whatever the op: backend and kernel.
  Backend& backend() { return input_->decodes() ? decode().backend() : ring().backend; }
  const KernelEntry& kernel() {
    if (input_->decodes()) return *decode().kernel().row;
    return *ring().kernel.row;
  }
  int threads() { return input_->decodes() ? decode().options().threads : ring().options.threads; }
  // The steps that input() decodes(): `caches` as of LoadedDecode.
  std::unique_ptr<LoadedDecode> load_decode(const ProgressCallback& on_progress = {}, int caches = 1);

  // The tiles of the kernel.
  KernelShape tiles();

  // The rows of attention() or latent(), to be computed any number of times.
  std::unique_ptr<LoadedJob> load(const ProgressCallback& on_progress = {});
  // Reads, computes, fetches.
  RankResult compute(const ProgressCallback& on_progress = {});
  // The same, and the digests.
  FileJobResult run(const ProgressCallback& on_progress = {});
  // Writes the output file, if the FileJob asks for one.
  void write(const FileJobResult& result);
  // Writes it to `path`. `more`: metadata beside the op's own.
  void write(const FileJobResult& result, const std::string& path, bool replace, const FileMetadata& more);

 private:
  void prepare(Transport& transport, Options options, int heads_at_a_time);

  FileJob job_;
  Collective collective_;
  std::optional<JobInput> input_;
  std::optional<Attention> attention_;
  std::optional<Decode> decode_;
  std::optional<Mla> latent_;
  std::optional<MlaDecode> mla_decode_;
  std::optional<DecodePlanSummary> step_;
};

// All steps.
FileJobResult run_file_job(const FileJob& job, Transport& transport, const Options& options,
                           const ProgressCallback& on_progress = {});

}  // namespace ringattn
