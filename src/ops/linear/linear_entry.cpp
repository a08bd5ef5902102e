// SPDX-License-Identifier: Apache-2.0
// The row of linear layers in the table of ops.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/linear/linear_oracle.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "ops/common/row_op.hpp"
#include "ops/common/staging.hpp"
#include "ops/common/values.hpp"
#include "ops/linear/linear.hpp"
#include "ops/linear/linear_input.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"x", "[tokens, in_features]"},
                                 {"weight", "[out_features, in_features], gated [2 * out_features, in_features]"},
                                 {"bias", "[out_features]", true}};
constexpr std::string_view kNotes[] = {"a gated layer's weight and bias have the rows of the gate first"};
constexpr std::int64_t kMostFeatures = 1 << 16;

constexpr std::string_view kParallel[] = {"none", "column", "row"};

void check_features(std::string_view text) { parse_size_value(text, "features", 1, kMostFeatures); }

constexpr SettingRow kOwn[] = {
    {.name = "in-features",
     .kind = SettingKind::kSize,
     .value = "K",
     .fallback = "1k",
     .help = "features of a row of x",
     .check = check_features},
    {.name = "out-features",
     .kind = SettingKind::kSize,
     .value = "N",
     .fallback = "1k",
     .help = "features of a row of y",
     .check = check_features},
    {.name = "activation",
     .kind = SettingKind::kText,
     .value = "NAME",
     .fallback = "none",
     .help = "none, gelu, gelu_tanh, silu, or gated: swiglu, geglu, geglu_tanh",
     .check = [](std::string_view text) { parse_choice(text, activation_names()); }},
    {.name = "parallel",
     .kind = SettingKind::kText,
     .value = "KIND",
     .fallback = "none",
     .help = "how ranks share the layer: none (each has some tokens), column or row; row has other bits",
     .check = [](std::string_view text) { parse_choice(text, kParallel); }}};

std::int64_t features(const Settings& settings, std::string_view name) {
  return parse_size_value(settings.own.find(name)->second, "features", 1, kMostFeatures);
}

// Reads whole tensors, and shows each rank its part of them.
class LoadedLinear final : public RowKernel {
 public:
  LoadedLinear(const LinearJob& job, Transport& world, const KernelRequest& kernel, const Options& options)
      : layer_(job, world, {kernel, options.threads, options.timeout_seconds}), timeouts_(options.timeout_seconds) {}

  Backend& backend() override { return layer_.backend(); }

  void load(const RowInput& input, const Layout& layout, int rank, int threads) override {
    const LinearSpec& spec = layer_.job().spec;
    const bool shared = spec.parallel != LinearParallel::kNone;
    tokens_ = shared ? input.tokens() : layout.tokens(rank);
    const std::vector<PackedRun> all{{0, input.tokens()}};
    read(input, 0, shared ? all : packed_runs(layout.runs(rank), layout.cu()), threads, x_);
    for (std::size_t i = 1; i < input.tensors().size(); ++i) {
      read(input, i, {{0, input.tensors()[i].tokens}}, threads, i == 1 ? weight_ : bias_);
    }
    out_ = backend().allocate(bytes(layout.tokens(rank) * spec.out_features));
    const FeatureRange in = layer_.features();
    const FeatureRange columns = layer_.columns();
    const auto matrix = [&](std::int64_t first_row) {
      LinearMatrix part;
      part.data = weight_.data() + bytes((first_row + columns.begin) * spec.in_features + in.begin);
      part.row_stride = static_cast<std::int64_t>(bytes(spec.in_features));
      if (spec.bias) part.bias = bias_.data() + bytes(first_row + columns.begin);
      return part;
    };
    layer_.load({matrix(0), spec.gated ? matrix(spec.out_features) : LinearMatrix{}}, backend().stream());
  }

  double run() override {
    const LinearSpec& spec = layer_.job().spec;
    const FeatureRange in = layer_.features();
    const std::int64_t rows = spec.parallel == LinearParallel::kNone ? tokens_ : layer_.tokens_of_rank(tokens_).size();
    const auto begin = std::chrono::steady_clock::now();
    layer_.run({x_.data() + bytes(in.begin), spec.dtype, tokens_, 1, in.size(), spec.in_features, in.size()},
               dense_view(static_cast<void*>(out_.data()), spec.dtype, rows, 1, spec.out_features), backend().stream());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  void fetch(std::span<std::byte> out) override {
    Staging(backend(), timeouts_).store(out_.data(), out.data(), out.size());
  }

 private:
  std::size_t bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * size_of(layer_.job().spec.dtype);
  }
  void read(const RowInput& input, std::size_t tensor, const std::vector<PackedRun>& runs, int threads,
            Buffer& target) {
    const RowTensor& of = input.tensors()[tensor];
    const MutableTensorView rows = make_rows(backend(), input.dtype(), total_tokens(runs), of.heads, of.dim, target);
    Staging(backend(), timeouts_)
        .load(
            runs, rows,
            [&](std::span<const PackedRun> piece, const MutableTensorView& into) {
              input.read(tensor, piece, into, threads);
            },
            [](std::int64_t) {});
  }

  Linear layer_;
  Timeouts timeouts_;
  std::int64_t tokens_ = 0;  // of x
  Buffer x_, weight_, bias_, out_;
};

class LinearOp final : public RowOp {
 public:
  explicit LinearOp(const OpRequest& request) : spec_(spec_of(request.settings)), input_(request, tensors_of(request)) {
    spec_.dtype = input_.dtype();
    const RowTensor& x = input_.tensors()[0];
    const RowTensor& weight = input_.tensors()[1];
    const std::int64_t matrices = spec_.gated ? 2 : 1;
    if (weight.dim != x.dim || weight.tokens % matrices != 0) {
      fail(ErrorCode::kFile, fmt::format("weight is [{}, {}]", weight.tokens, weight.dim),
           fmt::format("x has {} features, and the layer {}", x.dim,
                       spec_.gated ? "is gated: it has two rows for each feature of y" : "has no gate"),
           "Give weight as PyTorch stores it, [out_features, in_features], gate first.");
    }
    spec_.in_features = x.dim;
    spec_.out_features = weight.tokens / matrices;
    spec_.bias = input_.tensors().size() > 2;
    if (!spec_.bias || input_.tensors()[2].tokens == weight.tokens) return;
    fail(ErrorCode::kFile, fmt::format("bias has {} elements", input_.tensors()[2].tokens),
         fmt::format("weight has {} rows", weight.tokens), "Give one for each row of the weight.");
  }

  std::string_view name() const override { return "linear"; }
  std::string describe() const override { return ringattn::describe(spec_); }
  const RowInput& input() const override { return input_; }
  std::int64_t heads() const override { return 1; }
  std::int64_t dim() const override { return spec_.out_features; }
  Dtype out_dtype() const override { return spec_.dtype; }
  std::string_view out_name() const override { return "y"; }
  std::size_t kernel_bytes(int ranks) const override {
    std::size_t most = 0;
    for (int rank = 0; rank < ranks; ++rank) most = std::max(most, linear_exchange_bytes(job(), ranks, rank));
    return most;
  }
  void check_world(int ranks) const override { check_linear_job(job(), ranks); }
  double flops() const override {
    return 2.0 * static_cast<double>(input_.tokens()) * static_cast<double>(spec_.in_features) *
           static_cast<double>(spec_.sum_columns());
  }
  std::vector<std::pair<std::string, BenchValue>> members() const override {
    return {{"in_features", spec_.in_features},
            {"out_features", spec_.out_features},
            {"activation", std::string(activation_name(spec_.activation, spec_.gated))},
            {"parallel", std::string(parallel_name(spec_.parallel))}};
  }

  Kernel choose(const KernelRequest& request, KernelScope scope) const override {
    const LinearChoice choice = choose_kernel(spec_, request, scope);
    return {choice.row, choice.reason};
  }
  std::unique_ptr<RowKernel> make_kernel(const Kernel& kernel, Transport& world, const Options& options,
                                         const Layout&) const override {
    const KernelRequest same{std::string(kernel.entry->backend), std::string(kernel.entry->name)};
    return std::make_unique<LoadedLinear>(job(), world, same, options);
  }

  void compute_exactly(const RowReader& rows, std::int64_t token, std::int64_t, std::span<double> out,
                       std::span<double> allowed) const override {
    // Rows of a reader are fp32 and adjacent. The oracle's own rounding is then that of fp32.
    LinearSpec spec = spec_;
    spec.dtype = Dtype::kF32;
    const auto row_bytes = spec.in_features * static_cast<std::int64_t>(sizeof(float));
    const auto matrix = [&](std::int64_t first) {
      LinearMatrix part;
      part.data = rows.row(1, first, 0).data();
      part.row_stride = row_bytes;
      if (spec.bias) part.bias = rows.row(2, first, 0).data();
      return part;
    };
    const std::span<const float> x = rows.row(0, token, 0);
    const LinearOracleRow row =
        linear_oracle(spec, {matrix(0), spec.gated ? matrix(spec.out_features) : LinearMatrix{}},
                      dense_view(static_cast<const void*>(x.data()), Dtype::kF32, 1, 1, spec.in_features), 0);
    const double rounding = spec_.dtype == Dtype::kBf16 ? 0x1p-8 : spec_.dtype == Dtype::kF16 ? 0x1p-11 : 0.0;
    for (std::size_t n = 0; n < out.size(); ++n) {
      out[n] = row.y[n];
      allowed[n] = row.allowed[n] + rounding * (std::abs(row.y[n]) + row.allowed[n]) + 0x1p-24;
    }
  }

 private:
  static LinearSpec spec_of(const Settings& settings) {
    LinearSpec spec;
    parse_activation(settings.own.find("activation")->second, spec.activation, spec.gated);
    spec.parallel = static_cast<LinearParallel>(parse_choice(settings.own.find("parallel")->second, kParallel));
    return spec;
  }
  static std::vector<RowTensor> tensors_of(const OpRequest& request) {
    const LinearSpec spec = spec_of(request.settings);
    const std::int64_t in = features(request.settings, "in-features");
    const std::int64_t rows = features(request.settings, "out-features") * (spec.gated ? 2 : 1);
    const bool shared = spec.parallel != LinearParallel::kNone;
    std::vector<RowTensor> tensors{{.name = "x", .dim = in, .whole = shared, .flat = true},
                                   {.name = "weight", .dim = in, .whole = true, .tokens = rows, .flat = true}};
    if (request.from_file()) {
      tensors.push_back({.name = "bias", .whole = true, .tokens = rows, .flat = true, .optional = true});
    }
    return tensors;
  }

  LinearJob job() const { return {spec_, input_.tokens(), LinearOutput::kTokens}; }

  LinearSpec spec_;
  RowInput input_;
};

}  // namespace

bool holds_linear(const SafetensorsFile& file, const InputNames& names) {
  const std::string x = name_in(names, "x");
  const std::string weight = name_in(names, "weight");
  if (!file.contains(x) || !file.contains(weight) || file.contains(name_in(names, "dt"))) return false;
  const std::vector<std::int64_t> row = file.tensor(x).info->shape;
  const std::vector<std::int64_t> matrix = file.tensor(weight).info->shape;
  if (matrix.size() != 2 || row.empty()) return false;
  return matrix[0] != row.back() || matrix[1] > kMaxConv1dWidth;  // else the filters of causal_conv1d
}

extern const OpEntry kLinearOp;
const OpEntry kLinearOp{
    .name = "linear",
    .help = "a linear layer with its activation: y = activation(x W^T + b)",
    .file = "a file with x and weight",
    .tensors = kTensors,
    .tensor_notes = kNotes,
    .own_settings = kOwn,
    .recognizes = [](const TensorFile& opened) { return holds_linear(opened.file, opened.request.names); },
    .make = [](const OpRequest& request) { return make_row_job(std::make_unique<LinearOp>(request)); }};

}  // namespace ringattn
