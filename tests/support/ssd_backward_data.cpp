// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ssd_backward_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string_view>
#include <utility>

#include "tests/support/checks.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/placed_rows.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

std::size_t as_size(std::int64_t count) { return static_cast<std::size_t>(count); }

std::int64_t segments_of(std::int64_t length) { return (length + kSegmentTokens - 1) / kSegmentTokens; }

std::vector<float> concatenated(const std::vector<std::vector<float>>& states) {
  std::vector<float> all;
  for (const std::vector<float>& state : states) all.insert(all.end(), state.begin(), state.end());
  return all;
}

template <class Element>
std::vector<Element> rows_of(const std::vector<Element>& packed, std::int64_t begin, std::int64_t rows,
                             std::size_t per_row) {
  if (packed.empty()) return {};
  const auto first = packed.begin() + begin * static_cast<std::int64_t>(per_row);
  return {first, first + rows * static_cast<std::int64_t>(per_row)};
}

template <class Element>
bool same_bytes(const std::vector<Element>& a, const std::vector<Element>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Element)) == 0);
}

// Squares of the errors and of the values of all sequences' elements.
struct SquareSums {
  double errors = 0.0;
  double values = 0.0;
};

// Where `ours` is further from `exact` than `term` of the magnitude and its own rounding, or nothing.
std::string compare(std::string_view name, const std::vector<double>& ours, const std::vector<double>& exact,
                    const std::vector<double>& magnitudes, double term, Dtype dtype, SquareSums& sums) {
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (std::isnan(ours[i]) && std::isnan(exact[i])) continue;
    const double error = ours[i] - exact[i];
    sums.errors += error * error;
    sums.values += exact[i] * exact[i];
    const double bound = term * magnitudes[i] + output_rounding(dtype, exact[i]) + 1e-30;
    if (std::abs(error) <= bound) continue;
    return fmt::format("element {} of {} is {}, not {} ± {}", i, name, ours[i], exact[i], bound);
  }
  return {};
}

std::vector<double> widened(const std::vector<std::byte>& elements, Dtype dtype) {
  std::vector<double> values;
  for (std::size_t at = 0; at < elements.size(); at += size_of(dtype)) {
    values.push_back(static_cast<double>(load_element(elements.data() + at, dtype)));
  }
  return values;
}

// The sum of one sequence's terms of each head.
std::vector<double> summed(const std::vector<SsdTerms>& terms, int heads, float SsdTerms::*parameter) {
  std::vector<double> sums(as_size(heads));
  for (std::size_t i = 0; i < terms.size(); ++i) sums[i % as_size(heads)] += static_cast<double>(terms[i].*parameter);
  return sums;
}

}  // namespace

SsdBackwardTask SsdBackwardData::task() const {
  const SsmTask forward = ssm.task();
  SsdBackwardTask task;
  task.x = forward.x;
  task.dt = forward.dt;
  task.b = forward.b;
  task.c = forward.c;
  task.z = forward.z;
  task.a = forward.a;
  task.d = forward.d;
  task.dt_bias = forward.dt_bias;
  task.dy = dense_view(dy.data(), ssm.spec.dtype, ssm.rows(), ssm.spec.heads, ssm.spec.head_dim);
  return task;
}

SsdBackwardData random_ssd_backward(const SsdBackwardSpec& spec, const std::vector<std::int64_t>& lengths, bool states,
                                    std::uint64_t seed) {
  SsdBackwardData inputs{random_ssm(spec.forward, lengths, seed), spec.gradients, {}};
  std::mt19937_64 random(seed + 1);
  inputs.dy =
      random_elements(inputs.ssm.rows() * spec.forward.heads * spec.forward.head_dim, spec.forward.dtype, random);
  if (!states) return inputs;
  const Normal normal;
  for (std::vector<std::vector<float>>* all : {&inputs.ssm.initial, &inputs.final_gradients}) {
    all->assign(lengths.size(), std::vector<float>(inputs.ssm.state_floats()));
    for (std::vector<float>& state : *all) std::ranges::generate(state, [&] { return normal(random); });
  }
  return inputs;
}

SsdBackwardData sequence_of(const SsdBackwardData& inputs, std::size_t sequence) {
  const SsmSpec& spec = inputs.ssm.spec;
  SsdBackwardData one = inputs;
  one.ssm.lengths = {inputs.ssm.lengths[sequence]};
  const auto cut = [&](std::vector<std::byte>& packed, int per_row) {
    packed = rows_of(packed, inputs.ssm.row_of(sequence), one.ssm.rows(), as_size(per_row) * size_of(spec.dtype));
  };
  cut(one.ssm.x, spec.heads * spec.head_dim);
  cut(one.ssm.dt, spec.heads);
  cut(one.ssm.b, spec.groups * spec.state_dim);
  cut(one.ssm.c, spec.groups * spec.state_dim);
  cut(one.ssm.z, spec.heads * spec.head_dim);
  cut(one.dy, spec.heads * spec.head_dim);
  if (!one.ssm.initial.empty()) one.ssm.initial = {inputs.ssm.initial[sequence]};
  if (!one.final_gradients.empty()) one.final_gradients = {inputs.final_gradients[sequence]};
  return one;
}

bool SsdBackwardResult::same_bits(const SsdBackwardResult& other) const {
  count_check();
  return dx == other.dx && ddt == other.ddt && db == other.db && dc == other.dc && dz == other.dz &&
         same_bytes(terms, other.terms) && same_bytes(initial_gradients, other.initial_gradients);
}

SsdBackwardResult sequence_of(const SsdBackwardData& inputs, const SsdBackwardResult& result, std::size_t sequence) {
  const SsmSpec& spec = inputs.ssm.spec;
  const std::int64_t row = inputs.ssm.row_of(sequence);
  const std::int64_t length = inputs.ssm.lengths[sequence];
  const auto cut = [&](const std::vector<std::byte>& packed, int per_row) {
    return rows_of(packed, row, length, as_size(per_row) * size_of(inputs.gradients));
  };
  std::int64_t segment = 0;
  for (std::size_t s = 0; s < sequence; ++s) segment += segments_of(inputs.ssm.lengths[s]);
  return {cut(result.dx, spec.heads * spec.head_dim),
          cut(result.ddt, spec.heads),
          cut(result.db, spec.groups * spec.state_dim),
          cut(result.dc, spec.groups * spec.state_dim),
          cut(result.dz, spec.heads * spec.head_dim),
          rows_of(result.terms, segment, segments_of(length), as_size(spec.heads)),
          rows_of(result.initial_gradients, static_cast<std::int64_t>(sequence), 1, inputs.ssm.state_floats())};
}

SsdBackwardResult run_ssd_backward(const SsdBackwardRow& row, const SsdBackwardData& inputs,
                                   const SsmArrangement& arrangement) {
  const SsmSpec& spec = inputs.ssm.spec;
  const auto backend = row.make_backend({arrangement.threads, 0});
  const auto kernel = row.make_kernel(inputs.spec(), *backend);
  const std::int64_t rows = inputs.ssm.rows();
  const std::size_t sequences = inputs.ssm.lengths.size();
  const std::size_t state = inputs.ssm.state_floats();

  // Where each sequence begins, and where each packed row lies.
  std::vector<std::int64_t> begins(sequences);
  std::int64_t next = 0;
  for (std::size_t i = 0; i < sequences; ++i) {
    const std::size_t s = arrangement.strided ? sequences - 1 - i : i;
    begins[s] = next;
    next += inputs.ssm.lengths[s];
  }
  std::vector<std::int64_t> order;
  for (std::size_t s = 0; s < sequences; ++s) {
    for (std::int64_t t = 0; t < inputs.ssm.lengths[s]; ++t) order.push_back(begins[s] + t);
  }
  const auto place = [&](const std::vector<std::byte>& packed, Dtype dtype, int heads, int dims) {
    PlacedRows placed(*backend, dtype, rows, heads, dims, arrangement.strided, arrangement.unaligned);
    placed.write(packed, order);
    return placed;
  };
  const PlacedRows x = place(inputs.ssm.x, spec.dtype, spec.heads, spec.head_dim);
  const PlacedRows dt = place(inputs.ssm.dt, spec.dtype, spec.heads, 1);
  const PlacedRows b = place(inputs.ssm.b, spec.dtype, spec.groups, spec.state_dim);
  const PlacedRows c = place(inputs.ssm.c, spec.dtype, spec.groups, spec.state_dim);
  const PlacedRows z = place(inputs.ssm.z, spec.dtype, spec.heads, spec.head_dim);
  const PlacedRows dy = place(inputs.dy, spec.dtype, spec.heads, spec.head_dim);
  const PlacedRows dx = place({}, inputs.gradients, spec.heads, spec.head_dim);
  const PlacedRows ddt = place({}, inputs.gradients, spec.heads, 1);
  const PlacedRows db = place({}, inputs.gradients, spec.groups, spec.state_dim);
  const PlacedRows dc = place({}, inputs.gradients, spec.groups, spec.state_dim);
  const PlacedRows dz = place({}, inputs.gradients, spec.heads, spec.head_dim);
  const DeviceArray a = uploaded(*backend, inputs.ssm.a);
  const DeviceArray d = uploaded(*backend, inputs.ssm.d);
  const DeviceArray bias = uploaded(*backend, inputs.ssm.dt_bias);
  const DeviceArray initial = uploaded(*backend, concatenated(inputs.ssm.initial));
  const DeviceArray final_gradients = uploaded(*backend, concatenated(inputs.final_gradients));

  std::vector<SsdBackwardRun> runs;
  std::vector<std::size_t> first(sequences);  // run of each sequence that is not empty
  int steps = 1;
  for (std::size_t s = 0; s < sequences; ++s) {
    first[s] = runs.size();
    const std::int64_t length = inputs.ssm.lengths[s];
    const std::int64_t each = arrangement.cut ? kSuperSegmentTokens : std::max<std::int64_t>(1, length);
    const auto count = static_cast<int>((length + each - 1) / each);
    steps = std::max(steps, count);
    for (int i = 0; i < count; ++i) {
      runs.push_back({i * each, std::min(each, length - i * each), begins[s] + i * each});
      runs.back().step = i;
      runs.back().gradient_step = count - 1 - i;
      if (i == 0 && !inputs.ssm.initial.empty()) runs.back().initial = initial.floats() + s * state;
      if (i == count - 1 && !inputs.final_gradients.empty()) {
        runs.back().final_gradient = final_gradients.floats() + s * state;
      }
    }
  }
  const DeviceArray states(*backend, std::max<std::size_t>(1, runs.size() * state) * sizeof(float));
  const DeviceArray gradients(*backend, std::max<std::size_t>(1, runs.size() * state) * sizeof(float));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i].final = states.floats() + i * state;
    runs[i].initial_gradient = gradients.floats() + i * state;
    if (runs[i].begin == 0) continue;
    runs[i].initial = runs[i - 1].final;
    runs[i - 1].final_gradient = runs[i].initial_gradient;
  }
  const SsdBackwardLimits limits = limits_of(runs, rows);
  const std::size_t terms_count = as_size(limits.runs.segments * spec.heads);
  const DeviceArray terms(*backend, std::max<std::size_t>(1, terms_count * sizeof(SsdTerms)));

  SsdBackwardTask task;
  task.x = x.view();
  task.dt = dt.view();
  task.b = b.view();
  task.c = c.view();
  task.dy = dy.view();
  task.dx = dx.view();
  task.ddt = ddt.view();
  task.db = db.view();
  task.dc = dc.view();
  if (spec.gate) task.z = z.view();
  if (spec.gate) task.dz = dz.view();
  task.a = a.floats();
  if (spec.skip) task.d = d.floats();
  if (spec.dt_bias) task.dt_bias = bias.floats();
  task.runs = runs;
  if (!runs.empty()) task.terms = reinterpret_cast<SsdTerms*>(terms.data());
  // Leaves NaN where the scratch memory is likely to lie.
  static_cast<void>(DeviceArray(*backend, std::max<std::size_t>(1, kernel->scratch_bytes(limits))));
  kernel->reserve(limits);
  const Stream stream = backend->stream();
  std::vector<HeadRange> ranges{{0, spec.heads}};
  if (arrangement.heads_at_once > 0) {
    ranges.clear();
    const std::vector<HeadRange> sets = head_sets(spec, kernel->heads_together());
    for (std::size_t i = 0; i < sets.size(); i += as_size(arrangement.heads_at_once)) {
      const HeadRange& last = sets[std::min(sets.size(), i + as_size(arrangement.heads_at_once)) - 1];
      ranges.push_back({sets[i].first, last.end() - sets[i].first});
    }
  }
  // Ranges are at stages of their own, as where several ranks compute.
  for (const HeadRange& heads : ranges) kernel->accumulate_states(task, heads, stream, {});
  for (const HeadRange& heads : ranges) {
    kernel->accumulate_gradients(task, heads, stream, {});
    for (int step = 0; step < steps; ++step) kernel->carry_states(task, heads, step, stream);
  }
  for (const HeadRange& heads : ranges) {
    for (int step = 0; step < steps; ++step) kernel->carry_gradients(task, heads, step, stream);
    kernel->finish(task, heads, stream, {});
  }
  kernel->sum_sets(task, stream, {});
  backend->synchronize(stream, Deadline::after(600.0), {});

  SsdBackwardResult result{dx.read(order), ddt.read(order), db.read(order), dc.read(order), {}, {}, {}};
  if (spec.gate) result.dz = dz.read(order);
  result.terms.resize(terms_count);
  const std::vector<std::byte> bytes = terms.read();
  if (terms_count > 0) std::memcpy(result.terms.data(), bytes.data(), terms_count * sizeof(SsdTerms));
  const std::vector<float> all = gradients.read_floats();
  for (std::size_t s = 0; s < sequences; ++s) {
    std::vector<float> own(state);
    if (inputs.ssm.lengths[s] > 0) {
      own = rows_of(all, static_cast<std::int64_t>(first[s]), 1, state);
    } else if (!inputs.final_gradients.empty()) {
      own = inputs.final_gradients[s];  // no kernel sees an empty sequence: the gradient passes through
    }
    result.initial_gradients.insert(result.initial_gradients.end(), own.begin(), own.end());
  }
  return result;
}

std::string check_ssd_gradients(const SsdBackwardData& inputs, const SsdBackwardResult& result, bool rounds_factors) {
  using Gradient = std::vector<double> SsdGradients::*;
  const SsmSpec& spec = inputs.ssm.spec;
  const SsdBackwardTask task = inputs.task();
  struct Rows {
    std::string_view name;
    std::vector<std::byte> SsdBackwardResult::*values;
    Gradient gradient;
    SquareSums sums{};
  };
  Rows all_rows[] = {{"dx", &SsdBackwardResult::dx, &SsdGradients::dx},
                     {"ddt", &SsdBackwardResult::ddt, &SsdGradients::ddt},
                     {"dB", &SsdBackwardResult::db, &SsdGradients::db},
                     {"dC", &SsdBackwardResult::dc, &SsdGradients::dc},
                     {"dz", &SsdBackwardResult::dz, &SsdGradients::dz}};
  for (std::size_t s = 0; s < inputs.ssm.lengths.size(); ++s) {
    if (inputs.ssm.lengths[s] == 0) continue;
    count_check();
    const auto oracle = [&](OracleTerms terms) {
      const auto state_of = [s](const std::vector<std::vector<float>>& states) {
        return states.empty() ? std::span<const float>() : std::span<const float>(states[s]);
      };
      return oracle_ssd_backward(spec, task, inputs.ssm.row_of(s), inputs.ssm.lengths[s], state_of(inputs.ssm.initial),
                                 state_of(inputs.final_gradients), terms);
    };
    const SsdGradients exact = oracle(OracleTerms::kSigned);
    const SsdGradients magnitudes = oracle(OracleTerms::kMagnitudes);
    const SsdBackwardResult own = sequence_of(inputs, result, s);
    const auto check = [&](std::string_view name, const std::vector<double>& values, Gradient gradient, Dtype dtype,
                           SquareSums& sums) {
      const double term = ssd_gradient_term(ssd_roundings(gradient, spec, rounds_factors), spec.dtype);
      std::string wrong = compare(name, values, exact.*gradient, magnitudes.*gradient, term, dtype, sums);
      return wrong.empty() ? wrong : fmt::format("{} (sequence {})", wrong, s);
    };
    for (Rows& rows : all_rows) {
      const std::vector<double> values = widened(own.*rows.values, inputs.gradients);
      std::string wrong = check(rows.name, values, rows.gradient, inputs.gradients, rows.sums);
      if (!wrong.empty()) return wrong;
    }
    const auto check_fp32 = [&](std::string_view name, const std::vector<double>& values, Gradient gradient) {
      SquareSums unused;
      return check(name, values, gradient, Dtype::kF32, unused);
    };
    const auto parameter = [&](std::string_view name, float SsdTerms::*values, Gradient gradient) {
      return check_fp32(name, summed(own.terms, spec.heads, values), gradient);
    };
    const std::vector<double> initial(own.initial_gradients.begin(), own.initial_gradients.end());
    for (const std::string& wrong :
         {parameter("dA", &SsdTerms::a, &SsdGradients::da), parameter("dD", &SsdTerms::d, &SsdGradients::dd),
          parameter("ddt_bias", &SsdTerms::dt_bias, &SsdGradients::ddt_bias),
          check_fp32("the initial state's gradient", initial, &SsdGradients::initial_gradient)}) {
      if (!wrong.empty()) return wrong;
    }
  }
  for (const Rows& rows : all_rows) {
    if (!rounds_factors || rows.sums.values == 0.0) continue;
    const double part =
        ssd_gradient_rms(ssd_roundings(rows.gradient, spec, true), spec.dtype) + output_rounding(inputs.gradients, 1.0);
    const double found = std::sqrt(rows.sums.errors / rows.sums.values);
    if (found > part) {
      return fmt::format("the root mean square error of {} is {} of its values, and may be {}", rows.name, found, part);
    }
  }
  return {};
}

}  // namespace ringattn::testing
