// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/backward_output_file.hpp"

#include <fmt/format.h>

#include <bit>

#include "ops/common/output_tensor.hpp"

namespace ringattn {

std::vector<GradientTensor> gradient_tensors(const AttentionSpec& spec) {
  return {
      {"dq", GradientAxis::kQueries, spec.heads, spec.head_dim, &BackwardRankResult::dq_view, &BackwardRankResult::dq},
      {"dk", GradientAxis::kKeys, spec.kv_heads, spec.head_dim, &BackwardRankResult::dk_view, &BackwardRankResult::dk},
      {"dv", GradientAxis::kKeys, spec.kv_heads, spec.head_dim_v, &BackwardRankResult::dv_view,
       &BackwardRankResult::dv}};
}

std::vector<std::int64_t> cumulative_tokens(const Batch& batch, GradientAxis axis) {
  return axis == GradientAxis::kQueries ? batch.cu_q() : batch.cu_k();
}

std::string describe_difference(const GradientTensor& tensor, const Difference& difference, const Batch& batch) {
  return describe(difference, cumulative_tokens(batch, tensor.axis), tensor.name);
}

std::string describe_sink_difference(const std::vector<float>& left, const std::vector<float>& right) {
  for (std::size_t head = 0; head < left.size(); ++head) {
    const auto a = std::bit_cast<std::uint32_t>(left[head]);
    const auto b = std::bit_cast<std::uint32_t>(right[head]);
    if (a != b) {
      return fmt::format("dsinks at head {}: {} (0x{:08x}) against {} (0x{:08x})", head, left[head], a, right[head], b);
    }
  }
  return {};
}

BackwardOutputFile::BackwardOutputFile(const std::string& path, const BackwardInput& input)
    : file_(std::make_unique<const SafetensorsFile>(path)) {
  const BackwardJob& job = input.job();
  const AttentionSpec& spec = job.forward.spec;
  for (const GradientTensor& tensor : gradient_tensors(spec)) {
    tensors_.push_back(output_tensor(*file_, path, std::string(tensor.name)));
    check_output_tensor(path, tensors_.back(), input.grid(tensor.axis, tensor.heads, tensor.dim).shape(),
                        file_dtype(job.gradients));
  }
  if (spec.sinks) {
    dsinks_ = output_tensor(*file_, path, "dsinks");
    const std::int64_t heads = spec.heads;
    check_output_tensor(path, *dsinks_, {&heads, 1}, FileDtype::kF32);
  }
  const std::string scale = fmt::format("{}", spec.softmax_scale);
  const std::string* const other = file_->metadata("softmax_scale");
  if (other != nullptr && *other != scale) {
    other_job_.push_back(fmt::format("the file's scores are scaled by {}, the job's by {}", *other, scale));
  }
}

std::vector<FileFingerprint> BackwardOutputFile::fingerprints() const {
  std::vector<TensorSource> used = tensors_;
  if (dsinks_) used.push_back(*dsinks_);
  return ringattn::fingerprints(used);
}

std::string BackwardOutputFile::compare(const Collective& collective, const BackwardInput& input,
                                        const BackwardRankResult& result) const {
  const BackwardJob& job = input.job();
  std::size_t at = 0;
  for (const GradientTensor& tensor : gradient_tensors(job.forward.spec)) {
    const TensorSource& source = tensors_[at++];
    std::optional<Difference> mine;
    collective.run_collectively([&] {
      mine = difference_from_file(source, input.grid(tensor.axis, tensor.heads, tensor.dim), false,
                                  (result.*tensor.view)(job), tensor.runs(result));
    });
    if (const auto difference = earliest(collective, mine)) {
      return describe_difference(tensor, *difference, job.forward.batch);
    }
  }
  std::string text;
  if (dsinks_) {
    collective.run_collectively([&] { text = describe_sink_difference(result.dsinks, read_floats(*dsinks_)); });
  }
  return text;
}

}  // namespace ringattn
