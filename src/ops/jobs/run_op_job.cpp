// SPDX-License-Identifier: Apache-2.0
#include "ops/jobs/run_op_job.hpp"

namespace ringattn {

OpJobResult run_op_job(const std::function<std::unique_ptr<OpJob>()>& open, Transport& world, const Options& options,
                       const OutputRequest& output) {
  const Collective collective(world, Timeouts(options.timeout_seconds));
  std::unique_ptr<OpJob> job;
  collective.run_collectively([&] {
    job = open();
    if (!output.path.empty() && collective.rank() == 0) check_output_path(output.path, output.replace);
  });
  job->agree(world, options.kernel, collective);
  job->prepare(world, options);
  OpJobResult result{job->run(), {}};
  result.digests = job->digests(collective);
  if (!output.path.empty()) job->write(output);
  return result;
}

}  // namespace ringattn
