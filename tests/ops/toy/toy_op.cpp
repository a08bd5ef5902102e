// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/toy/toy_op.hpp"

#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "base/error.hpp"
#include "ops/common/values.hpp"
#include "ops/jobs/row_op.hpp"

namespace ringattn::testing {

namespace {

constexpr OpTensor kTensors[] = {
    {"left", "[tokens, heads, head_dim]"}, {"right", "[tokens, heads, head_dim]"}, {"gate", "[tokens, heads, 1]"}};
constexpr std::string_view kSettings[] = {"head-dim"};
constexpr SettingRow kOwn[] = {{.name = "temperature",
                                .value = "X",
                                .fallback = "1",
                                .help = "factor of left",
                                .check = [](std::string_view text) { parse_real(text, 0.0, 100.0); }}};

class Toy final : public RowOp {
 public:
  explicit Toy(const OpRequest& request)
      : input_(request, {{"left", request.settings.heads, request.settings.head_dim},
                         {"right", request.settings.heads, request.settings.head_dim},
                         {"gate", request.settings.heads, 1}}),
        temperature_(static_cast<float>(parse_real(request.settings.own.at("temperature")))) {
    const RowTensor& left = input_.tensors()[0];
    for (const RowTensor& other : input_.tensors()) {
      if (other.heads == left.heads && other.dim == (other.name == "gate" ? 1 : left.dim)) continue;
      fail(ErrorCode::kFile, fmt::format("{} has {} heads of {}", other.name, other.heads, other.dim),
           fmt::format("left has {} of {}", left.heads, left.dim), "Give tensors of one layer.");
    }
  }

  std::string_view name() const override { return "toy"; }
  std::string describe() const override {
    return fmt::format("{}, heads {}, head_dim {}, temperature {}", dtype_name(input_.dtype()), heads(), dim(),
                       temperature_);
  }
  const RowInput& input() const override { return input_; }
  std::int64_t heads() const override { return input_.tensors()[0].heads; }
  std::int64_t dim() const override { return input_.tensors()[0].dim; }
  double flops() const override { return 3.0 * static_cast<double>(input_.tokens() * heads() * dim()); }
  std::vector<std::pair<std::string, BenchValue>> members() const override {
    return {{"heads", heads()}, {"head_dim", dim()}, {"temperature", fmt::format("{}", temperature_)}};
  }

  void compute(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<float> out) const override {
    const std::span<const float> left = rows.row(0, token, head);
    const std::span<const float> right = rows.row(1, token, head);
    const float gate = rows.row(2, token, head)[0];
    for (std::size_t d = 0; d < out.size(); ++d) out[d] = temperature_ * left[d] + gate * right[d];
  }
  void compute_exactly(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<double> out,
                       std::span<double> allowed) const override {
    const double gate = rows.row(2, token, head)[0];
    for (std::size_t d = 0; d < out.size(); ++d) {
      const double left = double{temperature_} * rows.row(0, token, head)[d];
      const double right = gate * rows.row(1, token, head)[d];
      out[d] = left + right;
      allowed[d] = 0x1p-23 * (std::abs(left) + std::abs(right));
    }
  }

 private:
  RowInput input_;
  float temperature_;
};

}  // namespace

const OpEntry kToyOp{.name = "toy",
                     .help = "an op of tests",
                     .file = "a file with left and right",
                     .tensors = kTensors,
                     .settings = kSettings,
                     .own_settings = kOwn,
                     .recognizes = [](const TensorFile& file) { return has_tensors(file, kTensors); },
                     .make = [](const OpRequest& request) { return make_row_job(std::make_unique<Toy>(request)); }};

}  // namespace ringattn::testing
