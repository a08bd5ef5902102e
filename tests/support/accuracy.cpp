// SPDX-License-Identifier: Apache-2.0
#include "tests/support/accuracy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/attention/oracle.hpp"
#include "kernels/attention/oracle_math.hpp"
#include "kernels/common/registry.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {

namespace {

float round_to(Dtype dtype, float value) {
  std::byte bytes[sizeof(float)];
  store_element(bytes, dtype, value);
  return load_element(bytes, dtype);
}

std::vector<float> floats(const TensorView& view, std::int64_t token, std::int64_t head) {
  std::vector<float> row(static_cast<std::size_t>(view.dim));
  widen_row(view, token, head, row.data());
  return row;
}

bool sees(const Mask& mask, std::int64_t position, std::int64_t key) {
  return (mask.left < 0 || key >= position - mask.left) && (mask.right < 0 || key <= position + mask.right);
}

// One sequence and kv head, appended row by row where the caller says.
void same_precision_head(const AttentionInputs& inputs, std::size_t sequence, int head, Numbers& numbers) {
  const AttentionSpec& spec = inputs.spec;
  const SequenceShape& shape = inputs.sequences[sequence];
  const int kv_head = head / (spec.heads / spec.kv_heads);
  const auto keys = static_cast<std::size_t>(shape.k_len);
  const auto dims = static_cast<std::size_t>(spec.head_dim_v);
  // [head_dim, keys], so that add_scaled() computes the scores of several keys at a time, and [keys, head_dim_v].
  std::vector<float> k(static_cast<std::size_t>(spec.head_dim) * keys);
  std::vector<float> v(keys * dims);
  for (std::size_t key = 0; key < keys; ++key) {
    const std::vector<float> row = floats(inputs.k_view(sequence), static_cast<std::int64_t>(key), kv_head);
    for (std::size_t i = 0; i < row.size(); ++i) k[i * keys + key] = row[i];
    widen_row(inputs.v_view(sequence), static_cast<std::int64_t>(key), kv_head, &v[key * dims]);
  }
  std::vector<float> scores(keys);
  for (std::int64_t token = 0; token < shape.q_len; ++token) {
    const std::vector<float> q = floats(inputs.q_view(sequence), token, head);
    std::ranges::fill(scores, 0.0F);
    for (std::size_t i = 0; i < q.size(); ++i) {
      add_scaled(q[i], k.data() + i * keys, keys, scores.data());
    }
    std::vector<float> x(keys, -kInfinity);
    float m = spec.sinks ? inputs.sinks[static_cast<std::size_t>(head)] : -kInfinity;
    for (std::size_t key = 0; key < keys; ++key) {
      const auto number = static_cast<std::int64_t>(key);
      if (!sees(spec.mask, shape.q_offset + token, inputs.key_position(sequence, kv_head, number))) continue;
      if (!inputs.mask_has_key(sequence, head, shape.q_offset + token, number)) continue;
      x[key] = round_to(spec.dtype, scores[key]) * spec.softmax_scale;
      if (spec.softcap > 0.0F) x[key] = spec.softcap * std::tanh(x[key] / spec.softcap);
      m = std::max(m, x[key]);
    }
    float l = spec.sinks ? std::exp(inputs.sinks[static_cast<std::size_t>(head)] - m) : 0.0F;
    std::vector<float> o(dims, 0.0F);
    for (std::size_t key = 0; key < keys; ++key) {
      if (x[key] == -kInfinity) continue;
      const float p = std::exp(x[key] - m);
      l += p;
      const float rounded = round_to(spec.dtype, p);
      add_scaled(rounded, v.data() + key * dims, dims, o.data());
    }
    const std::int64_t row = (inputs.q_begin(sequence) + token) * spec.heads + head;
    for (std::size_t i = 0; i < dims; ++i) {
      numbers.out[static_cast<std::size_t>(row) * dims + i] =
          static_cast<double>(round_to(spec.dtype, l == 0.0F ? 0.0F : o[i] / l));
    }
    numbers.lse[static_cast<std::size_t>(row)] = static_cast<double>(m + std::log(l));
  }
}

// Whether the row's tiles hold a value that is not finite, for each element of out [tokens, heads, head_dim_v].
std::vector<bool> tainted_elements(const AttentionInputs& inputs, const TileSizes& tiles) {
  const AttentionSpec& spec = inputs.spec;
  std::vector<bool> tainted(static_cast<std::size_t>(inputs.q_tokens() * spec.heads * spec.head_dim_v), false);
  if (tiles.query == 1) return tainted;
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    const SequenceShape& shape = inputs.sequences[s];
    const Visibility visibility(spec.mask, shape.k_len);
    const auto tiles_at = [&](int kv_head, std::int64_t position) {
      if (inputs.positions == nullptr) return visibility.tiles(position, tiles);
      return PositionedVisibility(spec.mask, positions_of(inputs.positions.get(), s, kv_head))
          .tiles(position, 1, tiles);
    };
    for (std::int64_t key = 0; key < shape.k_len; ++key) {
      for (int kv_head = 0; kv_head < spec.kv_heads; ++kv_head) {
        const std::vector<float> v = floats(inputs.v_view(s), key, kv_head);
        for (std::size_t i = 0; i < v.size(); ++i) {
          if (std::isfinite(v[i])) continue;
          for (std::int64_t token = 0; token < shape.q_len; ++token) {
            const TileRange folded = tiles_at(kv_head, shape.q_offset + token);
            if (key / tiles.key < folded.begin || key / tiles.key >= folded.end) continue;
            const int group = spec.heads / spec.kv_heads;
            for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
              if (!inputs.mask_has_key(s, head, shape.q_offset + token, key)) continue;
              const std::int64_t row = (inputs.q_begin(s) + token) * spec.heads + head;
              tainted[static_cast<std::size_t>(row) * v.size() + i] = true;
            }
          }
        }
      }
    }
  }
  return tainted;
}

// "nan", "inf", "-inf", or "" for a finite value.
const char* kind(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return "";
}

}  // namespace

Numbers oracle_numbers(const AttentionInputs& inputs) {
  Numbers numbers;
  const float* sinks = inputs.spec.sinks ? inputs.sinks.data() : nullptr;
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    std::vector<double> out;
    std::vector<double> lse;
    oracle_attention(inputs.spec, inputs.q_view(s), inputs.k_view(s), inputs.v_view(s), inputs.sequences[s].q_offset,
                     sinks, out, lse, inputs.block_mask.get(), s, inputs.positions.get());
    numbers.out.insert(numbers.out.end(), out.begin(), out.end());
    numbers.lse.insert(numbers.lse.end(), lse.begin(), lse.end());
  }
  return numbers;
}

Numbers same_precision_reference(const AttentionInputs& inputs) {
  const auto rows = static_cast<std::size_t>(inputs.q_tokens() * inputs.spec.heads);
  Numbers numbers;
  numbers.out.resize(rows * static_cast<std::size_t>(inputs.spec.head_dim_v));
  numbers.lse.resize(rows);
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    for (int head = 0; head < inputs.spec.heads; ++head) same_precision_head(inputs, s, head, numbers);
  }
  return numbers;
}

double slack_of_towering_scores(Dtype dtype) {
  constexpr double kMaxOfV = 4.0;  // in random inputs
  if (dtype == Dtype::kF32) return 0.0;
  const double rounding = dtype == Dtype::kBf16 ? 0x1p-9 : 0x1p-12;
  return 2.0 * rounding * kMaxOfV;  // of the weight, and of the output
}

std::string check_accuracy(const AttentionInputs& inputs, const std::vector<std::byte>& out,
                           const std::vector<float>& lse, const TileSizes& tiles, double slack) {
  const AttentionSpec& spec = inputs.spec;
  const Numbers oracle = oracle_numbers(inputs);
  const Numbers same_precision = same_precision_reference(inputs);
  const std::vector<bool> tainted = tainted_elements(inputs, tiles);
  const auto row_size = static_cast<std::size_t>(spec.head_dim_v);
  const auto heads = static_cast<std::size_t>(spec.heads);
  const auto place = [&](std::size_t row) { return fmt::format("token {}, head {}", row / heads, row % heads); };
  if (out.size() != oracle.out.size() * size_of(spec.dtype) || lse.size() != oracle.lse.size()) {
    return fmt::format("out has {} bytes and lse {} rows", out.size(), lse.size());
  }
  if (!lse.empty()) count_check();

  double error = 0.0;
  double allowed = 0.0;
  std::size_t worst = 0;
  for (std::size_t i = 0; i < oracle.out.size(); ++i) {
    const auto value = static_cast<double>(load_element(out.data() + i * size_of(spec.dtype), spec.dtype));
    if (tainted[i]) {
      if (!std::isfinite(value)) continue;
      return fmt::format("out at {}, dim {} is {}, and its tiles hold a value that is not finite", place(i / row_size),
                         i % row_size, value);
    }
    // A value beyond the dtype's range is rounded to ∞.
    const double expected = static_cast<double>(round_to(spec.dtype, static_cast<float>(oracle.out[i])));
    if (kind(value) != kind(expected)) {
      return fmt::format("out at {}, dim {} is {}, the oracle has {}", place(i / row_size), i % row_size, value,
                         oracle.out[i]);
    }
    if (!std::isfinite(expected)) continue;
    if (std::abs(value - oracle.out[i]) > error) {
      error = std::abs(value - oracle.out[i]);
      worst = i;
    }
    const double simple = std::abs(same_precision.out[i] - oracle.out[i]);
    if (std::isfinite(simple)) allowed = std::max(allowed, simple);
  }
  allowed = 2.0 * allowed + kOutputSlack + slack;
  if (error > allowed) {
    return fmt::format("out at {}, dim {} is off by {:.3g}, allowed {:.3g} (oracle {})", place(worst / row_size),
                       worst % row_size, error, allowed, oracle.out[worst]);
  }

  for (std::size_t row = 0; row < lse.size(); ++row) {
    const auto value = static_cast<double>(lse[row]);
    const double expected = oracle.lse[row];
    if (kind(value) != kind(expected))
      return fmt::format("lse at {} is {}, the oracle has {}", place(row), value, expected);
    if (!std::isfinite(expected)) continue;
    const double tolerance = spec.dtype == Dtype::kF32
                                 ? kLseRelativeFp32 * std::max(1.0, std::abs(expected))
                                 : std::max(kLseAbsoluteSixteenBit, kLseUlps * std::abs(expected));
    if (std::abs(value - expected) > tolerance) {
      return fmt::format("lse at {} is {}, the oracle has {}, allowed {:.3g}", place(row), value, expected, tolerance);
    }
  }
  return {};
}

std::string check_weights(const AttentionInputs& inputs, const std::vector<std::byte>& out,
                          const std::vector<float>& lse, double score_error) {
  const Dtype dtype = inputs.spec.dtype;
  const double rounding = dtype == Dtype::kBf16 ? 0x1p-8 : dtype == Dtype::kF16 ? 0x1p-11 : 0.0;
  const Numbers oracle = oracle_numbers(inputs);
  AttentionInputs positive = inputs;
  for (std::size_t at = 0; at < inputs.v.size(); at += size_of(dtype)) {
    store_element(positive.v.data() + at, dtype, std::abs(load_element(inputs.v.data() + at, dtype)));
  }
  const Numbers magnitudes = oracle_numbers(positive);
  if (out.size() != oracle.out.size() * size_of(dtype) || lse.size() != oracle.lse.size()) {
    return fmt::format("out has {} bytes and lse {} rows", out.size(), lse.size());
  }
  if (!lse.empty()) count_check();
  // Written so that NaN is an error.
  const auto near = [](double value, double expected, double allowed) {
    return value == expected || std::abs(value - expected) <= allowed;
  };
  for (std::size_t i = 0; i < oracle.out.size(); ++i) {
    const double value = load_element(out.data() + i * size_of(dtype), dtype);
    const double allowed = (2.0 * rounding + score_error) * magnitudes.out[i];
    if (near(value, oracle.out[i], allowed)) continue;
    return fmt::format("out[{}] is {}, the oracle has {}, allowed {:.3g}", i, value, oracle.out[i], allowed);
  }
  for (std::size_t i = 0; i < oracle.lse.size(); ++i) {
    const double allowed = std::max(kLseAbsoluteSixteenBit, kLseUlps * std::abs(oracle.lse[i]));
    if (near(lse[i], oracle.lse[i], allowed)) continue;
    return fmt::format("lse[{}] is {}, the oracle has {}, allowed {:.3g}", i, lse[i], oracle.lse[i], allowed);
  }
  return {};
}

}  // namespace ringattn::testing
