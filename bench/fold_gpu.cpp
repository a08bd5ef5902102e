// SPDX-License-Identifier: Apache-2.0
// Measures the fold kernels of the cuda backend alone, through FoldKernel: speed over shapes, the cost of state and of
// enqueueing, and the error of long sums. One JSON line a figure; TFLOP/s by the field's convention, 4 · pairs · heads
// · head_dim, causal half,
// a window as many as its reach. All repeats are enqueued before anything is waited for.
//   fold_gpu_bench speed|touched|state|host|bias|generator [kernel [head_dim [tokens]]]  (the last two: of speed)
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/registry.hpp"
#include "kernels/sm80/config.hpp"

namespace ringattn {
namespace {

using Clock = std::chrono::steady_clock;
const Deadline kPatience = Deadline::after(3600.0);

struct Device {
  explicit Device(const FoldRow& kernel_row) : row(kernel_row), backend(row.make_backend({1, 0})) {}

  void wait() { backend->synchronize(backend->mark(stream()), kPatience, {}); }
  Stream stream() const { return backend->stream(); }

  const FoldRow& row;
  std::unique_ptr<Backend> backend;
};

constexpr int kLeastSamples = 10;
constexpr int kMostSamples = 1000;
constexpr double kLeastMilliseconds = 500.0;

// Milliseconds of each repeat, ascending: ten, or what half a second holds.
std::vector<double> time_repeats(Device& device, const std::function<void()>& enqueue) {
  Backend& backend = *device.backend;
  const auto time = [&](int repeats) {
    std::vector<Mark> marks{backend.mark(device.stream())};
    for (int i = 0; i < repeats; ++i) {
      enqueue();
      marks.push_back(backend.mark(device.stream()));
    }
    backend.synchronize(marks.back(), kPatience, {});
    std::vector<double> milliseconds;
    for (std::size_t i = 1; i < marks.size(); ++i) {
      milliseconds.push_back(1e3 * backend.elapsed(marks[i - 1], marks[i]));
    }
    backend.forget_marks();
    std::sort(milliseconds.begin(), milliseconds.end());
    return milliseconds;
  };
  const double warm_up = time(2).front();
  return time(std::clamp(static_cast<int>(kLeastMilliseconds / warm_up), kLeastSamples, kMostSamples));
}

double median(const std::vector<double>& sorted) { return sorted[sorted.size() / 2]; }

struct Heads {
  int heads;
  int kv_heads;
  int head_dim;
  int head_dim_v;
};

FoldSpec spec_of(Dtype dtype, const Heads& heads, const Mask& mask) {
  FoldSpec spec;
  spec.dtype = dtype;
  spec.heads = heads.heads;
  spec.kv_heads = heads.kv_heads;
  spec.head_dim = heads.head_dim;
  spec.head_dim_v = heads.head_dim_v;
  spec.mask = mask;
  spec.softmax_scale = 1.0F / std::sqrt(static_cast<float>(heads.head_dim));
  return spec;
}

struct Lengths {
  std::int64_t queries;
  std::int64_t keys;
};

// Sequences in device memory, the queries at the end of the keys, and tasks over them.
class Batch {
 public:
  // `batch` sequences of the same lengths.
  Batch(Device& device, const FoldSpec& spec, std::int64_t batch, std::int64_t queries, std::int64_t keys)
      : Batch(device, spec, std::vector<Lengths>(static_cast<std::size_t>(batch), {queries, keys})) {}

  Batch(Device& device, const FoldSpec& spec, const std::vector<Lengths>& sequences)
      : device_(device), spec_(spec), kernel_(device.row.make_kernel(spec, *device.backend)) {
    std::int64_t rows = 0;
    std::int64_t key_rows = 0;
    for (const Lengths& lengths : sequences) {
      const auto sequence = static_cast<std::int32_t>(lengths_.size());
      const auto table = static_cast<std::int64_t>(tiles_.size());
      queries_.push_back({sequence, lengths.keys - lengths.queries, rows, lengths.queries});
      lengths_.push_back(lengths.keys);
      for (std::int64_t key = 0; key < lengths.keys; key += kernel_->key_tile()) tiles_.push_back({0, key_rows + key});
      runs_.push_back({sequence, 0, static_cast<std::int64_t>(tiles_.size()) - table, table});
      rows += lengths.queries;
      key_rows += lengths.keys;
    }
    make(q_, q_memory_, SyntheticTensor::kQ, rows, spec.heads, spec.head_dim);
    make(k_, k_memory_, SyntheticTensor::kK, key_rows, spec.kv_heads, spec.head_dim);
    make(v_, v_memory_, SyntheticTensor::kV, key_rows, spec.kv_heads, spec.head_dim_v);
    out_ =
        device.backend->allocate(static_cast<std::size_t>(rows * spec.heads * spec.head_dim_v) * size_of(spec.dtype));
    lse_ = device.backend->allocate(static_cast<std::size_t>(rows * spec.heads) * sizeof(float));
    sources_.push_back({k_, v_});
    output_ = {dense_view(static_cast<void*>(out_.data()), spec.dtype, rows, spec.heads, spec.head_dim_v),
               {reinterpret_cast<float*>(lse_.data()), spec.heads, 1},
               nullptr};
    const auto count = static_cast<std::int64_t>(sequences.size());
    kernel_->reserve({rows, count, count, static_cast<std::int64_t>(tiles_.size()), 1, count});
  }

  // Whole, from the identity to the result.
  FoldTask task() const {
    FoldTask task;
    task.q = q_;
    task.queries = queries_;
    task.key_lengths = lengths_;
    task.key_runs = runs_;
    task.tiles = tiles_;
    task.sources = sources_;
    task.save = false;
    task.finish = &output_;
    return task;
  }
  // As above with a state in and out, which is allocated on the first call.
  FoldTask task(bool resume, bool save, bool finish) {
    if (state_.data() == nullptr) state_ = device_.backend->allocate(kernel_->state_bytes(q_.tokens));
    FoldTask task = this->task();
    task.state = state_.data();
    task.resume = resume;
    task.save = save;
    if (!finish) task.finish = nullptr;
    return task;
  }
  void fold(const FoldTask& task) { kernel_->fold(task, device_.stream(), {}); }

  FoldKernel& kernel() { return *kernel_; }
  const void* state() const { return state_.data(); }
  // Overwrites one tensor with elements of the host.
  void set_q(const std::vector<std::byte>& elements) { upload(q_memory_, elements); }
  void set_v(const std::vector<std::byte>& elements) { upload(v_memory_, elements); }

 private:
  void make(TensorView& view, Buffer& memory, SyntheticTensor tensor, std::int64_t tokens, std::int64_t heads,
            std::int64_t dim) {
    memory = device_.backend->allocate(static_cast<std::size_t>(tokens * heads * dim) * size_of(spec_.dtype));
    const MutableTensorView rows = dense_view(static_cast<void*>(memory.data()), spec_.dtype, tokens, heads, dim);
    const PackedRun all{0, tokens};
    device_.backend->fill_synthetic(1, tensor, {&all, 1}, rows, device_.stream());
    view = rows;
  }
  void upload(const Buffer& memory, const std::vector<std::byte>& elements) {
    const auto bytes = static_cast<std::int64_t>(elements.size());
    device_.backend->copy_rows(memory.data(), bytes, elements.data(), bytes, bytes, 1, device_.stream());
    device_.wait();
  }

  Device& device_;
  FoldSpec spec_;
  std::unique_ptr<FoldKernel> kernel_;
  Buffer q_memory_, k_memory_, v_memory_, out_, lse_, state_;
  TensorView q_, k_, v_;
  std::vector<QueryRun> queries_;
  std::vector<std::int64_t> lengths_;
  std::vector<KeyRun> runs_;
  std::vector<KeyTile> tiles_;
  std::vector<KeySource> sources_;
  FoldOutput output_;
};

bool can_run(const FoldRow& row, const FoldSpec& spec) { return row.missing(spec).empty(); }

void measure_speed(Device& device, const FoldSpec& spec, std::int64_t batch, std::int64_t tokens) {
  if (!can_run(device.row, spec)) return;
  Batch jobs(device, spec, batch, tokens, tokens);
  const FoldTask task = jobs.task();
  double pairs = static_cast<double>(tokens) * static_cast<double>(tokens);
  if (spec.mask.is_causal()) pairs /= 2.0;
  if (spec.mask.left >= 0) pairs = static_cast<double>(tokens) * static_cast<double>(spec.mask.left + 1);
  const double flops = 2.0 * static_cast<double>(batch) * pairs * spec.heads * (spec.head_dim + spec.head_dim_v);
  const auto ms = time_repeats(device, [&] { jobs.fold(task); });
  fmt::print(
      "{{\"what\":\"speed\",\"kernel\":\"{}\",\"dtype\":\"{}\",\"mask\":\"{}\",\"batch\":{},\"seq\":{},\"heads\":{},"
      "\"kv_heads\":{},\"head_dim\":{},\"head_dim_v\":{},\"softcap\":{},\"samples\":{},\"ms\":{:.4f},\"ms_min\":{:.4f},"
      "\"tflops\":{:."
      "1f}}}\n",
      device.row.name, dtype_name(spec.dtype), describe(spec.mask), batch, tokens, spec.heads, spec.kv_heads,
      spec.head_dim, spec.head_dim_v, spec.softcap, ms.size(), median(ms), ms.front(), flops / median(ms) * 1e-9);
  std::fflush(stdout);
}

// The house's shapes: 16k tokens in all up to 16k, one sequence beyond.
void measure_speeds(Device& device, int only_head_dim, std::int64_t only_tokens) {
  constexpr Heads kHeads[] = {
      {32, 8, 128, 128}, {32, 32, 64, 64}, {8, 8, 256, 256}, {32, 8, 96, 96}, {16, 16, 192, 128}};
  for (const Heads& heads : kHeads) {
    if (only_head_dim != 0 && heads.head_dim != only_head_dim) continue;
    const auto config = sm80::choose_config(spec_of(Dtype::kBf16, heads, {-1, 0}));
    if (device.row.name == "sm80_fold" && config) {
      fmt::print("{{\"what\":\"config\",\"kernel\":\"{}\",\"head_dim\":{},\"head_dim_v\":{},\"config\":\"{}\"}}\n",
                 device.row.name, heads.head_dim, heads.head_dim_v, describe(*config));
    }
    for (int log = 10; log <= 17; ++log) {
      const std::int64_t tokens = std::int64_t{1} << log;
      if (only_tokens != 0 && tokens != only_tokens) continue;
      if ((heads.head_dim != 128 && log > 15) || (device.row.name == "sm80_plain" && log > 13)) continue;
      const std::int64_t batch = std::max<std::int64_t>(1, 16384 / tokens);
      measure_speed(device, spec_of(Dtype::kBf16, heads, {-1, 0}), batch, tokens);
      if (log == 13) measure_speed(device, spec_of(Dtype::kBf16, heads, {-1, -1}), batch, tokens);
      if (log == 13) measure_speed(device, spec_of(Dtype::kF16, heads, {-1, 0}), batch, tokens);
    }
  }
  if (only_head_dim != 0) return;
  const Heads usual{32, 8, 128, 128};
  FoldSpec capped = spec_of(Dtype::kBf16, usual, {-1, 0});
  capped.softcap = 50.0F;
  measure_speed(device, capped, 2, 8192);
  measure_speed(device, spec_of(Dtype::kBf16, usual, {1023, 0}), 1, 32768);
  if (device.row.name == "sm80_plain") measure_speed(device, spec_of(Dtype::kF32, usual, {-1, 0}), 4, 4096);
}

// Pairs of query and key in the tiles that a kernel touches: each query tile with every key tile of which a row sees
// something.
std::int64_t touched_pairs(const FoldKernel& kernel, const Mask& mask, const std::vector<Lengths>& sequences) {
  const std::int64_t rows = kernel.query_tile();
  const std::int64_t keys = kernel.key_tile();
  std::int64_t tiles = 0;
  for (const Lengths& lengths : sequences) {
    for (std::int64_t row = 0; row < lengths.queries; row += rows) {
      const std::int64_t first = lengths.keys - lengths.queries + row;
      const std::int64_t last = std::min(first + rows, lengths.keys) - 1;
      const std::int64_t from = mask.left < 0 ? 0 : std::max<std::int64_t>(0, first - mask.left);
      const std::int64_t to = mask.right < 0 ? lengths.keys : std::min(lengths.keys, last + mask.right + 1);
      tiles += (to + keys - 1) / keys - from / keys;
    }
  }
  return tiles * rows * keys;
}

// A sliding window and a ragged batch beside dense ones, by the tiles that are touched.
void measure_touched(Device& device) {
  const Heads heads{32, 8, 128, 128};
  const std::vector<Lengths> one{{131072, 131072}};
  const std::vector<Lengths> dense(4, {4096, 4096});
  std::vector<Lengths> ragged;  // as many tokens
  for (const std::int64_t n : {7019, 1, 3000, 17, 2049, 64, 1500, 100, 1024, 333, 777, 500}) ragged.push_back({n, n});
  struct Case {
    const char* name;
    const std::vector<Lengths>& sequences;
    Mask mask;
  };
  for (const Case& c :
       {Case{"128k, causal", one, {-1, 0}}, Case{"128k, window 4096", one, {4095, 0}},
        Case{"4 of 4k, causal", dense, {-1, 0}}, Case{"1 to 7k, 16k in all, causal", ragged, {-1, 0}}}) {
    const FoldSpec spec = spec_of(Dtype::kBf16, heads, c.mask);
    if (!can_run(device.row, spec)) continue;
    Batch jobs(device, spec, c.sequences);
    const FoldTask task = jobs.task();
    const auto ms = time_repeats(device, [&] { jobs.fold(task); });
    const double flops = 2.0 * static_cast<double>(touched_pairs(jobs.kernel(), c.mask, c.sequences)) * spec.heads *
                         (spec.head_dim + spec.head_dim_v);
    fmt::print(
        "{{\"what\":\"touched\",\"kernel\":\"{}\",\"case\":\"{}\",\"samples\":{},\"ms\":{:.4f},\"tflops_touched\":{:."
        "1f}}}\n",
        device.row.name, c.name, ms.size(), median(ms), flops / median(ms) * 1e-9);
    std::fflush(stdout);
  }
}

// Every row folds the same keys, with and without state; and a last task that finds nothing to fold.
void measure_state(Device& device) {
  const FoldSpec spec = spec_of(Dtype::kBf16, {32, 8, 128, 128}, {-1, -1});
  constexpr std::int64_t kRows = 32768;
  for (const std::int64_t keys : {1024, 4096, 16384}) {
    Batch jobs(device, spec, 1, kRows, keys);
    const auto time = [&](bool resume, bool save, bool finish) {
      const FoldTask task = jobs.task(resume, save, finish);
      return median(time_repeats(device, [&] { jobs.fold(task); }));
    };
    const double save = time(false, true, false);
    const double both = time(true, true, false);
    const double resume = time(true, false, true);
    const double none = time(false, false, true);
    fmt::print(
        "{{\"what\":\"state\",\"kernel\":\"{}\",\"rows\":{},\"heads\":{},\"keys\":{},\"ms_save\":{:.4f},"
        "\"ms_resume_save\":{:.4f},\"ms_resume_finish\":{:.4f},\"ms_finish\":{:.4f},\"in_out_ns_per_row_head\":{:.4f}}}"
        "\n",
        device.row.name, kRows, spec.heads, keys, save, both, resume, none,
        (save + resume - 2 * none) * 1e6 / static_cast<double>(kRows * spec.heads));
  }
  Batch jobs(device, spec, 1, kRows, 1024);
  FoldTask task = jobs.task(false, true, false);
  jobs.fold(task);
  task = jobs.task(true, false, true);
  task.key_runs = {};
  const double ms = median(time_repeats(device, [&] { jobs.fold(task); }));
  fmt::print("{{\"what\":\"finish_only\",\"kernel\":\"{}\",\"rows\":{},\"heads\":{},\"ms\":{:.4f}}}\n", device.row.name,
             kRows, spec.heads, ms);
}

// Host time of fold() while the device is busy.
void measure_host(Device& device) {
  const auto measure = [&](std::int64_t rows, std::int64_t keys, std::int64_t run_rows) {
    const FoldSpec spec = spec_of(Dtype::kBf16, {8, 2, 128, 128}, {-1, 0});
    Batch jobs(device, spec, 1, rows, keys);
    FoldTask task = jobs.task(false, true, false);
    // Runs of a striped layout over eight ranks.
    std::vector<QueryRun> runs;
    for (std::int64_t row = 0; row < rows; row += run_rows) {
      runs.push_back({0, run_rows == rows ? keys - rows : 8 * row, row, std::min(run_rows, rows - row)});
    }
    task.queries = runs;
    jobs.kernel().reserve(
        {rows, static_cast<std::int64_t>(runs.size()), 1, static_cast<std::int64_t>(task.tiles.size()), 1, 1});
    jobs.fold(task);
    device.wait();
    std::string times;
    for (int i = 0; i < 4; ++i) {
      const auto start = Clock::now();
      jobs.fold(task);
      times += fmt::format("{}{:.1f}", i == 0 ? "" : ",",
                           std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    }
    const auto start = Clock::now();
    device.wait();
    fmt::print(
        "{{\"what\":\"host\",\"kernel\":\"{}\",\"rows\":{},\"runs\":{},\"tiles\":{},\"us\":[{}],\"device_ms_left\":{:."
        "1f}}}\n",
        device.row.name, rows, runs.size(), task.tiles.size(), times,
        std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  };
  measure(4096, 4096, 4096);
  measure(32768, 32768, 32768);
  measure(32768, 262144, 128);
  measure(131072, 1048576, 128);
}

// Q = 0 and V uniform in (0, 1): O / l is the plain mean of V, known exactly in fp64.
void measure_bias(Device& device, Dtype dtype) {
  const Heads heads{1, 1, 128, 128};
  const FoldSpec spec = spec_of(dtype, heads, {-1, -1});
  if (!can_run(device.row, spec)) return;
  for (const int log : {11, 14, 17, 19, 21}) {
    const std::int64_t keys = std::int64_t{1} << log;
    constexpr std::int64_t kRows = 1;
    Batch jobs(device, spec, 1, kRows, keys);
    const std::size_t element = size_of(dtype);
    jobs.set_q(std::vector<std::byte>(128 * element));
    std::vector<std::byte> v(static_cast<std::size_t>(keys) * 128 * element);
    std::vector<double> mean(128, 0.0);
    for (std::size_t i = 0; i < static_cast<std::size_t>(keys) * 128; ++i) {
      const PhiloxWords words = philox4x32_10({{static_cast<std::uint32_t>(i), 0, 0, 9}}, 5);
      std::byte* at = v.data() + i * element;
      store_element(at, dtype, static_cast<float>(words.word[0] >> 8) * 0x1p-24F);
      mean[i % 128] += static_cast<double>(load_element(at, dtype)) / static_cast<double>(keys);
    }
    jobs.set_v(v);
    const FoldTask task = jobs.task(false, true, false);
    jobs.fold(task);
    const Buffer numbers = device.backend->allocate(130 * sizeof(float));
    auto* floats = reinterpret_cast<float*>(numbers.data());
    const FoldStateView view{
        {floats, 1, 1}, {floats + 1, 1, 1}, dense_view(static_cast<void*>(floats + 2), Dtype::kF32, 1, 1, 128)};
    jobs.kernel().export_state(jobs.state(), kRows, view, device.stream());
    std::vector<float> host(130);
    constexpr std::int64_t kBytes = 130 * sizeof(float);
    device.backend->copy_rows(host.data(), kBytes, floats, kBytes, kBytes, 1, device.stream());
    device.wait();
    double sum = 0.0;
    double worst = 0.0;
    for (std::size_t d = 0; d < 128; ++d) {
      const double error = static_cast<double>(host[2 + d]) / static_cast<double>(host[1]) / mean[d] - 1.0;
      sum += error;
      worst = std::max(worst, std::abs(error));
    }
    fmt::print(
        "{{\"what\":\"bias\",\"kernel\":\"{}\",\"dtype\":\"{}\",\"keys\":{},\"key_tile\":{},\"l_error\":{:.3e},"
        "\"mean_relative_error\":{:.3e},\"worst\":{:.3e}}}\n",
        device.row.name, dtype_name(dtype), keys, jobs.kernel().key_tile(),
        static_cast<double>(host[1]) / static_cast<double>(keys) - 1.0, sum / 128.0, worst);
    std::fflush(stdout);
  }
}

// Synthetic input made on the device: one tensor of 2m tokens, whole and in runs of 128 tokens.
void measure_generator(Device& device) {
  constexpr std::int64_t kTokens = 1 << 21;
  constexpr std::int64_t kHeads = 32;
  constexpr std::int64_t kDim = 128;
  const Buffer memory = device.backend->allocate(static_cast<std::size_t>(kTokens * kHeads * kDim) * 2);
  const MutableTensorView rows = dense_view(static_cast<void*>(memory.data()), Dtype::kBf16, kTokens, kHeads, kDim);
  for (const std::int64_t run_tokens : {kTokens, std::int64_t{128}}) {
    std::vector<PackedRun> runs;
    for (std::int64_t begin = 0; begin < kTokens; begin += run_tokens)
      runs.push_back({8 * begin, 8 * begin + run_tokens});
    const double ms = median(time_repeats(
        device, [&] { device.backend->fill_synthetic(1, SyntheticTensor::kQ, runs, rows, device.stream()); }));
    fmt::print("{{\"what\":\"generator\",\"tokens\":{},\"heads\":{},\"head_dim\":{},\"runs\":{},\"ms\":{:.2f}}}\n",
               kTokens, kHeads, kDim, runs.size(), ms);
  }
}

int run(const std::string& what, const std::string& kernel, int head_dim, std::int64_t tokens) {
  for (const FoldRow& row : kernel_table<FoldSpec>()) {
    if (row.backend != "cuda" || (!kernel.empty() && row.name != kernel)) continue;
    const std::string reason = row.unavailable();
    if (!reason.empty()) {
      fmt::print(stderr, "{} can't run here: {}\n", row.name, reason);
      return 4;
    }
    Device device(row);
    if (what == "speed") measure_speeds(device, head_dim, tokens);
    if (what == "touched") measure_touched(device);
    if (what == "state") measure_state(device);
    if (what == "host") measure_host(device);
    if (what == "generator") measure_generator(device);
    if (what == "bias") {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) measure_bias(device, dtype);
    }
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  try {
    return ringattn::run(argc > 1 ? argv[1] : "speed", argc > 2 ? argv[2] : "", argc > 3 ? std::atoi(argv[3]) : 0,
                         argc > 4 ? std::atoll(argv[4]) : 0);
  } catch (const ringattn::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return static_cast<int>(error.code());
  }
}
