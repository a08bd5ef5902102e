// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "base/error.hpp"

namespace ringattn {

namespace {

struct ActivationRow {
  std::string_view name;
  LinearActivation activation;
  bool gated;
};
constexpr ActivationRow kActivations[] = {
    {"none", LinearActivation::kNone, false},          {"gelu", LinearActivation::kGelu, false},
    {"gelu_tanh", LinearActivation::kGeluTanh, false}, {"silu", LinearActivation::kSilu, false},
    {"swiglu", LinearActivation::kSilu, true},         {"geglu", LinearActivation::kGelu, true},
    {"geglu_tanh", LinearActivation::kGeluTanh, true},
};

[[noreturn]] void refuse(const LinearSpec& spec, const std::string& what) {
  fail(ErrorCode::kInternal, what, fmt::format("the kernel was made for {}", describe(spec)));
}

std::string text_of(const TensorView& view) {
  return fmt::format("{} [{}, {}, {}]", dtype_name(view.dtype), view.tokens, view.heads, view.dim);
}

void check_view(const LinearSpec& spec, std::string_view name, const TensorView& view, std::int64_t rows,
                std::int64_t dim) {
  if (view.dtype == spec.dtype && view.tokens == rows && view.heads == 1 && view.dim == dim) return;
  refuse(spec, fmt::format("{} of a linear layer is {}, not {} [{}, 1, {}]", name, text_of(view),
                           dtype_name(spec.dtype), rows, dim));
}

void check_matrix(const LinearSpec& spec, const LinearMatrix& matrix, bool reads_data) {
  const bool scales = spec.weights == WeightFormat::kInt8 || (spec.weights == WeightFormat::kInt4 && reads_data);
  if ((reads_data && matrix.data == nullptr) || (scales && matrix.scales == nullptr) ||
      spec.bias != (matrix.bias != nullptr)) {
    refuse(spec, "a matrix of a linear layer lacks its values, scales or bias, or has a bias too many");
  }
}

void check_weights(const LinearSpec& spec, const LinearWeights& weights, bool reads_data) {
  check_matrix(spec, weights.matrix, reads_data);
  if (spec.gated) check_matrix(spec, weights.up, reads_data);
}

void check_absmax(const LinearSpec& spec, const LinearAbsmax& absmax) {
  if ((spec.weights == WeightFormat::kInt8) == (absmax.values != nullptr)) return;
  refuse(spec, "row maxima of a linear layer are given, or missing");
}

}  // namespace

std::vector<int> aligned_nodes(LeafRange leaves) {
  std::vector<int> low, high;
  for (int begin = leaves.begin + kLinearLeaves, end = leaves.end + kLinearLeaves; begin < end; begin /= 2, end /= 2) {
    if (begin % 2 == 1) low.push_back(begin++);
    if (end % 2 == 1) high.push_back(--end);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

void check_linear_task(const LinearSpec& spec, const LinearTask& task) {
  check_view(spec, "x", task.x, task.x.tokens, spec.in_features);
  check_view(spec, "y", task.y, task.x.tokens, spec.out_features);
  check_weights(spec, task.weights.weights, true);
}

void check_linear_task(const LinearSpec& spec, const LinearPartialTask& task) {
  if (spec.parallel != LinearParallel::kRow) refuse(spec, "leaves of a layer that is not row-parallel");
  check_view(spec, "x", task.x, task.x.tokens, features_of(spec, task.leaves));
  if (features_of(spec, task.leaves) > 0) check_weights(spec, task.weights.weights, true);
  check_absmax(spec, task.absmax);
}

void check_linear_task(const LinearSpec& spec, const LinearFinishTask& task) {
  check_view(spec, "y", task.y, task.y.tokens, spec.out_features);
  check_weights(spec, task.weights, false);
  check_absmax(spec, task.absmax);
  int leaf = 0;
  for (const LinearPartial& partial : task.partials) {
    if (partial.leaves.begin != leaf || partial.leaves.end < leaf) {
      refuse(spec, fmt::format("sums of leaves {} to {} where leaf {} is next", partial.leaves.begin,
                               partial.leaves.end, leaf));
    }
    leaf = partial.leaves.end;
  }
  if (leaf != kLinearLeaves) refuse(spec, fmt::format("sums of only {} leaves", leaf));
}

void check_linear_task(const LinearSpec& spec, const LinearGradientTask& task) {
  check_view(spec, "dy", task.dy, task.dy.tokens, spec.out_features);
  check_view(spec, "z", task.z, task.dy.tokens, spec.sum_columns());
  check_view(spec, "dz", task.dz, task.dy.tokens, spec.sum_columns());
}

void LinearKernel::add_nodes(const LinearSumTask&, Stream, const Progress&) {
  fail(ErrorCode::kUnsupported, "the sum of gradients", "the kernel has quantized weights, which have none",
       "Use a kernel of floating-point weights.");
}

void LinearKernel::activation_gradient(const LinearGradientTask&, Stream, const Progress&) {
  fail(ErrorCode::kUnsupported, "the gradient of an activation", "the kernel has quantized weights, which have none",
       "Use a kernel of floating-point weights.");
}

std::string_view activation_name(LinearActivation activation, bool gated) {
  for (const ActivationRow& row : kActivations) {
    if (row.activation == activation && row.gated == gated) return row.name;
  }
  return {};
}

bool parse_activation(std::string_view name, LinearActivation& activation, bool& gated) {
  const auto* const row = std::ranges::find(kActivations, name, &ActivationRow::name);
  if (row == std::end(kActivations)) return false;
  activation = row->activation;
  gated = row->gated;
  return true;
}

std::span<const std::string_view> activation_names() {
  static const auto names = [] {
    std::array<std::string_view, std::size(kActivations)> all;
    std::ranges::transform(kActivations, all.begin(), &ActivationRow::name);
    return all;
  }();
  return names;
}

std::string_view parallel_name(LinearParallel parallel) {
  constexpr std::string_view kNames[] = {"none", "column", "row"};
  return kNames[static_cast<std::size_t>(parallel)];
}

std::string_view format_name(WeightFormat format) {
  constexpr std::string_view kNames[] = {"float", "int8", "int4"};
  return kNames[static_cast<std::size_t>(format)];
}

std::string describe(const LinearSpec& spec) {
  std::string text = fmt::format("{}, {} to {} features", dtype_name(spec.dtype), spec.in_features, spec.out_features);
  if (spec.activation != LinearActivation::kNone || spec.gated) {
    text += fmt::format(", {}", activation_name(spec.activation, spec.gated));
  }
  if (spec.bias) text += ", bias";
  if (spec.parallel != LinearParallel::kNone) text += fmt::format(", {}-parallel", parallel_name(spec.parallel));
  if (spec.weights != WeightFormat::kFloat) text += fmt::format(", {}", format_name(spec.weights));
  return text;
}

std::vector<std::string> missing_in_linear(const LinearSpec& spec) {
  std::vector<std::string> missing;
  if (spec.gated && spec.activation == LinearActivation::kNone) missing.emplace_back("a gate without an activation");
  if (spec.weights == WeightFormat::kInt4 && spec.in_features % kInt4Group != 0) {
    missing.push_back(
        fmt::format("int4 with {} input features (supported: multiples of {})", spec.in_features, kInt4Group));
  }
  if (spec.weights == WeightFormat::kInt8 && spec.in_features > kMaxInt8K) {
    missing.push_back(fmt::format("int8 with {} input features (supported: up to {}, whose sums fit into 32 bits)",
                                  spec.in_features, kMaxInt8K));
  }
  return missing;
}

}  // namespace ringattn
