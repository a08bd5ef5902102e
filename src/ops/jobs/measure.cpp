// SPDX-License-Identifier: Apache-2.0
#include "ops/jobs/measure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "base/host.hpp"
#include "base/threads.hpp"
#include "ops/attention_jobs/loaded_job.hpp"

namespace ringattn {

namespace {

constexpr double kComputeSeconds = 0.25;  // long enough to be measured
constexpr double kThreadSeconds = 0.05;   // the same for one of several threads
constexpr std::int64_t kFirstTokens = 1024;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 20;
constexpr std::size_t kLinkBytes = std::size_t{8} << 20;
constexpr int kLinkRounds = 6;
constexpr int kLatencyRounds = 50;

double slowest(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

// Seconds for `rounds` exchanges of `bytes` with both neighbours. The best round counts, because noise only adds time.
double best_round(Transport& world, Backend& backend, std::size_t bytes, int rounds, const Collective& collective) {
  const Buffer out = backend.allocate(bytes);
  const Buffer in = backend.allocate(bytes);
  const Stream stream = backend.stream();
  const auto marks = backend.make_events(2, true);
  const Progress progress = [&world] { world.progress(); };
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  double best = INFINITY;
  for (int round = 0; round < rounds; ++round) {
    Exchange exchange;
    exchange.label = "measurement";
    exchange.sends.push_back({next, 0, {{out.data(), bytes}}});
    exchange.receives.push_back({previous, 0, {{in.data(), bytes}}});
    collective.barrier();
    marks->record(0, stream);
    world.wait(world.post(std::move(exchange), stream), stream, collective.timeouts().for_peer());
    marks->record(1, stream);
    marks->synchronize(1, collective.timeouts().for_peer(), progress);
    best = std::min(best, marks->elapsed(0, 1));
  }
  return best;
}

// Bytes that are read for the memory rate: more than a processor's share of the last-level cache.
constexpr std::size_t kReadBytes = std::size_t{512} << 20;
constexpr int kReadRounds = 4;

// As kernels that stream do, it prefetches what it will read: on one core of a Xeon that is half as fast again.
std::uint64_t xor_of(const std::byte* data, std::size_t bytes) {
  constexpr std::size_t kWords = 8;  // a cache line
  constexpr std::size_t kBytesAhead = 4096;
  std::uint64_t all[kWords] = {};
  for (std::size_t at = 0; at + sizeof all <= bytes; at += sizeof all) {
    __builtin_prefetch(data + std::min(at + kBytesAhead, bytes - 1));
    std::uint64_t words[kWords];
    std::memcpy(words, data + at, sizeof words);
    for (std::size_t i = 0; i < kWords; ++i) all[i] ^= words[i];
  }
  return std::accumulate(std::begin(all), std::end(all), std::uint64_t{0}, std::bit_xor<>());
}

// Bytes per second that the threads of this rank read from memory; the best round counts. Each thread reads the memory
// that it wrote first, which is on its NUMA node.
double read_rate(int threads) {
  const std::size_t share = std::min(kReadBytes, usable_bytes() / 8) / static_cast<std::size_t>(threads) / 64 * 64;
  const std::size_t bytes = share * static_cast<std::size_t>(threads);
  const Buffer buffer = allocate_host(bytes);
  try_thread_pool(threads);
  std::atomic<std::uint64_t> sink{0};
  std::barrier<> sync(threads);
  double best = INFINITY;
  const auto read = [&](int thread) {
    std::byte* const own = buffer.data() + share * static_cast<std::size_t>(thread);
    std::memset(own, thread, share);
    for (int round = 0; round < kReadRounds; ++round) {
      sync.arrive_and_wait();
      const auto begin = std::chrono::steady_clock::now();
      sink.fetch_xor(xor_of(own, share), std::memory_order_relaxed);
      sync.arrive_and_wait();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
      if (thread == 0) best = std::min(best, elapsed.count());
    }
  };
  {
    std::vector<std::jthread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(read, thread);
    read(0);
  }
  return static_cast<double>(bytes) / best;
}

// Seconds of a parallel region in which threads have nothing to do; the median counts.
double region_seconds(int threads) {
  constexpr std::size_t kRegions = 101;
  std::array<double, kRegions> seconds{};
  std::atomic<int> sink{0};
  for (double& one : seconds) {
    const auto begin = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads)
    sink.fetch_add(1, std::memory_order_relaxed);
    one = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  std::ranges::nth_element(seconds, seconds.begin() + kRegions / 2);
  return seconds[kRegions / 2];
}

// A job of measured_spec() with `tokens` tokens per rank.
std::unique_ptr<Attention> measured_job(const Options& options, Transport& world, Dtype dtype, std::int64_t tokens) {
  Job job;
  job.spec = measured_spec(dtype);
  job.batch = uniform_batch(1, tokens * world.size(), tokens * world.size());
  return std::make_unique<Attention>(job, world, options);
}

// Compute time of this rank in a run, in seconds.
double compute_seconds(LoadedJob& loaded) {
  double seconds = 0.0;
  for (const BlockTimes& block : loaded.run().blocks) seconds += block.compute_end - block.compute_begin;
  return seconds;
}

// FLOPs per second of the slowest rank; 0 if no rank has any work. The median of three runs counts, as for jobs.
double slowest_attention_rate(const std::function<std::unique_ptr<Attention>(std::int64_t tokens)>& make,
                              const Collective& collective, std::unique_ptr<Attention>& last,
                              double min_seconds = kComputeSeconds) {
  for (std::int64_t tokens = kFirstTokens;; tokens *= 2) {
    last.reset();
    last = make(tokens);
    const JobInput input = JobInput::synthetic(last->job(), 1);
    LoadedJob loaded(input, *last, collective);
    loaded.run();
    std::array<double, 3> runs{compute_seconds(loaded)};
    const double longest = slowest(collective.gather_values(runs[0]));
    if (longest < min_seconds && tokens < kMaxTokens) continue;
    for (double& seconds : std::span(runs).subspan(1)) seconds = compute_seconds(loaded);
    std::ranges::sort(runs);
    const double flops = last->plan().flops();
    const double seconds_per_flop = slowest(collective.gather_values(flops > 0.0 ? runs[1] / flops : 0.0));
    return seconds_per_flop > 0.0 ? 1.0 / seconds_per_flop : 0.0;
  }
}

// Whether every rank has a kernel for fp32. The kernel that the caller named may not support it.
bool measures_fp32(const Options& options, const Collective& collective) {
  bool mine = true;
  try {
    static_cast<void>(choose_kernel(measured_spec(Dtype::kF32), options.kernel));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    mine = false;
  }
  const std::vector<char> all = collective.gather_values(static_cast<char>(mine));
  return std::ranges::all_of(all, [](char one) { return one != 0; });
}

double slowest_read_rate(int threads, const Collective& collective) {
  collective.barrier();  // ranks of one host share its memory
  double rate = 0.0;
  collective.run_collectively([&] { rate = read_rate(threads); });
  return std::ranges::min(collective.gather_values(rate));
}

// The rates of one of the threads of each rank, and what a parallel region of all of them takes.
void measure_one_thread(const Options& options, int threads, Transport& world, const Collective& collective,
                        MachineModel& machine) {
  Options one = options;
  one.threads = 1;
  std::unique_ptr<Attention> attention;
  const auto rate = [&](Dtype dtype) {
    return slowest_attention_rate([&](std::int64_t tokens) { return measured_job(one, world, dtype, tokens); },
                                  collective, attention, kThreadSeconds);
  };
  if (machine.fp32_flops_per_second > 0.0) machine.thread_fp32_flops_per_second = rate(Dtype::kF32);
  machine.thread_flops_per_second = rate(Dtype::kBf16);
  machine.thread_memory_bytes_per_second = slowest_read_rate(1, collective);
  machine.region_seconds = slowest(collective.gather_values(region_seconds(threads)));
}

}  // namespace

MachineModel measure_machine(const Options& options, Transport& world) {
  const Collective collective(world, Timeouts(options.timeout_seconds));
  std::unique_ptr<Attention> attention;
  MachineModel machine;
  if (measures_fp32(options, collective)) {
    machine.fp32_flops_per_second = slowest_attention_rate(
        [&](std::int64_t tokens) { return measured_job(options, world, Dtype::kF32, tokens); }, collective, attention);
  }
  const double flops_per_second = slowest_attention_rate(
      [&](std::int64_t tokens) { return measured_job(options, world, Dtype::kBf16, tokens); }, collective, attention);
  // The kernel's defaults are kept for what can't be measured.
  const MachineModel& assumed = attention->options().machine;
  machine.flops_per_second = flops_per_second > 0.0 ? flops_per_second : assumed.flops_per_second;
  machine.link_bytes_per_second = assumed.link_bytes_per_second;
  machine.latency_seconds = assumed.latency_seconds;
  machine.kernel = attention->kernel().row->name;
  const bool on_host = attention->backend().memory() == MemoryKind::kHost;
  if (on_host) {
    const int threads = attention->options().threads;
    machine.memory_bytes_per_second = slowest_read_rate(threads, collective);
    if (threads > 1) measure_one_thread(options, threads, world, collective, machine);
  }
  machine.name = fmt::format("{}, {} rank{}, {}", on_host ? cpu_model() : attention->backend().identity(), world.size(),
                             world.size() == 1 ? "" : "s", world.name());
  if (world.size() == 1) return machine;
  const auto slowest_round = [&](std::size_t bytes, int rounds) {
    return slowest(collective.gather_values(best_round(world, attention->backend(), bytes, rounds, collective)));
  };
  const double small = slowest_round(8, kLatencyRounds);
  const double large = slowest_round(kLinkBytes, kLinkRounds);
  machine.latency_seconds = small;
  machine.link_bytes_per_second = static_cast<double>(kLinkBytes) / std::max(large - small, large / 2);
  return machine;
}

}  // namespace ringattn
