// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/loaded_linear.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "ops/common/non_finite.hpp"
#include "ops/common/staging.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kDeviceBlockBytes = std::int64_t{32} << 20;  // host memory for staging a device's weights

// Writes rows [begin, end) of some bytes each to host memory.
using FillRows = std::function<void(FeatureRange rows, std::byte* target)>;
void load_rows(Backend& backend, const Timeouts& timeouts, std::int64_t rows, std::int64_t row_bytes,
               const FillRows& fill, Buffer& target) {
  if (rows * row_bytes == 0) return;
  target = backend.allocate(static_cast<std::size_t>(rows * row_bytes));
  if (backend.memory() == MemoryKind::kHost) return fill({0, rows}, target.data());
  const std::int64_t at_once = std::clamp<std::int64_t>(kDeviceBlockBytes / row_bytes, 1, rows);
  std::vector<std::byte> block(static_cast<std::size_t>(at_once * row_bytes));
  for (std::int64_t begin = 0; begin < rows; begin += at_once) {
    const FeatureRange piece{begin, std::min(rows, begin + at_once)};
    fill(piece, block.data());
    backend.copy_rows(target.data() + begin * row_bytes, row_bytes, block.data(), row_bytes, row_bytes, piece.size(),
                      backend.stream());
    await(backend, timeouts);  // the block is used again
  }
}

FeatureRange shifted(FeatureRange range, std::int64_t by) { return {range.begin + by, range.end + by}; }

}  // namespace

LoadedWeights::LoadedWeights(Backend& backend, const Timeouts& timeouts, const LinearInput& input,
                             const LinearSpec& spec, FeatureRange rows, FeatureRange features) {
  weights_.matrix = load(backend, timeouts, input, spec, 0, rows, features, memory_[0]);
  if (spec.gated) weights_.up = load(backend, timeouts, input, spec, 1, rows, features, memory_[1]);
}

LinearMatrix LoadedWeights::load(Backend& backend, const Timeouts& timeouts, const LinearInput& input,
                                 const LinearSpec& spec, int matrix, FeatureRange rows, FeatureRange features,
                                 Memory& memory) {
  const bool stacked = matrix > 0 && input.matrices.size() == 1;
  const LinearInput::Matrix& from = input.matrices[stacked ? 0 : static_cast<std::size_t>(matrix)];
  const WeightSource& weight = *from.weight;
  rows = shifted(rows, stacked ? spec.out_features : 0);  // rows of the tensor
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  LinearMatrix made;
  made.row_stride = weight_row_bytes(spec.weights, spec.dtype, features.size());
  made.group_stride = row_scales(spec.weights, features.size());
  load_rows(
      backend, timeouts, rows.size(), made.row_stride,
      [&](FeatureRange piece, std::byte* target) {
        weight.read(shifted(piece, rows.begin), features, target);
        if (spec.weights != WeightFormat::kFloat) return;
        non_finite_ += count_non_finite(
            dense_view(static_cast<const void*>(target), spec.dtype, piece.size(), 1, features.size()));
      },
      memory.data);
  made.data = memory.data.data();
  const std::int64_t scales = rows.size() * made.group_stride;
  std::vector<float> scale_values(static_cast<std::size_t>(scales));
  std::vector<std::uint8_t> zero_values(weight.has_zeros() ? scale_values.size() : 0);
  weight.read_scales(rows, features, scale_values.data(), zero_values.data());
  if (scales > 0) {
    memory.scales = upload(backend, std::span<const float>(scale_values));
    made.scales = reinterpret_cast<const float*>(memory.scales.data());
  }
  if (!zero_values.empty()) {
    memory.zeros = upload(backend, std::span<const std::uint8_t>(zero_values));
    made.zeros = reinterpret_cast<const std::uint8_t*>(memory.zeros.data());
  }
  if (from.bias) {
    load_rows(
        backend, timeouts, rows.size(), element,
        [&](FeatureRange piece, std::byte* target) {
          from.bias->shard->read(*from.bias->info, (rows.begin + piece.begin) * element,
                                 {target, static_cast<std::size_t>(piece.size() * element)});
          non_finite_ += count_non_finite(dense_view(static_cast<const void*>(target), spec.dtype, piece.size(), 1, 1));
        },
        memory.bias);
    made.bias = memory.bias.data();
  }
  await(backend, timeouts);  // until scales and zeros have been copied
  return made;
}

void LoadedLinear::load(const RowInput& input, const Layout& layout, int rank, int threads) {
  const LinearSpec& spec = layer_.job().spec;
  const bool shared = spec.parallel != LinearParallel::kNone;
  tokens_ = shared ? input.tokens() : layout.tokens(rank);
  const std::vector<PackedRun> runs =
      shared ? std::vector<PackedRun>{{0, input.tokens()}} : packed_runs(layout.runs(rank), layout.cu());
  Staging(backend(), timeouts_)
      .load(
          runs, make_rows(backend(), input.dtype(), total_tokens(runs), 1, spec.in_features, x_),
          [&](std::span<const PackedRun> piece, const MutableTensorView& into) { input.read(0, piece, into, threads); },
          [](std::int64_t) {});
  out_ = backend().allocate(bytes(layout.tokens(rank) * spec.out_features));
  weights_.emplace(backend(), timeouts_, input_, spec, layer_.columns(), layer_.features());
  layer_.load(weights_->weights(), backend().stream());
}

double LoadedLinear::run() {
  const LinearSpec& spec = layer_.job().spec;
  const FeatureRange in = layer_.features();
  const std::int64_t rows = spec.parallel == LinearParallel::kNone ? tokens_ : layer_.tokens_of_rank(tokens_).size();
  const auto begin = std::chrono::steady_clock::now();
  layer_.run({x_.data() + bytes(in.begin), spec.dtype, tokens_, 1, in.size(), spec.in_features, in.size()},
             dense_view(static_cast<void*>(out_.data()), spec.dtype, rows, 1, spec.out_features), backend().stream());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void LoadedLinear::fetch(std::span<std::byte> out) {
  Staging(backend(), timeouts_).store(out_.data(), out.data(), out.size());
}

}  // namespace ringattn
