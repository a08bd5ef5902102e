// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "attention/tokens/batch.hpp"
#include "base/error.hpp"
#include "base/memory.hpp"
#include "base/size.hpp"
#include "io/input_names.hpp"
#include "io/tensor_checks.hpp"
#include "ops/linear/linear_input.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMaxDims = 1 << 16;
constexpr std::int64_t kMaxPerToken = 1 << 20;  // elements of a token's row
constexpr std::int64_t kMaxDecays = 1 << 22;
constexpr std::int64_t kNumbersAtOnce = 1 << 16;
constexpr std::string_view kRows =
    "x is [tokens, heads, head_dim], dt [tokens, heads], B and C [tokens, groups, state_dim], each after an axis for "
    "the batch where x has one.";
constexpr std::string_view kChannelRows =
    "u and delta are [tokens, channels], B and C [tokens, state_dim], each after an axis for the batch where u has "
    "one.";
constexpr std::string_view kConvolvedRows = "x is [tokens, channels], with a batch axis in front if there is one.";
constexpr std::string_view kLinearRows =
    "q and k are [tokens, heads, dim], v is [tokens, heads, dim_v], log_decay [heads], [tokens, heads] or [tokens, "
    "heads, "
    "dim], each but [heads] after an axis for the batch where v has one.";
constexpr std::int64_t kMaxOffset = std::int64_t{1} << 60;  // so that positions after it don't overflow
constexpr std::string_view kCumulative = "Write 0, and then the end of every sequence in packed tokens.";

using Shape = std::vector<std::int64_t>;

// The names that the roles of a kind of SSM have in a file.
struct Roles {
  std::string x, dt, bias;
  std::string_view rows;  // a suggestion
};

Roles roles_of(bool selective, bool conv1d_only, const InputNames& names) {
  if (conv1d_only) return {names.x.value_or("x"), "", "", kConvolvedRows};
  if (selective) {
    return {names.u.value_or("u"), names.delta.value_or("delta"), names.delta_bias.value_or("delta_bias"),
            kChannelRows};
  }
  return {names.x.value_or("x"), names.dt.value_or("dt"), names.dt_bias.value_or("dt_bias"), kRows};
}

bool names_channels(const InputNames& names) { return names.u || names.delta || names.delta_bias; }
bool names_heads(const InputNames& names) { return names.x || names.dt || names.dt_bias; }

// Appends `inner` to the axes of x that count tokens.
Shape rows_shape(const SsmTensors& found, const Shape& inner) {
  Shape shape = found.batched ? Shape{found.x_grid.batch, found.x_grid.length} : Shape{found.x_grid.length};
  shape.insert(shape.end(), inner.begin(), inner.end());
  return shape;
}

void check_rows(const SsmTensors& found, const TensorSource& tensor, const Shape& inner, const Roles& roles) {
  require(row_dtype(tensor) == found.dtype, tensor, described(found.x), "Rows of one job have one dtype.");
  require(tensor.info->shape == rows_shape(found, inner), tensor, described(found.x), roles.rows);
}

RowGrid grid_of(const SsmTensors& found, std::int64_t heads, std::int64_t dim) {
  return {found.batched ? AxisOrder::kBthd : AxisOrder::kThd, found.x_grid.batch, found.x_grid.length, heads, dim};
}

// Reads a small tensor as fp32, whatever its dtype: [rows, dim].
std::vector<float> read_fp32(const TensorSource& tensor, std::int64_t rows, std::int64_t dim) {
  const Dtype dtype = row_dtype(tensor);
  const std::int64_t most = std::max<std::int64_t>(1, kNumbersAtOnce / dim);
  const Buffer bytes = allocate_host(static_cast<std::size_t>(std::min(rows, most) * dim) * size_of(dtype));
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(rows * dim));
  for (std::int64_t row = 0; row < rows; row += most) {
    const PackedRun piece{row, std::min(rows, row + most)};
    read_rows(tensor, {AxisOrder::kThd, 1, rows, 1, dim}, {&piece, 1},
              dense_view(static_cast<void*>(bytes.data()), dtype, piece.tokens(), 1, dim));
    const auto count = static_cast<std::size_t>(piece.tokens() * dim);
    for (std::size_t i = 0; i < count; ++i) values.push_back(load_element(bytes.data() + i * size_of(dtype), dtype));
  }
  return values;
}

// Reads one number per head, if the tensor exists.
std::vector<float> read_heads(SsmTensors& found, const SafetensorsFile& file, const std::optional<std::string>& name,
                              std::string_view role, std::string_view suggestion) {
  const auto tensor = find_optional(file, name, role);
  if (!tensor) return {};
  found.used.push_back(*tensor);
  require(tensor->info->shape == Shape{found.heads}, *tensor, described(found.x), suggestion);
  return read_fp32(*tensor, found.heads, 1);
}

// Finds the axes, heads and dims of x or u.
void find_shape(const SafetensorsFile& file, const Roles& roles, std::optional<AxisOrder> order, SsmTensors& found) {
  found.x = file.tensor(roles.x);
  const Shape& shape = found.x.info->shape;
  const std::size_t axes = found.selective ? 2 : 3;
  require(shape.size() == axes || shape.size() == axes + 1, found.x,
          fmt::format("it must have {} axes, or {} with one for the batch", axes, axes + 1), roles.rows);
  found.batched = shape.size() == axes + 1;
  const AxisOrder lies = found.batched ? AxisOrder::kBthd : AxisOrder::kThd;
  if (order && *order != lies) {
    fail(ErrorCode::kUsage, {setting("order", axis_order_name(*order)), fmt::format(", and {}", described(found.x))},
         fmt::format("tensors are ordered by token, {}", axis_order_name(lies)),
         "Leave it out; transpose tensors in another order.");
  }
  for (const std::int64_t extent : std::span(shape).subspan(found.batched ? 2 : 1)) {
    require(extent >= 1 && extent <= kMaxDims, found.x, fmt::format("1 to {} heads or dims are possible", kMaxDims),
            roles.rows);
  }
  found.dtype = row_dtype(found.x);
  found.heads = static_cast<int>(shape[found.batched ? 2 : 1]);
  if (!found.selective) found.head_dim = static_cast<int>(shape.back());
  require(std::int64_t{found.heads} * found.head_dim <= kMaxPerToken, found.x,
          fmt::format("at most {} numbers of a token are possible", kMaxPerToken), roles.rows);
  found.x_grid = {lies, found.batched ? shape[0] : 1, shape[found.batched ? 1 : 0], found.heads, found.head_dim};
}

// Finds B and C, which determine groups and state_dim.
void find_groups(const SafetensorsFile& file, const InputNames& names, const Roles& roles, SsmTensors& found) {
  found.b = file.tensor(names.b.value_or("B"));
  found.c = file.tensor(names.c.value_or("C"));
  const Shape& shape = found.b.info->shape;
  const std::size_t outer = found.batched ? 2 : 1;
  const bool grouped = shape.size() == outer + 2;
  require(grouped || (found.selective && shape.size() == outer + 1), found.b, described(found.x), roles.rows);
  const std::int64_t groups = grouped ? shape[outer] : 1;
  for (const std::int64_t extent : {groups, shape.back()}) {
    require(extent >= 1 && extent <= kMaxDims, found.b, fmt::format("1 to {} groups or states are possible", kMaxDims),
            roles.rows);
  }
  require(groups * shape.back() <= kMaxPerToken, found.b,
          fmt::format("at most {} numbers of a token are possible", kMaxPerToken), roles.rows);
  require(found.heads % groups == 0, found.b,
          fmt::format("{}, and {} groups don't divide {} {}", described(found.x), groups, found.heads,
                      found.selective ? "channels" : "heads"),
          "Each row of B and C serves the same number of heads.");
  found.groups = static_cast<int>(groups);
  found.state_dim = static_cast<int>(shape.back());
  const Shape inner = grouped ? Shape{groups, shape.back()} : Shape{shape.back()};
  check_rows(found, found.b, inner, roles);
  check_rows(found, found.c, inner, roles);
  found.b_grid = grid_of(found, groups, shape.back());
}

void find_decays(const SafetensorsFile& file, const InputNames& names, SsmTensors& found) {
  if (!names.a && !file.contains("A") && file.contains("A_log")) {
    fail(ErrorCode::kFile, fmt::format("{} has no tensor `A`", file.path()),
         "its `A_log` is the logarithm that models store", "Write A = -exp(A_log).");
  }
  const TensorSource a = file.tensor(names.a.value_or("A"));
  found.used.push_back(a);
  const std::int64_t dim = found.selective ? found.state_dim : 1;
  if (found.selective) {
    require(a.info->shape == Shape{found.heads, dim}, a,
            fmt::format("{}, and {}", described(found.x), described(found.b)),
            "A of a selective scan is [channels, state_dim].");
    require(found.heads * dim <= kMaxDecays, a, fmt::format("at most {} decays are possible", kMaxDecays),
            "Split the channels into several jobs: they do not depend on each other.");
  } else {
    require(a.info->shape == Shape{found.heads}, a, described(found.x), "A is [heads].");
  }
  found.a = read_fp32(a, found.heads, dim);
}

// Lengths of an update: each sequence has one token.
std::vector<std::int64_t> single_tokens(const std::optional<TensorSource>& cumulative, const SsmTensors& found) {
  require(!found.batched || found.x_grid.length == 1, found.x,
          fmt::format("`state` is there, so each of its {} sequences has one token", found.x_grid.batch),
          "Give one token of each sequence, or name what `state` is initial_states.");
  if (cumulative) {
    require(false, *cumulative, "`state` is there, so each sequence has one token", "Leave it out.");
  }
  const std::int64_t sequences = found.x_grid.tokens();
  check_count(found.x, sequences);
  return std::vector<std::int64_t>(static_cast<std::size_t>(sequences), 1);
}

std::vector<std::int64_t> find_lengths(const SafetensorsFile& file, const InputNames& names, SsmTensors& found) {
  const auto cumulative = find_optional(file, names.cu_seqlens, "cu_seqlens");
  if (found.update) return single_tokens(cumulative, found);
  if (!cumulative) {
    check_count(found.x, found.x_grid.batch);
    return std::vector<std::int64_t>(static_cast<std::size_t>(found.x_grid.batch), found.x_grid.length);
  }
  found.used.push_back(*cumulative);
  require(found.x_grid.batch == 1, *cumulative, described(found.x),
          "Leave it out, or pack all sequences into one axis of tokens.");
  const std::vector<std::int64_t> ends = read_cumulative(*cumulative, found.x_grid, found.x.info->name);
  require(ends.front() == 0, *cumulative, fmt::format("its first entry is {}", ends.front()), kCumulative);
  std::vector<std::int64_t> lengths;
  for (std::size_t s = 1; s < ends.size(); ++s) {
    require(ends[s] >= ends[s - 1], *cumulative, fmt::format("entry {} is {}, after {}", s, ends[s], ends[s - 1]),
            kCumulative);
    lengths.push_back(ends[s] - ends[s - 1]);
  }
  return lengths;
}

// Finds `state`, which makes the job an update. Called before the lengths are found.
void find_kind_of_states(const SafetensorsFile& file, const InputNames& names, SsmTensors& found) {
  found.initial_states = find_optional(file, names.initial_states, "initial_states");
  const auto state = find_optional(file, names.state, "state");
  found.update = state.has_value();
  if (!state) return;
  if (found.initial_states) {
    require(false, *state, fmt::format("{}", described(*found.initial_states)),
            "A file with `state` is an update of one token, one with initial_states whole sequences. Leave one of them "
            "out.");
  }
  found.initial_states = state;
}

void check_states(SsmTensors& found) {
  if (!found.initial_states) return;
  found.used.push_back(*found.initial_states);
  Shape shape{static_cast<std::int64_t>(found.lengths.size()), found.heads, found.head_dim, found.state_dim};
  if (found.selective) shape.erase(shape.begin() + 2);
  require(found.initial_states->info->shape == shape, *found.initial_states,
          fmt::format("the job's sequences, heads and states are {}", shape_text(shape)),
          "It holds a state for each sequence.");
  row_dtype(*found.initial_states);
}

void find_conv1d(const SafetensorsFile& file, const InputNames& names, SsmTensors& found) {
  const auto weight = find_optional(file, names.conv1d_weight, "conv1d_weight");
  const auto bias = find_optional(file, names.conv1d_bias, "conv1d_bias");
  found.conv_state = find_optional(
      file, found.conv1d_only && !names.conv_state ? names.initial_states : names.conv_state, "conv_state");
  if (!weight) {
    for (const auto& other : {bias, found.conv_state}) {
      if (other) require(false, *other, "there is no conv1d_weight", "Write the convolution's weight, too.");
    }
    return;
  }
  const std::int64_t channels =
      found.selective ? std::int64_t{found.heads}
                      : std::int64_t{found.heads} * found.head_dim + 2 * std::int64_t{found.groups} * found.state_dim;
  const Shape& shape = weight->info->shape;
  const std::int64_t width = shape.empty() ? 0 : shape.back();
  require(
      width >= 2 && width <= 4 && (shape == Shape{channels, width} || shape == Shape{channels, 1, width}), *weight,
      found.conv1d_only ? fmt::format("{}, and widths are 2, 3 and 4", described(found.x))
                        : fmt::format("the SSM has {} channels, and widths are 2, 3 and 4", channels),
      found.selective ? "It is [channels, width]." : "It is [channels, width], of all dims of x, then of B and of C.");
  found.used.push_back(*weight);
  found.conv_channels = static_cast<int>(channels);
  found.conv_width = static_cast<int>(width);
  found.conv_weight = read_fp32(*weight, channels, width);
  if (bias) {
    found.used.push_back(*bias);
    require(bias->info->shape == Shape{channels}, *bias, described(*weight), "It holds one number a channel.");
    found.conv_bias = read_fp32(*bias, channels, 1);
  }
  if (!found.conv_state) return;
  found.used.push_back(*found.conv_state);
  const Shape& tokens = found.conv_state->info->shape;
  const auto sequences = static_cast<std::int64_t>(found.lengths.size());
  require(tokens == Shape{sequences, channels, width - 1} || tokens == Shape{sequences, channels, width},
          *found.conv_state,
          fmt::format("the job's sequences and channels are {}", shape_text(Shape{sequences, channels})),
          fmt::format("It holds the last {} or {} tokens of each sequence.", width - 1, width));
  require(row_dtype(*found.conv_state) == found.dtype, *found.conv_state, described(found.x),
          "The rows of an SSM, and the tokens before them, have one dtype.");
}

// Finds log_decay, whose axes determine the kind of decay.
void find_log_decays(const SafetensorsFile& file, const InputNames& names, SsmTensors& found) {
  const TensorSource tensor = file.tensor(name_in(names, "log_decay"));
  found.used.push_back(tensor);
  const Shape& shape = tensor.info->shape;
  row_dtype(tensor);
  if (shape == Shape{found.heads}) {
    found.decay = SsmDecay::kHead;
    found.a = read_fp32(tensor, found.heads, 1);
    return;
  }
  found.dt = tensor;
  const bool of_dims = shape == rows_shape(found, {found.heads, found.state_dim});
  require(of_dims || shape == rows_shape(found, {found.heads}), tensor, described(found.x), kLinearRows);
  found.decay = of_dims ? SsmDecay::kDim : SsmDecay::kToken;
  found.dt_grid = grid_of(found, found.heads, of_dims ? found.state_dim : 1);
}

void find_offsets(const SafetensorsFile& file, const InputNames& names, SsmTensors& found) {
  const auto tensor = find_optional(file, names.q_offset, "q_offset");
  if (!tensor) return;
  found.used.push_back(*tensor);
  found.offsets = read_integers(*tensor);
  require(found.offsets.size() == found.lengths.size(), *tensor,
          fmt::format("the job has {}", counted(found.lengths.size(), "sequence")),
          "It holds the position of the first token of each sequence.");
  require(std::ranges::all_of(found.offsets, [](auto offset) { return offset >= 0 && offset <= kMaxOffset; }), *tensor,
          fmt::format("positions are 0 to {}", kMaxOffset),
          "It holds the position of the first token of each sequence.");
}

}  // namespace

bool holds_log_decays(const TensorFile& opened) {
  return opened.file.contains(name_in(opened.request.names, "log_decay"));
}

bool holds_linear_attention(const TensorFile& opened) {
  const auto has = [&](std::string_view tensor) { return opened.file.contains(name_in(opened.request.names, tensor)); };
  return holds_log_decays(opened) && has("q") && has("k") && has("v") && !has("beta");
}

SsmTensors find_linear_attention(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order) {
  SsmTensors found;
  const Roles roles{name_in(names, "v"), "", "", kLinearRows};
  find_shape(file, roles, order, found);
  found.b = file.tensor(name_in(names, "k"));
  found.c = file.tensor(name_in(names, "q"));
  const Shape& shape = found.b.info->shape;
  require(shape.size() == found.x.info->shape.size() && shape.back() >= 1 && shape.back() <= kMaxDims, found.b,
          described(found.x), kLinearRows);
  found.groups = found.heads;
  found.state_dim = static_cast<int>(shape.back());
  require(std::int64_t{found.heads} * found.state_dim <= kMaxPerToken, found.b,
          fmt::format("at most {} numbers of a token are possible", kMaxPerToken), kLinearRows);
  for (const TensorSource& rows : {found.b, found.c}) check_rows(found, rows, {found.heads, found.state_dim}, roles);
  found.b_grid = grid_of(found, found.heads, found.state_dim);
  for (const TensorSource& tensor : {found.x, found.b, found.c}) found.used.push_back(tensor);
  InputNames states = names;
  if (!states.initial_states) states.initial_states = name_in(names, "initial_state");
  if (!file.contains(*states.initial_states)) states.initial_states.reset();
  find_kind_of_states(file, states, found);
  found.lengths = find_lengths(file, names, found);
  find_log_decays(file, names, found);
  check_states(found);
  find_offsets(file, names, found);
  return found;
}

void read_log_decays(const SsmTensors& tensors, std::span<const PackedRun> runs, const MutableTensorView& rows) {
  const Dtype dtype = row_dtype(tensors.dt);
  if (dtype == Dtype::kF32) return read_rows(tensors.dt, tensors.dt_grid, runs, rows);
  const Buffer bytes = allocate_host(static_cast<std::size_t>(rows.tokens * rows.heads * rows.dim) * size_of(dtype));
  const MutableTensorView given =
      dense_view(static_cast<void*>(bytes.data()), dtype, rows.tokens, rows.heads, rows.dim);
  read_rows(tensors.dt, tensors.dt_grid, runs, given);
  for (std::int64_t row = 0; row < rows.tokens; ++row) {
    for (std::int64_t head = 0; head < rows.heads; ++head) {
      for (std::int64_t i = 0; i < rows.dim; ++i) {
        const float value = load_element(given.at(row, head) + i * static_cast<std::int64_t>(size_of(dtype)), dtype);
        store_element(rows.at(row, head) + i * static_cast<std::int64_t>(sizeof(float)), Dtype::kF32, value);
      }
    }
  }
}

bool holds_conv1d(const SafetensorsFile& file, const InputNames& names) {
  const bool weight = names.conv1d_weight || has_role(file, "conv1d_weight", JobKind::kConv1d);
  const bool scanned = names.dt || names_channels(names) || file.contains("dt") ||
                       ((file.contains("u") || file.contains("delta")) && !names.x);
  return weight && !scanned && (names.x || file.contains("x"));
}

bool holds_ssm(const SafetensorsFile& file, const InputNames& names) {
  if (holds_linear(file, names)) return false;
  const bool named = names_channels(names) || names_heads(names) || names.a || names.b || names.c || names.d ||
                     names.z || names.initial_states || names.state || names.conv1d_weight || names.conv1d_bias ||
                     names.conv_state;
  const bool others = names.q || names.k || names.v || names.latent || names.k_rope || names.latent_fp8 ||
                      names.latent_pages || names.k_pages || names.v_pages || names.w_uk || names.w_uv ||
                      names.kv_b_proj;
  if (named != others) return named;
  const bool queries = others || file.contains("q");
  const bool whole =
      named || (file.contains("x") && file.contains("dt")) || (file.contains("u") && file.contains("delta"));
  if (whole && queries) {
    fail(ErrorCode::kFile, fmt::format("{} holds an SSM and attention", file.path()), "a job is one of them",
         {"Name q, k and v, or x and dt, with ", setting("tensors"), "."});
  }
  return whole || (!queries && (file.contains("x") || file.contains("u")));
}

SsmTensors find_ssm(const SafetensorsFile& file, const InputNames& given, std::optional<AxisOrder> order) {
  SsmTensors found;
  const bool channels = file.contains("u");
  const bool heads = file.contains("x");
  if (names_channels(given) == names_heads(given) && channels && heads) {
    fail(ErrorCode::kFile, fmt::format("{} holds x and u", file.path()), "a job has one SSM",
         {"Name x and dt, or u and delta, with ", setting("tensors"), "."});
  }
  found.conv1d_only = holds_conv1d(file, given);
  found.selective =
      found.conv1d_only || (names_channels(given) != names_heads(given) ? names_channels(given) : channels);
  const InputNames names = resolve_names(file, given,
                                         found.conv1d_only ? JobKind::kConv1d
                                         : found.selective ? JobKind::kSelectiveScan
                                                           : JobKind::kSsd);
  const Roles roles = roles_of(found.selective, found.conv1d_only, names);
  find_shape(file, roles, order, found);
  if (found.conv1d_only) {
    found.used.push_back(found.x);
    found.state_dim = 1;
    found.lengths = find_lengths(file, names, found);
    find_conv1d(file, names, found);
    return found;
  }
  found.dt = file.tensor(roles.dt);
  check_rows(found, found.dt, {found.heads}, roles);
  found.dt_grid = grid_of(found, found.heads, 1);
  find_groups(file, names, roles, found);
  found.z = find_optional(file, names.z, "z");
  if (found.z)
    check_rows(found, *found.z, found.selective ? Shape{found.heads} : Shape{found.heads, found.head_dim}, roles);
  for (const TensorSource& tensor : {found.x, found.dt, found.b, found.c}) found.used.push_back(tensor);
  if (found.z) found.used.push_back(*found.z);
  find_kind_of_states(file, names, found);
  found.lengths = find_lengths(file, names, found);
  find_decays(file, names, found);
  found.d =
      read_heads(found, file, names.d, "D", "It holds one number a head; one for each dim of a head isn't computed.");
  const bool named_bias = found.selective ? names.delta_bias.has_value() : names.dt_bias.has_value();
  found.dt_bias = read_heads(found, file, named_bias ? std::optional(roles.bias) : std::nullopt, roles.bias,
                             "It holds one number a head.");
  check_states(found);
  find_conv1d(file, names, found);
  return found;
}

void read_states(const SsmTensors& tensors, std::span<const std::int32_t> sequences, std::span<float> states) {
  const TensorSource& source = *tensors.initial_states;
  const Dtype dtype = row_dtype(source);
  const auto count = static_cast<std::int64_t>(tensors.lengths.size());
  const std::int64_t dim = std::int64_t{tensors.head_dim} * tensors.state_dim;
  const auto floats = static_cast<std::size_t>(tensors.heads * dim);
  const RowGrid grid{AxisOrder::kThd, 1, count, tensors.heads, dim};
  const Buffer bytes = allocate_host(floats * size_of(dtype));
  float* to = states.data();
  for (const std::int32_t sequence : sequences) {
    const PackedRun one[] = {{sequence, sequence + 1}};
    read_rows(source, grid, one, dense_view(static_cast<void*>(bytes.data()), dtype, 1, tensors.heads, dim));
    for (std::size_t i = 0; i < floats; ++i) *to++ = load_element(bytes.data() + i * size_of(dtype), dtype);
  }
}

void read_halo(const SsmTensors& tensors, std::int32_t sequence, std::span<std::byte> halo) {
  const TensorSource& source = *tensors.conv_state;
  const std::int64_t kept = source.info->shape.back();
  const auto size = static_cast<std::int64_t>(size_of(tensors.dtype));
  const RowGrid grid{AxisOrder::kThd, 1, static_cast<std::int64_t>(tensors.lengths.size()), tensors.conv_channels,
                     kept};
  const Buffer bytes = allocate_host(static_cast<std::size_t>(tensors.conv_channels * kept * size));
  const PackedRun one[] = {{sequence, sequence + 1}};
  read_rows(source, grid, one,
            dense_view(static_cast<void*>(bytes.data()), tensors.dtype, 1, tensors.conv_channels, kept));
  turn_halo(bytes.data(), tensors.conv_channels, kept, tensors.dtype, halo);
}

void turn_halo(const std::byte* from, std::int64_t channels, std::int64_t kept, Dtype dtype,
               std::span<std::byte> halo) {
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t tokens = static_cast<std::int64_t>(halo.size()) / (channels * size);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t channel = 0; channel < channels; ++channel) {
      std::copy_n(from + (channel * kept + kept - tokens + token) * size, size,
                  halo.data() + (token * channels + channel) * size);
    }
  }
}

}  // namespace ringattn
