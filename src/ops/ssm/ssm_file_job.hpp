// SPDX-License-Identifier: Apache-2.0
// Whole SSM jobs, like file_job.hpp for attention: tensors from a file or a seed, SSM over the ranks of a world, y and
// final states to a file.
//
//   SsmFileJob job;
//   job.input = FileInput{"layer.safetensors"};
//   job.output = "y.safetensors";
//   const SsmFileResult result = run_ssm_job(job, *transport, options);  // collective
//
// Each rank reads and writes its own rows. The output file is the same byte for byte for any number of ranks.
#pragma once

#include <optional>
#include <string>

#include "comm/collective.hpp"
#include "io/safetensors_writer.hpp"
#include "ops/ssm/loaded_ssm.hpp"
#include "ops/ssm/ssm.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

struct SsmFileJob {
  SsmRequest input;
  SsmNumerics numerics;
  std::string output;     // empty: no file is written
  bool replace = false;   // overwrite an existing output file
  FileMetadata metadata;  // of the output, in addition to its own
};

// Digests like those of out (ops/common/digest.hpp). In that of the final states, or of a convolution's final halos,
// sequences count as tokens. Empty: not requested.
struct SsmDigests {
  std::string y;
  std::string final_states;
};

struct SsmFileResult {
  SsmRankResult rank;  // this rank's rows, in host memory
  SsmDigests digests;
};

// An SSM job in steps, for callers that show what they are about to do. Each call is collective. The transport must
// outlive the object.
class PreparedSsm {
 public:
  // Opens the input, checks that all ranks have the same one and that the output can be written, and prepares: kernel,
  // agreement, memory. Reads samples of the rows. Throws kFile, and what SsmInput and Ssm throw.
  PreparedSsm(SsmFileJob job, Transport& transport, SsmOptions options);
  // For an input on which the ranks have agreed; nothing is written.
  PreparedSsm(SsmInput input, Transport& transport, SsmOptions options);

  const SsmInput& input() const { return *input_; }
  Ssm& ssm() { return *ssm_; }
  const Ssm& ssm() const { return *ssm_; }

  // Reads the input, computes, and fetches the result.
  SsmRankResult compute(const ProgressCallback& on_progress = {});
  // The same, and computes the digests.
  SsmFileResult run(const ProgressCallback& on_progress = {});
  // Writes the output file, if the SsmFileJob asks for one.
  void write(const SsmFileResult& result);
  // Writes it to `path`. `more`: metadata in addition to the op's own.
  void write(const SsmFileResult& result, const std::string& path, bool replace, const FileMetadata& more);

 private:
  SsmFileJob job_;
  Collective collective_;
  std::optional<SsmInput> input_;
  std::optional<Ssm> ssm_;
};

// Runs all steps.
SsmFileResult run_ssm_job(const SsmFileJob& job, Transport& transport, const SsmOptions& options,
                          const ProgressCallback& on_progress = {});

// Collective.
SsmDigests digest_ssm(const SsmInput& input, const SsmRankResult& result, const Collective& collective);

}  // namespace ringattn
