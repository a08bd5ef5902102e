// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/tokens/ssm_layout.hpp"
#include "base/error.hpp"
#include "base/memory.hpp"
#include "io/input_names.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr double kMaxElements = 0x1p60;  // of a tensor: its bytes must stay countable
// Synthetic tokens of kSsmHeads that follow D and the bias of dt.
constexpr std::int64_t kConv1dToken = 2;                     // weights, then the bias; a channel is a head
constexpr std::int64_t kStatesToken = 16;                    // one of each sequence, [heads, head_dim · state_dim]
constexpr std::int64_t kHalosToken = std::int64_t{1} << 40;  // width − 1 of each sequence, [1, channels]
constexpr float kConv1dScale = 0.5F;               // of weights and biases, so that rows keep about their size
constexpr std::int64_t kSyntheticPosition = 1000;  // of the token of an update
constexpr float kDefaultBias = -4.0F;              // softplus makes about 0.02 of it

// −2^−e with e from 0 to 15. Neighbouring heads have very different e, and head 0 has the slowest decay.
float synthetic_decay(int head) {
  const int exponent = (15 + 11 * (head % 16)) % 16;
  return -std::ldexp(1.0F, -exponent);
}

// Turns normal values into synthetic log-decays of about the size of synthetic_decay().
void make_log_decays(const MutableTensorView& rows) {
  for (std::int64_t row = 0; row < rows.tokens; ++row) {
    for (std::int64_t head = 0; head < rows.heads; ++head) {
      const float rate = synthetic_decay(static_cast<int>(head));
      for (std::int64_t i = 0; i < rows.dim; ++i) {
        std::byte* const at = rows.at(row, head) + i * static_cast<std::int64_t>(sizeof(float));
        store_element(at, Dtype::kF32, rate * std::abs(load_element(at, Dtype::kF32)));
      }
    }
  }
}

// One number per head.
std::vector<float> synthetic_heads(std::uint64_t seed, int token, int heads, float mean) {
  std::vector<float> values;
  for (int head = 0; head < heads; ++head) {
    values.push_back(mean + synthetic_value(seed, SyntheticTensor::kSsmHeads, token, head, 0));
  }
  return values;
}

}  // namespace

SsmFile::SsmFile(std::shared_ptr<const TensorFile> opened_file, Op op) : opened(std::move(opened_file)) {
  const FileInput& input = opened->request;
  refuse_page_order(opened->file, input);
  if (op == Op::kLinearAttention) {
    if (opened->file.contains(name_in(input.names, "beta"))) {
      fail(ErrorCode::kFile, fmt::format("{} has beta beside log_decay", input.path),
           "linear attention has none: it is of the gated delta rule", "Leave it out, or compute that op.");
    }
    tensors = find_linear_attention(opened->file, input.names, input.order);
    return;
  }
  if (!holds_ssm(opened->file, input.names)) {
    fail(ErrorCode::kFile, fmt::format("{} holds no SSM", input.path),
         "x and dt, u and delta, or x and conv1d_weight aren't there", {"Name them with ", setting("tensors"), "."});
  }
  const auto has = [&](std::string_view name) { return opened->file.contains(name_in(input.names, name)); };
  if (op == Op::kConv1d && !holds_conv1d(opened->file, input.names) && !has("dt") && !has("delta")) {
    fail(ErrorCode::kFile, fmt::format("{} has x without a weight", input.path),
         "with conv1d_weight it is a convolution, with weight a linear layer, with dt, A, B and C an SSM",
         {"Write these tensors, too, or name them with ", setting("tensors"), "."});
  }
  tensors = find_ssm(opened->file, input.names, input.order);
}

Op ssm_op(const SsmJob& job) {
  if (job.conv1d_only) return Op::kConv1d;
  if (job.spec.decay != SsmDecay::kDt) return Op::kLinearAttention;
  return job.spec.state_decays ? Op::kSelectiveScan : Op::kSsd;
}

SsmInput::SsmInput(const SsmRequest& request, const SsmNumerics& numerics, std::shared_ptr<JobShare> share) {
  share = share_or_new(std::move(share));
  std::visit([&](const auto& input) { take_shape(input, numerics, *share); }, request);
  SsmSpec& spec = job_.spec;
  spec.dt_softplus = numerics.softplus.value_or(spec.dt_bias);
  spec.dt_min = numerics.dt_min;
  spec.dt_max = numerics.dt_max;
  job_.final_states = (numerics.final_states || job_.update) && !job_.conv1d_only;
  job_.final_halos = (numerics.final_states || job_.update) && job_.convolution;
  check_ssm_job(job_);
}

void SsmInput::set_scale(float scale) {
  job_.spec.scale = scale;
  check_ssm_job(job_);
}

void SsmInput::set_rope(std::optional<RopeSpec> rope) {
  if (!rope && !offsets_.empty()) {
    fail(ErrorCode::kUsage, "q_offset without RoPE", "nothing else depends on the positions of tokens",
         {"Leave it out, or use ", setting("rope", "on"), "."});
  }
  if (rope && !seed_ && job_.update && offsets_.empty()) {
    fail(ErrorCode::kUsage, "a decode step with RoPE has no q_offset",
         "a state does not say how many tokens it has seen",
         "Write the position of each sequence's token to q_offset.");
  }
  if (rope && seed_ && job_.update) offsets_.assign(job_.lengths.size(), kSyntheticPosition);
  job_.rope = std::move(rope);
  check_ssm_job(job_);
}

void SsmInput::take_shape(const SyntheticSsmInput& input, const SsmNumerics& numerics, JobShare&) {
  seed_ = input.seed;
  SsmSpec& spec = job_.spec;
  spec.dtype = input.dtype;
  spec.heads = input.heads;
  spec.head_dim = input.selective || input.convolution ? 1 : input.head_dim;
  spec.groups = input.convolution ? 1 : input.groups;
  spec.state_dim = input.convolution ? 1 : input.state_dim;
  spec.state_decays = input.selective || input.convolution;
  spec.skip = spec.gate = spec.dt_bias = !input.convolution && !input.linear;
  if (input.linear) {
    spec.groups = input.heads;
    spec.decay = *input.linear;
  }
  job_.conv1d_only = input.convolution;
  check_ssm(spec);
  if (input.tokens < 1 || input.batch < 1) {
    fail(ErrorCode::kUsage, {setting("seq", input.tokens), " with ", setting("batch", input.batch)},
         fmt::format("{} needs at least one token of one sequence", op_noun(job_)), "Check the shape of the input.");
  }
  const double elements =
      static_cast<double>(input.tokens) * static_cast<double>(input.batch) *
      std::max({static_cast<double>(spec.heads) * spec.head_dim, static_cast<double>(spec.groups) * spec.state_dim});
  const double states = static_cast<double>(input.batch) * static_cast<double>(state_bytes(spec));
  if (elements > kMaxElements || states > kMaxElements) {
    fail(ErrorCode::kUsage,
         {setting("seq", input.tokens), " with ", setting("batch", input.batch),
          fmt::format(" and {} heads", spec.heads)},
         "a tensor would have more than 2^60 elements", "Use fewer tokens, sequences or heads.");
  }
  if (input.batch > kMaxSequences) {
    fail(ErrorCode::kUsage, {setting("batch", input.batch)},
         fmt::format("at most {} sequences are possible", kMaxSequences), "Compute them in several jobs.");
  }
  const AxisOrder order = input.order.value_or(input.batch == 1 ? AxisOrder::kThd : AxisOrder::kBthd);
  if (order != AxisOrder::kThd && order != AxisOrder::kBthd) {
    fail(ErrorCode::kUsage, {setting("order", axis_order_name(order)), fmt::format(" with {}", op_noun(job_))},
         "its tensors are ordered by token", "Leave it out.");
  }
  const bool batched = order == AxisOrder::kBthd;
  y_grid_ = {order, batched ? input.batch : 1, batched ? input.tokens : input.tokens * input.batch, spec.heads,
             spec.head_dim};
  check_ssm_size(input.batch, input.batch * super_segments(input.tokens), numerics.ranks, scan_unit(job_));
  job_.lengths.assign(static_cast<std::size_t>(input.batch), input.tokens);
  job_.update = job_.initial_states = input.update;
  take_whole();
  const std::uint64_t seed = input.seed.value_or(0);
  if (input.linear == SsmDecay::kHead) {
    for (int head = 0; head < spec.heads; ++head) a_.push_back(synthetic_decay(head));
  }
  if (!job_.conv1d_only && !input.linear) {
    d_ = synthetic_heads(seed, 0, spec.heads, 0.0F);
    dt_bias_ = synthetic_heads(seed, 1, spec.heads, kDefaultBias);
    for (int head = 0; head < spec.heads; ++head) {
      for (int state = 0; state < (spec.state_decays ? spec.state_dim : 1); ++state) {
        a_.push_back(synthetic_decay(head) * static_cast<float>(state + 1));
      }
    }
  }
  if (input.conv_width == 0 && !job_.conv1d_only) return;
  set_conv1d(input.conv_width, true);
  job_.initial_halos = input.update;
  const auto number = [&](int token, int channel) {
    return synthetic_value(seed, SyntheticTensor::kSsmHeads, kConv1dToken + token, channel, 0);
  };
  for (int channel = 0; channel < job_.convolution->channels; ++channel) {
    for (int k = 0; k < input.conv_width; ++k) conv_weight_.push_back(kConv1dScale * number(k, channel));
    conv_bias_.push_back(kConv1dScale * number(input.conv_width, channel));
  }
}

void SsmInput::take_shape(const FileInput& input, const SsmNumerics& numerics, JobShare& share) {
  std::shared_ptr<const TensorFile> opened = open_tensor_file(input, share);
  file_ = share.ssm.get([&](const SsmFile& file) { return file.opened == opened; },
                        [&] { return std::make_shared<const SsmFile>(opened, numerics.op); });
  const SsmTensors& found = file_->tensors;
  SsmSpec& spec = job_.spec;
  spec.dtype = found.dtype;
  spec.heads = found.heads;
  spec.head_dim = found.head_dim;
  spec.groups = found.groups;
  spec.state_dim = found.state_dim;
  spec.state_decays = found.selective;
  spec.decay = found.decay;
  offsets_ = found.offsets;
  job_.conv1d_only = found.conv1d_only;
  spec.skip = !found.d.empty();
  spec.gate = found.z.has_value();
  spec.dt_bias = !found.dt_bias.empty();
  job_.update = found.update;
  job_.initial_states = found.initial_states.has_value();
  job_.initial_halos = found.conv_state.has_value();
  check_ssm_size(found.lengths, numerics.ranks, scan_unit(job_));
  job_.lengths = found.lengths;
  require(!job_.lengths.empty(), found.x, "there are no sequences", "At least one is needed.");
  y_grid_ = found.x_grid;
  a_ = found.a;
  d_ = found.d;
  dt_bias_ = found.dt_bias;
  conv_weight_ = found.conv_weight;
  conv_bias_ = found.conv_bias;
  if (found.conv_width > 0) set_conv1d(found.conv_width, !found.conv_bias.empty());
  take_whole();
}

// The convolution is followed by silu, as in models.
void SsmInput::set_conv1d(int width, bool bias) {
  job_.convolution = CausalConv1dSpec{job_.spec.dtype, conv1d_channels(job_.spec), width, bias, true};
}

void SsmInput::take_whole() {
  std::int64_t token = 0;
  for (std::size_t s = 0; s < job_.lengths.size(); ++s) {
    numbers_.push_back(static_cast<std::int32_t>(s));
    origins_.push_back(token);
    token += job_.lengths[s];
  }
}

SsmInput SsmInput::with_final_states() const {
  SsmInput all = *this;
  all.job_.final_states = !job_.conv1d_only;
  all.job_.final_halos = job_.convolution.has_value();
  return all;
}

SsmInput SsmInput::part(std::span<const std::int64_t> begins, std::span<const std::int64_t> ends,
                        std::vector<std::byte> carried) const {
  SsmInput some = *this;
  some.job_.lengths.clear();
  some.numbers_.clear();
  some.origins_.clear();
  some.begins_.clear();
  for (std::size_t s = 0; s < job_.lengths.size(); ++s) {
    if (begins[s] >= ends[s] && job_.lengths[s] > 0) continue;
    some.job_.lengths.push_back(ends[s] - begins[s]);
    some.numbers_.push_back(numbers_[s]);
    some.origins_.push_back(origins_[s] + begins[s]);
    some.begins_.push_back(begin_of(s) + begins[s]);
    some.job_.initial_halos = some.job_.initial_halos || (job_.convolution && begins[s] > 0);
  }
  if (!carried.empty()) {
    some.job_.initial_states = !job_.conv1d_only;
    some.carried_ = std::move(carried);
  }
  return some;
}

SsmInput::RowShape SsmInput::row_shape(SsmTensorKind rows) const {
  const SsmSpec& spec = job_.spec;
  switch (rows) {
    case SsmTensorKind::kX:
    case SsmTensorKind::kZ:
      return {spec.heads, spec.head_dim};
    case SsmTensorKind::kDt:
      return {spec.heads, dt_rows(spec).dim};
    case SsmTensorKind::kB:
    case SsmTensorKind::kC:
      break;
  }
  return {spec.groups, spec.state_dim};
}

Dtype SsmInput::row_dtype(SsmTensorKind rows) const {
  return rows == SsmTensorKind::kDt ? dt_rows(job_.spec).dtype : job_.spec.dtype;
}

std::vector<SsmTensorKind> SsmInput::convolved() const {
  if (!job_.convolution) return {};
  if (job_.spec.state_decays) return {SsmTensorKind::kX};
  return {SsmTensorKind::kX, SsmTensorKind::kB, SsmTensorKind::kC};
}

SyntheticTensor SsmInput::synthetic(SsmTensorKind rows) {
  return static_cast<SyntheticTensor>(static_cast<int>(SyntheticTensor::kSsmX) + static_cast<int>(rows));
}

void SsmInput::read(SsmTensorKind which, std::span<const PackedRun> runs, const MutableTensorView& rows,
                    int threads) const {
  if (seed_) {
    fill_synthetic(*seed_, synthetic(which), runs, rows, threads);
    if (is_log_decay(which)) make_log_decays(rows);
    return;
  }
  if (file_ == nullptr) {
    fail(ErrorCode::kUsage, "the job has no input", "only its shape is given", "Name a seed, or a file.");
  }
  const SsmTensors& found = file_->tensors;
  switch (which) {
    case SsmTensorKind::kX:
      return read_rows(found.x, found.x_grid, runs, rows);
    case SsmTensorKind::kDt:
      return is_log_decay(which) ? read_log_decays(found, runs, rows) : read_rows(found.dt, found.dt_grid, runs, rows);
    case SsmTensorKind::kB:
      return read_rows(found.b, found.b_grid, runs, rows);
    case SsmTensorKind::kC:
      return read_rows(found.c, found.b_grid, runs, rows);
    case SsmTensorKind::kZ:
      return read_rows(*found.z, found.x_grid, runs, rows);
  }
}

void SsmInput::read_initial(std::span<const std::int32_t> sequences, std::span<float> states) const {
  if (!carried_) {
    std::vector<std::int32_t> numbers;
    for (const std::int32_t sequence : sequences) numbers.push_back(numbers_[static_cast<std::size_t>(sequence)]);
    if (file_) return read_states(file_->tensors, numbers, states);
    std::vector<PackedRun> runs;
    for (const std::int32_t number : numbers) runs.push_back({kStatesToken + number, kStatesToken + number + 1});
    const std::int64_t dim = std::int64_t{job_.spec.head_dim} * job_.spec.state_dim;
    return fill_synthetic(
        seed_.value_or(0), SyntheticTensor::kSsmHeads, runs,
        dense_view(static_cast<void*>(states.data()), Dtype::kF32, total_tokens(runs), job_.spec.heads, dim), 1);
  }
  const auto bytes = static_cast<std::size_t>(state_bytes(job_.spec));
  const std::span<std::byte> to = std::as_writable_bytes(states);
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    std::copy_n(carried_->data() + static_cast<std::size_t>(sequences[i]) * bytes, bytes, to.data() + i * bytes);
  }
}

void SsmInput::read_halos(std::span<const std::int32_t> sequences, std::span<std::byte> halos) const {
  const CausalConv1dSpec& spec = *job_.convolution;
  const auto bytes = static_cast<std::size_t>(spec.halo_bytes());
  std::ranges::fill(halos, std::byte{0});
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto s = static_cast<std::size_t>(sequences[i]);
    const std::span<std::byte> halo = halos.subspan(i * bytes, bytes);
    const MutableTensorView rows =
        dense_view(static_cast<void*>(halo.data()), spec.dtype, spec.halo_tokens(), 1, spec.channels);
    if (job_.conv1d_only && carried_) {
      turn_halo(carried_->data() + s * bytes, spec.channels, spec.halo_tokens(), spec.dtype, halo);
    } else if (begin_of(s) >= spec.halo_tokens()) {
      read_before(origins_[s], rows);
    } else if (file_ && file_->tensors.conv_state) {
      read_halo(file_->tensors, numbers_[s], halo);
    } else if (seed_ && job_.update) {
      const std::int64_t first = kHalosToken + numbers_[s] * std::int64_t{spec.halo_tokens()};
      const PackedRun runs[] = {{first, first + spec.halo_tokens()}};
      fill_synthetic(*seed_, SyntheticTensor::kSsmHeads, runs, rows, 1);
    }
  }
}

// Reads the tokens of the same sequence that precede a packed token.
void SsmInput::read_before(std::int64_t token, const MutableTensorView& rows) const {
  const PackedRun runs[] = {{token - rows.tokens, token}};
  const auto size = static_cast<std::int64_t>(size_of(rows.dtype));
  std::int64_t first = 0;  // channel
  for (const SsmTensorKind which : convolved()) {
    const RowShape shape = row_shape(which);
    const std::int64_t dims = shape.heads * shape.dim;
    const Buffer some = allocate_host(static_cast<std::size_t>(rows.tokens * dims * size));
    read(which, runs, dense_view(static_cast<void*>(some.data()), rows.dtype, rows.tokens, shape.heads, shape.dim), 1);
    for (std::int64_t row = 0; row < rows.tokens; ++row) {
      std::copy_n(some.data() + row * dims * size, dims * size, rows.at(row, 0) + first * size);
    }
    first += dims;
  }
}

std::vector<std::int64_t> SsmInput::halos_shape() const {
  return {static_cast<std::int64_t>(job_.lengths.size()), job_.convolution->channels, job_.convolution->halo_tokens()};
}

std::vector<std::int64_t> SsmInput::y_shape() const {
  std::vector<std::int64_t> shape = y_grid_.shape();
  if (job_.spec.state_decays) shape.pop_back();
  return shape;
}

std::vector<std::int64_t> SsmInput::states_shape() const {
  const SsmSpec& spec = job_.spec;
  const auto sequences = static_cast<std::int64_t>(job_.lengths.size());
  if (spec.state_decays) return {sequences, spec.heads, spec.state_dim};
  return {sequences, spec.heads, spec.head_dim, spec.state_dim};
}

std::vector<FileFingerprint> SsmInput::fingerprints() const {
  return file_ ? ringattn::fingerprints(file_->tensors.used) : std::vector<FileFingerprint>();
}

UnreadTensors SsmInput::unread() const {
  if (!file_) return {};
  return unread_tensors(file_->opened->file, file_->tensors.used, file_->opened->request.names);
}

std::string SsmInput::source() const {
  return seed_ ? fmt::format("synthetic input, seed {}", *seed_) : file_ ? file_->opened->request.path : "no input";
}

}  // namespace ringattn
