// SPDX-License-Identifier: Apache-2.0
// Gradients of every row of the convolution's table: right by an fp64 oracle, which finite differences check, and with
// the same bits for any cut into runs, other sequences, threads and alignments. NaN stays in its channel and reach.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "kernels/common/token_units.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/ssm_oracle.hpp"
#include "tests/kernels/ssm/conv1d_row_test.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/random_elements.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

struct GradientInputs {
  CausalConv1dSpec spec;
  std::vector<std::int64_t> lengths;
  std::vector<std::byte> x, dy;            // [rows, channels]
  std::vector<std::byte> initial, dfinal;  // [sequences, width − 1, channels]
  std::vector<float> weight, bias;

  std::int64_t rows() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }
  double at(const std::vector<std::byte>& from, std::int64_t row, int channel) const {
    const std::int64_t index = row * spec.channels + channel;
    return load_element(from.data() + static_cast<std::size_t>(index) * size_of(spec.dtype), spec.dtype);
  }
};

GradientInputs random_gradient_inputs(const CausalConv1dSpec& spec, const std::vector<std::int64_t>& lengths,
                                      std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const Normal normal;
  GradientInputs inputs{spec, lengths, {}, {}, {}, {}, {}, {}};
  const auto halos = static_cast<std::int64_t>(lengths.size()) * spec.halo_tokens() * spec.channels;
  for (auto* rows : {&inputs.x, &inputs.dy}) *rows = random_elements(inputs.rows() * spec.channels, spec.dtype, random);
  for (auto* rows : {&inputs.initial, &inputs.dfinal}) *rows = random_elements(halos, spec.dtype, random);
  for (int i = 0; i < spec.channels * spec.width; ++i) inputs.weight.push_back(normal(random));
  for (int i = 0; i < spec.channels; ++i) inputs.bias.push_back(normal(random));
  return inputs;
}

struct GradientResult {
  std::vector<std::byte> dx;        // [rows, channels]
  std::vector<std::byte> dinitial;  // [sequences, width − 1, channels]
  std::vector<float> units;         // [units, width + 1, channels]
  std::vector<float> dweight, dbias;
};

// The loss Σ dy · y + Σ dfinal · final halo of one channel of one sequence in fp64, as a function of its halo and
// tokens.
double loss_of(const GradientInputs& inputs, std::size_t sequence, std::int64_t first_row, int channel,
               const std::vector<double>& tokens, const std::vector<double>& taps, double bias) {
  const CausalConv1dSpec& spec = inputs.spec;
  const std::int64_t halo = spec.halo_tokens();
  double loss = 0.0;
  for (std::int64_t t = 0; t < inputs.lengths[sequence]; ++t) {
    double v = bias;
    for (int k = 0; k < spec.width; ++k) {
      v += taps[static_cast<std::size_t>(k)] * tokens[static_cast<std::size_t>(t + k)];
    }
    loss += inputs.at(inputs.dy, first_row + t, channel) * (spec.silu ? v / (1.0 + std::exp(-v)) : v);
  }
  for (std::int64_t i = 0; i < halo; ++i) {
    loss += inputs.at(inputs.dfinal, static_cast<std::int64_t>(sequence) * halo + i, channel) *
            tokens[static_cast<std::size_t>(inputs.lengths[sequence] + i)];
  }
  return loss;
}

Conv1dChannel channel_of(const GradientInputs& inputs, std::size_t sequence, std::int64_t first_row, int channel) {
  const CausalConv1dSpec& spec = inputs.spec;
  Conv1dChannel made;
  for (std::int64_t i = 0; i < spec.halo_tokens(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(sequence) * spec.halo_tokens() + i;
    made.tokens.push_back(inputs.at(inputs.initial, at, channel));
    made.dfinal.push_back(inputs.at(inputs.dfinal, at, channel));
  }
  for (std::int64_t t = 0; t < inputs.lengths[sequence]; ++t) {
    made.tokens.push_back(inputs.at(inputs.x, first_row + t, channel));
    made.dy.push_back(inputs.at(inputs.dy, first_row + t, channel));
  }
  for (int k = 0; k < spec.width; ++k) {
    made.taps.push_back(inputs.weight[static_cast<std::size_t>(channel * spec.width + k)]);
  }
  if (spec.bias) made.bias = inputs.bias[static_cast<std::size_t>(channel)];
  return made;
}

Conv1dChannelGradients oracle(const GradientInputs& inputs, std::size_t sequence, std::int64_t first_row, int channel) {
  return oracle_conv1d_gradients(inputs.spec, channel_of(inputs, sequence, first_row, channel));
}

TEST(Conv1dGradientOracle, IsTheDerivativeOfTheConvolution) {
  for (const bool flag : {false, true}) {
    const GradientInputs inputs = random_gradient_inputs({Dtype::kF32, 8, 4, flag, flag}, {1, 2, 9}, 3);
    std::int64_t row = 0;
    for (std::size_t sequence = 0; sequence < inputs.lengths.size(); ++sequence) {
      for (int channel = 0; channel < 3; ++channel) {
        const Conv1dChannelGradients made = oracle(inputs, sequence, row, channel);
        const Conv1dChannel of = channel_of(inputs, sequence, row, channel);
        constexpr double kStep = 1e-5;
        const auto slope = [&](const auto& moved_by) {
          Conv1dChannel up = of;
          Conv1dChannel down = of;
          moved_by(up, kStep);
          moved_by(down, -kStep);
          return (loss_of(inputs, sequence, row, channel, up.tokens, up.taps, up.bias) -
                  loss_of(inputs, sequence, row, channel, down.tokens, down.taps, down.bias)) /
                 (2.0 * kStep);
        };
        for (std::size_t i = 0; i < of.tokens.size(); ++i) {
          EXPECT_NEAR(made.dtokens[i], slope([i](Conv1dChannel& moved, double step) { moved.tokens[i] += step; }),
                      1e-7);
        }
        for (std::size_t k = 0; k < of.taps.size(); ++k) {
          EXPECT_NEAR(made.dtaps[k], slope([k](Conv1dChannel& moved, double step) { moved.taps[k] += step; }), 1e-7);
        }
        EXPECT_NEAR(made.dtaps.back(), slope([](Conv1dChannel& moved, double step) { moved.bias += step; }), 1e-7);
      }
      row += inputs.lengths[sequence];
    }
  }
}

class Conv1dGradients : public Conv1dRowTest {
 protected:
  // Sequences cut into runs of at most `each` units, in one task or a task for each run. Rows begin `shift` elements
  // after an aligned address.
  GradientResult differentiated(const GradientInputs& inputs, std::int64_t each = 1000, int threads = 1,
                                std::size_t shift = 0, bool together = true) const {
    const CausalConv1dSpec& spec = inputs.spec;
    const auto backend = row().make_backend({threads, 0});
    const auto kernel = row().make_kernel(spec, *backend);
    const std::size_t shifted = shift * size_of(spec.dtype);
    const auto placed = [&](const std::vector<std::byte>& rows) {
      std::vector<std::byte> bytes(shifted, std::byte{0xff});
      bytes.insert(bytes.end(), rows.begin(), rows.end());
      return bytes;
    };
    DeviceArray x(*backend, shifted + inputs.x.size()), dy(*backend, shifted + inputs.x.size());
    DeviceArray dx(*backend, shifted + inputs.x.size());
    x.write(placed(inputs.x));
    dy.write(placed(inputs.dy));
    DeviceArray initial(*backend, inputs.initial.size()), dfinal(*backend, inputs.initial.size());
    DeviceArray dinitial(*backend, inputs.initial.size());
    initial.write(inputs.initial);
    dfinal.write(inputs.dfinal);
    const auto floats = [&](DeviceArray& array, const std::vector<float>& values) {
      std::vector<std::byte> bytes(values.size() * sizeof(float));
      std::memcpy(bytes.data(), values.data(), bytes.size());
      array.write(bytes);
    };
    DeviceArray weight(*backend, inputs.weight.size() * sizeof(float));
    DeviceArray bias(*backend, inputs.bias.size() * sizeof(float));
    floats(weight, inputs.weight);
    floats(bias, inputs.bias);
    const auto count = static_cast<std::int64_t>(token_units(inputs.lengths).size());
    const std::int64_t unit_floats = (spec.width + 1) * std::int64_t{spec.channels};
    DeviceArray units(*backend, static_cast<std::size_t>(count * unit_floats) * sizeof(float));

    const auto row_bytes = static_cast<std::int64_t>(size_of(spec.dtype)) * spec.channels;
    std::vector<CausalConv1dGradientRun> runs;
    std::int64_t first = 0;
    for (std::size_t s = 0; s < inputs.lengths.size(); ++s) {
      const std::int64_t length = inputs.lengths[s];
      const std::int64_t halo = static_cast<std::int64_t>(s) * spec.halo_bytes();
      for (std::int64_t begin = 0; begin < length; begin += each * kTokenUnit) {
        CausalConv1dGradientRun run;
        run.row = first + begin;
        run.tokens = std::min(each * kTokenUnit, length - begin);
        run.next_tokens = std::min<std::int64_t>(spec.halo_tokens(), length - begin - run.tokens);
        const std::int64_t before = (run.row - spec.halo_tokens()) * row_bytes;
        const std::int64_t after = (run.row + run.tokens) * row_bytes;
        const auto at = static_cast<std::ptrdiff_t>(shifted);
        run.initial_halo = begin == 0 ? initial.data() + halo : x.data() + at + before;
        run.dinitial_halo = begin == 0 ? dinitial.data() + halo : nullptr;
        run.next_x = x.data() + at + after;
        run.next_dy = dy.data() + at + after;
        const bool near_end = begin + run.tokens + run.next_tokens == length;
        run.dfinal_halo = near_end ? dfinal.data() + halo : nullptr;
        runs.push_back(run);
      }
      first += length;
    }
    CausalConv1dGradientTask task;
    const auto view = [&](DeviceArray& rows) {
      return dense_view(static_cast<void*>(rows.data() + shifted), spec.dtype, inputs.rows(), 1, spec.channels);
    };
    task.x = view(x);
    task.dy = view(dy);
    task.dx = view(dx);
    task.weight = weight.floats();
    if (spec.bias) task.bias = bias.floats();
    task.units = units.floats();
    if (together) {
      task.runs = runs;
      kernel->differentiate(task, backend->stream(), {});
    } else {
      for (const CausalConv1dGradientRun& run : runs) {
        task.runs = {&run, 1};
        kernel->differentiate(task, backend->stream(), {});
        task.units += (run.tokens + kTokenUnit - 1) / kTokenUnit * unit_floats;
      }
    }
    DeviceArray dweight(*backend, inputs.weight.size() * sizeof(float));
    DeviceArray dbias(*backend, inputs.bias.size() * sizeof(float));
    kernel->sum_units({units.floats(), count, spec.channels, dweight.floats(), dbias.floats()}, backend->stream());
    std::vector<std::byte> made = dx.read();
    made.erase(made.begin(), made.begin() + static_cast<std::ptrdiff_t>(shifted));
    return {made, dinitial.read(), units.read_floats(), dweight.read_floats(), dbias.read_floats()};
  }

  static void expect_accurate(const GradientInputs& inputs, const GradientResult& result) {
    const CausalConv1dSpec& spec = inputs.spec;
    const double rounding = spec.dtype == Dtype::kF32 ? 0.0 : spec.dtype == Dtype::kBf16 ? 0x1p-8 : 0x1p-11;
    const auto expect_near = [&](double made, double exact, double allowed, const std::string& what) {
      EXPECT_LE(std::abs(made - exact), allowed) << what << " of " << describe(spec);
    };
    std::vector<double> dtaps(result.dweight.size() + result.dbias.size()), sizes = dtaps;
    std::int64_t first = 0;
    for (std::size_t s = 0; s < inputs.lengths.size(); ++s) {
      for (int c = 0; c < spec.channels; ++c) {
        const Conv1dChannelGradients exact = oracle(inputs, s, first, c);
        for (std::size_t i = 0; i < exact.dtokens.size(); ++i) {
          const std::int64_t token = static_cast<std::int64_t>(i) - spec.halo_tokens();
          const double made =
              token < 0 ? inputs.at(result.dinitial,
                                    static_cast<std::int64_t>(s) * spec.halo_tokens() + token + spec.halo_tokens(), c)
                        : inputs.at(result.dx, first + token, c);
          expect_near(made, exact.dtokens[i],
                      rounding * std::abs(exact.dtokens[i]) + 2e-6 * exact.dtokens_size[i] + 1e-7,
                      fmt::format("dx of token {} of {}", token, inputs.lengths[s]));
        }
        for (std::size_t k = 0; k < exact.dtaps.size(); ++k) {
          const std::size_t at = static_cast<std::size_t>(c) * exact.dtaps.size() + k;
          dtaps[at] += exact.dtaps[k];
          sizes[at] += exact.dtaps_size[k];
        }
      }
      first += inputs.lengths[s];
    }
    count_check();
    const auto width = static_cast<std::size_t>(spec.width);
    for (std::size_t c = 0; c < result.dbias.size(); ++c) {
      for (std::size_t k = 0; k <= width; ++k) {
        const double made = k < width ? result.dweight[c * width + k] : result.dbias[c];
        const std::size_t at = c * (width + 1) + k;
        expect_near(made, dtaps[at], 3e-6 * sizes[at], fmt::format("tap {} of channel {}", k, c));
      }
    }
  }

  static void expect_same(const GradientResult& made, const GradientResult& expected, const CausalConv1dSpec& spec) {
    count_check();
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    EXPECT_TRUE(made.dx == expected.dx) << "dx of " << describe(spec);
    EXPECT_TRUE(made.dinitial == expected.dinitial) << "dinitial of " << describe(spec);
    EXPECT_TRUE(same(made.units, expected.units)) << "units of " << describe(spec);
    EXPECT_TRUE(same(made.dweight, expected.dweight) && same(made.dbias, expected.dbias)) << describe(spec);
  }
};

TEST_P(Conv1dGradients, AreAccurate) {
  for_every_spec([&](const CausalConv1dSpec& spec) {
    const GradientInputs inputs = random_gradient_inputs(spec, {1, 2, 3, 4, 127, 128, 131, 260}, 1);
    expect_accurate(inputs, differentiated(inputs, 1000, 2));
  });
}

TEST_P(Conv1dGradients, DontDependOnRunsThreadsAndAlignment) {
  for_every_spec([&](const CausalConv1dSpec& spec) {
    if (spec.width == 3) return;
    const GradientInputs inputs = random_gradient_inputs(spec, {2 * kTokenUnit + 1, 1, kTokenUnit + 2, 2}, 2);
    const GradientResult whole = differentiated(inputs);
    expect_accurate(inputs, whole);
    expect_same(differentiated(inputs, 1, 3), whole, spec);
    expect_same(differentiated(inputs, 1, 1, 1, false), whole, spec);
  });
}

// More runs than a launch takes, and channels of more than one CTA.
TEST_P(Conv1dGradients, TakeManySequencesAndChannels) {
  const CausalConv1dSpec spec{Dtype::kBf16, 264, 4, true, true};
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < 70; ++i) lengths.push_back(1 + i * 37 % 90);
  const GradientInputs inputs = random_gradient_inputs(spec, lengths, 4);
  const GradientResult together = differentiated(inputs, 1000, 2);
  expect_accurate(inputs, together);
  expect_same(differentiated(inputs, 1000, 1, 0, false), together, spec);
}

// silu is v above and 0 below: gradients at v = ±∞ are those of a v far away, and not ∞ · 0.
TEST_P(Conv1dGradients, SlopeOfInfiniteSums) {
  const CausalConv1dSpec spec{Dtype::kBf16, 24, 4, true, true};
  const auto with_biases = [&](float above, float below) {
    GradientInputs inputs = random_gradient_inputs(spec, {40, 9}, 7);
    inputs.bias[3] = above;
    inputs.bias[4] = below;
    const GradientResult result = differentiated(inputs);
    expect_accurate(inputs, result);
    return result;
  };
  expect_same(with_biases(kInfinity, -kInfinity), with_biases(1e4F, -1e4F), spec);
}

// A NaN in dy of a token reaches dx of the width − 1 tokens before it, and the sums of its channel. One in x reaches g
// of the width − 1 tokens after it, if there is silu, and through it dx around it.
TEST_P(Conv1dGradients, KeepNanInItsChannelAndReach) {
  for (const bool silu : {false, true}) {
    for (const bool in_x : {false, true}) {
      const CausalConv1dSpec spec{Dtype::kBf16, 24, 4, true, silu};
      GradientInputs inputs = random_gradient_inputs(spec, {40, 9}, 6);
      constexpr std::int64_t kToken = 20;
      constexpr int kChannel = 5;
      store_element((in_x ? inputs.x : inputs.dy).data() + (kToken * spec.channels + kChannel) * 2, spec.dtype,
                    std::numeric_limits<float>::quiet_NaN());
      const GradientResult result = differentiated(inputs);
      const std::int64_t reach = spec.halo_tokens();
      count_check();
      for (std::int64_t row = 0; row < inputs.rows(); ++row) {
        for (int c = 0; c < spec.channels; ++c) {
          const bool near = c == kChannel && row >= kToken - reach && row <= kToken + (in_x ? reach : 0);
          EXPECT_EQ(std::isnan(inputs.at(result.dx, row, c)), near && (silu || !in_x)) << row << ", " << c;
        }
      }
      for (int c = 0; c < spec.channels; ++c) {
        EXPECT_EQ(std::isnan(result.dweight[static_cast<std::size_t>(c * spec.width)]), c == kChannel);
        EXPECT_EQ(std::isnan(result.dbias[static_cast<std::size_t>(c)]), c == kChannel && (silu || !in_x));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Conv1dGradients,
                         ::testing::ValuesIn(kernel_table<CausalConv1dSpec>().begin(),
                                             kernel_table<CausalConv1dSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ringattn::testing
