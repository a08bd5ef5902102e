// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ssm_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "kernels/rope/token_rotation.hpp"
#include "kernels/ssm/ssm_oracle.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/placed_rows.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

std::vector<std::byte> absolute(std::vector<std::byte> bytes, Dtype dtype) {
  for (std::size_t at = 0; at < bytes.size(); at += size_of(dtype)) {
    store_element(bytes.data() + at, dtype, std::fabs(load_element(bytes.data() + at, dtype)));
  }
  return bytes;
}

SsmData absolute(SsmData inputs) {
  for (auto* array : {&inputs.x, &inputs.b, &inputs.c}) *array = absolute(std::move(*array), inputs.spec.dtype);
  for (float& d : inputs.d) d = std::fabs(d);
  for (auto& state : inputs.initial) {
    for (float& s : state) s = std::fabs(s);
  }
  return inputs;
}

}  // namespace

std::int64_t SsmData::rows() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }

std::int64_t SsmData::row_of(std::size_t sequence) const {
  return std::accumulate(lengths.begin(), lengths.begin() + static_cast<std::ptrdiff_t>(sequence), std::int64_t{0});
}

std::size_t SsmData::state_floats() const { return size(std::int64_t{spec.heads} * spec.head_dim * spec.state_dim); }

void SsmData::set(std::vector<std::byte>& array, int heads, int dims, std::int64_t row, int head, int dim,
                  float value) const {
  const std::size_t at = size((row * heads + head) * dims + dim) * size_of(spec.dtype);
  store_element(array.data() + at, spec.dtype, value);
}

std::size_t SsmData::dt_row_bytes() const {
  return size(std::int64_t{spec.heads} * dt_rows(spec).dim) * size_of(dt_rows(spec).dtype);
}

void SsmData::set_dt(std::int64_t row, int head, float value) {
  const SsmDtRows rows = dt_rows(spec);
  for (int dim = 0; dim < rows.dim; ++dim) {
    const std::size_t at = size((row * spec.heads + head) * rows.dim + dim) * size_of(rows.dtype);
    store_element(dt.data() + at, rows.dtype, value);
  }
}

SsmTask SsmData::task() const {
  SsmTask task;
  const std::int64_t tokens = rows();
  task.x = dense_view(x.data(), spec.dtype, tokens, spec.heads, spec.head_dim);
  if (dt_rows(spec).dim > 0) {
    task.dt = dense_view(dt.data(), dt_rows(spec).dtype, tokens, spec.heads, dt_rows(spec).dim);
  }
  task.b = dense_view(b.data(), spec.dtype, tokens, spec.groups, spec.state_dim);
  task.c = dense_view(c.data(), spec.dtype, tokens, spec.groups, spec.state_dim);
  if (spec.gate) task.z = dense_view(z.data(), spec.dtype, tokens, spec.heads, spec.head_dim);
  if (!a.empty()) task.a = a.data();
  if (spec.skip) task.d = d.data();
  if (spec.dt_bias) task.dt_bias = dt_bias.data();
  return task;
}

SsmData random_ssm(const SsmSpec& spec, const std::vector<std::int64_t>& lengths, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  SsmData inputs{spec, lengths, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  const std::int64_t rows = inputs.rows();
  inputs.x = random_elements(rows * spec.heads * spec.head_dim, spec.dtype, random);
  inputs.b = random_elements(rows * spec.groups * spec.state_dim, spec.dtype, random);
  inputs.c = random_elements(rows * spec.groups * spec.state_dim, spec.dtype, random);
  if (spec.gate) inputs.z = random_elements(rows * spec.heads * spec.head_dim, spec.dtype, random);
  // Behind softplus about 0.1, without it as large. Log-decays are negative.
  const SsmDtRows dt = dt_rows(spec);
  inputs.dt = random_elements(rows * spec.heads * dt.dim, dt.dtype, random,
                              Normal(spec.dt_softplus ? -2.0F : 0.0F, spec.dt_softplus ? 1.0F : 0.1F));
  if (!spec.dt_softplus) {
    const float sign = spec.decay == SsmDecay::kDt ? 1.0F : -1.0F;
    for (std::size_t at = 0; at < inputs.dt.size(); at += size_of(dt.dtype)) {
      store_element(inputs.dt.data() + at, dt.dtype, sign * std::fabs(load_element(inputs.dt.data() + at, dt.dtype)));
    }
  }
  std::uniform_real_distribution<float> rate(0.05F, 4.0F);
  const std::int64_t rates = std::int64_t{spec.heads} * (spec.state_decays ? spec.state_dim : 1);
  for (std::int64_t i = 0; i < rates && spec.decay < SsmDecay::kToken; ++i) {
    inputs.a.push_back((spec.decay == SsmDecay::kHead ? -0.1F : -1.0F) * rate(random));
  }
  const Normal normal;
  for (int head = 0; head < spec.heads; ++head) {
    inputs.d.push_back(normal(random));
    inputs.dt_bias.push_back(0.3F * normal(random));
  }
  return inputs;
}

SsmData with_slow_decays(SsmData inputs) {
  for (float& a : inputs.a) a *= 1e-5F;
  if (inputs.spec.decay >= SsmDecay::kToken) {
    for (std::size_t at = 0; at < inputs.dt.size(); at += sizeof(float)) {
      store_element(inputs.dt.data() + at, Dtype::kF32, 1e-5F * load_element(inputs.dt.data() + at, Dtype::kF32));
    }
  }
  return inputs;
}

bool SsmResult::same_bits(const SsmResult& other) const {
  count_check();
  return y == other.y && finals.size() == other.finals.size() &&
         (finals.empty() || std::memcmp(finals.data(), other.finals.data(), finals.size() * sizeof(float)) == 0);
}

std::string first_difference(const SsmData& inputs, const SsmResult& result, const SsmResult& expected) {
  const SsmSpec& spec = inputs.spec;
  if (result.same_bits(expected)) return {};
  const std::size_t width = size(std::int64_t{spec.heads} * spec.head_dim);
  for (std::size_t i = 0; i < expected.y.size() / size_of(spec.dtype); ++i) {
    const std::size_t at = i * size_of(spec.dtype);
    if (std::memcmp(result.y.data() + at, expected.y.data() + at, size_of(spec.dtype)) == 0) continue;
    return fmt::format("row {}, head {}, dim {} of y is {}, not {}", i / width, i % width / size(spec.head_dim),
                       i % size(spec.head_dim), load_element(result.y.data() + at, spec.dtype),
                       load_element(expected.y.data() + at, spec.dtype));
  }
  for (std::size_t i = 0; i < expected.finals.size(); ++i) {
    if (std::memcmp(&result.finals[i], &expected.finals[i], sizeof(float)) == 0) continue;
    return fmt::format("element {} of final state {} is {}, not {}", i % inputs.state_floats(),
                       i / inputs.state_floats(), result.finals[i], expected.finals[i]);
  }
  return "the results differ in size";
}

SsmData rotated(SsmData inputs) {
  const SsmSpec& spec = inputs.spec;
  TokenRotation rotation(row_rotation(*inputs.rope, inputs.rope->frequencies.data()));
  for (std::int64_t row = 0; row < inputs.rows(); ++row) {
    rotation.move_to(inputs.positions[size(row)]);
    for (int group = 0; group < spec.groups; ++group) {
      const std::size_t at = size((row * spec.groups + group) * spec.state_dim) * size_of(spec.dtype);
      for (auto* const rows : {&inputs.b, &inputs.c}) rotation.rotate(rows->data() + at, rows->data() + at);
    }
  }
  inputs.rope.reset();
  inputs.positions.clear();
  return inputs;
}

namespace {

// Angles of rows at these positions, as SsmRotation has them.
DeviceArray angles_of(Backend& backend, const SsmRow& row, const SsmData& inputs,
                      const std::vector<std::int64_t>& positions) {
  if (!inputs.rope) return uploaded(backend, {});
  const RopeSpec spec = angle_spec(*inputs.rope);
  const auto rows = static_cast<std::int64_t>(positions.size());
  DeviceArray angles = uploaded(backend, std::vector<float>(size(rows * spec.rotary_dim)));
  DeviceArray places(backend, positions.size() * sizeof(std::int64_t));
  const auto* const bytes = reinterpret_cast<const std::byte*>(positions.data());
  places.write({bytes, bytes + positions.size() * sizeof(std::int64_t)});
  const DeviceArray basis = uploaded(backend, angle_basis(*inputs.rope));
  const MutableTensorView y = dense_view(static_cast<void*>(angles.data()), Dtype::kF32, rows, 1, spec.rotary_dim);
  TensorView x = y;
  x.data = basis.data();
  x.token_stride = 0;
  const RopeTensor tensors[] = {{x, y}};
  const auto rope = choose_kernel(spec, {std::string(row.backend), "auto"}).row->make_kernel(spec, backend);
  rope->rotate({{places.data(), true}, tensors}, backend.stream(), {});
  backend.synchronize(backend.stream(), Deadline::after(600.0), {});
  return angles;
}

SsmRotation rotation_of(const SsmData& inputs, const DeviceArray& angles, std::int64_t first_row) {
  if (!inputs.rope) return {};
  return {&*inputs.rope, angles.floats() + first_row * inputs.rope->rotary_dim};
}

}  // namespace

SsmResult run_ssm(const SsmRow& row, const SsmData& inputs, const SsmArrangement& arrangement) {
  const SsmSpec& spec = inputs.spec;
  const auto backend = row.make_backend({arrangement.threads, 0});
  const auto kernel = row.make_kernel(spec, *backend);
  const std::int64_t rows = inputs.rows();
  const std::size_t sequences = inputs.lengths.size();

  // Where each sequence begins, and where each packed row lies.
  std::vector<std::int64_t> begins(sequences);
  std::int64_t next = 0;
  for (std::size_t i = 0; i < sequences; ++i) {
    const std::size_t s = arrangement.strided ? sequences - 1 - i : i;
    begins[s] = next;
    next += inputs.lengths[s];
  }
  std::vector<std::int64_t> order;
  for (std::size_t s = 0; s < sequences; ++s) {
    for (std::int64_t t = 0; t < inputs.lengths[s]; ++t) order.push_back(begins[s] + t);
  }

  const auto place_as = [&](Dtype dtype, const std::vector<std::byte>& packed, int heads, int dims) {
    PlacedRows placed(*backend, dtype, rows, heads, dims, arrangement.strided, arrangement.unaligned);
    placed.write(packed, order);
    return placed;
  };
  const auto place = [&](const std::vector<std::byte>& packed, int heads, int dims) {
    return place_as(spec.dtype, packed, heads, dims);
  };
  const PlacedRows x = place(inputs.x, spec.heads, spec.head_dim);
  const PlacedRows dt = place_as(dt_rows(spec).dtype, inputs.dt, spec.heads, std::max(1, dt_rows(spec).dim));
  const PlacedRows b = place(inputs.b, spec.groups, spec.state_dim);
  const PlacedRows c = place(inputs.c, spec.groups, spec.state_dim);
  const PlacedRows z = place(inputs.z, spec.heads, spec.head_dim);
  const PlacedRows y = place({}, spec.heads, spec.head_dim);
  const auto upload = [&](const std::vector<float>& values) { return uploaded(*backend, values); };
  const DeviceArray a = upload(inputs.a);
  const DeviceArray d = upload(inputs.d);
  const DeviceArray bias = upload(inputs.dt_bias);
  std::vector<float> all_initial;
  for (const auto& state : inputs.initial) all_initial.insert(all_initial.end(), state.begin(), state.end());
  const DeviceArray initial = upload(all_initial);
  const std::size_t state = inputs.state_floats();

  std::vector<SsmRun> runs;
  for (std::size_t s = 0; s < sequences; ++s) {
    const std::int64_t length = inputs.lengths[s];
    const std::int64_t each = arrangement.cut ? kSuperSegmentTokens : std::max<std::int64_t>(1, length);
    for (std::int64_t begin = 0; begin < length; begin += each) {
      runs.push_back(
          {begin, std::min(each, length - begin), begins[s] + begin, nullptr, nullptr, static_cast<int>(begin / each)});
    }
  }
  const DeviceArray states(*backend, std::max<std::size_t>(1, runs.size() * state) * sizeof(float));
  std::vector<std::size_t> last(sequences, runs.size());  // run of each sequence
  int steps = 1;
  std::size_t sequence = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (i > 0 && runs[i].begin == 0) ++sequence;
    while (inputs.lengths[sequence] == 0) ++sequence;
    runs[i].final = states.floats() + i * state;
    if (runs[i].begin > 0) {
      runs[i].initial = runs[i - 1].final;
    } else if (!inputs.initial.empty()) {
      runs[i].initial = initial.floats() + sequence * state;
    }
    last[sequence] = i;
    steps = std::max(steps, runs[i].step + 1);
  }

  SsmTask task;
  task.x = x.view();
  if (dt_rows(spec).dim > 0) task.dt = dt.view();
  task.b = b.view();
  task.c = c.view();
  if (spec.gate) task.z = z.view();
  if (!inputs.a.empty()) task.a = a.floats();
  if (spec.skip) task.d = d.floats();
  if (spec.dt_bias) task.dt_bias = bias.floats();
  std::vector<std::int64_t> positions(inputs.positions.size());
  for (std::size_t i = 0; i < positions.size(); ++i) positions[size(order[i])] = inputs.positions[i];
  const DeviceArray angles = angles_of(*backend, row, inputs, positions);
  task.rotation = rotation_of(inputs, angles, 0);
  task.runs = runs;
  task.y = y.view();
  // Leaves NaN where the scratch memory is likely to lie.
  static_cast<void>(DeviceArray(*backend, std::max<std::size_t>(1, kernel->scratch_bytes(limits_of(runs)))));
  kernel->reserve(limits_of(runs));
  const Stream stream = backend->stream();
  const int each = arrangement.heads_at_once > 0 ? arrangement.heads_at_once * kernel->heads_together() : spec.heads;
  std::vector<HeadRange> ranges;
  for (int head = 0; head < spec.heads; head += each) ranges.push_back({head, std::min(each, spec.heads - head)});
  // Ranges are at stages of their own, as where several ranks scan.
  for (const HeadRange& heads : ranges) kernel->accumulate_states(task, heads, stream, {});
  for (const HeadRange& heads : ranges) {
    for (int step = 0; step < steps; ++step) kernel->carry(task, heads, step, stream);
    kernel->finish(task, heads, stream, {});
  }
  backend->synchronize(stream, Deadline::after(600.0), {});

  SsmResult result;
  result.y = y.read(order);
  const std::vector<float> all = states.read_floats();
  for (std::size_t s = 0; s < sequences; ++s) {
    if (last[s] == runs.size()) {  // an empty sequence, which no kernel sees: its state passes through
      const std::vector<float> passed = inputs.initial.empty() ? std::vector<float>(state) : inputs.initial[s];
      result.finals.insert(result.finals.end(), passed.begin(), passed.end());
      continue;
    }
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(last[s] * state);
    result.finals.insert(result.finals.end(), from, from + static_cast<std::ptrdiff_t>(state));
  }
  return result;
}

SsmResult update_with(const SsmRow& row, const SsmData& inputs, int threads, const std::vector<std::int32_t>& slots,
                      bool unaligned) {
  const SsmSpec& spec = inputs.spec;
  const auto backend = row.make_backend({threads, 0});
  const auto kernel = row.make_kernel(spec, *backend);
  const auto sequences = static_cast<std::int64_t>(inputs.lengths.size());
  const std::int64_t length = inputs.lengths.front();
  // All rows stand in the memory of the kernel; a step is every length-th of them.
  std::vector<std::int64_t> order(size(inputs.rows()));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const auto place_as = [&](Dtype dtype, const std::vector<std::byte>& packed, int heads, int dims) {
    PlacedRows placed(*backend, dtype, inputs.rows(), heads, dims, false, unaligned);
    placed.write(packed, order);
    return placed;
  };
  const auto place = [&](const std::vector<std::byte>& packed, int heads, int dims) {
    return place_as(spec.dtype, packed, heads, dims);
  };
  const PlacedRows x = place(inputs.x, spec.heads, spec.head_dim);
  const PlacedRows dt = place_as(dt_rows(spec).dtype, inputs.dt, spec.heads, std::max(1, dt_rows(spec).dim));
  const PlacedRows b = place(inputs.b, spec.groups, spec.state_dim);
  const PlacedRows c = place(inputs.c, spec.groups, spec.state_dim);
  const PlacedRows z = place(inputs.z, spec.heads, spec.head_dim);
  const PlacedRows y = place({}, spec.heads, spec.head_dim);
  const auto upload = [&](const std::vector<float>& values) { return uploaded(*backend, values); };
  const DeviceArray a = upload(inputs.a);
  const DeviceArray d = upload(inputs.d);
  const DeviceArray bias = upload(inputs.dt_bias);
  const std::int64_t all = slots.empty() ? sequences : *std::ranges::max_element(slots) + 1;
  std::vector<float> initial(size(all) * inputs.state_floats(), std::numeric_limits<float>::quiet_NaN());
  for (std::size_t s = 0; s < size(sequences); ++s) {
    const std::int64_t slot = slots.empty() ? static_cast<std::int64_t>(s) : slots[s];
    if (slot < 0) continue;
    const auto at = initial.begin() + static_cast<std::ptrdiff_t>(size(slot) * inputs.state_floats());
    std::fill_n(at, inputs.state_floats(), 0.0F);
    if (!inputs.initial.empty()) std::ranges::copy(inputs.initial[s], at);
  }
  const DeviceArray states = upload(initial);
  DeviceArray slot_table(*backend, std::max<std::size_t>(1, slots.size() * sizeof(std::int32_t)));
  const auto* const slot_bytes = reinterpret_cast<const std::byte*>(slots.data());
  if (!slots.empty()) slot_table.write({slot_bytes, slot_bytes + slots.size() * sizeof(std::int32_t)});
  std::vector<std::int64_t> positions(inputs.positions.size());  // step by step
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const std::size_t lanes = inputs.lengths.size();
    positions[i] = inputs.positions[i % lanes * size(length) + i / lanes];
  }
  const DeviceArray angles = angles_of(*backend, row, inputs, positions);
  for (std::int64_t token = 0; token < length; ++token) {
    const auto step = [&](const PlacedRows& placed) {
      MutableTensorView view = placed.view();
      view.data = view.at(token, 0);
      view.tokens = sequences;
      view.token_stride *= length;
      return view;
    };
    SsmUpdate update;
    update.x = step(x);
    if (dt_rows(spec).dim > 0) update.dt = step(dt);
    update.b = step(b);
    update.c = step(c);
    if (spec.gate) update.z = step(z);
    if (!inputs.a.empty()) update.a = a.floats();
    if (spec.skip) update.d = d.floats();
    if (spec.dt_bias) update.dt_bias = bias.floats();
    update.rotation = rotation_of(inputs, angles, token * sequences);
    update.states = states.floats();
    update.y = step(y);
    if (!slots.empty()) update.slots = reinterpret_cast<const std::int32_t*>(slot_table.data());
    kernel->update(update, backend->stream());
  }
  backend->synchronize(backend->stream(), Deadline::after(600.0), {});
  return {y.read(order), states.read_floats()};
}

std::string check_ssm_accuracy(const SsmData& inputs, const SsmResult& result, const SsmTolerance& tolerance) {
  const SsmSpec& spec = inputs.spec;
  const SsmData magnitudes = absolute(inputs);
  const SsmTask task = inputs.task();
  const SsmTask magnitude_task = magnitudes.task();
  const std::size_t width = size(std::int64_t{spec.heads} * spec.head_dim);
  std::size_t state_at = 0;
  for (std::size_t s = 0; s < inputs.lengths.size(); ++s) {
    if (inputs.lengths[s] == 0) {
      state_at += inputs.state_floats();
      continue;
    }
    count_check();
    const auto states_of = [s](const SsmData& of) {
      return of.initial.empty() ? std::vector<double>()
                                : std::vector<double>(of.initial[s].begin(), of.initial[s].end());
    };
    std::vector<double> final = states_of(inputs);
    std::vector<double> final_magnitude = states_of(magnitudes);
    const std::int64_t row = inputs.row_of(s);
    const std::vector<double> y = oracle_ssm(spec, task, row, inputs.lengths[s], final);
    const std::vector<double> magnitude = oracle_ssm(spec, magnitude_task, row, inputs.lengths[s], final_magnitude);
    for (std::size_t i = 0; i < y.size(); ++i) {
      const std::size_t at = (size(row) * width + i) * size_of(spec.dtype);
      const auto ours = static_cast<double>(load_element(result.y.data() + at, spec.dtype));
      if (std::isnan(ours) && std::isnan(y[i])) continue;
      const double bound = tolerance.rows * std::fabs(magnitude[i]) + output_rounding(spec.dtype, y[i]) + 1e-30;
      if (std::fabs(ours - y[i]) <= bound) continue;
      return fmt::format("y of sequence {}, token {}, head {}, dim {} is {}, not {} ± {}", s, i / width,
                         i % width / size(spec.head_dim), i % size(spec.head_dim), ours, y[i], bound);
    }
    for (std::size_t i = 0; i < final.size(); ++i) {
      const auto ours = static_cast<double>(result.finals[state_at + i]);
      if (std::isnan(ours) && std::isnan(final[i])) continue;
      const double bound = tolerance.states * std::fabs(final_magnitude[i]) + 1e-30;
      if (std::fabs(ours - final[i]) <= bound) continue;
      return fmt::format("element {} of the final state of sequence {} is {}, not {} ± {}", i, s, ours, final[i],
                         bound);
    }
    state_at += final.size();
  }
  return {};
}

}  // namespace ringattn::testing
