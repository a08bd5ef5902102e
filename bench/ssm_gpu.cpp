// SPDX-License-Identifier: Apache-2.0
// Measures SSM kernels, their gradients, their updates and the causal convolution before them on a GPU. Prints one JSON
// line per shape (schema "ringattn.ssm/1"): milliseconds of the whole and of its stages, the minimum number of bytes to
// move, and their rate next to that of a copy in the same run.
//   ssm_gpu_bench                                   every shape
//   ssm_gpu_bench ssd-131k update-128               some of them
//   ssm_gpu_bench --kernel sm80_ssd ssd-131k       by a kernel that isn't the first choice
//   ssm_gpu_bench --git 0123abcd gla-4k            names the commit, where the build doesn't; before --kernel
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/build.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "bench/arguments.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {
namespace {

constexpr int kRounds = 11;
constexpr int kWarmRounds = 3;
constexpr std::int64_t kCopyBytes = std::int64_t{1} << 30;

enum class Kind { kSsd, kSsdBackward, kUpdate, kConv1d };

struct Shape {
  std::string_view name;
  Kind kind;
  std::int64_t sequences;
  std::int64_t tokens;  // of each
  int heads, head_dim, state_dim;
  bool state_decays;
  bool gate = false;
  SsmDecay decay = SsmDecay::kDt;  // others: linear attention, whose heads have their own k and q
};

constexpr Shape kShapes[] = {
    {"ssd-16k", Kind::kSsd, 1, 16'384, 80, 64, 128, false},
    {"ssd-8x2k", Kind::kSsd, 8, 2048, 80, 64, 128, false},
    {"ssd-131k", Kind::kSsd, 1, 131'072, 80, 64, 128, false},
    {"ssd-2m", Kind::kSsd, 1, 2'097'152, 80, 64, 128, false},
    {"ssd-gated-131k", Kind::kSsd, 1, 131'072, 80, 64, 128, false, true},
    {"ssd-backward-16k", Kind::kSsdBackward, 1, 16'384, 80, 64, 128, false},
    {"ssd-backward-8x2k", Kind::kSsdBackward, 8, 2048, 80, 64, 128, false},
    {"ssd-backward-131k", Kind::kSsdBackward, 1, 131'072, 80, 64, 128, false},
    {"ssd-backward-gated-131k", Kind::kSsdBackward, 1, 131'072, 80, 64, 128, false, true},
    {"lightning-4k", Kind::kSsd, 1, 4096, 64, 128, 128, false, false, SsmDecay::kHead},
    {"lightning-131k", Kind::kSsd, 1, 131'072, 64, 128, 128, false, false, SsmDecay::kHead},
    {"token-decay-4k", Kind::kSsd, 1, 4096, 64, 128, 128, false, false, SsmDecay::kToken},
    {"token-decay-32k", Kind::kSsd, 1, 32'768, 64, 128, 128, false, false, SsmDecay::kToken},
    {"gla-4k", Kind::kSsd, 1, 4096, 64, 128, 128, false, false, SsmDecay::kDim},
    {"gla-32k", Kind::kSsd, 1, 32'768, 64, 128, 128, false, false, SsmDecay::kDim},
    {"gla-131k", Kind::kSsd, 1, 131'072, 64, 128, 128, false, false, SsmDecay::kDim},
    {"selective-131k", Kind::kSsd, 1, 131'072, 5120, 1, 16, true, true},
    {"update-128", Kind::kUpdate, 128, 1, 80, 64, 128, false},
    {"selective-update-128", Kind::kUpdate, 128, 1, 5120, 1, 16, true, true},
    {"lightning-update-128", Kind::kUpdate, 128, 1, 64, 128, 128, false, false, SsmDecay::kHead},
    {"gla-update-128", Kind::kUpdate, 128, 1, 64, 128, 128, false, false, SsmDecay::kDim},
    {"conv1d-131k", Kind::kConv1d, 1, 131'072, 1, 8448, 0, false},
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench(Backend& backend, std::string_view kernel, std::string git)
      : backend_(backend), kernel_(kernel), git_(std::move(git)) {
    const Buffer from = backend.allocate(static_cast<std::size_t>(kCopyBytes));
    const Buffer to = backend.allocate(static_cast<std::size_t>(kCopyBytes));
    backend.fill_bytes(from.data(), std::byte{0}, static_cast<std::size_t>(kCopyBytes), backend.stream());
    const Times times =
        time({{"copy", [&] {
                 backend.copy_rows(to.data(), kCopyBytes, from.data(), kCopyBytes, kCopyBytes, 1, backend.stream());
               }}});
    copy_rate_ = 2.0 * static_cast<double>(kCopyBytes) / times.whole;
  }

  void measure(const Shape& shape) {
    memory_.clear();
    switch (shape.kind) {
      case Kind::kSsd:
        return scan(shape);
      case Kind::kSsdBackward:
        return scan_backward(shape);
      case Kind::kUpdate:
        return update(shape);
      case Kind::kConv1d:
        return conv1d(shape);
    }
  }

 private:
  using Stages = std::vector<std::pair<std::string, std::function<void()>>>;
  struct Times {
    double whole = 0.0;  // seconds
    std::vector<std::pair<std::string, double>> stages;
  };

  // Medians over rounds of all stages, each timed in sequence.
  Times time(const Stages& stages) {
    std::vector<double> whole;
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
      whole.push_back(marks->elapsed(0, stages.size()));
      for (std::size_t i = 0; i < stages.size(); ++i) parts[i].push_back(marks->elapsed(i, i + 1));
    }
    Times times{median(whole), {}};
    for (std::size_t i = 0; i < stages.size(); ++i) times.stages.emplace_back(stages[i].first, median(parts[i]));
    return times;
  }

  MutableTensorView rows(SyntheticTensor tensor, std::int64_t tokens, int heads, int dim, Dtype dtype = Dtype::kBf16) {
    const std::int64_t bytes = tokens * heads * dim * static_cast<std::int64_t>(size_of(dtype));
    memory_.push_back(backend_.allocate(static_cast<std::size_t>(bytes)));
    moved_ += bytes;
    const MutableTensorView view = dense_view(static_cast<void*>(memory_.back().data()), dtype, tokens, heads, dim);
    const PackedRun all{0, tokens};
    backend_.fill_synthetic(memory_.size(), tensor, {&all, 1}, view, backend_.stream());
    return view;
  }
  const float* numbers(std::size_t count, float least, float most) {
    std::mt19937_64 random(count);
    std::uniform_real_distribution<float> uniform(least, most);
    std::vector<float> values(count);
    for (float& value : values) value = uniform(random);
    const auto bytes = static_cast<std::int64_t>(count * sizeof(float));
    memory_.push_back(backend_.allocate(static_cast<std::size_t>(bytes)));
    backend_.copy_rows(memory_.back().data(), bytes, values.data(), bytes, bytes, 1, backend_.stream());
    backend_.synchronize(backend_.stream(), Deadline::after(600.0), {});
    return reinterpret_cast<const float*>(memory_.back().data());
  }

  static SsmSpec spec_of(const Shape& shape) {
    SsmSpec spec;
    spec.heads = shape.heads;
    spec.head_dim = shape.head_dim;
    spec.state_dim = shape.state_dim;
    spec.state_decays = shape.state_decays;
    if (shape.decay != SsmDecay::kDt) {
      spec.decay = shape.decay;
      spec.groups = shape.heads;
      spec.scale = 0.0884F;
      return spec;
    }
    spec.skip = true;
    spec.gate = shape.gate;  // Mamba-2 mostly normalises before its gate, and then the SSM layer has no gate
    spec.dt_bias = true;
    spec.dt_softplus = true;
    return spec;
  }

  // Tensors of a SsmTask or a SsmUpdate.
  template <class Tensors>
  void fill(const SsmSpec& spec, std::int64_t tokens, Tensors& tensors) {
    moved_ = 0;
    const auto heads = static_cast<std::size_t>(spec.heads);
    const auto rates = heads * static_cast<std::size_t>(spec.state_decays ? spec.state_dim : 1);
    tensors.x = rows(SyntheticTensor::kV, tokens, spec.heads, spec.head_dim);
    // Log-decays of both signs cost the same time.
    if (const SsmDtRows dt = dt_rows(spec); dt.dim > 0) {
      tensors.dt = rows(SyntheticTensor::kQ, tokens, spec.heads, dt.dim, dt.dtype);
    }
    tensors.b = rows(SyntheticTensor::kK, tokens, spec.groups, spec.state_dim);
    tensors.c = rows(SyntheticTensor::kQ, tokens, spec.groups, spec.state_dim);
    if (spec.gate) tensors.z = rows(SyntheticTensor::kV, tokens, spec.heads, spec.head_dim);
    tensors.y = rows(SyntheticTensor::kV, tokens, spec.heads, spec.head_dim);
    if (spec.decay <= SsmDecay::kHead) tensors.a = numbers(rates, -4.0F, -0.5F);
    if (spec.skip) tensors.d = numbers(heads, -1.0F, 1.0F);
    if (spec.dt_bias) tensors.dt_bias = numbers(heads, -4.0F, -2.0F);
  }

  void scan(const Shape& shape) {
    const SsmSpec spec = spec_of(shape);
    const auto choice = choose_kernel(spec, {"cuda", kernel_});
    const auto kernel = choice.row->make_kernel(spec, backend_);
    SsmTask task;
    fill(spec, shape.sequences * shape.tokens, task);
    std::vector<SsmRun> runs;
    for (std::int64_t s = 0; s < shape.sequences; ++s) {
      runs.push_back({0, shape.tokens, s * shape.tokens, nullptr, nullptr, 0});
    }
    task.runs = runs;
    kernel->reserve(limits_of(runs));
    const HeadRange heads{0, spec.heads};
    const Stream stream = backend_.stream();
    print(shape, choice.row->name, describe(spec),
          time({{"fold", [&] { kernel->accumulate_states(task, heads, stream, {}); }},
                {"carry", [&] { kernel->carry(task, heads, 0, stream); }},
                {"finish", [&] { kernel->finish(task, heads, stream, {}); }}}));
  }

  // dy and the gradients are rows like those of x, dt, B, C and z.
  void scan_backward(const Shape& shape) {
    const SsdBackwardSpec spec{spec_of(shape), Dtype::kBf16};
    const SsmSpec& forward = spec.forward;
    const auto choice = choose_kernel(spec, {"cuda", kernel_});
    const auto kernel = choice.row->make_kernel(spec, backend_);
    const std::int64_t tokens = shape.sequences * shape.tokens;
    SsmTask inputs;
    fill(forward, tokens, inputs);
    SsdBackwardTask task;
    task.x = inputs.x;
    task.dt = inputs.dt;
    task.b = inputs.b;
    task.c = inputs.c;
    task.z = inputs.z;
    task.dy = inputs.y;
    task.a = inputs.a;
    task.d = inputs.d;
    task.dt_bias = inputs.dt_bias;
    task.dx = rows(SyntheticTensor::kV, tokens, forward.heads, forward.head_dim);
    task.ddt = rows(SyntheticTensor::kV, tokens, forward.heads, 1);
    task.db = rows(SyntheticTensor::kV, tokens, forward.groups, forward.state_dim);
    task.dc = rows(SyntheticTensor::kV, tokens, forward.groups, forward.state_dim);
    if (forward.gate) task.dz = rows(SyntheticTensor::kV, tokens, forward.heads, forward.head_dim);
    std::vector<SsdBackwardRun> runs(static_cast<std::size_t>(shape.sequences));
    for (std::int64_t s = 0; s < shape.sequences; ++s) {
      runs[static_cast<std::size_t>(s)].tokens = shape.tokens;
      runs[static_cast<std::size_t>(s)].row = s * shape.tokens;
    }
    task.runs = runs;
    const SsdBackwardLimits limits = limits_of(runs, tokens);
    const Buffer terms =
        backend_.allocate(static_cast<std::size_t>(limits.runs.segments * forward.heads) * sizeof(SsdTerms));
    task.terms = reinterpret_cast<SsdTerms*>(terms.data());
    kernel->reserve(limits);
    const HeadRange heads{0, forward.heads};
    const Stream stream = backend_.stream();
    print(shape, choice.row->name, describe(spec),
          time({{"states", [&] { kernel->accumulate_states(task, heads, stream, {}); }},
                {"gradients", [&] { kernel->accumulate_gradients(task, heads, stream, {}); }},
                {"carry",
                 [&] {
                   kernel->carry_states(task, heads, 0, stream);
                   kernel->carry_gradients(task, heads, 0, stream);
                 }},
                {"finish", [&] { kernel->finish(task, heads, stream, {}); }},
                {"sum_sets", [&] { kernel->sum_sets(task, stream, {}); }}}));
  }

  void update(const Shape& shape) {
    const SsmSpec spec = spec_of(shape);
    const auto choice = choose_kernel(spec, {"cuda", kernel_});
    const auto kernel = choice.row->make_kernel(spec, backend_);
    SsmUpdate update;
    fill(spec, shape.sequences, update);
    const std::int64_t floats = shape.sequences * spec.heads * spec.head_dim * spec.state_dim;
    memory_.push_back(backend_.allocate(static_cast<std::size_t>(floats) * sizeof(float)));
    backend_.fill_bytes(memory_.back().data(), std::byte{0}, static_cast<std::size_t>(floats) * sizeof(float),
                        backend_.stream());
    update.states = reinterpret_cast<float*>(memory_.back().data());
    moved_ += 2 * floats * static_cast<std::int64_t>(sizeof(float));
    print(shape, choice.row->name, describe(spec),
          time({{"update", [&] { kernel->update(update, backend_.stream()); }}}));
  }

  void conv1d(const Shape& shape) {
    const CausalConv1dSpec spec{Dtype::kBf16, shape.head_dim, 4, true, true};
    const auto choice = choose_kernel(spec, {"cuda", "auto"});
    const auto kernel = choice.row->make_kernel(spec, backend_);
    const auto channels = static_cast<std::size_t>(spec.channels);
    moved_ = 0;
    CausalConv1dTask task;
    task.x = rows(SyntheticTensor::kV, shape.sequences * shape.tokens, 1, spec.channels);
    task.y = rows(SyntheticTensor::kV, shape.sequences * shape.tokens, 1, spec.channels);
    task.weight = numbers(channels * 4, -1.0F, 1.0F);
    task.bias = numbers(channels, -1.0F, 1.0F);
    std::vector<CausalConv1dRun> runs;
    for (std::int64_t s = 0; s < shape.sequences; ++s) runs.push_back({s * shape.tokens, shape.tokens});
    task.runs = runs;
    print(shape, choice.row->name, describe(spec),
          time({{"convolve", [&] { kernel->convolve(task, backend_.stream(), {}); }}}));
  }

  void print(const Shape& shape, std::string_view kernel, const std::string& job, const Times& times) const {
    const double rate = static_cast<double>(moved_) / times.whole;
    JsonWriter line(false);
    line.begin_object().member("schema", "ringattn.ssm/1");
    line.key("tool").begin_object().member("name", "ringattn").member("version", version()).end_object();
    line.member("git", git_);
    line.key("devices").begin_array().value(backend_.identity()).end_array();
    line.member("kernel", kernel).member("shape", shape.name).member("job", job);
    line.member("sequences", shape.sequences).member("tokens", shape.tokens).member("samples", kRounds);
    line.member("ms", times.whole * 1e3).key("stages_ms").begin_object();
    for (const auto& [name, seconds] : times.stages) line.member(name, seconds * 1e3);
    line.end_object().member("bytes", moved_).member("gb_per_s", rate * 1e-9);
    line.member("copy_gb_per_s", copy_rate_ * 1e-9).member("share_of_copy", rate / copy_rate_);
    fmt::print("{}\n", line.end_object().text());
    std::fflush(stdout);
  }

  Backend& backend_;
  std::string kernel_;  // of SSM ops and updates
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
  std::string_view kernel = "auto";
  if (names.size() >= 2 && names[0] == "--kernel") {
    kernel = names[1];
    names.erase(names.begin(), names.begin() + 2);
  }
  for (const std::string_view name : names) {
    if (std::any_of(std::begin(kShapes), std::end(kShapes), [&](const Shape& shape) { return shape.name == name; })) {
      continue;
    }
    std::vector<std::string_view> known;
    for (const Shape& shape : kShapes) known.push_back(shape.name);
    fmt::print(stderr, "ssm_gpu_bench does not know \"{}\". It measures {}.\n", name, fmt::join(known, ", "));
    return 2;
  }
  const auto backend = kernel_table<SsmSpec>().front().make_backend({1, 0});
  Bench bench(*backend, kernel, git);
  for (const Shape& shape : kShapes) {
    if (names.empty() || std::find(names.begin(), names.end(), shape.name) != names.end()) bench.measure(shape);
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) { return ringattn::run_main(ringattn::run, count, words); }
