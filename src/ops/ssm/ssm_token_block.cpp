// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_token_block.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/rope/rope_oracle.hpp"

namespace ringattn {

namespace {

constexpr double kConv1dTolerance = 1e-6;  // allowed fp32 error of a convolution's terms

}  // namespace

double rounding_of(Dtype dtype) { return dtype == Dtype::kBf16 ? 0x1p-8 : dtype == Dtype::kF16 ? 0x1p-11 : 0x1p-24; }

double rounding_error(Dtype dtype, double value) {
  return std::max(rounding_of(dtype) * std::abs(value), dtype == Dtype::kF16 ? 0x1p-25 : 0.0);
}

SsmTokenBlock::SsmTokenBlock(const SsmInput& input, std::int32_t sequence, PackedRun tokens, std::span<const int> heads,
                             int threads)
    : job_(input.job()), first_(tokens.begin), conv_weight_(input.conv_weight()), conv_bias_(input.conv_bias()) {
  const auto s = static_cast<std::size_t>(sequence);
  const std::vector<SsmTensorKind> convolved = input.convolved();
  if (!convolved.empty()) {
    before_ = std::min<std::int64_t>(job_.convolution->halo_tokens(), tokens.begin - input.origins()[s]);
    std::int64_t channel = 0;
    for (const SsmTensorKind which : convolved) {
      channels_[static_cast<std::size_t>(which)] = channel;
      const SsmInput::RowShape shape = input.row_shape(which);
      channel += shape.heads * shape.dim;
    }
    halo_ = allocate_host(static_cast<std::size_t>(job_.convolution->halo_bytes()));
    input.read_halos({&sequence, 1}, {halo_.data(), halo_.bytes()});
  }
  const auto read = [&](SsmTensorKind which) {
    const SsmInput::RowShape shape = input.row_shape(which);
    const Dtype dtype = input.row_dtype(which);
    const std::int64_t before = channels_[static_cast<std::size_t>(which)] < 0 ? 0 : before_;
    const PackedRun runs[] = {{tokens.begin - before, tokens.end}};
    buffers_.push_back(
        allocate_host(static_cast<std::size_t>(total_tokens(runs) * shape.heads * shape.dim) * size_of(dtype)));
    const MutableTensorView rows =
        dense_view(static_cast<void*>(buffers_.back().data()), dtype, total_tokens(runs), shape.heads, shape.dim);
    input.read(which, runs, rows, threads);
    views_[static_cast<std::size_t>(which)] = rows;
  };
  read(SsmTensorKind::kX);
  if (job_.conv1d_only) return;
  if (dt_rows(job_.spec).dim > 0) read(SsmTensorKind::kDt);
  for (const SsmTensorKind which : {SsmTensorKind::kB, SsmTensorKind::kC}) {
    read(which);
    if (job_.rope) rotate(which, input.position_of(s) + tokens.begin - input.origins()[s], heads);
  }
  if (job_.spec.gate) read(SsmTensorKind::kZ);
}

void SsmTokenBlock::rotate(SsmTensorKind which, std::int64_t first_position, std::span<const int> heads) {
  const TensorView& view = views_[static_cast<std::size_t>(which)];
  std::vector<Rounded>& rotated = rotated_[static_cast<std::size_t>(which)];
  rotated.resize(static_cast<std::size_t>(view.tokens * view.heads * view.dim));
  const auto dims = static_cast<std::size_t>(view.dim);
  std::vector<float> row(dims);
  std::vector<double> y(dims), allowed(dims);
  for (std::int64_t token = 0; token < view.tokens; ++token) {
    const std::int64_t position[] = {first_position + token};
    for (const int head : heads) {
      for (std::size_t i = 0; i < dims; ++i) {
        row[i] = load_element(view.at(token, head) + i * size_of(view.dtype), view.dtype);
      }
      rope_oracle(*job_.rope, position, false, row, y, allowed);
      Rounded* const to = rotated.data() + static_cast<std::size_t>((token * view.heads + head) * view.dim);
      for (std::size_t i = 0; i < dims; ++i) to[i] = {y[i], allowed[i]};
    }
  }
}

double SsmTokenBlock::at(SsmTensorKind which, std::int64_t token, int head, std::int64_t dim) const {
  const TensorView& view = views_[static_cast<std::size_t>(which)];
  const std::int64_t before = channels_[static_cast<std::size_t>(which)] < 0 ? 0 : before_;
  return static_cast<double>(load_element(
      view.at(token - first_ + before, head) + dim * static_cast<std::int64_t>(size_of(view.dtype)), view.dtype));
}

Rounded SsmTokenBlock::taken(SsmTensorKind which, std::int64_t token, int head, std::int64_t dim) const {
  const std::int64_t first = channels_[static_cast<std::size_t>(which)];
  if (const std::vector<Rounded>& rotated = rotated_[static_cast<std::size_t>(which)]; !rotated.empty()) {
    const TensorView& view = views_[static_cast<std::size_t>(which)];
    return rotated[static_cast<std::size_t>(((token - first_) * view.heads + head) * view.dim + dim)];
  }
  if (first < 0) return {at(which, token, head, dim), 0.0};
  const CausalConv1dSpec& spec = *job_.convolution;
  const std::int64_t channel = first + head * views_[static_cast<std::size_t>(which)].dim + dim;
  double sum = spec.bias ? static_cast<double>(conv_bias_[static_cast<std::size_t>(channel)]) : 0.0;
  double magnitude = std::abs(sum);
  for (int k = 0; k < spec.width; ++k) {
    const std::int64_t from = token - spec.halo_tokens() + k;
    const std::int64_t missing = first_ - before_ - from;  // tokens before the ones that were read
    const double value = missing <= 0 ? at(which, from, head, dim) : in_halo(spec.halo_tokens() - missing, channel);
    const double term = value * static_cast<double>(conv_weight_[static_cast<std::size_t>(channel * spec.width + k)]);
    sum += term;
    magnitude += std::abs(term);
  }
  const double y = spec.silu ? sum / (1.0 + std::exp(-sum)) : sum;
  // For a job of conv1d only, the rounding of y is allowed where y is compared.
  const double rounding = job_.conv1d_only ? 0.0 : rounding_error(spec.dtype, y);
  return {y, rounding + kConv1dTolerance * magnitude};
}

double SsmTokenBlock::in_halo(std::int64_t token, std::int64_t channel) const {
  const Dtype dtype = job_.spec.dtype;
  const auto at = static_cast<std::size_t>(token * job_.convolution->channels + channel) * size_of(dtype);
  return static_cast<double>(load_element(halo_.data() + at, dtype));
}

}  // namespace ringattn
