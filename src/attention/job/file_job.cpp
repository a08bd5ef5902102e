// SPDX-License-Identifier: Apache-2.0
#include "attention/job/file_job.hpp"

#include <utility>

#include "attention/job/one_input.hpp"

namespace ringattn {

DecodeOptions decode_options(const Options& options) {
  // The host has lengths and tables, and checks them.
  return {options.kernel, options.memory_budget, false, options.threads, options.timeout_seconds};
}

StepForecast forecast_step(const JobInput& input, const KernelRequest& request, int ranks, KernelPlace place) {
  const DecodeSpec spec{input.job().spec};
  const DecodeChoice choice = choose_kernel(spec, request, place);
  const auto backend = choice.row->make_backend({1, kNoDevice});
  return forecast_step(input, *choice.row->make_kernel(spec, *backend), ranks);
}

PreparedFileJob::PreparedFileJob(FileJob job, Transport& transport, Options options)
    : job_(std::move(job)), meeting_(transport, Patience(options.timeout_seconds)) {
  meeting_.together([this] {
    input_.emplace(job_.input, job_.numerics);
    if (!job_.output.empty() && meeting_.rank() == 0) check_output_path(job_.output, job_.replace);
  });
  agree_on_input(meeting_, *input_);
  prepare(transport, std::move(options));
}

PreparedFileJob::PreparedFileJob(JobInput input, Transport& transport, Options options)
    : meeting_(transport, Patience(options.timeout_seconds)), input_(std::move(input)) {
  prepare(transport, std::move(options));
}

void PreparedFileJob::prepare(Transport& transport, Options options) {
  if (input_->op() == Op::kAttention) {
    attention_.emplace(input_->job(), transport, std::move(options));
    return;
  }
  meeting_.together(
      [&] { step_ = forecast_step(*input_, fitting_request(options.kernel, transport), transport.size()); });
  decode_.emplace(step_->job, transport, decode_options(options));
}

const KernelEntry& PreparedFileJob::kernel() const {
  if (decode_) return *decode_->kernel().row;
  return *attention_->kernel().row;
}

KernelShape PreparedFileJob::tiles() const {
  if (attention_) return attention_->plan().kernel;
  // Rows that are decoded fold the tiles that the fold kernel of the same name gives them.
  const FoldSpec& spec = input_->job().spec;
  const FoldChoice fold = choose_kernel(spec, {std::string(kernel().backend), std::string(kernel().name)});
  const auto backend = fold.row->make_backend({1, kNoDevice});
  return {step_->key_tile, fold.row->make_kernel(spec, *backend)->query_tile()};
}

RankResult PreparedFileJob::compute(const StepDone& step_done) {
  return decode_ ? execute_step(*input_, *decode_, meeting_, step_done)
                 : execute_job(*input_, *attention_, meeting_, step_done);
}

FileJobResult PreparedFileJob::run(const StepDone& step_done) {
  FileJobResult result{compute(step_done), {}};
  result.digests = digest_result(*input_, result.rank, meeting_);
  return result;
}

void PreparedFileJob::write(const FileJobResult& result) {
  if (job_.output.empty()) return;
  FileMetadata metadata = output_metadata(kernel(), backend(), result.digests);
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
