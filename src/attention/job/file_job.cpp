// SPDX-License-Identifier: Apache-2.0
#include "attention/job/file_job.hpp"

#include <utility>

#include "attention/job/one_input.hpp"

namespace ringattn {

DecodeOptions decode_options(const Options& options) {
  // The host has lengths and tables, and checks them.
  return {options.kernel, options.memory_budget, false, options.threads, options.timeout_seconds};
}

DecodeJob decode_job(const JobInput& input, const DecodeOptions& options, const Transport& transport) {
  const DecodeSpec spec{input.job().spec};
  const DecodeChoice choice = choose_kernel(spec, fitting_request(options.kernel, transport));
  const auto backend = choice.row->make_backend({1, kNoDevice});
  return decode_job(input, transport.size(), choice.row->make_kernel(spec, *backend)->key_tile());
}

PreparedFileJob::PreparedFileJob(FileJob job, Transport& transport, Options options)
    : job_(std::move(job)), meeting_(transport, Patience(options.timeout_seconds)) {
  meeting_.together([this] {
    input_.emplace(job_.input, job_.numerics);
    if (!job_.output.empty() && meeting_.rank() == 0) check_output_path(job_.output, job_.replace);
  });
  agree_on_input(meeting_, *input_);
  if (input_->op() == Op::kAttention) {
    attention_.emplace(input_->job(), transport, std::move(options));
    return;
  }
  const DecodeOptions decoding = decode_options(options);
  DecodeJob steps;
  meeting_.together([&] { steps = decode_job(*input_, decoding, transport); });
  decode_.emplace(std::move(steps), transport, decoding);
}

FileJobResult PreparedFileJob::run(const StepDone& step_done) {
  FileJobResult result{decode_ ? execute_step(*input_, *decode_, meeting_, step_done)
                               : execute_job(*input_, *attention_, meeting_, step_done),
                       {}};
  result.digests = digest_result(*input_, result.rank, meeting_);
  return result;
}

void PreparedFileJob::write(const FileJobResult& result) {
  if (job_.output.empty()) return;
  FileMetadata metadata = decode_ ? output_metadata(*decode_->kernel().row, decode_->backend(), result.digests)
                                  : output_metadata(*attention_->kernel().row, attention_->backend(), result.digests);
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
