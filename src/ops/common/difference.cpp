// SPDX-License-Identifier: Apache-2.0
#include "ops/common/difference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string_view>
#include <tuple>
#include <vector>

namespace ringattn {

namespace {

std::uint32_t bits_at(const std::byte* address, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, address, sizeof bits);
    return bits;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, address, sizeof bits);
  return bits;
}

float value_of(std::uint32_t bits, Dtype dtype) {
  if (dtype == Dtype::kF32) return std::bit_cast<float>(bits);
  const auto half = static_cast<std::uint16_t>(bits);
  return dtype == Dtype::kBf16 ? bf16_to_float(half) : f16_to_float(half);
}

// Representable values in ascending order as consecutive integers.
std::int64_t ordinal(std::uint32_t bits, Dtype dtype) {
  const std::uint32_t sign = dtype == Dtype::kF32 ? 0x80000000U : 0x8000U;
  const auto magnitude = static_cast<std::int64_t>(bits & (sign - 1));
  return (bits & sign) != 0 ? -magnitude - 1 : magnitude;
}

std::string value_text(std::uint32_t bits, Dtype dtype) {
  return fmt::format("{} (0x{:0{}x})", value_of(bits, dtype), bits, dtype == Dtype::kF32 ? 8 : 4);
}

}  // namespace

std::int64_t ulp_distance(std::uint32_t left, std::uint32_t right, Dtype dtype) {
  if (std::isnan(value_of(left, dtype)) || std::isnan(value_of(right, dtype))) return -1;
  return std::abs(ordinal(left, dtype) - ordinal(right, dtype));
}

namespace {

// ": 0.5 (0x3f00) against 0.503906 (0x3f01), 1 ulp apart"
std::string values_text(const Difference& difference) {
  const std::string text = fmt::format(": {} against {}", value_text(difference.left_bits, difference.dtype),
                                       value_text(difference.right_bits, difference.dtype));
  const std::int64_t ulps = ulp_distance(difference.left_bits, difference.right_bits, difference.dtype);
  return ulps < 0 ? text : text + fmt::format(", {} ulp apart", ulps);
}

// "out at sequence 0, token 17". `cu`: token at which each sequence begins, then the total.
std::string token_text(std::string_view tensor, const Difference& difference, std::span<const std::int64_t> cu) {
  const auto after = std::upper_bound(cu.begin(), cu.end() - 1, difference.token);
  return fmt::format("{} at sequence {}, token {}", tensor, after - cu.begin() - 1, difference.token - *(after - 1));
}

// The same with ", head 3".
std::string coordinates_text(std::string_view tensor, const Difference& difference, std::span<const std::int64_t> cu) {
  return token_text(tensor, difference, cu) + fmt::format(", head {}", difference.head);
}

}  // namespace

std::string describe(const Difference& difference, std::span<const std::int64_t> cu, std::string_view tensor) {
  return coordinates_text(tensor, difference, cu) + fmt::format(", dim {}", difference.dim) + values_text(difference);
}

std::string describe_feature(const Difference& difference, std::span<const std::int64_t> cu, std::string_view tensor) {
  return token_text(tensor, difference, cu) + fmt::format(", feature {}", difference.dim) + values_text(difference);
}

std::string describe(const Difference& difference, const Job& job) {
  std::string text = coordinates_text(difference.in_lse ? "lse" : "out", difference, job.batch.cu_q());
  if (!difference.in_lse) text += fmt::format(", dim {}", difference.dim);
  return text + values_text(difference);
}

std::string describe(const Difference& difference, const SsmJob& job) {
  if (difference.in_lse && job.conv1d_only) {
    return fmt::format("final_conv_state at sequence {}, channel {}, token {}{}", difference.token, difference.head,
                       difference.dim, values_text(difference));
  }
  if (difference.in_lse) {
    return fmt::format("final_states at sequence {}, head {}, dim {}, state {}{}", difference.token, difference.head,
                       difference.dim / job.spec.state_dim, difference.dim % job.spec.state_dim,
                       values_text(difference));
  }
  std::vector<std::int64_t> cu{0};
  for (const std::int64_t length : job.lengths) cu.push_back(cu.back() + length);
  return fmt::format("{}, dim {}{}", coordinates_text("y", difference, cu), difference.dim, values_text(difference));
}

std::optional<Difference> first_difference(bool in_lse, const TensorView& left, const TensorView& right,
                                           std::span<const PackedRun> runs) {
  const std::size_t element = size_of(left.dtype);
  const std::size_t row_bytes = static_cast<std::size_t>(left.dim) * element;
  std::int64_t row = 0;
  for (const PackedRun& run : runs) {
    for (std::int64_t token = run.begin; token < run.end; ++token, ++row) {
      for (std::int64_t head = 0; head < left.heads; ++head) {
        const std::byte* a = left.at(row, head);
        const std::byte* b = right.at(row, head);
        if (row_bytes == 0 || std::memcmp(a, b, row_bytes) == 0) continue;
        std::size_t at = 0;
        while (bits_at(a + at, left.dtype) == bits_at(b + at, left.dtype)) at += element;
        return Difference{in_lse,
                          token,
                          head,
                          static_cast<std::int64_t>(at / element),
                          left.dtype,
                          bits_at(a + at, left.dtype),
                          bits_at(b + at, left.dtype)};
      }
    }
  }
  return std::nullopt;
}

std::optional<Difference> earliest(const Collective& collective, const std::optional<Difference>& mine) {
  std::string bytes;
  if (mine) bytes.assign(reinterpret_cast<const char*>(&*mine), sizeof *mine);
  std::optional<Difference> first;
  const auto order = [](const Difference& d) { return std::tuple(d.in_lse, d.token, d.head, d.dim); };
  for (const std::string& theirs : collective.world().all_gather(bytes, collective.timeouts().for_peer())) {
    if (theirs.empty()) continue;
    const auto difference = gathered_value<Difference>(theirs);
    if (!first || order(difference) < order(*first)) first = difference;
  }
  return first;
}

}  // namespace ringattn
