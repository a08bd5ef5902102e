// SPDX-License-Identifier: Apache-2.0
// Measures gated delta rule kernels and their updates on a GPU. Prints one JSON line per shape (schema
// "ringattn.gated_delta/1"): milliseconds of the whole and of its stages, and the bytes to move at least, next to the
// rate of a copy in the same run.
//   gated_delta_gpu_bench                                  every shape
//   gated_delta_gpu_bench gdn-16-64-32k gdn-2-8-32k        some of them
//   gated_delta_gpu_bench --git 0123abcd gdn-16-64-32k     names the commit, where the build doesn't
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/build.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "bench/arguments.hpp"
#include "bench/quantile.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn {
namespace {

constexpr int kRounds = 21;
constexpr int kWarmRounds = 3;
constexpr std::int64_t kCopyBytes = std::int64_t{1} << 30;

struct DeltaShape {
  std::string_view name;
  std::int64_t sequences, tokens;  // tokens of each
  int key_heads, value_heads;
  bool states = false;  // from initial states to final ones
  bool update = false;  // one token of each sequence
  bool key_decays = false;
};

// Heads of Qwen3.5 (16 key heads), whole and by tensor-parallel width 8, and of KDA.
constexpr DeltaShape kShapes[] = {
    {"gdn-16-64-32k", 1, 32'768, 16, 64},
    {"gdn-16-64-8k", 1, 8192, 16, 64},
    {"gdn-16-64-4x8k", 4, 8192, 16, 64},
    {"gdn-16-64-32k-states", 1, 32'768, 16, 64, true},
    {"gdn-16-32-32k", 1, 32'768, 16, 32},
    {"gdn-2-8-32k", 1, 32'768, 2, 8},
    {"gdn-2-8-8k", 1, 8192, 2, 8},
    {"gdn-16-64-256k", 1, 262'144, 16, 64},
    {"gdn-update-16-64-128", 128, 1, 16, 64, true, true},
    {"kda-64-8k", 1, 8192, 64, 64, false, false, true},
    {"kda-16-8k", 1, 8192, 16, 16, false, false, true},
};

class DeltaBench {
 public:
  DeltaBench(Backend& backend, std::string git) : backend_(backend), git_(std::move(git)) {
    const Buffer from = backend.allocate(static_cast<std::size_t>(kCopyBytes));
    const Buffer to = backend.allocate(static_cast<std::size_t>(kCopyBytes));
    backend.fill_bytes(from.data(), std::byte{0}, static_cast<std::size_t>(kCopyBytes), backend.stream());
    const Times times =
        time({{"copy", [&] {
                 backend.copy_rows(to.data(), kCopyBytes, from.data(), kCopyBytes, kCopyBytes, 1, backend.stream());
               }}});
    copy_rate_ = 2.0 * static_cast<double>(kCopyBytes) / quantile(times.whole, 0.5);
  }

  void measure(const DeltaShape& shape) {
    memory_.clear();
    moved_ = 0;
    GatedDeltaSpec spec;
    spec.key_heads = shape.key_heads;
    spec.value_heads = shape.value_heads;
    spec.key_decays = shape.key_decays;
    spec.qk_l2norm = true;  // as in models; keys of another length than 1 would grow without bound
    const auto choice = choose_kernel(spec, {"cuda", "auto"});
    const auto kernel = choice.row->make_kernel(spec, backend_);
    const Stream stream = backend_.stream();
    if (shape.update) {
      GatedDeltaUpdate update;
      fill(spec, shape.sequences, update);
      update.states = floats(shape.sequences * state_floats(spec), -0.1F, 0.1F);
      moved_ += shape.sequences * state_floats(spec) * 8;  // read and written
      print(shape, choice.row->name, spec, time({{"update", [&] { kernel->update(update, stream); }}}));
      return;
    }
    GatedDeltaTask task;
    fill(spec, shape.sequences * shape.tokens, task);
    std::vector<GatedDeltaRun> runs;
    for (std::int64_t s = 0; s < shape.sequences; ++s) {
      GatedDeltaRun run{0, shape.tokens, s * shape.tokens, nullptr, nullptr, 0};
      if (shape.states) {
        run.initial = floats(state_floats(spec), -0.1F, 0.1F);
        run.final = floats(state_floats(spec), 0.0F, 1.0F);
        moved_ += state_floats(spec) * 8;
      }
      runs.push_back(run);
    }
    task.runs = runs;
    kernel->reserve(limits_of(runs));
    const HeadRange heads{0, spec.value_heads};
    print(shape, choice.row->name, spec,
          time({{"accumulate_states", [&] { kernel->accumulate_states(task, heads, stream, {}); }},
                {"carry", [&] { kernel->carry(task, heads, 0, stream); }},
                {"finish", [&] { kernel->finish(task, heads, stream, {}); }}}));
  }

 private:
  using Stages = std::vector<std::pair<std::string, std::function<void()>>>;
  struct Times {
    std::vector<double> whole;                           // seconds, sorted
    std::vector<std::pair<std::string, double>> stages;  // medians
  };

  Times time(const Stages& stages) {
    Times times;
    std::vector<std::vector<double>> parts(stages.size());
    const auto marks = backend_.make_events(stages.size() + 1, true);
    for (int round = 0; round < kWarmRounds + kRounds; ++round) {
      marks->record(0, backend_.stream());
      for (std::size_t i = 0; i < stages.size(); ++i) {
        stages[i].second();
        marks->record(i + 1, backend_.stream());
      }
      marks->synchronize(stages.size(), Deadline::after(600.0), {});
      if (round < kWarmRounds) continue;
      times.whole.push_back(marks->elapsed(0, stages.size()));
      for (std::size_t i = 0; i < stages.size(); ++i) parts[i].push_back(marks->elapsed(i, i + 1));
    }
    std::sort(times.whole.begin(), times.whole.end());
    for (std::size_t i = 0; i < stages.size(); ++i) {
      std::sort(parts[i].begin(), parts[i].end());
      times.stages.emplace_back(stages[i].first, quantile(parts[i], 0.5));
    }
    return times;
  }

  MutableTensorView rows(SyntheticTensor tensor, std::int64_t tokens, int heads, int dim) {
    const std::int64_t bytes = tokens * heads * dim * 2;
    memory_.push_back(backend_.allocate(static_cast<std::size_t>(bytes)));
    moved_ += bytes;
    const MutableTensorView view =
        dense_view(static_cast<void*>(memory_.back().data()), Dtype::kBf16, tokens, heads, dim);
    const PackedRun all{0, tokens};
    backend_.fill_synthetic(memory_.size(), tensor, {&all, 1}, view, backend_.stream());
    return view;
  }
  // Numbers repeat after a million: drawing more takes longer than to measure.
  float* floats(std::int64_t count, float least, float most) {
    constexpr std::int64_t kDrawn = std::int64_t{1} << 20;
    std::mt19937_64 random(static_cast<std::uint64_t>(count));
    std::uniform_real_distribution<float> uniform(least, most);
    std::vector<float> values(static_cast<std::size_t>(std::min(count, kDrawn)));
    for (float& value : values) value = uniform(random);
    memory_.push_back(backend_.allocate(static_cast<std::size_t>(count) * sizeof(float)));
    for (std::int64_t at = 0; at < count; at += kDrawn) {
      const auto bytes = static_cast<std::int64_t>(std::min(count - at, kDrawn) * std::int64_t{sizeof(float)});
      backend_.copy_rows(memory_.back().data() + at * std::int64_t{sizeof(float)}, bytes, values.data(), bytes, bytes,
                         1, backend_.stream());
    }
    backend_.synchronize(backend_.stream(), Deadline::after(600.0), {});
    return reinterpret_cast<float*>(memory_.back().data());
  }

  // Tensors of a task or an update.
  template <class Tensors>
  void fill(const GatedDeltaSpec& spec, std::int64_t tokens, Tensors& tensors) {
    tensors.q = rows(SyntheticTensor::kQ, tokens, spec.key_heads, spec.key_dim);
    tensors.k = rows(SyntheticTensor::kK, tokens, spec.key_heads, spec.key_dim);
    tensors.v = rows(SyntheticTensor::kV, tokens, spec.value_heads, spec.value_dim);
    tensors.o = rows(SyntheticTensor::kV, tokens, spec.value_heads, spec.value_dim);
    const auto gates = [&](int dim, float least, float most) {
      const std::int64_t count = tokens * spec.value_heads * dim;
      moved_ += count * std::int64_t{sizeof(float)};
      return dense_view(static_cast<const void*>(floats(count, least, most)), Dtype::kF32, tokens, spec.value_heads,
                        dim);
    };
    tensors.log_decay = gates(spec.decay_dim(), -0.1F, 0.0F);
    tensors.beta = gates(1, 0.0F, 1.0F);
  }

  void print(const DeltaShape& shape, std::string_view kernel, const GatedDeltaSpec& spec, const Times& times) const {
    const double median = quantile(times.whole, 0.5);
    JsonWriter line(false);
    line.begin_object().member("schema", "ringattn.gated_delta/1");
    line.key("tool").begin_object().member("name", "ringattn").member("version", version()).end_object();
    line.member("git", git_);
    line.key("devices").begin_array().value(backend_.identity()).end_array();
    line.member("kernel", kernel).member("shape", shape.name).member("job", describe(spec));
    line.member("sequences", shape.sequences).member("tokens", shape.tokens).member("samples", kRounds);
    line.member("ms", median * 1e3).member("p10_ms", quantile(times.whole, 0.1) * 1e3);
    line.member("p90_ms", quantile(times.whole, 0.9) * 1e3).key("stages_ms").begin_object();
    for (const auto& [name, seconds] : times.stages) line.member(name, seconds * 1e3);
    line.end_object().member("bytes", moved_);
    line.member("gb_per_s", static_cast<double>(moved_) / median * 1e-9).member("copy_gb_per_s", copy_rate_ * 1e-9);
    fmt::print("{}\n", line.end_object().text());
    std::fflush(stdout);
  }

  Backend& backend_;
  std::string git_;
  double copy_rate_ = 0.0;  // bytes read and written, a second
  std::vector<Buffer> memory_;
  std::int64_t moved_ = 0;  // bytes that a shape has to read or write at least
};

int run(std::vector<std::string_view> names) {
  std::string git = std::string(git_revision()) + (git_dirty() ? "-dirty" : "");
  if (names.size() >= 2 && names[0] == "--git") {
    git = names[1];
    names.erase(names.begin(), names.begin() + 2);
  }
  for (const std::string_view name : names) {
    if (std::any_of(std::begin(kShapes), std::end(kShapes), [&](const DeltaShape& s) { return s.name == name; })) {
      continue;
    }
    std::vector<std::string_view> known;
    for (const DeltaShape& shape : kShapes) known.push_back(shape.name);
    fmt::print(stderr, "gated_delta_gpu_bench does not know \"{}\". It measures {}.\n", name, fmt::join(known, ", "));
    return 2;
  }
  GatedDeltaSpec spec;
  const auto backend = choose_kernel(spec, {"cuda", "auto"}).row->make_backend({1, 0});
  DeltaBench bench(*backend, git);
  for (const DeltaShape& shape : kShapes) {
    if (names.empty() || std::find(names.begin(), names.end(), shape.name) != names.end()) bench.measure(shape);
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) { return ringattn::run_main(ringattn::run, count, words); }
