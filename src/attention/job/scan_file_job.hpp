// SPDX-License-Identifier: Apache-2.0
// The front door to whole scans, as file_job.hpp is of attention: tensors from a file or a seed, a scan over the ranks
// of a world, y and final states to a file.
//
//   ScanFileJob job;
//   job.input = FileInput{"layer.safetensors"};
//   job.output = "y.safetensors";
//   const ScanFileResult result = run_scan_job(job, *transport, options);  // collective
//
// Each rank reads and writes its own rows. The output file is the same byte for byte for any number of ranks.
#pragma once

#include <optional>
#include <string>

#include "attention/files/safetensors_writer.hpp"
#include "attention/files/scan_input.hpp"
#include "attention/job/loaded_scan.hpp"
#include "attention/scan.hpp"
#include "comm/meeting.hpp"

namespace ringattn {

struct ScanFileJob {
  ScanRequest input;
  ScanNumerics numerics;
  std::string output;     // empty: no file is written
  bool replace = false;   // an output file that exists
  FileMetadata metadata;  // of the output, beside its own
};

// As of out (check/digest.hpp); of the final states, or a convolution's final halos, sequences count as tokens. Empty:
// they were not wanted.
struct ScanDigests {
  std::string y;
  std::string final_states;
};

struct ScanFileResult {
  ScanRankResult rank;  // this rank's rows, in host memory
  ScanDigests digests;
};

// A scan in steps, for callers that show what they are about to do. Each call is collective; the transport outlives the
// object.
class PreparedScan {
 public:
  // Opens the input, checks that all ranks have the same one and that the output can be written, and prepares: kernel,
  // agreement, memory. Reads samples of the rows. Throws kFile, and what ScanInput and Scan throw.
  PreparedScan(ScanFileJob job, Transport& transport, ScanOptions options);
  // Of an input on which the ranks have agreed; nothing is written.
  PreparedScan(ScanInput input, Transport& transport, ScanOptions options);

  const ScanInput& input() const { return *input_; }
  Scan& scan() { return *scan_; }

  // Reads, computes, fetches.
  ScanRankResult compute(const StepDone& step_done = {});
  // The same, and the digests.
  ScanFileResult run(const StepDone& step_done = {});
  // Writes the output file, if one is asked for.
  void write(const ScanFileResult& result);

 private:
  ScanFileJob job_;
  Meeting meeting_;
  std::optional<ScanInput> input_;
  std::optional<Scan> scan_;
};

// All steps.
ScanFileResult run_scan_job(const ScanFileJob& job, Transport& transport, const ScanOptions& options,
                            const StepDone& step_done = {});

// Collective.
ScanDigests digest_scan(const ScanInput& input, const ScanRankResult& result, const Meeting& meeting);

}  // namespace ringattn
