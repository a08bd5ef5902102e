// SPDX-License-Identifier: Apache-2.0
// Jobs of attention, decode or MLA from file to file, through the library.
#pragma once

#include <variant>

#include "ops/attention/attention_op_job.hpp"
#include "ops/jobs/run_op_job.hpp"

namespace ringattn::testing {

struct FileJob {
  InputRequest input;
  Numerics numerics;
  OutputRequest output;
};

inline OpJobResult run_file_job(const FileJob& job, Transport& world, const Options& options) {
  AttentionOpJob::Origin origin;
  origin.settles = std::holds_alternative<FileInput>(job.input);
  const auto open = [&] { return AttentionOpJob::make(JobInput(job.input, job.numerics), origin); };
  return run_op_job(open, world, options, job.output);
}

}  // namespace ringattn::testing
