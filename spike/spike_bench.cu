// SPDX-License-Identifier: Apache-2.0
// Spike: speed of the fold on one GPU, cost of its state, of enqueueing it, and the bias of its long sums.
// One JSON line a figure. Usage: spike_bench [speed|state|host|bias|all]
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>

#include "cuda_fold.hpp"
#include "synthetic.cuh"

using namespace ringattn;
using Clock = std::chrono::steady_clock;

namespace {

template <class T>
T* device_array(std::size_t n) {
  T* p = nullptr;
  CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
  CUDA_CHECK(cudaMemset(p, 0xff, n * sizeof(T)));
  return p;
}

struct Timer {
  cudaEvent_t a, b;
  Timer() {
    CUDA_CHECK(cudaEventCreate(&a));
    CUDA_CHECK(cudaEventCreate(&b));
  }
  template <class F>
  std::vector<double> operator()(F&& f, int repeats) {
    for (int i = 0; i < 2; ++i) f();
    // Everything is enqueued first: the host's work hides behind the device's, as it does in a run.
    std::vector<double> ms;
    std::vector<cudaEvent_t> events(static_cast<std::size_t>(repeats) + 1);
    for (auto& event : events) CUDA_CHECK(cudaEventCreate(&event));
    CUDA_CHECK(cudaEventRecord(events[0]));
    for (std::size_t i = 1; i < events.size(); ++i) {
      f();
      CUDA_CHECK(cudaEventRecord(events[i]));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    for (std::size_t i = 1; i < events.size(); ++i) {
      float t = 0;
      CUDA_CHECK(cudaEventElapsedTime(&t, events[i - 1], events[i]));
      ms.push_back(static_cast<double>(t));
    }
    for (auto& event : events) CUDA_CHECK(cudaEventDestroy(event));
    std::sort(ms.begin(), ms.end());
    return ms;
  }
};

template <class C>
struct Bench {
  const char* name;
  int heads, kv_heads;
  std::uint16_t *q, *k, *v, *out;
  float* lse;
  std::byte* state;
  std::int64_t q_tokens, k_tokens;

  Bench(const char* n, int h, int hk, std::int64_t qt, std::int64_t kt)
      : name(n), heads(h), kv_heads(hk), q_tokens(qt), k_tokens(kt) {
    q = device_array<std::uint16_t>(static_cast<std::size_t>(qt * h * C::kHeadDim));
    out = device_array<std::uint16_t>(static_cast<std::size_t>(qt * h * C::kHeadDim));
    k = device_array<std::uint16_t>(static_cast<std::size_t>(kt * hk * C::kHeadDim));
    v = device_array<std::uint16_t>(static_cast<std::size_t>(kt * hk * C::kHeadDim));
    lse = device_array<float>(static_cast<std::size_t>(qt * h));
    state = device_array<std::byte>(static_cast<std::size_t>(qt * h) * (2 * C::kHeadDim + 8) * 4);
    synthetic_fill<<<1024, 256>>>(q, qt, h, C::kHeadDim, 1, 0, 0);
    synthetic_fill<<<1024, 256>>>(k, kt, hk, C::kHeadDim, 1, 1, 0);
    synthetic_fill<<<1024, 256>>>(v, kt, hk, C::kHeadDim, 1, 2, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  ~Bench() {
    for (void* p : {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v), static_cast<void*>(out),
                    static_cast<void*>(lse), static_cast<void*>(state)})
      cudaFree(p);
  }

  FoldSpec spec(Mask mask) const {
    FoldSpec s;
    s.heads = heads;
    s.kv_heads = kv_heads;
    s.head_dim = s.head_dim_v = C::kHeadDim;
    s.mask = mask;
    s.softmax_scale = 1.0F / std::sqrt(static_cast<float>(C::kHeadDim));
    return s;
  }

  // Batch of equal sequences; the tables of one task over keys [first, first + tiles) of each.
  struct Tables {
    std::vector<QueryRun> queries;
    std::vector<std::int64_t> lengths;
    std::vector<KeyRun> runs;
    std::vector<KeyTile> tiles;
    std::vector<KeySource> sources;
    FoldOutput finish;
    FoldTask task;
  };
  void fill(Tables& t, int batch, std::int64_t q_len, std::int64_t k_len, std::int64_t first_tile, std::int64_t tiles) {
    for (int b = 0; b < batch; ++b) {
      t.queries.push_back({b, k_len - q_len, b * q_len, q_len});
      t.lengths.push_back(k_len);
      t.runs.push_back({b, first_tile, tiles, static_cast<std::int64_t>(t.tiles.size())});
      for (std::int64_t i = 0; i < tiles; ++i) t.tiles.push_back({0, b * k_len + (first_tile + i) * C::kKeyTile});
    }
    t.sources.push_back({dense_view(k, Dtype::kBf16, k_tokens, kv_heads, C::kHeadDim),
                         dense_view(v, Dtype::kBf16, k_tokens, kv_heads, C::kHeadDim)});
    t.finish = {dense_view(out, Dtype::kBf16, q_tokens, heads, C::kHeadDim), RowView{lse, heads, 1}, nullptr};
    t.task.q = dense_view(q, Dtype::kBf16, batch * q_len, heads, C::kHeadDim);
    t.task.queries = t.queries;
    t.task.key_lengths = t.lengths;
    t.task.key_runs = t.runs;
    t.task.tiles = t.tiles;
    t.task.sources = t.sources;
    t.task.state = state;
    t.task.save = false;
    t.task.finish = &t.finish;
  }

  void speed(int batch, std::int64_t n, Mask mask, std::int64_t l2_mib = 32, bool section_sequences = true) {
    CudaFold<C> kernel(spec(mask), std::size_t{8} << 20);
    kernel.l2_bytes = l2_mib << 20;
    kernel.section_sequences = section_sequences;
    Tables t;
    fill(t, batch, n, n, 0, (n + C::kKeyTile - 1) / C::kKeyTile);
    Timer timer;
    const auto ms = timer([&] { kernel.fold(t.task, Stream{}); }, n >= 65536 ? 5 : 15);
    const double flops = 4.0 * static_cast<double>(batch) * static_cast<double>(n) * static_cast<double>(n) *
                         C::kHeadDim * heads * (mask.is_causal() ? 0.5 : 1.0);
    std::printf(
        "{\"what\":\"speed\",\"kernel\":\"%s\",\"mask\":\"%s\",\"batch\":%d,\"seq\":%lld,\"heads\":%d,\"kv_heads\":%d,"
        "\"head_dim\":%d,\"ms\":%.4f,\"ms_min\":%.4f,\"tflops\":%.1f}\n",
        name, mask.is_causal() ? "causal" : "full", batch, static_cast<long long>(n), heads, kv_heads, C::kHeadDim,
        ms[ms.size() / 2], ms[0], flops / ms[ms.size() / 2] * 1e-9);
    std::fflush(stdout);
  }

  // Every row folds `tiles` tiles: with and without state.
  void state_cost(std::int64_t rows, std::int64_t tiles) {
    CudaFold<C> kernel(spec(Mask{-1, -1}), std::size_t{8} << 20);
    Tables t;
    fill(t, 1, rows, tiles * C::kKeyTile, 0, tiles);
    Timer timer;
    double ms[4];
    for (int i = 0; i < 4; ++i) {
      t.task.resume = i == 1 || i == 2;
      t.task.save = i <= 1;
      t.task.finish = i >= 2 ? &t.finish : nullptr;
      const auto v = timer([&] { kernel.fold(t.task, Stream{}); }, 15);
      ms[i] = v[v.size() / 2];
    }
    std::printf(
        "{\"what\":\"state\",\"kernel\":\"%s\",\"rows\":%lld,\"heads\":%d,\"keys\":%lld,\"ms_save\":%.4f,\"ms_resume_"
        "save\":%.4f,\"ms_resume_finish\":%.4f,\"ms_finish\":%.4f,\"in_out_ns_per_row_head\":%.4f}\n",
        name, static_cast<long long>(rows), heads, static_cast<long long>(tiles * C::kKeyTile), ms[0], ms[1], ms[2],
        ms[3], (ms[0] + ms[2] - 2 * ms[3]) * 1e6 / static_cast<double>(rows * heads));
    std::fflush(stdout);
  }

  // A task that finds nothing to fold: state in, division, out.
  void finish_cost(std::int64_t rows) {
    CudaFold<C> kernel(spec(Mask{-1, -1}), std::size_t{8} << 20);
    Tables t;
    fill(t, 1, rows, C::kKeyTile, 0, 1);
    t.task.key_runs = {};
    t.task.resume = true;
    Timer timer;
    const auto ms = timer([&] { kernel.fold(t.task, Stream{}); }, 15);
    std::printf(
        "{\"what\":\"finish_only\",\"kernel\":\"%s\",\"rows\":%lld,\"heads\":%d,\"ms\":%.4f,\"gb_per_s\":%.0f}\n", name,
        static_cast<long long>(rows), heads, ms[ms.size() / 2],
        static_cast<double>(rows * heads) * (544 + 260) / ms[ms.size() / 2] * 1e-6);
  }

  // Host time of fold() while the device is busy with other things.
  void host_cost(std::int64_t rows, std::int64_t tiles) {
    CudaFold<C> kernel(spec(Mask{-1, -1}), std::size_t{1} << 20);
    Tables t;
    fill(t, 1, rows, tiles * C::kKeyTile, 0, tiles);
    kernel.fold(t.task, Stream{});
    CUDA_CHECK(cudaDeviceSynchronize());
    double us[6];
    for (double& x : us) {
      const auto start = Clock::now();
      kernel.fold(t.task, Stream{});
      x = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    }
    const auto start = Clock::now();
    CUDA_CHECK(cudaDeviceSynchronize());
    const double wait = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    std::printf(
        "{\"what\":\"host\",\"kernel\":\"%s\",\"rows\":%lld,\"tiles\":%lld,\"table_bytes\":%zu,\"us\":[%.1f,%.1f,%.1f,%"
        ".1f,%.1f,%.1f],\"device_ms_left\":%.1f,\"ring_grew\":%d}\n",
        name, static_cast<long long>(rows), static_cast<long long>(tiles),
        static_cast<std::size_t>(rows / C::kQueryTile) * sizeof(sm80::Item) + static_cast<std::size_t>(tiles) * 16,
        us[0], us[1], us[2], us[3], us[4], us[5], wait, kernel.grown());
    std::fflush(stdout);
  }
};

__global__ void positive_fill(std::uint16_t* v, std::int64_t n, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * blockDim.x)
    v[i] = bf16_bits(static_cast<float>(philox4x32_10({{static_cast<std::uint32_t>(i), 0, 0, 9}}, seed).word[0] >> 8) *
                     0x1p-24F);  // uniform in (0, 1)
}
__global__ void column_means(const std::uint16_t* v, std::int64_t n, int dim, double* mean) {
  __shared__ double part[256];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += 256)
    sum += static_cast<double>(__uint_as_float(std::uint32_t{v[i * dim + blockIdx.x]} << 16));
  part[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (double x : part) sum += x;
    mean[blockIdx.x] = sum / static_cast<double>(n);
  }
}

// Q = 0, V uniform in (0, 1): O / l is the plain mean, known exactly.
template <class C>
void bias(const char* name, std::int64_t n) {
  Bench<C> b(name, 1, 1, C::kQueryTile, n);
  CUDA_CHECK(cudaMemset(b.q, 0, static_cast<std::size_t>(C::kQueryTile * C::kHeadDim * 2)));
  positive_fill<<<1024, 256>>>(b.v, n * C::kHeadDim, 5);
  double* means = device_array<double>(C::kHeadDim);
  column_means<<<C::kHeadDim, 256>>>(b.v, n, C::kHeadDim, means);
  CudaFold<C> kernel(b.spec(Mask{-1, -1}), std::size_t{8} << 20);
  typename Bench<C>::Tables t;
  b.fill(t, 1, C::kQueryTile, n, 0, n / C::kKeyTile);
  t.task.save = true;
  t.task.finish = nullptr;
  kernel.fold(t.task, Stream{});
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<double> mean(C::kHeadDim);
  std::vector<float> state(kernel.state_bytes(C::kQueryTile) / 4);
  CUDA_CHECK(cudaMemcpy(mean.data(), means, mean.size() * 8, cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(state.data(), b.state, state.size() * 4, cudaMemcpyDeviceToHost));
  double sum = 0, worst = 0, l = 0;
  for (int i = 0; i < 4; ++i)
    l += static_cast<double>(state[static_cast<std::size_t>(C::kQueryTile * C::kHeadDim + i)]);
  // Where the sum is: in the open group, or, since n is a multiple of a group, in the full ones.
  std::size_t at = 0;
  if constexpr (is_turns<C>())
    if (!C::kInPlace) at = C::kQueryTile * (C::kHeadDim + 8);
  for (int d = 0; d < C::kHeadDim; ++d) {
    const int place = d / 16 * 16 + d % 8 / 2 * 4 + d % 16 / 8 * 2 + d % 2;
    const double error =
        static_cast<double>(state[at + static_cast<std::size_t>(place)]) / l / mean[static_cast<std::size_t>(d)] - 1;
    sum += error;
    worst = std::max(worst, std::abs(error));
  }
  std::printf(
      "{\"what\":\"bias\",\"kernel\":\"%s\",\"keys\":%lld,\"key_tile\":%d,\"in_place\":%s,\"l_error\":%.3e,\"mean_"
      "relative_error\":%.3e,\"worst\":%.3e}\n",
      name, static_cast<long long>(n), C::kKeyTile, C::kInPlace ? "true" : "false", l / static_cast<double>(n) - 1,
      sum / C::kHeadDim, worst);
  std::fflush(stdout);
}

// The shapes of the house's tables: 16k tokens in all up to 16k, batch 1 beyond; 32/8 heads of 128, 32/32 of 64, 8/8 of
// 256.
template <class C>
void speeds(const char* name) {
  const int heads = C::kHeadDim == 256 ? 8 : 32, kv_heads = C::kHeadDim == 128 ? 8 : heads;
  for (int log = 10; log <= 17; ++log) {
    const std::int64_t n = std::int64_t{1} << log;
    if (C::kHeadDim != 128 && (n < 4096 || n > 32768)) continue;
    const int batch = n < 16384 ? static_cast<int>(16384 / n) : 1;
    Bench<C> b(name, heads, kv_heads, batch * n, batch * n);
    b.speed(batch, n, Mask{-1, 0});
    if (n == 8192 || n == 16384) b.speed(batch, n, Mask{-1, -1});
  }
}

#ifdef SPIKE_VARIANT
}  // namespace

// One variant, named on the command line of the compiler; repeated, since the card's clock wanders.
int main(int argc, char** argv) {
  using V = SPIKE_VARIANT;
  const char* name = SPIKE_NAME;
  const std::string what = argc > 1 ? argv[1] : "speed";
  if (what == "speed") {
    for (int repeat = 0; repeat < (argc > 2 ? 3 : 1); ++repeat)
      for (const std::int64_t n : {1024, 2048, 4096, 8192, 16384, 32768}) {
        const int batch = n < 16384 ? static_cast<int>(16384 / n) : 1;
        Bench<V> b(name, 32, 8, batch * n, batch * n);
        b.speed(batch, n, Mask{-1, 0});
        if (n == 8192) b.speed(batch, n, Mask{-1, -1});
      }
  } else if (what == "long") {
    for (const std::int64_t n : {65536, 131072}) {
      Bench<V> b(name, 32, 8, n, n);
      b.speed(1, n, Mask{-1, 0});
    }
  } else if (what == "state") {
    Bench<V> b(name, 32, 8, 32768, 32768);
    for (const std::int64_t tiles : {8, 32, 128}) b.state_cost(32768, tiles);
    b.finish_cost(32768);
  } else if (what == "bias") {
    for (const int log : {11, 14, 17, 19, 21}) bias<V>(name, std::int64_t{1} << log);
  }
  return 0;
}
#else
using Portable128 = sm80::Config<128, 64, 4, 2, 2, 2, false, 1>;
using Portable128Tile128 = sm80::Config<128, 128, 8, 1, 2, 1, false, 2, false>;
using Portable128InPlace = sm80::Config<128, 64, 4, 2, 2, 2, true>;
using Portable64 = sm80::Config<64, 128, 4, 2, 2, 2, false, 1>;
using Portable256 = sm80::Config<256, 64, 8, 1, 2, 1, false, 2>;
using Hopper = sm90::Config<2, false, 2, false, false, 3, false>;
using HopperInTurn = sm90::Config<2, true, 2>;
using HopperInPlace = sm90::Config<2, true, 1, false, true>;

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  const auto wanted = [&](const char* w) { return what == "all" || what == w; };
  if (wanted("speed")) {
    speeds<Hopper>("sm90 3 groups");
    speeds<HopperInTurn>("sm90 2 groups in turn");
    speeds<HopperInPlace>("sm90 2 groups in turn, in place");
    speeds<Portable128>("sm80 128x64");
    speeds<Portable128Tile128>("sm80 128x128");
    speeds<Portable64>("sm80 128x128");
    speeds<Portable256>("sm80 128x64");
  }
  if (wanted("l2")) {
    for (const std::int64_t n :
         {std::int64_t{8192}, std::int64_t{16384}, std::int64_t{32768}, std::int64_t{65536}, std::int64_t{131072}}) {
      const int batch = n < 16384 ? static_cast<int>(16384 / n) : 1;
      Bench<Hopper> b("sm90 3 groups", 32, 8, batch * n, batch * n);
      for (const std::int64_t mib : {4, 16, 32, 64, 100000}) {
        std::printf("{\"l2_mib\":%lld} ", static_cast<long long>(mib));
        b.speed(batch, n, Mask{-1, 0}, mib);
      }
    }
  }
  if (wanted("state")) {
    Bench<Hopper> b("sm90 3 groups", 32, 8, 32768, 32768);
    for (const std::int64_t tiles : {8, 32, 128}) b.state_cost(32768, tiles);
    b.finish_cost(32768);
    Bench<Portable128> c("sm80 128x64", 32, 8, 32768, 32768);
    for (const std::int64_t tiles : {16, 64, 256}) c.state_cost(32768, tiles);
    c.finish_cost(32768);
  }
  if (wanted("host")) {
    Bench<Hopper> b("sm90 3 groups", 8, 2, 262144, 131072);
    b.host_cost(4096, 64);
    b.host_cost(262144, 1024);
  }
  if (wanted("bias")) {
    for (const int log : {11, 14, 17, 19, 21}) {
      const std::int64_t n = std::int64_t{1} << log;
      bias<Portable128InPlace>("mma.sync", n);
      bias<Portable128>("mma.sync", n);
      bias<Portable128Tile128>("mma.sync", n);
      bias<HopperInPlace>("wgmma", n);
      bias<Hopper>("wgmma", n);
    }
  }
  return 0;
}
#endif
