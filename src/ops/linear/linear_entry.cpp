// SPDX-License-Identifier: Apache-2.0
// The row of linear layers in the table of ops.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/ring/reshard.hpp"
#include "base/error.hpp"
#include "base/quotes.hpp"
#include "io/layer_tensors.hpp"
#include "kernels/linear/linear_oracle.hpp"
#include "ops/common/op_plan.hpp"
#include "ops/common/values.hpp"
#include "ops/jobs/row_op.hpp"
#include "ops/linear/linear.hpp"
#include "ops/linear/linear_input.hpp"
#include "ops/linear/loaded_linear.hpp"
#include "ops/linear/synthetic_weights.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"x", "[tokens, in_features]"},
                                 {"weight", "[out_features, in_features], gated [2 * out_features, in_features]"},
                                 {"up", "[out_features, in_features], if weight is the gate alone", true},
                                 {"bias", "[out_features]", true}};
constexpr std::string_view kLayerTensors[] = {"weight", "up", "bias"};
constexpr std::string_view kNotes[] = {
    "a gated layer's weight and bias have the rows of the gate first",
    "weight may also be a layer's name, such as model.layers.0.mlp.down_proj, with tensors of compressed-tensors, GPTQ",
    "or AWQ; without a name it is the tensors without a prefix, or the only layer in the file"};
constexpr std::int64_t kMostFeatures = std::int64_t{1} << 24;
constexpr double kHostSeconds = 60.0;  // host code waits for nothing

constexpr std::string_view kWeights[] = {"float", "int8", "int4"};

constexpr std::string_view kModelIsInput = "input";

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
    {.name = "weights",
     .kind = SettingKind::kText,
     .value = "FORMAT",
     .fallback = "float",
     .help = "float, int8 (W8A8), or int4 (W4A16, groups of 128): of synthetic input",
     .check = [](std::string_view text) { parse_choice(text, kWeights); }},
    {.name = "model",
     .kind = SettingKind::kText,
     .value = "FILE|DIR",
     .fallback = kModelIsInput,
     .help = "model that has the layer whose name `tensors` gives for weight: a folder, as quantize writes it, an "
             "*.index.json or a safetensors file; input: the file of x has it",
     .check = [](std::string_view text) { parse_text(text, "the name of a file or folder"); }},
    {.name = "quantization-config",
     .kind = SettingKind::kText,
     .value = "FILE",
     .fallback = "auto",
     .help = "config.json with the quantization_config of the layer; auto: the one beside its file, if there is one",
     .check = [](std::string_view text) { parse_text(text, "the name of a file"); }},
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

class LinearOp final : public RowOp {
 public:
  explicit LinearOp(const OpRequest& request)
      : spec_(spec_of(request.settings)), input_(request, tensors_of(request), kLayerTensors) {
    spec_.dtype = input_.dtype();
    if (request.from_file()) {
      find(request);
    } else {
      make(request);
    }
    spec_.weights = layer_.matrices.front().weight->format();
    spec_.bias = layer_.matrices.front().bias.has_value();
  }

  std::string_view name() const override { return "linear"; }
  std::string describe() const override {
    const std::string text = ringattn::describe(spec_);
    return layer_.format.empty() ? text : fmt::format("{} ({})", text, layer_.format);
  }
  const RowInput& input() const override { return input_; }
  std::int64_t heads() const override { return 1; }
  std::int64_t dim() const override { return spec_.out_features; }
  Dtype out_dtype() const override { return spec_.dtype; }
  std::string_view out_name() const override { return "y"; }
  std::size_t kernel_bytes(const Kernel& kernel, Backend& backend, int ranks) const override {
    const LinearChoice choice{static_cast<const KernelRow<LinearSpec>*>(kernel.entry), kernel.reason};
    const int different = spec_.parallel == LinearParallel::kNone ? 1 : ranks;
    std::size_t most = 0;
    for (int rank = 0; rank < different; ++rank) {
      most = std::max(most, linear_rank_bytes(job(ranks), choice, backend, ranks, rank));
    }
    return most;
  }
  std::int64_t other_bytes() const override {
    std::int64_t bytes = 0;
    for (const LinearInput::Matrix& matrix : layer_.matrices) {
      const WeightSource& weight = *matrix.weight;
      const std::int64_t scales = row_scales(weight.format(), spec_.in_features);
      bytes += weight.out_features() * (weight_row_bytes(weight.format(), spec_.dtype, spec_.in_features) +
                                        scales * (weight.has_zeros() ? 5 : 4));
    }
    return bytes;
  }
  void check_world(int ranks) const override { check_linear_job(job(ranks), ranks); }
  double flops() const override {
    return 2.0 * static_cast<double>(input_.tokens()) * static_cast<double>(spec_.in_features) *
           static_cast<double>(spec_.sum_columns());
  }
  // Only for CPU kernels, where a rank computes while it reads the weights. With few rows, a GPU's time is limited by
  // its memory rate, which the machine model does not have.
  std::optional<double> seconds(const PlanRequest& request, const Kernel& kernel, const Backend& backend,
                                int world) const override {
    if (kernel.entry->backend != "cpu") return std::nullopt;
    const auto& row = static_cast<const KernelRow<LinearSpec>&>(*kernel.entry);
    const bool shared = spec_.parallel != LinearParallel::kNone;
    const std::int64_t tokens = shared ? input_.tokens() : (input_.tokens() + world - 1) / world;
    HostWork work = row.host_work(spec_, backend, tokens);
    const double part = flops() / world / work.flops;
    for (WorkPhase& phase : work.phases) {
      phase.vector_seconds *= part;
      phase.amx_seconds *= part;
      phase.bytes = static_cast<double>(other_bytes()) / (shared ? world : 1);
    }
    return host_seconds(work, host_rates(request.options.machine, work.threads));
  }
  std::vector<std::pair<std::string, BenchValue>> members() const override {
    return {{"in_features", spec_.in_features},
            {"out_features", spec_.out_features},
            {"weights", std::string(format_name(spec_.weights))},
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
    return std::make_unique<LoadedLinear>(job(world.size()), layer_, world, same, options);
  }

  void compute_exactly(const RowReader& rows, std::int64_t token, std::int64_t, std::span<double> out,
                       std::span<double> allowed) const override {
    if (!whole_) {
      host_ = cpu::make_cpu_backend({1, kNoDevice});
      whole_ = std::make_unique<const LoadedWeights>(*host_, Timeouts(kHostSeconds), layer_, spec_,
                                                     FeatureRange{0, spec_.out_features},
                                                     FeatureRange{0, spec_.in_features});
    }
    // The reader's rows are fp32, which is exact.
    const std::span<const float> x = rows.row(0, token, 0);
    const LinearOracleRow row =
        linear_oracle(spec_, whole_->weights(),
                      dense_view(static_cast<const void*>(x.data()), Dtype::kF32, 1, 1, spec_.in_features), 0);
    std::ranges::copy(row.y, out.begin());
    std::ranges::copy(row.allowed, allowed.begin());
  }

 private:
  static LinearSpec spec_of(const Settings& settings) {
    LinearSpec spec;
    parse_activation(settings.own.find("activation")->second, spec.activation, spec.gated);
    spec.parallel = static_cast<LinearParallel>(parse_choice(settings.own.find("parallel")->second, kParallel));
    return spec;
  }
  static std::vector<RowTensor> tensors_of(const OpRequest& request) {
    const bool shared = spec_of(request.settings).parallel != LinearParallel::kNone;
    return {{.name = "x", .dim = features(request.settings, "in-features"), .whole = shared, .flat = true}};
  }

  void find(const OpRequest& request) {
    for (const std::string_view name : {"in-features", "out-features", "weights"}) {
      if (!request.sources.chosen(name)) continue;
      std::string in_library(name);
      std::ranges::replace(in_library, '-', '_');
      fail(ErrorCode::kUsage, {setting(in_library), " contradicts ", setting("input")}, "the file's tensors give it",
           {"Leave it out, or use ", setting("synthetic"), "."});
    }
    const TensorFile& opened = *input_.file();
    const InputNames& names = opened.request.names;
    const std::string& model = request.settings.own.find("model")->second;
    if (model != kModelIsInput) model_ = std::make_unique<const SafetensorsFile>(weights_file(model));
    const std::string weight = name_in(names, "weight");
    if (!model_ && !opened.file.contains(weight) && layer_names(opened.file).empty()) {
      fail(ErrorCode::kFile, fmt::format("{} has no layer {}", opened.request.path, in_quotes(weight)),
           "it has x and no weights", {"Name the model that has the layer with ", setting("model", "DIR"), "."});
    }
    layer_ = find_linear(model_ ? *model_ : opened.file, opened.file.tensor(name_in(names, "x")), names, spec_.gated,
                         request.settings.own.find("quantization-config")->second);
    input_.add_sources(layer_.sources);
    const std::int64_t x_features = input_.tensors()[0].dim;
    const std::int64_t rows = layer_.out_features();
    const std::int64_t weight_features = layer_.matrices.front().weight->in_features();
    const std::int64_t matrices = spec_.gated ? 2 : 1;
    if (weight_features != x_features || rows % matrices != 0) {
      fail(ErrorCode::kFile, fmt::format("weight is [{}, {}]", rows, weight_features),
           fmt::format("x has {} features, and the layer {}", x_features,
                       spec_.gated ? "is gated: it has two rows for each feature of y" : "has no gate"),
           "Give weight as PyTorch stores it, [out_features, in_features], gate first.");
    }
    spec_.in_features = x_features;
    spec_.out_features = rows / matrices;
  }

  void make(const OpRequest& request) {
    if (request.settings.own.find("model")->second != kModelIsInput) {
      fail(ErrorCode::kUsage, {setting("model"), " needs ", setting("input")}, "x is read from it",
           {"Add it, or use ", setting("weights"), " for synthetic weights."});
    }
    constexpr WeightFormat kFormats[] = {WeightFormat::kFloat, WeightFormat::kInt8, WeightFormat::kInt4};
    const WeightFormat format = kFormats[parse_choice(request.settings.own.find("weights")->second, kWeights)];
    spec_.in_features = input_.tensors()[0].dim;
    spec_.out_features = features(request.settings, "out-features");
    if (format == WeightFormat::kInt4 && spec_.in_features % kInt4Group != 0) {
      fail(ErrorCode::kUsage, setting("in_features", spec_.in_features),
           fmt::format("int4 weights have groups of {} features", kInt4Group),
           {"Use a multiple of it, or other ", setting("weights"), "."});
    }
    layer_.matrices.push_back({std::make_unique<SyntheticWeights>(request.settings.synthetic.value_or(0), format,
                                                                  spec_.dtype, spec_.sum_columns(), spec_.in_features),
                               std::nullopt});
  }

  // Ranks that don't share the layer have some of the tokens each.
  LinearJob job(int ranks) const {
    std::int64_t tokens = input_.tokens();
    if (spec_.parallel == LinearParallel::kNone) {
      const Layout layout = even_layout(input_.lengths(), ranks);
      tokens = 1;
      for (int rank = 0; rank < ranks; ++rank) tokens = std::max(tokens, layout.tokens(rank));
    }
    return {spec_, tokens, LinearOutput::kTokens};
  }

  LinearSpec spec_;
  RowInput input_;
  std::unique_ptr<const SafetensorsFile> model_;  // the layer's file; null: the input has it
  LinearInput layer_;
  // The whole layer in host memory, only for the oracle. It is read when the first row is requested.
  mutable std::unique_ptr<Backend> host_;
  mutable std::unique_ptr<const LoadedWeights> whole_;
};

}  // namespace

extern const OpEntry kLinearOp;
const OpEntry kLinearOp{
    .name = "linear",
    .help = "a linear layer with its activation: y = activation(x W^T + b)",
    .file = "a file with x and weight",
    .tensors = kTensors,
    .tensor_notes = kNotes,
    .own_settings = kOwn,
    .recognizes = [](const TensorFile& opened) { return holds_linear(opened.file, opened.request.names); },
    .accepts_if_named = [](const TensorFile& opened) { return holds_square_linear(opened.file, opened.request.names); },
    .make = [](const OpRequest& request) { return make_row_job(std::make_unique<LinearOp>(request)); }};

}  // namespace ringattn
