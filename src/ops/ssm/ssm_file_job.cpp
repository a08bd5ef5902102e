// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_file_job.hpp"

#include <fmt/format.h>

#include <utility>

#include "base/failpoint.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/common/digest.hpp"
#include "ops/common/input_agreement.hpp"

namespace ringattn {

PreparedSsm::PreparedSsm(SsmFileJob job, Transport& transport, SsmOptions options)
    : job_(std::move(job)), collective_(transport, Timeouts(options.timeout_seconds)) {
  collective_.run_collectively([this] {
    input_.emplace(job_.input, job_.numerics);
    if (!job_.output.empty() && collective_.rank() == 0) check_output_path(job_.output, job_.replace);
  });
  agree_on_files(collective_, [this] { return input_->fingerprints(); });
  ssm_.emplace(input_->job(), transport, std::move(options));
}

PreparedSsm::PreparedSsm(SsmInput input, Transport& transport, SsmOptions options)
    : collective_(transport, Timeouts(options.timeout_seconds)), input_(std::move(input)) {
  ssm_.emplace(input_->job(), transport, std::move(options));
}

SsmRankResult PreparedSsm::compute(const ProgressCallback& on_progress) {
  LoadedSsm loaded(*input_, *ssm_, collective_, on_progress);
  return loaded.fetch(loaded.run());
}

SsmFileResult PreparedSsm::run(const ProgressCallback& on_progress) {
  SsmFileResult result{compute(on_progress), {}};
  result.digests = digest_ssm(*input_, result.rank, collective_);
  return result;
}

SsmDigests digest_ssm(const SsmInput& input, const SsmRankResult& result, const Collective& collective) {
  const SsmJob& job = input.job();
  SsmDigests digests;
  digests.y = digest(collective, result.y_view(job.spec), result.runs, job.tokens());
  if (job.final_states || (job.conv1d_only && job.final_halos)) {
    digests.final_states =
        digest(collective, result.carried_view(job), result.sequences, static_cast<std::int64_t>(job.lengths.size()));
  }
  return digests;
}

void PreparedSsm::write(const SsmFileResult& result) {
  if (!job_.output.empty()) write(result, job_.output, job_.replace, job_.metadata);
}

void PreparedSsm::write(const SsmFileResult& result, const std::string& path, bool replace, const FileMetadata& more) {
  const SsmJob& job = input_->job();
  const SsmSpec& spec = job.spec;
  const KernelEntry& kernel = *ssm_->kernel().row;
  FileMetadata metadata = output_metadata(kernel, identity_of(kernel, ssm_->backend()), {result.digests.y, {}});
  std::erase_if(metadata, [](const auto& entry) { return entry.first == "digest.lse"; });
  metadata.emplace_back("op", std::string(op_name(input_->op())));
  if (!result.digests.final_states.empty()) {
    metadata.emplace_back(fmt::format("digest.{}", carried_name(job)), result.digests.final_states);
  }
  const auto note = [&](const char* name, int value) { metadata.emplace_back(name, fmt::format("{}", value)); };
  if (job.conv1d_only) {
    note("channels", job.convolution->channels);
    note("width", job.convolution->width);
  } else {
    note("heads", spec.heads);
    note("head_dim", spec.head_dim);
    note("state_dim", spec.state_dim);
    note("groups", spec.groups);
  }
  metadata.insert(metadata.end(), more.begin(), more.end());
  const std::string rows(rows_name(spec));
  std::vector<OutputTensor> tensors{{rows, file_dtype(spec.dtype), input_->y_shape()}};
  if (job.final_states) tensors.push_back({"final_states", FileDtype::kF32, input_->states_shape()});
  if (job.final_halos) tensors.push_back({"final_conv_state", file_dtype(spec.dtype), input_->halos_shape()});
  write_collectively(collective_, tensors, metadata, path, replace, [&](SafetensorsWriter& writer) {
    writer.write_rows(rows, input_->y_grid(), result.rank.runs, result.rank.y_view(spec));
    failpoint("writing");
    const auto sequences = static_cast<std::int64_t>(job.lengths.size());
    if (job.final_states) {
      const RowGrid grid{AxisOrder::kThd, 1, sequences, spec.heads, std::int64_t{spec.head_dim} * spec.state_dim};
      writer.write_rows("final_states", grid, result.rank.sequences, result.rank.carried_view(job));
    }
    if (!job.final_halos) return;
    const CausalConv1dSpec& convolution = *job.convolution;
    const RowGrid grid{AxisOrder::kThd, 1, sequences, convolution.channels, convolution.halo_tokens()};
    writer.write_rows("final_conv_state", grid, result.rank.sequences,
                      dense_view(static_cast<const void*>(result.rank.halos.data()), convolution.dtype,
                                 total_tokens(result.rank.sequences), convolution.channels, convolution.halo_tokens()));
  });
}

SsmFileResult run_ssm_job(const SsmFileJob& job, Transport& transport, const SsmOptions& options,
                          const ProgressCallback& on_progress) {
  PreparedSsm prepared(job, transport, options);
  SsmFileResult result = prepared.run(on_progress);
  prepared.write(result);
  return result;
}

}  // namespace ringattn
