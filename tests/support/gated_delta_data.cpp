// SPDX-License-Identifier: Apache-2.0
#include "tests/support/gated_delta_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "kernels/gated_delta/gated_delta_oracle.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/placed_rows.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

std::size_t delta_size(std::int64_t count) { return static_cast<std::size_t>(count); }

std::vector<std::byte> bytes_of(const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(float));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The tensors of a task in a kernel's memory.
struct PlacedDelta {
  PlacedRows q, k, v, log_decay, beta, o;

  PlacedDelta(Backend& backend, const GatedDeltaData& data, const std::vector<std::int64_t>& order, bool strided,
              bool unaligned)
      : q(place(backend, data, data.spec.dtype, data.spec.key_heads, data.spec.key_dim, strided, unaligned)),
        k(place(backend, data, data.spec.dtype, data.spec.key_heads, data.spec.key_dim, strided, unaligned)),
        v(place(backend, data, data.spec.dtype, data.spec.value_heads, data.spec.value_dim, strided, unaligned)),
        log_decay(place(backend, data, Dtype::kF32, data.spec.value_heads, data.spec.decay_dim(), strided, unaligned)),
        beta(place(backend, data, Dtype::kF32, data.spec.value_heads, 1, strided, unaligned)),
        o(place(backend, data, data.spec.dtype, data.spec.value_heads, data.spec.value_dim, strided, unaligned)) {
    q.write(data.q, order);
    k.write(data.k, order);
    v.write(data.v, order);
    log_decay.write(bytes_of(data.log_decay), order);
    beta.write(bytes_of(data.beta), order);
    o.write({}, order);
  }
  static PlacedRows place(Backend& backend, const GatedDeltaData& data, Dtype dtype, int heads, int dims, bool strided,
                          bool unaligned) {
    return {backend, dtype, data.rows(), heads, dims, strided, unaligned};
  }
};

}  // namespace

std::int64_t GatedDeltaData::rows() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }

std::int64_t GatedDeltaData::row_of(std::size_t sequence) const {
  return std::accumulate(lengths.begin(), lengths.begin() + static_cast<std::ptrdiff_t>(sequence), std::int64_t{0});
}

GatedDeltaTask GatedDeltaData::task() const {
  GatedDeltaTask task;
  task.q = dense_view(static_cast<const void*>(q.data()), spec.dtype, rows(), spec.key_heads, spec.key_dim);
  task.k = dense_view(static_cast<const void*>(k.data()), spec.dtype, rows(), spec.key_heads, spec.key_dim);
  task.v = dense_view(static_cast<const void*>(v.data()), spec.dtype, rows(), spec.value_heads, spec.value_dim);
  task.log_decay =
      dense_view(static_cast<const void*>(log_decay.data()), Dtype::kF32, rows(), spec.value_heads, spec.decay_dim());
  task.beta = dense_view(static_cast<const void*>(beta.data()), Dtype::kF32, rows(), spec.value_heads, 1);
  return task;
}

GatedDeltaData GatedDeltaData::slice(std::size_t sequence, std::int64_t begin, std::int64_t end) const {
  GatedDeltaData part;
  part.spec = spec;
  part.lengths = {end - begin};
  const auto cut = [&](const auto& array, auto& target) {
    const std::ptrdiff_t each = std::ssize(array) / rows();
    const auto first = array.begin() + (row_of(sequence) + begin) * each;
    target.assign(first, first + (end - begin) * each);
  };
  cut(q, part.q);
  cut(k, part.k);
  cut(v, part.v);
  cut(log_decay, part.log_decay);
  cut(beta, part.beta);
  return part;
}

GatedDeltaData random_gated_delta(const GatedDeltaSpec& spec, const std::vector<std::int64_t>& lengths,
                                  std::uint64_t seed) {
  GatedDeltaData data;
  data.spec = spec;
  data.lengths = lengths;
  std::mt19937_64 random(seed);
  const std::int64_t rows = data.rows();
  const float key_size = spec.qk_l2norm ? 1.0F : 1.0F / std::sqrt(static_cast<float>(spec.key_dim));
  data.q = random_elements(rows * spec.key_heads * spec.key_dim, spec.dtype, random);
  data.k = random_elements(rows * spec.key_heads * spec.key_dim, spec.dtype, random, Normal(0.0F, key_size));
  data.v = random_elements(rows * spec.value_heads * spec.value_dim, spec.dtype, random);
  std::uniform_real_distribution<float> uniform;
  data.log_decay.resize(delta_size(rows * spec.value_heads * spec.decay_dim()));
  std::ranges::generate(data.log_decay, [&] { return -0.2F * uniform(random); });
  data.beta.resize(delta_size(rows * spec.value_heads));
  std::ranges::generate(data.beta, [&] { return uniform(random); });
  return data;
}

GatedDeltaData with_initial_states(GatedDeltaData data, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const Normal normal;
  data.initial.assign(data.lengths.size(), std::vector<float>(data.state_size()));
  for (auto& state : data.initial) std::ranges::generate(state, [&] { return normal(random); });
  return data;
}

std::string first_difference(const GatedDeltaData& data, const GatedDeltaResult& result,
                             const GatedDeltaResult& expected) {
  count_check();
  const GatedDeltaSpec& spec = data.spec;
  if (result.o.size() != expected.o.size() || result.finals.size() != expected.finals.size()) {
    return "the results differ in size";
  }
  const auto o = std::ranges::mismatch(result.o, expected.o).in1;
  if (o != result.o.end()) {
    const auto element =
        static_cast<std::int64_t>((o - result.o.begin()) / static_cast<std::ptrdiff_t>(size_of(spec.dtype)));
    return fmt::format("o of row {}, head {}, dim {}", element / (spec.value_heads * spec.value_dim),
                       element / spec.value_dim % spec.value_heads, element % spec.value_dim);
  }
  for (std::size_t i = 0; i < result.finals.size(); ++i) {
    if (std::memcmp(&result.finals[i], &expected.finals[i], sizeof(float)) == 0) continue;
    return fmt::format("element {} of final state {} is {}, not {}", i % data.state_size(), i / data.state_size(),
                       result.finals[i], expected.finals[i]);
  }
  return {};
}

GatedDeltaResult run_gated_delta(const GatedDeltaRow& row, const GatedDeltaData& data,
                                 const GatedDeltaArrangement& arrangement) {
  const GatedDeltaSpec& spec = data.spec;
  const auto backend = row.make_backend({arrangement.threads, 0});
  const auto kernel = row.make_kernel(spec, *backend);
  const std::size_t sequences = data.lengths.size();

  // Where each sequence begins, and where each packed row lies.
  std::vector<std::int64_t> begins(sequences);
  std::int64_t next = 0;
  for (std::size_t i = 0; i < sequences; ++i) {
    const std::size_t s = arrangement.strided ? sequences - 1 - i : i;
    begins[s] = next;
    next += data.lengths[s];
  }
  std::vector<std::int64_t> order;
  for (std::size_t s = 0; s < sequences; ++s) {
    for (std::int64_t t = 0; t < data.lengths[s]; ++t) order.push_back(begins[s] + t);
  }
  const PlacedDelta placed(*backend, data, order, arrangement.strided, arrangement.unaligned);
  std::vector<float> all_initial;
  for (const auto& state : data.initial) all_initial.insert(all_initial.end(), state.begin(), state.end());
  const DeviceArray initial = uploaded(*backend, all_initial);
  const std::size_t state = data.state_size();

  std::vector<GatedDeltaRun> runs;
  std::vector<std::size_t> sequence_of;  // [runs]
  int steps = 1;
  for (std::size_t s = 0; s < sequences; ++s) {
    const std::int64_t length = data.lengths[s];
    const std::int64_t each = arrangement.cut ? kSegmentTokens : std::max<std::int64_t>(1, length);
    for (std::int64_t begin = 0; begin < length; begin += each) {
      runs.push_back(
          {begin, std::min(each, length - begin), begins[s] + begin, nullptr, nullptr, static_cast<int>(begin / each)});
      sequence_of.push_back(s);
      steps = std::max(steps, runs.back().step + 1);
    }
  }
  const DeviceArray states(*backend, std::max<std::size_t>(1, runs.size() * state) * sizeof(float));
  std::vector<std::size_t> last(sequences, runs.size());  // run of each sequence
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const bool ends = i + 1 == runs.size() || runs[i + 1].begin == 0;
    if (!ends || arrangement.finals) runs[i].final = states.floats() + i * state;
    if (runs[i].begin > 0) {
      runs[i].initial = runs[i - 1].final;
    } else if (!data.initial.empty()) {
      runs[i].initial = initial.floats() + sequence_of[i] * state;
    }
    last[sequence_of[i]] = i;
  }

  GatedDeltaTask task{placed.q.view(),         placed.k.view(),    placed.v.view(),
                      placed.log_decay.view(), placed.beta.view(), runs,
                      placed.o.view()};
  kernel->reserve(limits_of(runs));
  const Stream stream = backend->stream();
  const int each =
      arrangement.heads_at_once > 0 ? arrangement.heads_at_once * kernel->heads_together() : spec.value_heads;
  std::vector<HeadRange> ranges;
  for (int head = 0; head < spec.value_heads; head += each) {
    ranges.push_back({head, std::min(each, spec.value_heads - head)});
  }
  // Ranges are at stages of their own, as where several ranks compute.
  for (const HeadRange& heads : ranges) kernel->accumulate_states(task, heads, stream, {});
  for (const HeadRange& heads : ranges) {
    for (int step = 0; step < steps; ++step) kernel->carry(task, heads, step, stream);
    kernel->finish(task, heads, stream, {});
  }
  backend->synchronize(stream, Deadline::after(600.0), {});

  GatedDeltaResult result;
  result.o = placed.o.read(order);
  if (!arrangement.finals) return result;
  const std::vector<float> all = states.read_floats();
  for (std::size_t s = 0; s < sequences; ++s) {
    if (last[s] == runs.size()) {  // an empty sequence, which no kernel sees: its state passes through
      const std::vector<float> passed = data.initial.empty() ? std::vector<float>(state) : data.initial[s];
      result.finals.insert(result.finals.end(), passed.begin(), passed.end());
      continue;
    }
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(last[s] * state);
    result.finals.insert(result.finals.end(), from, from + static_cast<std::ptrdiff_t>(state));
  }
  return result;
}

GatedDeltaResult update_gated_delta(const GatedDeltaRow& row, const GatedDeltaData& data, int threads,
                                    const std::vector<std::int32_t>& slots) {
  const auto backend = row.make_backend({threads, 0});
  const auto kernel = row.make_kernel(data.spec, *backend);
  const auto sequences = static_cast<std::int64_t>(data.lengths.size());
  const std::int64_t length = data.lengths.front();
  // A step is every length-th row.
  std::vector<std::int64_t> order(delta_size(data.rows()));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const PlacedDelta placed(*backend, data, order, false, false);
  const std::int64_t all = slots.empty() ? sequences : *std::ranges::max_element(slots) + 1;
  std::vector<float> initial(delta_size(all) * data.state_size(), std::numeric_limits<float>::quiet_NaN());
  for (std::size_t s = 0; s < delta_size(sequences); ++s) {
    const std::int64_t slot = slots.empty() ? static_cast<std::int64_t>(s) : slots[s];
    if (slot < 0) continue;
    const auto at = initial.begin() + static_cast<std::ptrdiff_t>(delta_size(slot) * data.state_size());
    std::fill_n(at, data.state_size(), 0.0F);
    if (!data.initial.empty()) std::ranges::copy(data.initial[s], at);
  }
  const DeviceArray states = uploaded(*backend, initial);
  DeviceArray slot_table(*backend, std::max<std::size_t>(1, slots.size() * sizeof(std::int32_t)));
  const auto* const slot_bytes = reinterpret_cast<const std::byte*>(slots.data());
  if (!slots.empty()) slot_table.write({slot_bytes, slot_bytes + slots.size() * sizeof(std::int32_t)});
  for (std::int64_t token = 0; token < length; ++token) {
    const auto step = [&](const PlacedRows& rows) {
      MutableTensorView view = rows.view();
      view.data = view.at(token, 0);
      view.tokens = sequences;
      view.token_stride *= length;
      return view;
    };
    GatedDeltaUpdate update{step(placed.q),    step(placed.k),  step(placed.v), step(placed.log_decay),
                            step(placed.beta), states.floats(), step(placed.o), nullptr};
    if (!slots.empty()) update.slots = reinterpret_cast<const std::int32_t*>(slot_table.data());
    kernel->update(update, backend->stream());
  }
  backend->synchronize(backend->stream(), Deadline::after(600.0), {});
  return {placed.o.read(order), states.read_floats()};
}

std::string check_gated_delta_accuracy(const GatedDeltaData& data, const GatedDeltaResult& result, bool rounded) {
  const GatedDeltaSpec& spec = data.spec;
  const GatedDeltaTask task = data.task();
  const auto far = [](double ours, double expected, double bound) {
    if (std::isnan(expected) || std::isnan(bound)) return !std::isnan(ours);
    return !(std::abs(ours - expected) <= bound + 1e-30);
  };
  for (std::size_t s = 0; s < data.lengths.size(); ++s) {
    for (int head = 0; head < spec.value_heads; ++head) {
      count_check();
      const std::int64_t state_size = std::int64_t{spec.key_dim} * spec.value_dim;
      GatedDeltaOracle oracle(spec, rounded,
                              data.initial.empty() ? nullptr : data.initial[s].data() + head * state_size);
      for (std::int64_t token = 0; token < data.lengths[s]; ++token) {
        const std::int64_t row = data.row_of(s) + token;
        oracle.add(task, row, head);
        for (std::size_t c = 0; c < delta_size(spec.value_dim); ++c) {
          const std::size_t at = delta_size((row * spec.value_heads + head) * spec.value_dim) + c;
          const auto ours = static_cast<double>(load_element(result.o.data() + at * size_of(spec.dtype), spec.dtype));
          const double bound = oracle.o_error()[c] + output_rounding(spec.dtype, oracle.o()[c]);
          if (!far(ours, oracle.o()[c], bound)) continue;
          return fmt::format("o of sequence {}, token {}, head {}, dim {} is {}, not {} ± {}", s, token, head, c, ours,
                             oracle.o()[c], bound);
        }
      }
      const std::vector<double> bounds = oracle.state_error();
      for (std::size_t i = 0; !result.finals.empty() && i < delta_size(state_size); ++i) {
        const auto ours = static_cast<double>(result.finals[s * data.state_size() + delta_size(head * state_size) + i]);
        if (!far(ours, oracle.state()[i], bounds[i % delta_size(spec.value_dim)])) continue;
        return fmt::format("element {} of the final state of sequence {}, head {} is {}, not {} ± {}", i, s, head, ours,
                           oracle.state()[i], bounds[i % delta_size(spec.value_dim)]);
      }
    }
  }
  return {};
}

}  // namespace ringattn::testing
