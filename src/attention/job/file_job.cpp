// SPDX-License-Identifier: Apache-2.0
#include "attention/job/file_job.hpp"

#include <utility>

#include "attention/job/one_input.hpp"

namespace ringattn {

PreparedFileJob::PreparedFileJob(FileJob job, Transport& transport, Options options)
    : job_(std::move(job)), meeting_(transport, Patience(options.timeout_seconds)) {
  meeting_.together([this] {
    input_.emplace(job_.input, job_.numerics);
    if (!job_.output.empty() && meeting_.rank() == 0) check_output_path(job_.output, job_.replace);
  });
  agree_on_input(meeting_, *input_);
  attention_.emplace(input_->job(), transport, std::move(options));
}

FileJobResult PreparedFileJob::run(const StepDone& step_done) {
  FileJobResult result{execute_job(*input_, *attention_, meeting_, step_done), {}};
  result.digests = digest_result(*input_, result.rank, meeting_);
  return result;
}

void PreparedFileJob::write(const FileJobResult& result) {
  if (job_.output.empty()) return;
  FileMetadata metadata = output_metadata(*attention_, result.digests);
  metadata.insert(metadata.end(), job_.metadata.begin(), job_.metadata.end());
  write_output(*input_, result.rank, job_.output, job_.replace, metadata, meeting_);
}

FileJobResult run_file_job(const FileJob& job, Transport& transport, const Options& options,
                           const StepDone& step_done) {
  PreparedFileJob prepared(job, transport, options);
  FileJobResult result = prepared.run(step_done);
  prepared.write(result);
  return result;
}

}  // namespace ringattn
