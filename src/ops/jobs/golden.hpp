// SPDX-License-Identifier: Apache-2.0
// Golden files: the digests of a job together with everything that they depend on, so that a later run can distinguish
// a changed result from a changed program.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "ops/attention_jobs/job_input.hpp"
#include "ops/ssm/ssm_input.hpp"

namespace ringattn {

// Replaces the digest of LSE for an op that has only out.
inline constexpr std::string_view kNoDigest = "none";

struct Golden {
  std::string version;   // of the tool
  std::string git;       // revision
  std::string build_id;  // empty: the linker wrote none
  std::string kernel;
  std::string target;  // instruction set or device model
  std::string job;     // one-line description of the computation
  // Digests of the result's tensors, by their keys (ResultDigest): hex, or kNoDigest.
  std::map<std::string, std::string, std::less<>> digests = {};
};

// The golden of this job without digests. `kernel` and `target` compute it.
Golden golden_of(const JobInput& input, std::string_view kernel, const std::string& target);

// The same for an SSM op.
Golden golden_of(const SsmInput& input, std::string_view kernel, const std::string& target);

// The same for any other op. `job`: one-line description of the computation.
Golden golden_of(std::string job, std::string_view kernel, const std::string& target);

std::string golden_text(const Golden& golden);

// Throws kFile for a text that golden_text() would not write.
Golden parse_golden(std::string_view text, const std::string& path);

// Throws kUnsupported if another kernel, build or target made the recorded digests, which may then differ, and kUsage
// if they belong to another job.
void check_comparable(const Golden& recorded, const Golden& now, const std::string& path);

}  // namespace ringattn
