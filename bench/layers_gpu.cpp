// SPDX-License-Identifier: Apache-2.0
// Measures what it costs to enqueue consecutive layers: their time on the device against the sum of their kernels'
// times, and the host's time per call. Prints one JSON line per length.
//
// On one rank the compute-only baseline is the same number of launches of one kernel on one task, without events
// between them, measured in turn with the layers. With several ranks there are several blocks and concurrent copies:
// there the kernel times of single runs are added up, each measured by events around it, which themselves take a few
// µs.
//   layers_gpu_bench [layers [ranks [transport [tokens …]]]]     32 layers on one rank, of 1k to 32k tokens
//   mpirun -np 2 layers_gpu_bench 32 0 p2p                       the ranks are processes
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/packed_run.hpp"
#include "bench/attention_gpu_jobs.hpp"
#include "comm/collective.hpp"
#include "comm/world.hpp"
#include "ops/attention/attention.hpp"

namespace ringattn {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSamples = 11;
constexpr double kTimeout = 60.0;

double middle(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return median(values);
}

// Causal, bf16, 32/8 heads of 128.
Job job_of(std::int64_t tokens) {
  Job job;
  job.spec.heads = 32;
  job.spec.kv_heads = 8;
  job.spec.softmax_scale = 1.0F / std::sqrt(128.0F);
  job.batch = uniform_batch(1, tokens, tokens);
  return job;
}

// This rank's rows. All layers have the same: what is measured doesn't depend on it.
class DeviceRows {
 public:
  DeviceRows(Attention& attention, int rank) {
    const AttentionSpec& spec = attention.job().spec;
    const JobLayout& layout = attention.layout();
    const auto queries = packed_runs(layout.queries.runs(rank), layout.queries.cu());
    const auto keys = packed_runs(layout.keys.runs(rank), layout.keys.cu());
    Backend& backend = attention.backend();
    const auto new_buffer = [&](std::int64_t rows, std::int64_t bytes) -> std::byte* {
      return buffers_.emplace_back(backend.allocate(static_cast<std::size_t>(rows * bytes))).data();
    };
    const auto fill = [&](SyntheticTensor tensor, const std::vector<PackedRun>& runs, std::int64_t rows, int heads,
                          int dim, std::int64_t bytes) {
      const MutableTensorView view =
          dense_view(static_cast<void*>(new_buffer(rows, bytes)), spec.dtype, rows, heads, dim);
      backend.fill_synthetic(1, tensor, runs, view, backend.stream());
      return view;
    };
    const std::int64_t q_rows = attention.q_rows();
    const std::int64_t k_rows = attention.k_rows();
    inputs.q = fill(SyntheticTensor::kQ, queries, q_rows, spec.heads, spec.head_dim, q_token_bytes(spec));
    inputs.k = fill(SyntheticTensor::kK, keys, k_rows, spec.kv_heads, spec.head_dim, k_token_bytes(spec));
    inputs.v = fill(SyntheticTensor::kV, keys, k_rows, spec.kv_heads, spec.head_dim_v, v_token_bytes(spec));
    void* const out = new_buffer(q_rows, out_token_bytes(spec));
    outputs.out = dense_view(out, spec.dtype, q_rows, spec.heads, spec.head_dim_v);
    outputs.lse = {reinterpret_cast<float*>(new_buffer(q_rows, lse_token_bytes(spec))), spec.heads, 1};
    const std::size_t bytes = attention.workspace_bytes();
    workspace = {new_buffer(1, static_cast<std::int64_t>(bytes)), bytes};
  }

  Inputs inputs;
  Outputs outputs;
  std::span<std::byte> workspace;

 private:
  std::vector<Buffer> buffers_;
};

// What one rank has measured, in milliseconds a layer.
struct Figures {
  double compute = 0.0;  // of its compute only
  double layer = 0.0;    // of many in a row
  double host = 0.0;     // of enqueue()
};

// Attention over a whole sequence on one rank, launched repeatedly.
class AttentionAlone {
 public:
  AttentionAlone(const AttentionRow& row, const AttentionSpec& spec, std::int64_t tokens)
      : device_(row), job_(device_, spec, 1, tokens, tokens), task_(job_.task()) {}

  // Milliseconds a launch.
  double time(int launches) {
    const auto marks = device_.backend->make_events(2, true);
    marks->record(0, device_.stream());
    for (int i = 0; i < launches; ++i) job_.attend(task_);
    marks->record(1, device_.stream());
    marks->synchronize(1, kMaxWait, {});
    return 1e3 * marks->elapsed(0, 1) / launches;
  }

 private:
  Device device_;
  GpuJob job_;
  AttentionTask task_;
};

Figures measure(Attention& attention, const DeviceRows& rows, const Collective& collective, int layers,
                std::int64_t tokens) {
  Backend& backend = attention.backend();
  const Stream stream = backend.stream();
  std::optional<AttentionAlone> alone;
  if (collective.size() == 1) alone.emplace(*attention.kernel().row, attention.job().spec, tokens);
  Figures figures;
  std::vector<double> compute, in_a_row, host;
  const auto marks = backend.make_events(2, true);
  for (int sample = 0; sample < kSamples; ++sample) {
    collective.barrier();
    if (alone) {
      compute.push_back(alone->time(layers));
    } else {
      const RunStats stats = attention.run(rows.inputs, rows.outputs, rows.workspace, stream, {}, RunMode::kWhole);
      double sum = 0.0;
      for (const BlockTimes& block : stats.blocks) sum += block.compute_end - block.compute_begin;
      compute.push_back(1e3 * sum);
    }

    collective.barrier();
    marks->record(0, stream);
    const auto begin = Clock::now();
    for (int i = 0; i < layers; ++i) attention.enqueue(rows.inputs, rows.outputs, rows.workspace, stream);
    host.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count() / layers);
    marks->record(1, stream);
    attention.wait();
    marks->synchronize(1, collective.timeouts().for_peer(), {});
    in_a_row.push_back(1e3 * marks->elapsed(0, 1) / layers);
  }
  figures.compute = middle(compute);
  figures.layer = middle(in_a_row);
  figures.host = middle(host);
  return figures;
}

void measure_length(Transport& world, std::int64_t tokens, int layers) {
  Options options;
  options.kernel.backend = "cuda";
  options.timeout_seconds = kTimeout;
  const Collective collective(world, Timeouts(kTimeout));
  Attention attention(job_of(tokens), world, options);
  Figures slowest;
  {
    const DeviceRows rows(attention, world.rank());
    for (const Figures& theirs : collective.gather_values(measure(attention, rows, collective, layers, tokens))) {
      slowest.compute = std::max(slowest.compute, theirs.compute);
      slowest.layer = std::max(slowest.layer, theirs.layer);
      slowest.host = std::max(slowest.host, theirs.host);
    }
    collective.barrier();  // no rank may free device memory while another rank's work is in flight
  }
  if (world.rank() != 0) return;
  fmt::print(
      "{{\"what\":\"layers\",\"kernel\":\"{}\",\"device\":\"{}\",\"transport\":\"{}\",\"ranks\":{},\"tokens\":{},"
      "\"layers\":{},\"blocks\":{},\"ms_a_layer\":{:.4f},\"compute_ms\":{:.4f},\"compute_by\":\"{}\",\"lost\":{:.4f},"
      "\"host_us\":{:.2f}}}\n",
      attention.kernel().row->name, attention.backend().identity(), world.name(), world.size(), tokens, layers,
      attention.plan().blocks.size(), slowest.layer, slowest.compute,
      world.size() == 1 ? "launches in a row" : "events", slowest.layer / slowest.compute - 1.0, 1e3 * slowest.host);
  std::fflush(stdout);
}

int run(const std::vector<std::string>& arguments) {
  const auto argument = [&](std::size_t index, const std::string& otherwise) {
    return index < arguments.size() ? arguments[index] : otherwise;
  };
  const int layers = std::stoi(argument(0, "32"));
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 3; i < arguments.size(); ++i) lengths.push_back(std::stoll(arguments[i]));
  if (lengths.empty()) lengths = {1024, 4096, 8192, 32768};
  WorldRequest request;
  // Under mpirun the ranks are mpirun's: 0 asks for none here.
  if (const int ranks = std::stoi(argument(1, "1")); ranks > 0) request.ranks = ranks;
  request.transport = argument(2, "auto");
  request.memory = WantedMemory::kDevice;
  return run_world(
      request,
      [&](Transport& world) {
        for (const std::int64_t tokens : lengths) measure_length(world, tokens, layers);
        return 0;
      },
      [](const Error& error) { fmt::print(stderr, "{}\n", error.what()); });
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  try {
    return ringattn::run({argv + 1, argv + argc});
  } catch (const ringattn::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return static_cast<int>(error.code());
  }
}
