// SPDX-License-Identifier: Apache-2.0
#include "tests/support/gemm_runner.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "tests/support/checks.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

constexpr std::int64_t kGuard = 64;  // elements around out

}  // namespace

GemmInputs normal_gemm_inputs(const BatchedGemmSpec& spec, std::int64_t rows, std::int64_t heads, bool shared,
                              std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  const Normal normal;
  return gemm_inputs(spec, rows, heads, shared, [&] { return normal(generator); });
}

std::string describe(const GemmLayout& layout) {
  return fmt::format("{} threads, cut at rows [{}]{}{}, gap {}, shift {}, weight gap {}", layout.threads,
                     fmt::join(layout.cuts, ", "), layout.head_by_head ? ", head by head" : "",
                     layout.transposed ? ", transposed" : "", layout.gap, layout.shift, layout.weight_gap);
}

std::string first_difference(const GemmInputs& inputs, const std::vector<std::byte>& out,
                             const std::vector<std::byte>& expected) {
  const BatchedGemmSpec& spec = inputs.spec;
  const std::size_t element = size_of(spec.dtype);
  if (out.size() != expected.size()) return fmt::format("{} bytes, not {}", out.size(), expected.size());
  std::string first;
  std::int64_t count = 0;
  for (std::size_t at = 0; at < out.size(); at += element) {
    if (std::memcmp(out.data() + at, expected.data() + at, element) == 0) continue;
    if (++count > 1) continue;
    const auto i = static_cast<std::int64_t>(at / element);
    std::uint32_t got = 0;
    std::uint32_t wanted = 0;
    std::memcpy(&got, out.data() + at, element);
    std::memcpy(&wanted, expected.data() + at, element);
    first = fmt::format("row {}, head {}, column {}: {} ({:#x}), expected {} ({:#x})", i / spec.dim_n / inputs.heads,
                        i / spec.dim_n % inputs.heads, i % spec.dim_n, load_element(out.data() + at, spec.dtype), got,
                        load_element(expected.data() + at, spec.dtype), wanted);
  }
  return count == 0 ? first : fmt::format("{} of {} differ, first {}", count, out.size() / element, first);
}

std::vector<std::byte> multiplied(const BatchedGemmRow& row, const GemmInputs& inputs, const GemmLayout& layout) {
  const std::unique_ptr<Backend> backend = row.make_backend({layout.threads, 0});
  const std::unique_ptr<BatchedGemmKernel> kernel = row.make_kernel(inputs.spec, *backend);
  kernel->reserve(inputs.heads);
  return multiplied_by([&](const BatchedGemmTask& task) { kernel->multiply(task, backend->stream(), {}); }, *backend,
                       inputs, layout);
}

std::vector<std::byte> multiplied_by(const Multiply& multiply, Backend& backend, const GemmInputs& inputs,
                                     const GemmLayout& layout) {
  const BatchedGemmSpec& spec = inputs.spec;
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  const std::int64_t left_head = spec.dim_k + layout.gap;
  const std::int64_t right_row = (layout.transposed ? spec.dim_n : spec.dim_k) + layout.weight_gap;
  const std::int64_t right_head = right_row * (layout.transposed ? spec.dim_k : spec.dim_n) + layout.gap;
  const std::int64_t out_head = spec.dim_n + layout.gap;
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::size_t>(elements * element); };
  std::vector<std::byte> left(bytes(layout.shift + inputs.rows * inputs.row_heads() * left_head), std::byte{0xff});
  for (std::int64_t i = 0; i < inputs.rows * inputs.row_heads(); ++i) {
    std::memcpy(left.data() + bytes(layout.shift + i * left_head), inputs.left.data() + bytes(i * spec.dim_k),
                bytes(spec.dim_k));
  }
  std::vector<std::byte> right(bytes(layout.shift + inputs.heads * right_head), std::byte{0xff});
  for (std::int64_t head = 0; head < inputs.heads; ++head) {
    for (std::int64_t o = 0; o < spec.dim_n; ++o) {
      for (std::int64_t i = 0; i < spec.dim_k; ++i) {
        const std::int64_t at = layout.transposed ? i * right_row + o : o * right_row + i;
        std::memcpy(right.data() + bytes(layout.shift + head * right_head + at),
                    inputs.right.data() + bytes((head * spec.dim_n + o) * spec.dim_k + i), bytes(1));
      }
    }
  }
  const std::int64_t out_begin = kGuard + layout.shift;
  DeviceArray left_array(backend, left.size());
  DeviceArray right_array(backend, right.size());
  DeviceArray out_array(backend, bytes(out_begin + inputs.rows * inputs.heads * out_head + kGuard));
  left_array.write(left);
  right_array.write(right);
  std::byte* const left_at = left_array.data() + bytes(layout.shift);
  std::byte* const out_at = out_array.data() + bytes(out_begin);

  GemmWeights weights{right_array.data() + bytes(layout.shift),
                      spec.dtype,
                      inputs.heads,
                      spec.dim_n,
                      spec.dim_k,
                      right_head,
                      right_row,
                      1};
  if (layout.transposed) std::swap(weights.n_stride, weights.k_stride);
  std::vector<std::int64_t> ends = layout.cuts;
  ends.push_back(inputs.rows);
  std::int64_t begin = 0;
  for (const std::int64_t end : ends) {
    const std::int64_t at_once = layout.head_by_head ? 1 : inputs.heads;
    for (std::int64_t head = 0; head < inputs.heads; head += at_once) {
      const TensorView all_left{
          left_at, spec.dtype, inputs.rows, inputs.row_heads(), spec.dim_k, inputs.row_heads() * left_head, left_head};
      const MutableTensorView all_out{
          out_at, spec.dtype, inputs.rows, inputs.heads, spec.dim_n, inputs.heads * out_head, out_head};
      BatchedGemmTask task{all_left, weights.slice(head, at_once), all_out};
      task.rows.data = all_left.at(begin, inputs.shared ? 0 : head);
      task.rows.heads = inputs.shared ? 1 : at_once;
      task.out.data = all_out.at(begin, head);
      task.out.heads = at_once;
      task.rows.tokens = task.out.tokens = end - begin;
      multiply(task);
    }
    begin = end;
  }
  backend.synchronize(backend.stream(), Deadline::after(60.0), {});

  const std::vector<std::byte> out = out_array.read();
  std::vector<std::byte> dense(bytes(inputs.rows * inputs.heads * spec.dim_n));
  std::vector<bool> written(out.size());
  for (std::int64_t i = 0; i < inputs.rows * inputs.heads; ++i) {
    const std::size_t at = bytes(out_begin + i * out_head);
    std::memcpy(dense.data() + bytes(i * spec.dim_n), out.data() + at, bytes(spec.dim_n));
    std::fill_n(written.begin() + static_cast<std::ptrdiff_t>(at), bytes(spec.dim_n), true);
  }
  for (std::size_t at = 0; at < out.size(); ++at) {
    if (written[at] || out[at] == std::byte{0xff}) continue;
    ADD_FAILURE() << "byte " << static_cast<std::int64_t>(at) - static_cast<std::int64_t>(bytes(out_begin))
                  << " behind the begin of out was written, beside its rows of " << bytes(spec.dim_n) << " bytes, "
                  << bytes(out_head) << " apart; " << describe(layout);
    break;
  }
  return dense;
}

void expect_accurate_gemm(const GemmInputs& inputs, const std::vector<std::byte>& out) {
  const BatchedGemmSpec& spec = inputs.spec;
  const double rounding = spec.dtype == Dtype::kBf16 ? 0x1p-8 : spec.dtype == Dtype::kF16 ? 0x1p-11 : 0x1p-24;
  const double least = spec.dtype == Dtype::kF16 ? 0x1p-25 : 0.0;  // half a step of fp16's subnormals
  // Each of the additions loses at most half a unit in the last place of fp32; one that truncates, twice as much.
  const double lost = spec.dim_k * 0x1p-23;
  count_check();
  for (std::int64_t i = 0; i < inputs.rows * inputs.heads * spec.dim_n; ++i) {
    const std::int64_t o = i % spec.dim_n;
    const std::int64_t head = i / spec.dim_n % inputs.heads;
    const std::int64_t r = i / spec.dim_n / inputs.heads;
    double sum = 0.0;
    double magnitude = 0.0;
    for (std::int64_t k = 0; k < spec.dim_k; ++k) {
      const double term = static_cast<double>(inputs.left_at(r, head, k)) * inputs.right_at(head, o, k);
      sum += term;
      magnitude += std::abs(term);
    }
    const double value = load_element(out.data() + static_cast<std::size_t>(i) * size_of(spec.dtype), spec.dtype);
    const std::string place = fmt::format("{}: row {}, head {}, column {}", describe(spec), r, head, o);
    if (!std::isfinite(sum)) {
      ASSERT_TRUE(std::isnan(sum) ? std::isnan(value) : value == sum) << place << ": " << value << ", not " << sum;
      continue;
    }
    ASSERT_LE(std::abs(value - sum), rounding * std::abs(sum) + 1.01 * lost * magnitude + least) << place;
  }
}

}  // namespace ringattn::testing
