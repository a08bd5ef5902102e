// SPDX-License-Identifier: Apache-2.0
#include "ops/conv1d_backward/conv1d_backward_input.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/error.hpp"
#include "io/tensor_checks.hpp"
#include "ops/ssm/ssm_entry.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kFinalGradients[] = {"dfinal_conv_state", "dfinal_states"};

bool names_or_has(const TensorFile& file, std::string_view tensor) {
  const InputNames& names = file.request.names;
  return names.others.contains(tensor) || file.file.contains(name_in(names, tensor));
}

}  // namespace

bool holds_conv1d_gradient(const TensorFile& file) {
  return names_or_has(file, "dy") && holds_conv1d(file.file, file.request.names);
}

Conv1dBackwardInput::Conv1dBackwardInput(const OpRequest& request) : forward_(make_ssm_input(Op::kConv1d, request)) {
  const SsmJob& forward = forward_.job();
  if (!forward.conv1d_only) {
    fail(ErrorCode::kFile, fmt::format("{} holds an SSM", forward_.source()),
         "these are the gradients of a convolution by itself", "Give x, conv1d_weight and dy, without dt.");
  }
  if (forward.update) {
    fail(ErrorCode::kUnsupported, "no gradients for decode steps", "training has whole sequences",
         "Give x of all tokens.");
  }
  job_ = {*forward.convolution, forward.lengths, forward.initial_halos};
  if (!request.from_file()) return;
  file_ = open_tensor_file(file_input(request.settings), *request.share);
  for (const std::string_view gradient : kFinalGradients) {
    if (!names_or_has(*file_, gradient)) continue;
    fail(ErrorCode::kUnsupported, fmt::format("{} has a tensor {}", forward_.source(), gradient),
         "the program takes no gradient of final states of a convolution",
         "Leave it out, or call CausalConv1dBackward with dfinal_halos.");
  }
  const std::string name = name_in(file_->request.names, "dy");
  if (!file_->file.contains(name)) {
    fail(ErrorCode::kFile, fmt::format("{} has no tensor {}", file_->request.path, name),
         "gradients of a convolution are computed from dy", "Give dy with the shape of x.");
  }
  dy_ = file_->file.tensor(name);
  const FileDtype dtype = file_dtype(spec().dtype);
  require(dy_->info->dtype == dtype && dy_->info->shape == forward_.y_shape(), *dy_,
          fmt::format("the convolution asks for {} {}", file_dtype_name(dtype), shape_text(forward_.y_shape())),
          "Give dy with the shape of x.");
  used_ = forward_.used();
  used_.push_back(*dy_);
}

void Conv1dBackwardInput::read_dy(std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const {
  if (dy_) return read_rows(*dy_, forward_.y_grid(), runs, rows);
  if (!forward_.seed()) {
    fail(ErrorCode::kUsage, "the job has no input", "only its shape is given", "Name a seed, or a file.");
  }
  fill_synthetic(*forward_.seed(), SyntheticTensor::kDout, runs, rows, threads);
}

UnreadTensors Conv1dBackwardInput::unread() const {
  return file_ == nullptr ? UnreadTensors{} : unread_tensors(file_->file, used_, file_->request.names);
}

}  // namespace ringattn
