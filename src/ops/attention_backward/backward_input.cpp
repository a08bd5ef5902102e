// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/backward_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <iterator>
#include <string_view>

#include "base/error.hpp"
#include "io/input_names.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kSuggestion =
    "Give out and lse as the forward wrote them, and gradients of the same shapes.";

JobInput open_forward(const OpRequest& request) {
  const Numerics numerics = numerics_of(request.settings);
  if (request.from_file()) return {file_input(request.settings), numerics, {}, request.share};
  return {synthetic_input(request.settings, Op::kAttention, request.tokens), numerics, {}, request.share};
}

[[noreturn]] void refuse_input(std::string_view what, std::string_view suggestion) {
  fail(ErrorCode::kUnsupported, fmt::format("no gradients for {}", what),
       "the backward pass reads keys and values in rows", suggestion);
}

void check_forward(const JobInput& input) {
  if (input.mla() != nullptr) refuse_input("latents", "Expand them, and give k and v.");
  if (input.pages() != nullptr) refuse_input("keys in pages", "Give k and v in rows.");
}

Dtype gradient_dtype(const OpRequest& request, const AttentionSpec& spec) {
  return request.settings.own.at("gradients") == "fp32" ? Dtype::kF32 : spec.dtype;
}

TensorSource required(const TensorFile& opened, std::string_view name) {
  const std::string in_file = name_in(opened.request.names, name);
  if (!opened.file.contains(in_file)) {
    fail(ErrorCode::kFile, fmt::format("{} has no tensor {}", opened.request.path, in_file),
         "gradients are computed from out, lse and dout, and from dlse where it is named", kSuggestion);
  }
  return opened.file.tensor(in_file);
}

void require_shape(const TensorSource& tensor, FileDtype dtype, const std::vector<std::int64_t>& shape) {
  require(tensor.info->dtype == dtype && tensor.info->shape == shape, tensor,
          fmt::format("q, k and v ask for {} {}", file_dtype_name(dtype), shape_text(shape)), kSuggestion);
}

}  // namespace

// A user who names either tensor wants gradients, even if the file lacks the tensor: find() then reports that.
bool holds_gradient(const TensorFile& file) {
  const InputNames& names = file.request.names;
  return std::ranges::any_of(std::initializer_list<std::string_view>{"dout", "dlse"}, [&](std::string_view name) {
    return names.others.contains(name) || file.file.contains(name_in(names, name));
  });
}

BackwardInput::BackwardInput(const OpRequest& request)
    : forward_(open_forward(request)), made_dlse_(request.settings.dlse), with_forward_(request.settings.with_forward) {
  if (with_forward_ && request.from_file()) {
    fail(ErrorCode::kUsage, {setting("with_forward"), " contradicts ", setting("input")},
         "a file with gradients has out and lse, which the forward would compute",
         {"Leave it out, or use ", setting("synthetic", 7), "."});
  }
  check_forward(forward_);
  job_ = {forward_.job(), gradient_dtype(request, forward_.job().spec)};
  check_backward_job(job_);
  if (request.from_file()) find(file_input(request.settings), *request.share);
}

void BackwardInput::find(const FileInput& input, JobShare& share) {
  file_ = open_input_file(input, share);
  const TensorFile& opened = *file_->opened;
  out_ = required(opened, "out");
  lse_ = required(opened, "lse");
  dout_ = required(opened, "dout");
  const RowGrid grid = forward_.out_grid();
  const FileDtype dtype = file_dtype(job_.forward.spec.dtype);
  require_shape(*out_, dtype, grid.shape());
  require_shape(*dout_, dtype, grid.shape());
  require_shape(*lse_, FileDtype::kF32, lse_shape(grid));
  used_ = file_->tensors.used;
  used_.insert(used_.end(), {*out_, *lse_, *dout_});
  const bool named = opened.request.names.others.contains("dlse");
  if (named || opened.file.contains("dlse")) {
    dlse_ = required(opened, "dlse");
    require_shape(*dlse_, FileDtype::kF32, lse_shape(grid));
    used_.push_back(*dlse_);
  }
  refuse_unread();
}

// Refuses tensors that a user may take for inputs of the backward pass, but that are not read.
void BackwardInput::refuse_unread() const {
  constexpr std::string_view kBlockMask[] = {"block_mask", "block_indptr", "block_indices"};
  for (const std::string_view name : file_->file().names()) {
    if (std::ranges::any_of(used_, [&](const TensorSource& tensor) { return tensor.info->name == name; })) continue;
    if (std::ranges::find(kBlockMask, name) != std::end(kBlockMask)) {
      fail(ErrorCode::kUnsupported, fmt::format("{} has a tensor {}", source(), name),
           "attention with a block-sparse mask has no gradients",
           "Leave it out, and give out, lse and dout of dense attention.");
    }
    // "d_lse", "grad_lse", "dLSE"; not "layers.3.lse"
    std::string lower(name);
    std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (!dlse_ && lower.find("lse") != std::string::npos && lower.find('.') == std::string::npos) {
      fail(ErrorCode::kFile, fmt::format("{} has a tensor {}", source(), name),
           "the gradient of LSE is `dlse`, and this one is not read",
           {"Rename it, leave it out, or add ", setting("tensors", fmt::format("dlse={}", name)), "."});
    }
  }
}

void BackwardInput::read_out(std::span<const PackedRun> runs, const MutableTensorView& rows) const {
  read_rows(*out_, forward_.out_grid(), runs, rows);
}

void BackwardInput::read_dout(std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const {
  if (dout_) return read_rows(*dout_, forward_.out_grid(), runs, rows);
  make(SyntheticTensor::kDout, runs, rows, threads);
}

void BackwardInput::make(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows,
                         int threads) const {
  if (!forward_.seed()) {
    fail(ErrorCode::kUsage, "the job has no input", "only its shape is given", "Name a seed, or a file.");
  }
  fill_synthetic(*forward_.seed(), tensor, forward_.made_tokens(SyntheticTensor::kQ, runs), rows, threads);
}

void BackwardInput::read_lse(std::span<const PackedRun> runs, std::span<float> rows) const {
  read_rows(*lse_, lse_grid(forward_.out_grid()), runs,
            dense_view(static_cast<void*>(rows.data()), Dtype::kF32, total_tokens(runs), job_.forward.spec.heads, 1));
}

void BackwardInput::read_dlse(std::span<const PackedRun> runs, std::span<float> rows, int threads) const {
  const MutableTensorView view =
      dense_view(static_cast<void*>(rows.data()), Dtype::kF32, total_tokens(runs), job_.forward.spec.heads, 1);
  if (dlse_) return read_rows(*dlse_, lse_grid(forward_.out_grid()), runs, view);
  make(SyntheticTensor::kDlse, runs, view, threads);
}

RowGrid BackwardInput::grid(GradientAxis axis, std::int64_t heads, std::int64_t dim) const {
  RowGrid grid = forward_.out_grid();
  grid.heads = heads;
  grid.dim = dim;
  if (axis == GradientAxis::kQueries) return grid;
  grid.length = job_.forward.batch.k_tokens() / std::max<std::int64_t>(1, grid.batch);
  return grid;
}

UnreadTensors BackwardInput::unread() const {
  return file_ == nullptr ? UnreadTensors{} : unread_tensors(file_->file(), used_, file_->request().names);
}

}  // namespace ringattn
