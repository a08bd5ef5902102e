// SPDX-License-Identifier: Apache-2.0
// Whole jobs of attention, decode and MLA: q, k and v, a cache, or latents, from a file or a seed; the computation over
// the ranks of a world; O and LSE to a file.
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
  bool replace = false;   // an existing output file may be replaced
  FileMetadata metadata;  // of the output, in addition to output_metadata()
  // MLA only, for latents in rows that could be a decode step: why they are computed around the ring. Empty: they are
  // decoded, over a cache that is made from the rows.
  std::string not_decoded_reason;
};

struct FileJobResult {
  RankResult rank;  // this rank's rows, in host memory
  Digests digests;
};

// A job's options for Decode.
DecodeOptions decode_options(const Options& options);

// The decode step of `input` with the kernel that `request` chooses, on `ranks` ranks, each with `threads` threads of a
// host kernel (0: the processors that this process may use). Throws the errors of the kernel choice.
DecodePlanSummary summarize_decode_plan(const JobInput& input, const KernelRequest& request, int ranks, int threads,
                                        KernelScope scope = KernelScope::kThisMachine);

// A file job in steps, for callers that report what they are about to do. Each call is collective. The transport
// outlives the object.
class PreparedFileJob {
 public:
  // Opens the input, checks that all ranks have the same one and that the output can be written, and prepares the op:
  // kernel, plan, memory. Caches and latents in rows that no kernel decodes are computed as rows (decode_or_attend()).
  // Reads samples of the rows. Throws kFile, and what JobInput and the ops throw.
  PreparedFileJob(FileJob job, Transport& transport, Options options);
  // For an input that the caller has opened and on which the ranks have agreed. Nothing is written. `heads_at_a_time`:
  // as in MlaOptions, only used for MLA.
  PreparedFileJob(JobInput input, Transport& transport, Options options, int heads_at_a_time = 0);

  const JobInput& input() const { return *input_; }
  // The op that input().op() and input().decodes() select; for MLA that is decoded, decode() is in_latent().
  Attention& attention() { return *attention_; }
  Decode& decode() { return mla_decode_ ? mla_decode_->in_latent() : *decode_; }
  Mla& latent() { return *latent_; }
  // Plan of decode(), including the memory that its budget must hold.
  const DecodePlanSummary& step() const { return *step_; }

  // Kernel, plan and layout of attention() or latent().
  RingOp ring() { return latent_ ? ring_op(*latent_) : ring_op(*attention_); }

  // Backend and kernel of the op.
  Backend& backend() { return input_->decodes() ? decode().backend() : ring().backend; }
  const KernelEntry& kernel() {
    if (input_->decodes()) return *decode().kernel().row;
    return *ring().kernel.row;
  }
  int threads() { return input_->decodes() ? decode().options().threads : ring().options.threads; }
  // Loads the decode steps of input(). `caches`: as in LoadedDecode.
  std::unique_ptr<LoadedDecode> load_decode(const ProgressCallback& on_progress = {}, int caches = 1);

  // The tile sizes of the kernel.
  KernelShape tiles();

  // Loads the rows of attention() or latent(), to be computed any number of times.
  std::unique_ptr<LoadedJob> load(const ProgressCallback& on_progress = {});
  // Loads, computes and fetches.
  RankResult compute(const ProgressCallback& on_progress = {});
  // The same, and computes the digests.
  FileJobResult run(const ProgressCallback& on_progress = {});
  // Writes the output file, if the FileJob asks for one.
  void write(const FileJobResult& result);
  // Writes the result to `path`. `more`: metadata in addition to the op's own.
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

// All steps in one call.
FileJobResult run_file_job(const FileJob& job, Transport& transport, const Options& options,
                           const ProgressCallback& on_progress = {});

}  // namespace ringattn
