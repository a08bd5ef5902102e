// SPDX-License-Identifier: Apache-2.0
#include "attention/job/scan_file_job.hpp"

#include <fmt/format.h>

#include <utility>

#include "attention/check/digest.hpp"
#include "attention/job/one_input.hpp"
#include "attention/job/output.hpp"
#include "base/moment.hpp"

namespace ringattn {

PreparedScan::PreparedScan(ScanFileJob job, Transport& transport, ScanOptions options)
    : job_(std::move(job)), meeting_(transport, Patience(options.timeout_seconds)) {
  meeting_.together([this] {
    input_.emplace(job_.input, job_.numerics);
    if (!job_.output.empty() && meeting_.rank() == 0) check_output_path(job_.output, job_.replace);
  });
  agree_on_files(meeting_, [this] { return input_->fingerprints(); });
  scan_.emplace(input_->job(), transport, std::move(options));
}

PreparedScan::PreparedScan(ScanInput input, Transport& transport, ScanOptions options)
    : meeting_(transport, Patience(options.timeout_seconds)), input_(std::move(input)) {
  scan_.emplace(input_->job(), transport, std::move(options));
}

ScanRankResult PreparedScan::compute(const StepDone& step_done) {
  LoadedScan loaded(*input_, *scan_, meeting_, step_done);
  return loaded.fetch(loaded.run());
}

ScanFileResult PreparedScan::run(const StepDone& step_done) {
  ScanFileResult result{compute(step_done), {}};
  result.digests = digest_scan(*input_, result.rank, meeting_);
  return result;
}

ScanDigests digest_scan(const ScanInput& input, const ScanRankResult& result, const Meeting& meeting) {
  const ScanJob& job = input.job();
  ScanDigests digests;
  digests.y = digest(meeting, result.y_view(job.spec), result.runs, job.tokens());
  if (job.final_states || (job.alone && job.final_halos)) {
    digests.final_states =
        digest(meeting, result.carried_view(job), result.sequences, static_cast<std::int64_t>(job.lengths.size()));
  }
  return digests;
}

void PreparedScan::write(const ScanFileResult& result) {
  if (job_.output.empty()) return;
  const ScanJob& job = input_->job();
  const ScanSpec& spec = job.spec;
  FileMetadata metadata = output_metadata(*scan_->kernel().row, scan_->backend(), {result.digests.y, {}});
  std::erase_if(metadata, [](const auto& entry) { return entry.first == "digest.lse"; });
  metadata.emplace_back("op", std::string(op_name(input_->op())));
  if (!result.digests.final_states.empty()) {
    metadata.emplace_back(fmt::format("digest.{}", carried_name(job)), result.digests.final_states);
  }
  const auto note = [&](const char* name, int value) { metadata.emplace_back(name, fmt::format("{}", value)); };
  if (job.alone) {
    note("channels", job.convolution->channels);
    note("width", job.convolution->width);
  } else {
    note("heads", spec.heads);
    note("head_dim", spec.head_dim);
    note("state_dim", spec.state_dim);
    note("groups", spec.groups);
  }
  metadata.insert(metadata.end(), job_.metadata.begin(), job_.metadata.end());
  std::vector<OutputTensor> tensors{{"y", file_dtype(spec.dtype), input_->y_shape()}};
  if (job.final_states) tensors.push_back({"final_states", FileDtype::kF32, input_->states_shape()});
  if (job.final_halos) tensors.push_back({"final_conv_state", file_dtype(spec.dtype), input_->halos_shape()});
  write_together(meeting_, tensors, metadata, job_.output, job_.replace, [&](SafetensorsWriter& writer) {
    writer.write_rows("y", input_->y_grid(), result.rank.runs, result.rank.y_view(spec));
    moment("writing");
    const auto sequences = static_cast<std::int64_t>(job.lengths.size());
    if (job.final_states) {
      const RowGrid grid{AxisOrder::kThd, 1, sequences, spec.heads, std::int64_t{spec.head_dim} * spec.state_dim};
      writer.write_rows("final_states", grid, result.rank.sequences, result.rank.carried_view(job));
    }
    if (!job.final_halos) return;
    const ConvolutionSpec& convolution = *job.convolution;
    const RowGrid grid{AxisOrder::kThd, 1, sequences, convolution.channels, convolution.halo_tokens()};
    writer.write_rows("final_conv_state", grid, result.rank.sequences,
                      dense_view(static_cast<const void*>(result.rank.halos.data()), convolution.dtype,
                                 total_tokens(result.rank.sequences), convolution.channels, convolution.halo_tokens()));
  });
}

ScanFileResult run_scan_job(const ScanFileJob& job, Transport& transport, const ScanOptions& options,
                            const StepDone& step_done) {
  PreparedScan prepared(job, transport, options);
  ScanFileResult result = prepared.run(step_done);
  prepared.write(result);
  return result;
}

}  // namespace ringattn
