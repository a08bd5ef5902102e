// SPDX-License-Identifier: Apache-2.0
// Small SSM jobs through the library's jobs, on one rank, and their comparison with fp64.
#pragma once

#include <memory>

#include "comm/threads.hpp"
#include "ops/jobs/run_op_job.hpp"
#include "ops/ssm/ssm_accuracy.hpp"
#include "ops/ssm/ssm_op_job.hpp"

namespace ringattn::testing {

inline SsmOptions one_thread() {
  SsmOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

// From file to file.
struct SsmFileJob {
  SsmRequest input;
  SsmNumerics numerics;
  OutputRequest output;
};

inline void run_ssm_job(const SsmFileJob& job, Transport& world) {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  const auto open = [&] { return std::make_unique<SsmOpJob>(SsmInput(job.input, job.numerics)); };
  run_op_job(open, world, options, job.output);
}

inline SyntheticSsmInput small_ssm(std::int64_t tokens, bool selective = false) {
  SyntheticSsmInput scan;
  scan.selective = selective;
  scan.seed = 7;
  scan.tokens = tokens;
  scan.heads = selective ? 8 : 2;
  scan.head_dim = 8;
  scan.state_dim = 8;
  return scan;
}

// y of a synthetic SSM layer on one rank.
struct FinishedSsm {
  SsmInput input;
  SsmRankResult result;
};

// `rounded`: as if its kernel rounded factors of rows.
inline SsmAccuracy checked(const FinishedSsm& scan, bool rounded = false) {
  SsmAccuracy accuracy;
  run_threads_world(1, {}, [&](Transport& transport) {
    const Collective collective(transport, Timeouts(60.0));
    accuracy = check_ssm_result(collective, scan.input, 64, scan.result.result_view(scan.input.job()), rounded, 1);
  });
  return accuracy;
}

inline FinishedSsm finished(const SsmInput& input) {
  FinishedSsm scan{input, {}};
  run_threads_world(1, {},
                    [&](Transport& transport) { scan.result = PreparedSsm(input, transport, one_thread()).compute(); });
  return scan;
}

}  // namespace ringattn::testing
