// SPDX-License-Identifier: Apache-2.0
// The oracle of SSD's gradients against finite differences of the forward's oracle.
#include "kernels/ssd_backward/ssd_backward_oracle.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "kernels/ssm/ssm_oracle.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kTokens = 7;

// One sequence in fp32, with the gradients of its outputs.
struct Problem {
  SsmSpec spec;
  std::vector<float> x, dt, b, c, z, dy, a, d, dt_bias, initial, final_gradient;

  template <class Task>
  Task task() const {
    Task task;
    task.x = dense_view(x.data(), Dtype::kF32, kTokens, spec.heads, spec.head_dim);
    task.dt = dense_view(dt.data(), Dtype::kF32, kTokens, spec.heads, 1);
    task.b = dense_view(b.data(), Dtype::kF32, kTokens, spec.groups, spec.state_dim);
    task.c = dense_view(c.data(), Dtype::kF32, kTokens, spec.groups, spec.state_dim);
    task.z = dense_view(z.data(), Dtype::kF32, kTokens, spec.heads, spec.head_dim);
    task.a = a.data();
    task.d = d.data();
    task.dt_bias = dt_bias.data();
    return task;
  }
};

Problem random_problem(const SsmSpec& spec, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  // Multiples of 2⁻¹², to which steps of a difference are added exactly.
  const auto values = [&](std::int64_t count, float mean = 0.0F, float deviation = 1.0F) {
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float> lattice;
    for (std::int64_t i = 0; i < count; ++i) lattice.push_back(std::round(normal(random) * 4096.0F) / 4096.0F);
    return lattice;
  };
  const std::int64_t state = std::int64_t{spec.heads} * spec.head_dim * spec.state_dim;
  Problem problem;
  problem.spec = spec;
  problem.x = values(kTokens * spec.heads * spec.head_dim);
  problem.dt = values(kTokens * spec.heads, 0.5F, 0.6F);
  problem.b = values(kTokens * spec.groups * spec.state_dim);
  problem.c = values(kTokens * spec.groups * spec.state_dim);
  problem.z = values(kTokens * spec.heads * spec.head_dim);
  problem.dy = values(kTokens * spec.heads * spec.head_dim);
  problem.a = values(spec.heads, -0.7F, 0.3F);
  problem.d = values(spec.heads);
  problem.dt_bias = values(spec.heads, 0.0F, 0.2F);
  problem.initial = values(state);
  problem.final_gradient = values(state);
  return problem;
}

// Σ dy ∘ y + Σ final_gradient ∘ final state.
double loss(const Problem& problem) {
  std::vector<double> state(problem.initial.begin(), problem.initial.end());
  const std::vector<double> y = oracle_ssm(problem.spec, problem.task<SsmTask>(), 0, kTokens, state);
  double sum = 0.0;
  for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * static_cast<double>(problem.dy[i]);
  for (std::size_t i = 0; i < state.size(); ++i) sum += state[i] * static_cast<double>(problem.final_gradient[i]);
  return sum;
}

// The gradient by each of `values`, which are the problem's, against central differences of fourth order: each element
// within 1e-6 of its own size, or of a thousandth of the largest one.
void expect_derivative(const std::vector<double>& gradient, const Problem& problem, std::vector<float>& values,
                       const char* name) {
  constexpr float kStep = 0x1p-9F;
  ASSERT_EQ(gradient.size(), values.size()) << name;
  double largest = 0.0;
  for (const double value : gradient) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float center = values[i];
    const auto at = [&](float steps) {
      values[i] = center + steps * kStep;
      return loss(problem);
    };
    const double difference = (8.0 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12.0 * static_cast<double>(kStep));
    values[i] = center;
    ASSERT_NEAR(gradient[i], difference, 1e-6 * std::max(std::abs(difference), 1e-3 * largest)) << name << ' ' << i;
  }
}

// Moves dt away from its limits, over which a difference must not step.
void avoid_limits(Problem& problem) {
  const SsmSpec& spec = problem.spec;
  for (std::size_t i = 0; i < problem.dt.size(); ++i) {
    const auto near = [&](float limit) {
      float value = problem.dt[i] + (spec.dt_bias ? problem.dt_bias[i % problem.dt_bias.size()] : 0.0F);
      if (spec.dt_softplus) value = std::log1p(std::exp(value));
      return std::abs(value - limit) < 0.02F;
    };
    while (near(spec.dt_min) || near(spec.dt_max)) problem.dt[i] += 0x1p-4F;
  }
}

TEST(SsdBackwardOracle, IsTheDerivative) {
  for (int flags = 0; flags < 32; ++flags) {
    SsmSpec spec;
    spec.dtype = Dtype::kF32;
    spec.heads = 4;
    spec.head_dim = 2;
    spec.state_dim = 3;
    spec.groups = flags % 2 + 1;
    spec.skip = (flags & 2) != 0;
    spec.gate = (flags & 4) != 0;
    spec.dt_bias = (flags & 8) != 0;
    spec.dt_softplus = (flags & 16) != 0;
    if (spec.gate) {
      spec.dt_min = 0.3F;
      spec.dt_max = 1.2F;
    }
    SCOPED_TRACE(describe(spec));
    Problem problem = random_problem(spec, 700 + static_cast<std::uint64_t>(flags));
    problem.dt[1] = -3.0F;
    problem.dt[2] = 4.0F;
    avoid_limits(problem);
    auto task = problem.task<SsdBackwardTask>();
    task.dy = dense_view(problem.dy.data(), Dtype::kF32, kTokens, spec.heads, spec.head_dim);
    const SsdGradients gradients = oracle_ssd_backward(spec, task, 0, kTokens, problem.initial, problem.final_gradient);
    expect_derivative(gradients.dx, problem, problem.x, "dx");
    expect_derivative(gradients.ddt, problem, problem.dt, "ddt");
    expect_derivative(gradients.db, problem, problem.b, "dB");
    expect_derivative(gradients.dc, problem, problem.c, "dC");
    expect_derivative(gradients.da, problem, problem.a, "dA");
    expect_derivative(gradients.initial_gradient, problem, problem.initial, "initial state");
    if (spec.skip) expect_derivative(gradients.dd, problem, problem.d, "dD");
    if (spec.gate) expect_derivative(gradients.dz, problem, problem.z, "dz");
    if (spec.dt_bias) expect_derivative(gradients.ddt_bias, problem, problem.dt_bias, "ddt_bias");
    if (spec.gate) {
      EXPECT_EQ(gradients.ddt[1], 0.0);
      EXPECT_EQ(gradients.ddt[2], 0.0);
    }
  }
}

// States are kept every 64 tokens and computed again between them: a sequence cut there has the same gradients.
TEST(SsdBackwardOracle, GoesOnFromStatesThatItKept) {
  SsmSpec spec;
  spec.dtype = Dtype::kF32;
  spec.heads = 1;
  spec.head_dim = 2;
  spec.state_dim = 2;
  std::mt19937_64 random(71);
  std::normal_distribution<float> normal;
  constexpr std::int64_t kLength = 200;
  std::vector<float> rows(kLength * 2);
  std::ranges::generate(rows, [&] { return normal(random); });
  const std::vector<float> dt(kLength, 0.1F);
  const float a = -0.5F;
  SsdBackwardTask task;
  task.x = task.b = task.c = task.dy = dense_view(rows.data(), Dtype::kF32, kLength, 1, 2);
  task.dt = dense_view(dt.data(), Dtype::kF32, kLength, 1, 1);
  task.a = &a;
  const SsdGradients whole = oracle_ssd_backward(spec, task, 0, kLength, {}, {});
  SsmTask forward;
  forward.x = forward.b = forward.c = task.x;
  forward.dt = task.dt;
  forward.a = &a;
  std::vector<double> state;
  oracle_ssm(spec, forward, 0, 150, state);
  const std::vector<float> initial(state.begin(), state.end());
  const SsdGradients second = oracle_ssd_backward(spec, task, 150, 50, initial, {});
  const std::vector<float> after(second.initial_gradient.begin(), second.initial_gradient.end());
  const SsdGradients first = oracle_ssd_backward(spec, task, 0, 150, {}, after);
  for (std::size_t i = 0; i < whole.dx.size(); ++i) {
    EXPECT_NEAR(i < 300 ? first.dx[i] : second.dx[i - 300], whole.dx[i], 1e-6) << i;
  }
  EXPECT_NEAR(first.da[0] + second.da[0], whole.da[0], 1e-4);
}

}  // namespace
}  // namespace ringattn::testing
