// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_delta/gated_delta_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "base/error.hpp"
#include "base/memory.hpp"
#include "io/input_names.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMaxHeadsOrDims = 1 << 16;
constexpr double kMaxDeltaElements = 0x1p60;  // of a tensor, so that its number of bytes doesn't overflow
// The initial states are synthetic tokens of kSsmHeads, one per sequence: [heads, key_dim · value_dim].
constexpr std::int64_t kDeltaStatesToken = 16;
constexpr std::string_view kDeltaRows =
    "q and k are [tokens, key_heads, key_dim], v is [tokens, value_heads, value_dim], log_decay [tokens, value_heads] "
    "or "
    "[tokens, value_heads, key_dim], beta [tokens, value_heads], each after an axis for the batch where q has one.";

std::string_view tensor_name(DeltaTensor tensor) {
  constexpr std::string_view kNames[] = {"q", "k", "v", "log_decay", "beta"};
  return kNames[static_cast<std::size_t>(tensor)];
}

}  // namespace

bool holds_gated_delta(const SafetensorsFile& file, const InputNames& names) {
  return std::ranges::all_of(kDeltaTensors,
                             [&](DeltaTensor tensor) { return file.contains(name_in(names, tensor_name(tensor))); });
}

GatedDeltaInput::GatedDeltaInput(const OpRequest& request, const GatedDeltaSpec& spec) {
  job_.spec = spec;
  job_.final_states = request.settings.final_states || request.use == OpUse::kVerify;  // a check compares them, too
  request.from_file() ? take_file(request) : take_synthetic(request);
  job_.final_states = job_.final_states || job_.update;
  origins_.push_back(0);
  for (const std::int64_t length : job_.lengths) origins_.push_back(origins_.back() + length);
  check_gated_delta_job(job_);
  check_ssm_size(job_.lengths, request.settings.ranks.value_or(1), kGatedDeltaUnit);
}

// The tensor of that name, whose axes are tokens and then heads, or heads and dims.
GatedDeltaInput::FileRows GatedDeltaInput::find_rows(std::string_view name, std::size_t outer_axes,
                                                     std::int64_t tokens) const {
  FileRows found{file_->file.tensor(name_in(file_->request.names, name)), {}};
  const std::vector<std::int64_t>& shape = found.source.info->shape;
  require(shape.size() == outer_axes + 1 || shape.size() == outer_axes + 2, found.source,
          "it must have one axis for heads, and perhaps one for dims, after those of tokens", kDeltaRows);
  for (std::size_t axis = outer_axes; axis < shape.size(); ++axis) {
    require(shape[axis] >= 1 && shape[axis] <= kMaxHeadsOrDims, found.source,
            fmt::format("1 to {} heads or dims are possible", kMaxHeadsOrDims), kDeltaRows);
  }
  const bool batched = outer_axes == 2;
  found.grid = {batched ? AxisOrder::kBthd : AxisOrder::kThd, batched ? shape[0] : 1, shape[outer_axes - 1],
                shape[outer_axes], shape.size() == outer_axes + 2 ? shape.back() : 1};
  require(tokens < 0 || found.grid.tokens() == tokens, found.source, fmt::format("q has {} tokens", tokens),
          kDeltaRows);
  row_dtype(found.source);
  return found;
}

void GatedDeltaInput::take_file(const OpRequest& request) {
  file_ = open_tensor_file(file_input(request.settings), *request.share);
  const InputNames& names = file_->request.names;
  refuse_page_order(file_->file, file_->request);
  const std::size_t axes = file_->file.tensor(name_in(names, "q")).info->shape.size();
  const std::size_t outer = axes == 4 ? 2 : 1;
  if (file_->request.order && *file_->request.order != (outer == 2 ? AxisOrder::kBthd : AxisOrder::kThd)) {
    fail(ErrorCode::kUsage, {setting("order", axis_order_name(*file_->request.order)), " with a gated delta rule"},
         "its tensors are ordered by token", "Leave it out; transpose tensors in another order.");
  }
  for (const DeltaTensor tensor : kDeltaTensors) {
    rows_.push_back(find_rows(tensor_name(tensor), outer, rows_.empty() ? -1 : rows_.front().grid.tokens()));
    used_.push_back(rows_.back().source);
  }
  const auto at = [&](DeltaTensor tensor) -> const FileRows& { return rows_[static_cast<std::size_t>(tensor)]; };
  const FileRows& q = at(DeltaTensor::kQ);
  const FileRows& v = at(DeltaTensor::kV);
  GatedDeltaSpec& spec = job_.spec;
  spec.dtype = row_dtype(q.source);
  spec.key_heads = static_cast<int>(q.grid.heads);
  spec.key_dim = static_cast<int>(q.grid.dim);
  spec.value_heads = static_cast<int>(v.grid.heads);
  spec.value_dim = static_cast<int>(v.grid.dim);
  const auto same = [&](DeltaTensor tensor, std::int64_t heads, std::int64_t dim) {
    const FileRows& rows = at(tensor);
    require(rows.grid.heads == heads && rows.grid.dim == dim && rows.grid.batch == q.grid.batch, rows.source,
            fmt::format("{}, and {}", described(q.source), described(v.source)), kDeltaRows);
  };
  same(DeltaTensor::kK, spec.key_heads, spec.key_dim);
  spec.key_decays = at(DeltaTensor::kLogDecay).source.info->shape.size() == outer + 2;
  same(DeltaTensor::kLogDecay, spec.value_heads, spec.decay_dim());
  same(DeltaTensor::kBeta, spec.value_heads, 1);
  for (const DeltaTensor tensor : {DeltaTensor::kK, DeltaTensor::kV}) {
    require(row_dtype(at(tensor).source) == spec.dtype, at(tensor).source, described(q.source),
            "q, k and v have one dtype.");
  }
  require(spec.value_heads % spec.key_heads == 0, v.source, described(q.source),
          "Each row of q and k serves the same number of value heads.");
  out_grid_ = v.grid;
  take_lengths();
  if (!initial_) return;
  job_.initial_states = true;
  used_.push_back(*initial_);
  require(initial_->info->shape == states_shape(), *initial_,
          fmt::format("the job's states are [{}]", fmt::join(states_shape(), ", ")),
          "It holds a state for each sequence.");
  row_dtype(*initial_);
}

// Reads the sequences of a file and their states.
void GatedDeltaInput::take_lengths() {
  const InputNames& names = file_->request.names;
  const FileRows& q = rows_.front();
  const auto find = [&](std::string_view name) -> std::optional<TensorSource> {
    const std::string there = name_in(names, name);
    return file_->file.contains(there) ? std::optional(file_->file.tensor(there)) : std::nullopt;
  };
  initial_ = find("initial_state");
  const auto state = find("state");
  const auto cumulative = find("cu_seqlens");
  job_.update = state.has_value();
  if (job_.update) {
    require(!initial_ && !cumulative, *state, "initial_state or cu_seqlens is there, too",
            "A file with `state` is a decode step of one token of each sequence. Leave one of them out.");
    require(q.grid.batch == 1 || q.grid.length == 1, q.source, "`state` is there, so each sequence has one token",
            "Give one token of each sequence, or rename `state` to initial_state.");
    initial_ = state;
    check_count(q.source, q.grid.tokens());
    job_.lengths.assign(static_cast<std::size_t>(q.grid.tokens()), 1);
    return;
  }
  if (!cumulative) {
    check_count(q.source, q.grid.batch);
    job_.lengths.assign(static_cast<std::size_t>(q.grid.batch), q.grid.length);
    return;
  }
  used_.push_back(*cumulative);
  require(q.grid.batch == 1, *cumulative, described(q.source),
          "Leave it out, or pack all sequences into one axis of tokens.");
  const std::vector<std::int64_t> ends = read_cumulative(*cumulative, q.grid, "q");
  constexpr std::string_view kEnds = "Write 0, and then the end of every sequence in packed tokens.";
  require(ends.front() == 0, *cumulative, fmt::format("its first entry is {}", ends.front()), kEnds);
  for (std::size_t s = 1; s < ends.size(); ++s) {
    require(ends[s] >= ends[s - 1], *cumulative, fmt::format("entry {} is {}, after {}", s, ends[s], ends[s - 1]),
            kEnds);
    job_.lengths.push_back(ends[s] - ends[s - 1]);
  }
}

void GatedDeltaInput::take_synthetic(const OpRequest& request) {
  const Settings& settings = request.settings;
  seed_ = settings.synthetic;
  job_.update = job_.initial_states = settings.q_len.has_value();
  if (job_.update && *settings.q_len != 1) {
    fail(ErrorCode::kUsage, setting("q_len", *settings.q_len), "a decode step takes one token of each sequence",
         {"Use ", setting("q_len", 1), ", or leave it out to process ", setting("seq"), " tokens."});
  }
  if (job_.update && request.sources.chosen("seq")) {
    fail(ErrorCode::kUsage, {setting("seq"), " contradicts ", setting("q_len")},
         "a decode step continues from a state, whose size does not depend on the number of earlier tokens",
         "Leave one of them out.");
  }
  const std::int64_t tokens = job_.update ? 1 : request.tokens;
  check_gated_delta(job_.spec);
  if (tokens < 1 || settings.batch < 1 || settings.batch > kMaxSequences) {
    fail(ErrorCode::kUsage, {setting("seq", tokens), " with ", setting("batch", settings.batch)},
         fmt::format("1 to {} sequences of at least one token are possible", kMaxSequences),
         "Check the shape of the input.");
  }
  const double rows = static_cast<double>(tokens) * static_cast<double>(settings.batch);
  const double states = static_cast<double>(settings.batch) * static_cast<double>(state_floats(job_.spec));
  const double widest = static_cast<double>(job_.spec.value_heads) * std::max(job_.spec.key_dim, job_.spec.value_dim);
  if (rows * widest > kMaxDeltaElements || states > kMaxDeltaElements) {
    fail(ErrorCode::kUsage, {setting("seq", tokens), " with ", setting("batch", settings.batch)},
         "a tensor would have more than 2^60 elements", "Use fewer tokens, sequences or heads.");
  }
  const AxisOrder order = settings.order.value_or(settings.batch == 1 ? AxisOrder::kThd : AxisOrder::kBthd);
  if (order != AxisOrder::kThd && order != AxisOrder::kBthd) {
    fail(ErrorCode::kUsage, {setting("order", axis_order_name(order)), " with a gated delta rule"},
         "its tensors are ordered by token", "Leave it out.");
  }
  const bool batched = order == AxisOrder::kBthd;
  out_grid_ = {order, batched ? settings.batch : 1, batched ? tokens : tokens * settings.batch, job_.spec.value_heads,
               job_.spec.value_dim};
  job_.lengths.assign(static_cast<std::size_t>(settings.batch), tokens);
}

GatedDeltaInput::RowShape GatedDeltaInput::row_shape(DeltaTensor tensor) const {
  const GatedDeltaSpec& spec = job_.spec;
  switch (tensor) {
    case DeltaTensor::kQ:
    case DeltaTensor::kK:
      return {spec.dtype, spec.key_heads, spec.key_dim};
    case DeltaTensor::kV:
      return {spec.dtype, spec.value_heads, spec.value_dim};
    case DeltaTensor::kLogDecay:
      return {Dtype::kF32, spec.value_heads, spec.decay_dim()};
    case DeltaTensor::kBeta:
      break;
  }
  return {Dtype::kF32, spec.value_heads, 1};
}

// q and v are normally distributed; keys are scaled by the weights to lengths of about 1; log-decays are about −2^−h in
// head h of 16, so that some heads forget within a chunk and others remember for segments; beta is in (0, 1).
SyntheticTensor GatedDeltaInput::synthetic(DeltaTensor tensor) {
  constexpr SyntheticTensor kKinds[] = {SyntheticTensor::kQ, SyntheticTensor::kWeightKeys, SyntheticTensor::kV,
                                        SyntheticTensor::kSsmDt, SyntheticTensor::kSsmB};
  return kKinds[static_cast<std::size_t>(tensor)];
}

bool GatedDeltaInput::made_by_backend(DeltaTensor tensor) const {
  return seed_ && tensor != DeltaTensor::kLogDecay && tensor != DeltaTensor::kBeta;
}

void GatedDeltaInput::read_synthetic(DeltaTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows,
                                     int threads) const {
  fill_synthetic(*seed_, synthetic(tensor), runs, rows, threads);
  if (made_by_backend(tensor)) return;
  for (std::int64_t row = 0; row < rows.tokens; ++row) {
    for (std::int64_t head = 0; head < rows.heads; ++head) {
      auto* const values = reinterpret_cast<float*>(rows.at(row, head));
      const float size = std::ldexp(1.0F, -static_cast<int>(head * 5 % 12));
      for (std::int64_t d = 0; d < rows.dim; ++d) {
        values[d] = tensor == DeltaTensor::kLogDecay ? -std::fabs(values[d]) * size
                                                     : 0.5F + 0.125F * values[d];  // within 0.5 ± 0.44
      }
    }
  }
}

void GatedDeltaInput::read(DeltaTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows,
                           int threads) const {
  if (file_ == nullptr) {
    if (!seed_) {
      fail(ErrorCode::kUsage, "the job has no input", "only its shape is given", "Name a seed, or a file.");
    }
    return read_synthetic(tensor, runs, rows, threads);
  }
  const FileRows& found = rows_[static_cast<std::size_t>(tensor)];
  const Dtype stored = row_dtype(found.source);
  if (stored == rows.dtype) return read_rows(found.source, found.grid, runs, rows);
  const Buffer bytes = allocate_host(static_cast<std::size_t>(rows.tokens * rows.heads * rows.dim) * size_of(stored));
  read_rows(found.source, found.grid, runs,
            dense_view(static_cast<void*>(bytes.data()), stored, rows.tokens, rows.heads, rows.dim));
  const std::byte* from = bytes.data();
  for (std::int64_t row = 0; row < rows.tokens; ++row) {
    for (std::int64_t head = 0; head < rows.heads; ++head) {
      auto* const to = reinterpret_cast<float*>(rows.at(row, head));
      for (std::int64_t d = 0; d < rows.dim; ++d, from += size_of(stored)) to[d] = load_element(from, stored);
    }
  }
}

GatedDeltaInput GatedDeltaInput::part(std::span<const std::int64_t> begins, std::span<const std::int64_t> ends) const {
  GatedDeltaInput some = *this;
  for (std::size_t s = 0; s < job_.lengths.size(); ++s) {
    some.job_.lengths[s] = ends[s] - begins[s];
    some.origins_[s] = origins_[s] + begins[s];
  }
  return some;
}

void GatedDeltaInput::set_initial(std::vector<std::int32_t> sequences, Buffer states) {
  given_sequences_ = std::move(sequences);
  given_states_ = std::make_shared<const Buffer>(std::move(states));
}

void GatedDeltaInput::read_initial(std::span<const std::int32_t> sequences, std::span<float> states) const {
  if (given_states_ != nullptr) {
    const auto bytes = static_cast<std::size_t>(state_bytes(job_.spec));
    auto* to = reinterpret_cast<std::byte*>(states.data());
    for (const std::int32_t s : sequences) {
      const auto at = std::ranges::lower_bound(given_sequences_, s) - given_sequences_.begin();
      std::memcpy(to, given_states_->data() + static_cast<std::size_t>(at) * bytes, bytes);
      to += bytes;
    }
    return;
  }
  std::vector<PackedRun> runs;
  const std::int64_t first = initial_ ? 0 : kDeltaStatesToken;
  for (const std::int32_t s : sequences) runs.push_back({first + s, first + s + 1});
  const std::int64_t dim = std::int64_t{job_.spec.key_dim} * job_.spec.value_dim;
  const std::int64_t heads = job_.spec.value_heads;
  if (!initial_) {
    return fill_synthetic(seed_.value_or(0), SyntheticTensor::kSsmHeads, runs,
                          dense_view(static_cast<void*>(states.data()), Dtype::kF32, std::ssize(runs), heads, dim), 1);
  }
  const Dtype stored = row_dtype(*initial_);
  const Buffer bytes = allocate_host(states.size() * size_of(stored));
  read_rows(*initial_, {AxisOrder::kThd, 1, std::ssize(job_.lengths), heads, dim}, runs,
            dense_view(static_cast<void*>(bytes.data()), stored, std::ssize(runs), heads, dim));
  for (std::size_t i = 0; i < states.size(); ++i) states[i] = load_element(bytes.data() + i * size_of(stored), stored);
}

std::vector<std::int64_t> GatedDeltaInput::states_shape() const {
  const GatedDeltaSpec& spec = job_.spec;
  return {std::ssize(job_.lengths), spec.value_heads, spec.key_dim, spec.value_dim};
}

std::vector<FileFingerprint> GatedDeltaInput::fingerprints() const {
  return file_ ? ringattn::fingerprints(used_) : std::vector<FileFingerprint>();
}

UnreadTensors GatedDeltaInput::unread() const {
  if (!file_) return {};
  return unread_tensors(file_->file, used_, file_->request.names);
}

std::string GatedDeltaInput::source() const {
  return seed_ ? fmt::format("synthetic input, seed {}", *seed_) : file_ ? file_->request.path : "no input";
}

}  // namespace ringattn
