// SPDX-License-Identifier: Apache-2.0
#include "attention/files/job_input.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "attention/files/list_request.hpp"
#include "base/error.hpp"
#include "kernels/fold_spec.hpp"

namespace ringattn {

namespace {

// How many elements the largest tensor may have: its bytes must stay countable.
constexpr double kMostElements = 0x1p60;

}  // namespace

JobInput::JobInput(const InputRequest& request, const Numerics& numerics) {
  std::visit([this](const auto& input) { take_shape(input); }, request);
  take_numerics(numerics);
}

JobInput JobInput::synthetic(Job job, std::uint64_t seed) {
  JobInput input;
  input.job_ = std::move(job);
  input.seed_ = seed;
  const FoldSpec& spec = input.job_.spec;
  input.out_grid_ = {AxisOrder::kThd, 1, input.job_.batch.q_tokens(), spec.heads, spec.head_dim_v};
  return input;
}

void JobInput::take_shape(const SyntheticInput& input) {
  seed_ = input.seed;
  FoldSpec& spec = job_.spec;
  spec.dtype = input.dtype;
  spec.heads = input.heads;
  spec.kv_heads = input.kv_heads;
  spec.head_dim = input.head_dim;
  spec.head_dim_v = input.head_dim_v.value_or(input.head_dim);
  if (input.batch < 0 || input.tokens < 0) {
    fail(ErrorCode::kUsage, {setting("seq", input.tokens), " with ", setting("batch", input.batch)},
         "neither is negative", "Check the shape of the input.");
  }
  if (spec.kv_heads > 0 && spec.heads % spec.kv_heads != 0) {
    fail(ErrorCode::kUsage, fmt::format("K has {} heads, Q has {}", spec.kv_heads, spec.heads),
         fmt::format("{} is not a multiple of {}", spec.heads, spec.kv_heads),
         {"Check ", setting("heads"), " and ", setting("kv_heads"), "."});
  }
  const double elements = static_cast<double>(input.tokens) * static_cast<double>(input.batch) * spec.heads *
                          std::max(spec.head_dim, spec.head_dim_v);
  if (elements > kMostElements) {
    fail(ErrorCode::kUsage,
         {setting("seq", input.tokens), " with ", setting("batch", input.batch),
          fmt::format(" and {} heads", spec.heads)},
         "a tensor would have more than 2^60 elements", "Use fewer tokens, sequences or heads.");
  }
  job_.batch = uniform_batch(input.batch, input.tokens, input.tokens);
  const AxisOrder order = input.order.value_or(input.batch == 1 ? AxisOrder::kThd : AxisOrder::kBthd);
  const bool batched = order == AxisOrder::kBthd || order == AxisOrder::kBhtd;
  out_grid_ = {order, batched ? input.batch : 1, batched ? input.tokens : input.tokens * input.batch, spec.heads,
               spec.head_dim_v};
}

void JobInput::take_shape(const FileInput& input) {
  file_ = open_input_file(input);
  const InputTensors& found = file_->tensors;
  constexpr std::int64_t kMost = 1 << 16;
  const std::int64_t largest =
      std::max({found.q_grid.heads, found.q_grid.dim, found.k_grid.heads, found.v_grid.heads, found.v_grid.dim});
  if (largest > kMost) {
    fail(ErrorCode::kFile, fmt::format("{} has {} heads or dims", found.q.text(), largest),
         fmt::format("at most {} are possible", kMost), {setting("order"), " says which axis is which."});
  }
  out_grid_ = found.out_grid();
  job_.batch.sequences = found.sequences;
  FoldSpec& spec = job_.spec;
  spec.dtype = found.dtype;
  spec.heads = static_cast<int>(found.q_grid.heads);
  spec.kv_heads = static_cast<int>(found.k_grid.heads);
  spec.head_dim = static_cast<int>(found.q_grid.dim);
  spec.head_dim_v = static_cast<int>(found.v_grid.dim);
  spec.sinks = !found.sinks.empty();
}

void JobInput::take_numerics(const Numerics& numerics) {
  FoldSpec& spec = job_.spec;
  spec.mask = numerics.mask;
  spec.softmax_scale =
      numerics.softmax_scale ? static_cast<float>(*numerics.softmax_scale) : default_softmax_scale(spec.head_dim);
  spec.softcap = static_cast<float>(numerics.softcap);
  if (numerics.query_offset) {
    job_.batch.sequences = job_.batch.sequences.with_offset(*numerics.query_offset);
  }
  check_job(job_);
  if (numerics.lists.empty()) return;
  set_lists(job_,
            requested_lists(numerics.lists, job_, [this](SyntheticTensor tensor, const auto& runs, const auto& rows) {
              read(tensor, runs, rows, 1);
            }));
  check_job(job_);
}

void JobInput::read(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows,
                    int threads) const {
  if (seed_) {
    fill_synthetic(*seed_, tensor, runs, rows, threads);
    return;
  }
  if (file_ == nullptr) {
    fail(ErrorCode::kUsage, "the job has no input", "its shape alone is given", "Name a seed, or a file.");
  }
  const InputTensors& found = file_->tensors;
  const std::pair<const TensorSource&, const RowGrid&> sources[] = {
      {found.q, found.q_grid}, {found.k, found.k_grid}, {found.v, found.v_grid}};
  const auto& [source, grid] = sources[static_cast<std::size_t>(tensor)];
  read_rows(source, grid, runs, rows);
}

std::span<const float> JobInput::sinks() const {
  return file_ ? std::span<const float>(file_->tensors.sinks) : std::span<const float>();
}

std::vector<FileFingerprint> JobInput::fingerprints() const {
  return file_ ? ringattn::fingerprints(file_->tensors.used) : std::vector<FileFingerprint>();
}

std::string JobInput::source() const {
  return seed_ ? fmt::format("synthetic input, seed {}", *seed_) : file_ ? file_->request.path : "no input";
}

}  // namespace ringattn
