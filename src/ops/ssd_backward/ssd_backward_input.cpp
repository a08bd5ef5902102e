// SPDX-License-Identifier: Apache-2.0
#include "ops/ssd_backward/ssd_backward_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/error.hpp"
#include "io/tensor_checks.hpp"
#include "ops/ssm/ssm_entry.hpp"

namespace ringattn {

namespace {

bool has(const TensorFile& file, std::string_view name) {
  const InputNames& names = file.request.names;
  return names.others.contains(name) || file.file.contains(name_in(names, name));
}

TensorSource gradient(const TensorFile& opened, std::string_view name, FileDtype dtype,
                      const std::vector<std::int64_t>& shape) {
  const std::string in_file = name_in(opened.request.names, name);
  if (!opened.file.contains(in_file)) {
    fail(ErrorCode::kFile, fmt::format("{} has no tensor {}", opened.request.path, in_file),
         "gradients of SSD are computed from dy, and from dfinal_states if it is named",
         "Give dy with the shape of x.");
  }
  TensorSource tensor = opened.file.tensor(in_file);
  require(tensor.info->dtype == dtype && tensor.info->shape == shape, tensor,
          fmt::format("the layer asks for {} {}", file_dtype_name(dtype), shape_text(shape)),
          "Give dy with the shape of x, and dfinal_states in fp32 with that of the states.");
  return tensor;
}

}  // namespace

bool holds_ssd_gradient(const TensorFile& file) {
  const InputNames& names = file.request.names;
  return has(file, "dy") && (names.dt || names.delta || file.file.contains("dt") || file.file.contains("delta"));
}

SsdBackwardInput::SsdBackwardInput(const OpRequest& request) : forward_(make_ssm_input(Op::kSsd, request)) {
  const SsmJob& forward = forward_.job();
  job_.forward = forward;
  job_.forward.final_states = false;  // only their gradients are used
  job_.gradients = request.settings.own.at("gradients") == "fp32" ? Dtype::kF32 : forward.spec.dtype;
  check_ssd_backward_job(job_);
  if (!request.from_file()) return;
  file_ = open_tensor_file(file_input(request.settings), *request.share);
  dy_ = gradient(*file_, "dy", file_dtype(forward.spec.dtype), forward_.y_shape());
  used_ = forward_.used();
  used_.push_back(*dy_);
  if (!has(*file_, "dfinal_states")) return;
  job_.final_gradients = true;
  final_gradients_ = gradient(*file_, "dfinal_states", FileDtype::kF32, forward_.states_shape());
  used_.push_back(*final_gradients_);
}

void SsdBackwardInput::read_dy(std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const {
  if (dy_) return read_rows(*dy_, forward_.y_grid(), runs, rows);
  if (!forward_.seed()) {
    fail(ErrorCode::kUsage, "the job has no input", "only its shape is given", "Name a seed, or a file.");
  }
  fill_synthetic(*forward_.seed(), SyntheticTensor::kDout, runs, rows, threads);
}

void SsdBackwardInput::read_final_gradients(std::span<const std::int32_t> sequences, std::span<float> states) const {
  const SsmSpec& spec = job_.forward.spec;
  const std::int64_t dim = std::int64_t{spec.head_dim} * spec.state_dim;
  const RowGrid states_grid{AxisOrder::kThd, 1, std::ssize(job_.forward.lengths), spec.heads, dim};
  float* to = states.data();
  for (const std::int32_t sequence : sequences) {
    const PackedRun one[] = {{sequence, sequence + 1}};
    read_rows(*final_gradients_, states_grid, one, dense_view(static_cast<void*>(to), Dtype::kF32, 1, spec.heads, dim));
    to += spec.heads * dim;
  }
}

RowGrid SsdBackwardInput::grid(std::int64_t heads, std::int64_t dim) const {
  RowGrid grid = forward_.y_grid();
  grid.heads = heads;
  grid.dim = dim;
  return grid;
}

std::vector<FileFingerprint> SsdBackwardInput::fingerprints() const { return ringattn::fingerprints(used_); }

UnreadTensors SsdBackwardInput::unread() const {
  return file_ == nullptr ? UnreadTensors{} : unread_tensors(file_->file, used_, file_->request.names);
}

}  // namespace ringattn
