// SPDX-License-Identifier: Apache-2.0
// The output of a result that is distributed over the ranks: digests and files.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/collective.hpp"
#include "io/safetensors_writer.hpp"
#include "ops/attention/attention.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/loaded_job.hpp"

namespace ringattn {

struct Digests {
  std::string out;
  std::string lse;
};

// Collective.
Digests digest_result(const JobInput& input, const RankResult& result, const Collective& collective);

// Metadata of an output file: the program, the kernel, everything else that the bits depend on (identity_of()), and the
// result. It does not say how the job was run, so that files of different worlds are equal byte for byte.
FileMetadata output_metadata(const KernelEntry& kernel, const std::string& target);
FileMetadata output_metadata(const KernelEntry& kernel, const std::string& target, const Digests& digests);

// Makes a safetensors file `path` of these tensors, which appears complete or not at all. `write` writes this rank's
// rows. `replace`: an existing file may be replaced. Collective. Throws kFile.
void write_collectively(const Collective& collective, const std::vector<OutputTensor>& tensors,
                        const FileMetadata& metadata, const std::string& path, bool replace,
                        const std::function<void(SafetensorsWriter&)>& write);

// Writes out, in the input's order of axes, and lse to the safetensors file `path`, which appears complete or not at
// all. `replace`: an existing file may be replaced. Collective. Throws kFile.
void write_output(const JobInput& input, const RankResult& result, const std::string& path, bool replace,
                  const FileMetadata& metadata, const Collective& collective);

}  // namespace ringattn
