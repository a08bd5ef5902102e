// SPDX-License-Identifier: Apache-2.0
// Every row of the convolution's table: right by the fp64 oracle, and with bits that no cut into runs, no number of
// threads and no step by step moves.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/ssm_oracle.hpp"
#include "tests/kernels/ssm/conv1d_row_test.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn {
inline void PrintTo(const KernelRow<CausalConv1dSpec>& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

struct Inputs {
  CausalConv1dSpec spec;
  std::vector<std::int64_t> lengths;
  std::vector<std::byte> x;  // [rows, channels]
  std::vector<float> weight;
  std::vector<float> bias;

  std::int64_t rows() const {
    std::int64_t rows = 0;
    for (const std::int64_t length : lengths) rows += length;
    return rows;
  }
  std::size_t row_bytes() const { return static_cast<std::size_t>(spec.channels) * size_of(spec.dtype); }
};

Inputs random_inputs(const CausalConv1dSpec& spec, const std::vector<std::int64_t>& lengths, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const Normal normal;
  Inputs inputs{spec, lengths, {}, {}, {}};
  inputs.x = random_elements(inputs.rows() * spec.channels, spec.dtype, random);
  for (int i = 0; i < spec.channels * spec.width; ++i) inputs.weight.push_back(normal(random));
  for (int i = 0; i < spec.channels; ++i) inputs.bias.push_back(normal(random));
  return inputs;
}

std::vector<std::byte> bytes_of(const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

struct Result {
  std::vector<std::byte> y;
  std::vector<std::byte> halos;  // after each sequence
};

class Conv1dKernels : public Conv1dRowTest {
 protected:
  // Each sequence cut into runs of at most `each` tokens, which hand halos on; x and y begin `shift` elements after a
  // multiple of 16 bytes.
  Result convolved(const Inputs& inputs, std::int64_t each, int threads, std::size_t shift = 0) const {
    const CausalConv1dSpec& spec = inputs.spec;
    const auto backend = row().make_backend({threads, 0});
    const auto kernel = row().make_kernel(spec, *backend);
    const std::size_t shifted = shift * size_of(spec.dtype);
    DeviceArray x(*backend, shifted + inputs.x.size());
    std::vector<std::byte> placed(shifted, std::byte{0xff});
    placed.insert(placed.end(), inputs.x.begin(), inputs.x.end());
    x.write(placed);
    DeviceArray y(*backend, shifted + inputs.x.size());
    DeviceArray weight(*backend, inputs.weight.size() * sizeof(float));
    weight.write(bytes_of(inputs.weight));
    DeviceArray bias(*backend, inputs.bias.size() * sizeof(float));
    bias.write(bytes_of(inputs.bias));
    DeviceArray halos(*backend, inputs.lengths.size() * static_cast<std::size_t>(spec.halo_bytes()));
    CausalConv1dTask task;
    task.x = dense_view(static_cast<const void*>(x.data() + shifted), spec.dtype, inputs.rows(), 1, spec.channels);
    task.y = dense_view(static_cast<void*>(y.data() + shifted), spec.dtype, inputs.rows(), 1, spec.channels);
    task.weight = weight.floats();
    if (spec.bias) task.bias = bias.floats();
    std::int64_t row = 0;
    for (std::size_t s = 0; s < inputs.lengths.size(); ++s) {
      std::byte* const halo = halos.data() + static_cast<std::int64_t>(s) * spec.halo_bytes();
      for (std::int64_t begin = 0; begin < inputs.lengths[s]; begin += each) {
        const std::int64_t tokens = std::min(each, inputs.lengths[s] - begin);
        const CausalConv1dRun run{row + begin, tokens, begin == 0 ? nullptr : halo, halo};
        task.runs = {&run, 1};
        kernel->convolve(task, backend->stream(), {});
      }
      row += inputs.lengths[s];
    }
    const std::vector<std::byte> all = y.read();
    return {{all.begin() + static_cast<std::ptrdiff_t>(shifted), all.end()}, halos.read()};
  }

  // All sequences in one task.
  Result convolved_together(const Inputs& inputs) const {
    const CausalConv1dSpec& spec = inputs.spec;
    const auto backend = row().make_backend({2, 0});
    const auto kernel = row().make_kernel(spec, *backend);
    DeviceArray x(*backend, inputs.x.size());
    x.write(inputs.x);
    DeviceArray y(*backend, inputs.x.size());
    DeviceArray weight(*backend, inputs.weight.size() * sizeof(float));
    weight.write(bytes_of(inputs.weight));
    DeviceArray bias(*backend, inputs.bias.size() * sizeof(float));
    bias.write(bytes_of(inputs.bias));
    DeviceArray halos(*backend, inputs.lengths.size() * static_cast<std::size_t>(spec.halo_bytes()));
    std::vector<CausalConv1dRun> runs;
    std::int64_t row = 0;
    for (std::size_t s = 0; s < inputs.lengths.size(); ++s) {
      std::byte* const halo = halos.data() + static_cast<std::int64_t>(s) * spec.halo_bytes();
      runs.push_back({row, inputs.lengths[s], nullptr, halo});
      row += inputs.lengths[s];
    }
    const TensorView x_view =
        dense_view(static_cast<const void*>(x.data()), spec.dtype, inputs.rows(), 1, spec.channels);
    const MutableTensorView y_view =
        dense_view(static_cast<void*>(y.data()), spec.dtype, inputs.rows(), 1, spec.channels);
    kernel->convolve({x_view, weight.floats(), spec.bias ? bias.floats() : nullptr, runs, y_view}, backend->stream(),
                     {});
    return {y.read(), halos.read()};
  }

  // Token by token, all sequences of one length.
  Result updated(const Inputs& inputs, const std::vector<std::int32_t>& slots = {}) const {
    const CausalConv1dSpec& spec = inputs.spec;
    const auto backend = row().make_backend({2, 0});
    const auto kernel = row().make_kernel(spec, *backend);
    DeviceArray x(*backend, inputs.x.size());
    x.write(inputs.x);
    DeviceArray y(*backend, inputs.x.size());
    DeviceArray weight(*backend, inputs.weight.size() * sizeof(float));
    weight.write(bytes_of(inputs.weight));
    DeviceArray bias(*backend, inputs.bias.size() * sizeof(float));
    bias.write(bytes_of(inputs.bias));
    const auto sequences = static_cast<std::int64_t>(inputs.lengths.size());
    const std::int64_t all = slots.empty() ? sequences : *std::ranges::max_element(slots) + 1;
    const std::vector<std::byte> zeros(static_cast<std::size_t>(all * spec.halo_bytes()));
    DeviceArray slot_table(*backend, std::max<std::size_t>(1, slots.size() * sizeof(std::int32_t)));
    const auto* const slot_bytes = reinterpret_cast<const std::byte*>(slots.data());
    if (!slots.empty()) slot_table.write({slot_bytes, slot_bytes + slots.size() * sizeof(std::int32_t)});
    const auto* const table = slots.empty() ? nullptr : reinterpret_cast<const std::int32_t*>(slot_table.data());
    DeviceArray halos(*backend, zeros.size());
    halos.write(zeros);
    const std::int64_t length = inputs.lengths.front();
    for (std::int64_t token = 0; token < length; ++token) {
      MutableTensorView x_view = dense_view(static_cast<void*>(x.data()), spec.dtype, inputs.rows(), 1, spec.channels);
      MutableTensorView y_view = dense_view(static_cast<void*>(y.data()), spec.dtype, inputs.rows(), 1, spec.channels);
      for (MutableTensorView* view : {&x_view, &y_view}) {
        view->data = view->at(token, 0);
        view->tokens = sequences;
        view->token_stride *= length;
      }
      kernel->update({x_view, weight.floats(), spec.bias ? bias.floats() : nullptr, halos.data(), y_view, table},
                     backend->stream());
    }
    return {y.read(), halos.read()};
  }

  static void expect_same(const Result& result, const Result& expected, const CausalConv1dSpec& spec) {
    count_check();
    EXPECT_EQ(result.y, expected.y) << describe(spec);
    EXPECT_EQ(result.halos, expected.halos) << describe(spec);
  }
};

void expect_accurate(const Inputs& inputs, const Result& result) {
  const CausalConv1dSpec& spec = inputs.spec;
  const TensorView x =
      dense_view(static_cast<const void*>(inputs.x.data()), spec.dtype, inputs.rows(), 1, spec.channels);
  std::int64_t row = 0;
  for (const std::int64_t length : inputs.lengths) {
    const std::vector<double> y = oracle_conv1d(spec, x, inputs.weight.data(), inputs.bias.data(), row, length);
    // Five terms of about 1, and the rounding of the result.
    const double rounding = spec.dtype == Dtype::kF32 ? 0x1p-23 : spec.dtype == Dtype::kBf16 ? 0x1p-8 : 0x1p-11;
    std::int64_t wrong = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const std::size_t at = static_cast<std::size_t>(row) * inputs.row_bytes() + i * size_of(spec.dtype);
      const auto ours = static_cast<double>(load_element(result.y.data() + at, spec.dtype));
      if (std::fabs(ours - y[i]) <= rounding * std::fabs(y[i]) + 1e-5) continue;
      if (wrong++ > 0) continue;
      const auto channels = static_cast<std::size_t>(spec.channels);
      ADD_FAILURE() << describe(spec) << ", length " << length << ": token " << i / channels << ", channel "
                    << i % channels << " is " << ours << ", not " << y[i];
    }
    EXPECT_EQ(wrong, 0) << describe(spec) << ", length " << length;
    count_check();
    row += length;
  }
}

TEST_P(Conv1dKernels, AreAccurate) {
  for_every_spec([&](const CausalConv1dSpec& spec) {
    const Inputs inputs = random_inputs(spec, {1, 2, 3, 4, 5, 63, 64, 65, 200}, 1);
    expect_accurate(inputs, convolved(inputs, 1000, 2));
  });
}

TEST_P(Conv1dKernels, DontDependOnRunsAndThreads) {
  for_every_spec([&](const CausalConv1dSpec& spec) {
    const Inputs inputs = random_inputs(spec, {150, 1, 2, 70}, 2);
    const Result whole = convolved(inputs, 1000, 1);
    for (const std::int64_t each : {1, 2, 3, 64, 65}) expect_same(convolved(inputs, each, 5), whole, spec);
    expect_same(convolved(inputs, 1000, 2, 1), whole, spec);
  });
}

// More runs than a launch takes of them.
TEST_P(Conv1dKernels, TakeManySequences) {
  for_every_spec([&](const CausalConv1dSpec& spec) {
    std::vector<std::int64_t> lengths;
    for (std::int64_t i = 0; i < 150; ++i) lengths.push_back(1 + i * 37 % 90);
    const Inputs inputs = random_inputs(spec, lengths, 4);
    expect_same(convolved_together(inputs), convolved(inputs, 1000, 1), spec);
  });
}

// Channels of more than one CTA.
TEST_P(Conv1dKernels, TakeManyChannels) {
  const CausalConv1dSpec spec{Dtype::kBf16, 8448, 4, true, true};
  if (!row().missing(spec).empty()) GTEST_SKIP() << "not of this kernel";
  const Inputs inputs = random_inputs(spec, {70, 3}, 5);
  const Result whole = convolved(inputs, 1000, 2);
  expect_accurate(inputs, whole);
  expect_same(convolved(inputs, 33, 1), whole, spec);
  expect_same(convolved_together(inputs), whole, spec);
}

TEST_P(Conv1dKernels, GoOnTokenByToken) {
  for_every_spec([&](const CausalConv1dSpec& spec) {
    const Inputs inputs = random_inputs(spec, {40, 40, 40}, 3);
    expect_same(updated(inputs), convolved(inputs, 1000, 1), spec);
  });
}

TEST_P(Conv1dKernels, GoOnInTheirSlots) {
  for_every_spec([&](const CausalConv1dSpec& spec) {
    const Inputs inputs = random_inputs(spec, {7, 7, 7}, 4);
    const Result plain = updated(inputs);
    const std::vector<std::int32_t> slots{3, -1, 0};
    const Result slotted = updated(inputs, slots);
    const auto halo = static_cast<std::size_t>(spec.halo_bytes());
    const std::size_t rows = plain.y.size() / 3;
    const std::byte* const y = slotted.y.data();
    count_check();
    for (const std::size_t s : {0U, 2U}) {
      const auto slot = static_cast<std::size_t>(slots[s]);
      EXPECT_EQ(std::memcmp(slotted.halos.data() + slot * halo, plain.halos.data() + s * halo, halo), 0);
      EXPECT_EQ(std::memcmp(y + s * rows, plain.y.data() + s * rows, rows), 0) << describe(spec);
    }
    const auto is_zero = [](std::byte value) { return value == std::byte{0}; };
    EXPECT_TRUE(std::all_of(y + rows, y + 2 * rows, is_zero)) << "the padding row of " << describe(spec);
    const std::byte* const unused = slotted.halos.data() + halo;
    EXPECT_TRUE(std::all_of(unused, unused + 2 * halo, is_zero));
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, Conv1dKernels,
                         ::testing::ValuesIn(kernel_table<CausalConv1dSpec>().begin(),
                                             kernel_table<CausalConv1dSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Conv1dSpecs, AreDescribedAndChecked) {
  const CausalConv1dSpec spec{Dtype::kBf16, 8448, 4, true, true};
  EXPECT_EQ(describe(spec), "conv1d, bf16, 8448 channels, width 4, bias, silu");
  check_causal_conv1d(spec);
  for (const int width : {-1, 1, 5}) {
    CausalConv1dSpec wrong = spec;
    wrong.width = width;
    EXPECT_EQ(error_of([&] { check_causal_conv1d(wrong); }).code(), ErrorCode::kUsage);
  }
  EXPECT_EQ(error_of([] { check_causal_conv1d({Dtype::kF32, 0, 4, false, false}); }).code(), ErrorCode::kUsage);
  EXPECT_EQ(error_of([] {
              choose_kernel(CausalConv1dSpec{Dtype::kF32, 12, 4, false, false}, {"cpu", "auto"});
            }).code(),
            ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace ringattn::testing
