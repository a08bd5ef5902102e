// SPDX-License-Identifier: Apache-2.0
// Measures the attention kernels of the cuda backend without communication, through AttentionKernel: speed over shapes
// (attention_gpu_speed.cpp), the cost of state and of enqueueing, and the error of long sums. Also measures the
// selection of key blocks that precedes them (attention_gpu_choice.cpp). Prints one JSON line a figure.
//   attention_gpu_bench speed|gate|touched|pages|choice|state|host|bias|generator [kernel [head_dim [tokens]]]
//   (head_dim: of speed, gate, pages and choice, tokens: of speed and choice)
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "bench/attention_gpu_jobs.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {
namespace {

using Clock = std::chrono::steady_clock;

// Every row sees the same keys, with and without state; and a last task that has no key tiles to compute.
void measure_state(Device& device) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, {32, 8, 128, 128}, {-1, -1});
  constexpr std::int64_t kRows = 32768;
  for (const std::int64_t keys : {1024, 4096, 16384}) {
    GpuJob jobs(device, spec, 1, kRows, keys);
    const auto time = [&](bool resume, bool save, bool finish) {
      const AttentionTask task = jobs.task(resume, save, finish);
      return median(time_repeats(device, [&] { jobs.attend(task); }));
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
  GpuJob jobs(device, spec, 1, kRows, 1024);
  AttentionTask task = jobs.task(false, true, false);
  jobs.attend(task);
  task = jobs.task(true, false, true);
  task.key_runs = {};
  const double ms = median(time_repeats(device, [&] { jobs.attend(task); }));
  fmt::print("{{\"what\":\"finish_only\",\"kernel\":\"{}\",\"rows\":{},\"heads\":{},\"ms\":{:.4f}}}\n", device.row.name,
             kRows, spec.heads, ms);
}

// Host time of enqueueing while the device is busy.
void measure_host(Device& device) {
  const auto measure = [&](std::int64_t rows, std::int64_t keys, std::int64_t run_rows) {
    const AttentionSpec spec = make_spec(Dtype::kBf16, {8, 2, 128, 128}, {-1, 0});
    GpuJob jobs(device, spec, 1, rows, keys);
    AttentionTask task = jobs.task(false, true, false);
    // Runs of a striped layout over eight ranks.
    std::vector<QueryRun> runs;
    for (std::int64_t row = 0; row < rows; row += run_rows) {
      runs.push_back({0, run_rows == rows ? keys - rows : 8 * row, row, std::min(run_rows, rows - row)});
    }
    task.queries = runs;
    jobs.kernel().reserve(
        {rows, static_cast<std::int64_t>(runs.size()), 1, static_cast<std::int64_t>(task.tiles.size()), 1, 1});
    jobs.attend(task);
    device.wait();
    std::string times;
    for (int i = 0; i < 4; ++i) {
      const auto start = Clock::now();
      jobs.attend(task);
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
  const AttentionSpec spec = make_spec(dtype, heads, {-1, -1});
  if (!can_run(device.row, spec)) return;
  for (const int log : {11, 14, 17, 19, 21}) {
    const std::int64_t keys = std::int64_t{1} << log;
    constexpr std::int64_t kRows = 1;
    GpuJob jobs(device, spec, 1, kRows, keys);
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
    const AttentionTask task = jobs.task(false, true, false);
    jobs.attend(task);
    const Buffer numbers = device.backend->allocate(130 * sizeof(float));
    auto* floats = reinterpret_cast<float*>(numbers.data());
    const AttentionStateView view{
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
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    if (row.backend != "cuda" || (!kernel.empty() && row.name != kernel)) continue;
    const std::string reason = row.unavailable();
    if (!reason.empty()) {
      fmt::print(stderr, "{} can't run here: {}\n", row.name, reason);
      return 4;
    }
    Device device(row);
    if (what == "speed") measure_speeds(device, head_dim, tokens);
    if (what == "gate") measure_gate(device, head_dim);
    if (what == "touched") measure_touched(device);
    if (what == "choice") measure_choice(device, head_dim, tokens);
    if (what == "pages") measure_pages(device, head_dim);
    if (what == "state") measure_state(device);
    if (what == "host") measure_host(device);
    if (what == "generator") measure_generator(device);
    if (what == "bias") {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) measure_bias(device, dtype);
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
