// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/error.hpp"
#include "io/input_names.hpp"
#include "io/tensor_checks.hpp"
#include "ops/jobs/row_op.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kCumulative = "cu_seqlens";
// Synthetic tensors are numbered from 0. Higher numbers are used elsewhere (kernels/common/synthetic.hpp).
constexpr std::size_t kMostTensors = 14;
constexpr std::int64_t kMostDim = 1 << 16;
constexpr std::int64_t kMostFlatDim = 1 << 24;  // of rows without heads: features

// Refuses names for tensors that the op doesn't have, and tensors of the file that would change the result of another
// op, such as cu_seqlens_q.
void refuse_others(const TensorFile& opened, std::span<const RowTensor> tensors,
                   std::span<const std::string_view> others) {
  const auto has = [&](std::string_view name) {
    return name == kCumulative || std::ranges::find(others, name) != others.end() ||
           std::ranges::find(tensors, name, &RowTensor::name) != tensors.end();
  };
  const InputNames& names = opened.request.names;
  std::vector<std::string_view> named;
  for (const TensorRole& role : tensor_roles()) {
    if (names.*role.member) named.push_back(role.name);
  }
  for (const auto& [name, unused] : names.others) named.push_back(name);
  for (const std::string_view name : named) {
    if (has(name)) continue;
    fail(ErrorCode::kUsage, {setting("tensors"), fmt::format(" names {}", name)},
         fmt::format("the job of {} has no such tensor", opened.request.path), "Leave it out.");
  }
  if (!named.empty()) return;  // the caller knows the file
  for (const std::string_view name : {"mask", "attn_mask", "cu_seqlens_q", "cu_seqlens_k", "q_offset"}) {
    if (has(name) || !opened.file.contains(name)) continue;
    fail(ErrorCode::kFile, fmt::format("{} has {}, which isn't read", opened.request.path, name),
         fmt::format("sequences are those of {}, and there is no mask", kCumulative),
         {"Leave it out, or name the tensors that are meant with ", setting("tensors"), "."});
  }
}

std::vector<std::int64_t> lengths_of(const TensorSource& cumulative, std::int64_t tokens) {
  const std::vector<std::int64_t> ends = read_integers(cumulative);
  const bool ascends = std::ranges::is_sorted(ends);
  require(ends.size() >= 2 && ends.front() == 0 && ends.back() == tokens && ascends, cumulative,
          fmt::format("it must ascend from 0 to {} tokens", tokens),
          "Write 0, and then the end of every sequence in packed tokens.");
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 1; i < ends.size(); ++i) lengths.push_back(ends[i] - ends[i - 1]);
  return lengths;
}

RowGrid flat_grid(const TensorSource& source) {
  const std::vector<std::int64_t>& shape = source.info->shape;
  require(!shape.empty() && shape.size() <= 3, source, "it must be [tokens, dim], [batch, tokens, dim] or [dim]",
          "Reshape it.");
  if (shape.size() == 1) return {AxisOrder::kThd, 1, shape[0], 1, 1};
  if (shape.size() == 2) return {AxisOrder::kThd, 1, shape[0], 1, shape[1]};
  return {AxisOrder::kBthd, shape[0], shape[1], 1, shape[2]};
}

}  // namespace

bool has_tensors(const TensorFile& file, std::span<const OpTensor> tensors) {
  return std::ranges::all_of(tensors, [&](const OpTensor& tensor) {
    return tensor.optional || file.file.contains(name_in(file.request.names, tensor.name));
  });
}

RowInput::RowInput(const OpRequest& request, std::vector<RowTensor> tensors, std::span<const std::string_view> others)
    : tensors_(std::move(tensors)) {
  if (tensors_.size() > kMostTensors) {
    fail(ErrorCode::kInternal, fmt::format("{} tensors of rows", tensors_.size()),
         fmt::format("at most {} are possible", kMostTensors));
  }
  if (request.from_file()) {
    find(request, others);
    return;
  }
  const Settings& settings = request.settings;
  seed_ = settings.synthetic;
  dtype_ = settings.dtype;
  order_ = settings.order.value_or(settings.batch == 1 ? AxisOrder::kThd : AxisOrder::kBthd);
  lengths_.assign(static_cast<std::size_t>(settings.batch), request.tokens);
  if (request.tokens < 1) {
    fail(ErrorCode::kUsage, setting("seq", request.tokens), "a job has at least one token of each sequence",
         {"Use ", setting("seq", 1), " or more."});
  }
  double elements = 0.0;
  for (const RowTensor& tensor : tensors_) {
    const auto rows = static_cast<double>(tokens_read(tensor, {0, tokens()}).tokens());
    elements = std::max(elements, rows * static_cast<double>(tensor.heads * tensor.dim));
  }
  if (elements > 0x1p60) {
    fail(ErrorCode::kUsage, {setting("seq", request.tokens), " with ", setting("batch", settings.batch)},
         "a tensor would have more than 2^60 elements", "Use fewer tokens, sequences or heads.");
  }
}

void RowInput::find(const OpRequest& request, std::span<const std::string_view> others) {
  file_ = open_tensor_file(file_input(request.settings), *request.share);
  refuse_page_order(file_->file, file_->request);
  refuse_others(*file_, tensors_, others);
  const InputNames& names = file_->request.names;
  std::erase_if(tensors_, [&](const RowTensor& tensor) {
    return tensor.optional && !file_->file.contains(name_in(names, tensor.name));
  });
  for (RowTensor& tensor : tensors_) {
    const TensorSource& source = sources_.emplace_back(file_->file.tensor(name_in(names, tensor.name)));
    const RowGrid& grid = grids_.emplace_back(
        tensor.flat ? flat_grid(source) : row_grid(source, tensor.tokens > 0 ? std::nullopt : file_->request.order));
    tensor.heads = grid.heads;
    tensor.dim = grid.dim;
    if (sources_.size() == 1) dtype_ = row_dtype(source);
    const bool same = grid.batch == grids_.front().batch && grid.length == grids_.front().length;
    require(row_dtype(source) == dtype_ && (same || tensor.tokens > 0), source, described(sources_.front()),
            "Give tensors of the same tokens and one dtype.");
    const std::int64_t most = tensor.flat ? kMostFlatDim : kMostDim;
    require(grid.heads > 0 && grid.dim > 0 && grid.heads <= kMostDim && grid.dim <= most, source,
            fmt::format("1 to {} heads or dims are possible", most), "Check the order of its axes.");
    if (tensor.tokens > 0) tensor.tokens = grid.tokens();
  }
  const RowGrid& first = grids_.front();
  order_ = first.order;
  require(first.tokens() > 0, sources_.front(), "it has no tokens", "Give a file with at least one token.");
  lengths_.assign(static_cast<std::size_t>(first.batch), first.length);
  const auto cumulative = find_optional(file_->file, names.cu_seqlens, kCumulative);
  if (!cumulative) return;
  require(first.batch == 1, *cumulative,
          fmt::format("{} has an axis for the batch already", described(sources_.front())), "Leave one of them out.");
  lengths_ = lengths_of(*cumulative, first.tokens());
  sources_.push_back(*cumulative);
}

std::vector<std::int64_t> RowInput::out_shape(std::int64_t heads, std::int64_t dim) const {
  const RowGrid grid = out_grid(heads, dim);
  std::vector<std::int64_t> shape = grid.shape();
  if (tensors_.front().flat) shape.erase(shape.begin() + (grid.has_batch() ? 2 : 1));
  return shape;
}

RowGrid RowInput::out_grid(std::int64_t heads, std::int64_t dim) const {
  RowGrid grid{order_, 1, tokens(), heads, dim};
  if (!grid.has_batch()) return grid;
  grid.batch = grids_.empty() ? std::ssize(lengths_) : grids_.front().batch;
  grid.length = tokens() / grid.batch;
  return grid;
}

PackedRun RowInput::tokens_read(const RowTensor& tensor, const PackedRun& own) const {
  if (tensor.tokens > 0) return {0, tensor.tokens};
  return tensor.whole ? PackedRun{0, tokens()} : own;
}

std::int64_t RowInput::tokens() const {
  std::int64_t tokens = 0;
  for (const std::int64_t length : lengths_) tokens += length;
  return tokens;
}

void RowInput::read(std::size_t tensor, std::span<const PackedRun> runs, const MutableTensorView& rows,
                    int threads) const {
  if (file_ != nullptr) return read_rows(sources_[tensor], grids_[tensor], runs, rows);
  if (!seed_) fail(ErrorCode::kUsage, "the job has no input", "only its shape is given", "Name a seed, or a file.");
  fill_synthetic(*seed_, static_cast<SyntheticTensor>(tensor), runs, rows, threads);
}

std::vector<FileFingerprint> RowInput::fingerprints() const { return ringattn::fingerprints(sources_); }

UnreadTensors RowInput::unread() const {
  return file_ == nullptr ? UnreadTensors{} : unread_tensors(file_->file, sources_, file_->request.names);
}

std::string RowInput::source() const {
  if (file_ != nullptr) return file_->request.path;
  return seed_ ? fmt::format("synthetic input, seed {}", *seed_) : "no input";
}

}  // namespace ringattn
