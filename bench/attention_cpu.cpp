// SPDX-License-Identifier: Apache-2.0
// Measures the CPU attention kernel without communication, and OpenBLAS's SGEMM for comparison where the build found
// it. Prints medians of a few runs.
//   attention_cpu_bench [threads] [runs]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#ifdef RINGATTN_BENCH_OPENBLAS
#include <cblas.h>
#endif

#include "base/philox.hpp"
#include "bench/attention_flops.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {
namespace {

struct Seconds {
  double wall;
  double cpu;  // of all threads: what a busy machine gets wrong last
};

// Medians.
Seconds measure(int runs, const std::function<void()>& work) {
  work();  // warm-up: memory is touched, threads are started
  std::vector<double> wall;
  std::vector<double> cpu;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const std::clock_t cpu_start = std::clock();
    work();
    cpu.push_back(static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC);
    wall.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(wall.begin(), wall.end());
  std::sort(cpu.begin(), cpu.end());
  return {wall[wall.size() / 2], cpu[cpu.size() / 2]};
}

void print_line(const std::string& what, Seconds seconds, double flops) {
  fmt::print("{:<75} {:>9.1f} ms {:>7.1f} GFLOP/s {:>7.1f} per core\n", what, seconds.wall * 1e3,
             flops / seconds.wall * 1e-9, flops / seconds.cpu * 1e-9);
}

// Uniform in [−1, 1).
std::vector<std::byte> random_elements(std::int64_t count, Dtype dtype, std::uint64_t key) {
  std::vector<std::byte> elements(static_cast<std::size_t>(count) * size_of(dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    const PhiloxWords words = philox4x32_10({{static_cast<std::uint32_t>(i), 0, 0, 0}}, key);
    const float value = static_cast<float>(static_cast<std::int32_t>(words.word[0])) * 0x1p-31F;
    store_element(elements.data() + static_cast<std::size_t>(i) * size_of(dtype), dtype, value);
  }
  return elements;
}

struct Shape {
  std::int64_t tokens;
  AttentionSpec spec;
};

void measure_attention(const Shape& shape, int threads, int runs) {
  const AttentionSpec& spec = shape.spec;
  const std::int64_t n = shape.tokens;
  const AttentionChoice choice = choose_kernel(spec, {"cpu", "auto"});
  const auto backend = choice.row->make_backend({threads, 0});
  const auto kernel = choice.row->make_kernel(spec, *backend);
  kernel->reserve({});

  const auto q = random_elements(n * spec.heads * spec.head_dim, spec.dtype, 1);
  const auto k = random_elements(n * spec.kv_heads * spec.head_dim, spec.dtype, 2);
  const auto v = random_elements(n * spec.kv_heads * spec.head_dim_v, spec.dtype, 3);
  std::vector<std::byte> out(static_cast<std::size_t>(n * spec.heads * spec.head_dim_v) * size_of(spec.dtype));
  std::vector<float> lse(static_cast<std::size_t>(n * spec.heads));

  const std::int64_t tile_count = (n + kernel->key_tile() - 1) / kernel->key_tile();
  std::vector<PageRun> tiles;
  for (std::int64_t t = 0; t < tile_count; ++t) tiles.push_back({0, t * kernel->key_tile()});
  const QueryRun query_run{0, 0, 0, n};
  const KeyRun key_run{0, 0, tile_count, 0};
  const KeySource source{dense_view(k.data(), spec.dtype, n, spec.kv_heads, spec.head_dim),
                         dense_view(v.data(), spec.dtype, n, spec.kv_heads, spec.head_dim_v)};
  const AttentionOutput output{
      dense_view(out.data(), spec.dtype, n, spec.heads, spec.head_dim_v), {lse.data(), spec.heads, 1}, nullptr};
  AttentionTask task;
  task.q = dense_view(q.data(), spec.dtype, n, spec.heads, spec.head_dim);
  task.queries = {&query_run, 1};
  task.key_lengths = {&n, 1};
  task.key_runs = {&key_run, 1};
  task.tiles = tiles;
  task.sources = {&source, 1};
  task.save = false;
  task.finish = &output;

  const Seconds seconds = measure(runs, [&] { kernel->attend(task, {}, {}); });
  print_line(fmt::format("{} tokens, {} ({})", n, describe(spec), backend->identity()), seconds,
             attention_flops(spec, n));
}

#ifdef RINGATTN_BENCH_OPENBLAS
void measure_sgemm(int threads, int runs) {
  constexpr int kSize = 2048;
  if (threads > 0) openblas_set_num_threads(threads);
  const std::vector<float> a(std::size_t{kSize} * kSize, 0.5F);
  const std::vector<float> b(a);
  std::vector<float> c(a.size());
  const Seconds seconds = measure(runs, [&] {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSize, kSize, kSize, 1.0F, a.data(), kSize, b.data(), kSize,
                0.0F, c.data(), kSize);
  });
  print_line(fmt::format("SGEMM {}³", kSize), seconds, 2.0 * kSize * kSize * kSize);
}
#endif

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  using ringattn::Dtype;
  const int threads = argc > 1 ? std::atoi(argv[1]) : 0;
  const int runs = argc > 2 ? std::atoi(argv[2]) : 3;
  const auto causal = [](Dtype dtype, int heads, int kv_heads, int head_dim) {
    return ringattn::make_spec(dtype, heads, kv_heads, head_dim, {-1, 0});
  };
  ringattn::AttentionSpec capped = causal(Dtype::kBf16, 8, 2, 128);
  capped.softcap = 50.0F;
  const std::vector<ringattn::Shape> shapes = {{8192, causal(Dtype::kBf16, 8, 2, 128)},
                                               {2048, causal(Dtype::kBf16, 8, 8, 128)},
                                               {2048, ringattn::make_spec(Dtype::kF32, 8, 2, 128, {-1, -1})},
                                               {2048, causal(Dtype::kF16, 8, 2, 64)},
                                               {2048, ringattn::make_spec(Dtype::kBf16, 8, 1, 192, {-1, 0}, 128)},
                                               {8192, ringattn::make_spec(Dtype::kBf16, 8, 2, 128, {1023, 0})},
                                               {2048, capped}};
#ifdef RINGATTN_BENCH_OPENBLAS
  ringattn::measure_sgemm(threads, runs);
#endif
  for (const ringattn::Shape& shape : shapes) ringattn::measure_attention(shape, threads, runs);
  return 0;
}
