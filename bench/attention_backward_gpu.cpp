// SPDX-License-Identifier: Apache-2.0
// Times attention's backward kernels on a GPU through their interface: one task with all tiles. Prints one JSON line
// per kernel and shape. Raw TFLOP/s count 3 matmuls for dQ and 4 for dK and dV, also where two kernels compute S, and
// half of a causal one. Part dq_dkv is one call for all gradients. O is random and LSE that of random scores, so P has
// its usual size.
//   attention_backward_gpu_bench
//       [[--kernel name] [--dtype bf16] [--heads 32/8] [--dims 128] [--mask causal] sequences x length ...]
// A mask is causal, full, or the number of keys before a query that it sees. An option holds for the shapes after it.
// Without shapes: 2x8192 1x16384 1x32768. sm80_simt_backward, which is slow, only runs for fp32 or by name.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "bench/quantile.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

constexpr int kRounds = 6;    // the kernels take turns, so that a change of the clock affects all of them
constexpr int kLaunches = 4;  // timed launches of a kernel in a round

struct Shape {
  std::string kernel;  // empty: every kernel
  Dtype dtype = Dtype::kBf16;
  int heads = 32, kv_heads = 8;
  int head_dim = 128, head_dim_v = 128;
  bool causal = true;
  std::int64_t window = -1;  // keys before a query that it sees; -1: all
  std::int64_t sequences = 0, length = 0;

  std::int64_t tokens() const { return sequences * length; }
  std::string mask() const { return window >= 0 ? fmt::format("{}", window) : causal ? "causal" : "full"; }
  // Matmuls of scores by `of_qk` · head_dim and by `of_v` · head_dim_v.
  double flops(int of_qk, int of_v) const {
    const auto n = static_cast<double>(length);
    const double unseen = window < 0 || window >= length ? 0.0 : n - static_cast<double>(window);
    const double pairs = n * n * (causal ? 1 : 2) - unseen * unseen;  // twice
    return static_cast<double>(sequences) * pairs * heads * (of_qk * head_dim + of_v * head_dim_v);
  }
};

class Bench {
 public:
  Bench(const KernelRow<AttentionBackwardSpec>& row, const AttentionBackwardSpec& spec)
      : row_(row), backend_(row.make_backend({1, 0})), kernel_(row.make_kernel(spec, *backend_)) {}

  void measure(const Shape& shape) {
    const std::int64_t tokens = shape.tokens();
    const int heads = shape.heads, kv_heads = shape.kv_heads, dim = shape.head_dim, dim_v = shape.head_dim_v;
    const Dtype dtype = shape.dtype;
    const Buffer q = random(1, SyntheticTensor::kQ, dtype, tokens, heads, dim),
                 k = random(1, SyntheticTensor::kK, dtype, tokens, kv_heads, dim),
                 v = random(1, SyntheticTensor::kV, dtype, tokens, kv_heads, dim_v),
                 out = random(2, SyntheticTensor::kQ, dtype, tokens, heads, dim_v),
                 dout = random(3, SyntheticTensor::kQ, dtype, tokens, heads, dim_v);
    const auto view = [tokens, dtype](const Buffer& rows, int of_heads, int of_dim) {
      return dense_view(static_cast<void*>(rows.data()), dtype, tokens, of_heads, of_dim);
    };
    std::vector<float> host(static_cast<std::size_t>(tokens * heads));
    for (std::size_t i = 0; i < host.size(); ++i) {
      const std::int64_t position = static_cast<std::int64_t>(i) / heads % shape.length;
      const std::int64_t seen = shape.causal ? position + 1 : shape.length;
      const std::int64_t keys = shape.window < 0 ? seen : std::min(seen, shape.window + 1);
      host[i] = std::log(static_cast<float>(keys)) + 0.5F;  // of normally distributed scores
    }
    const Buffer lse = backend_->allocate(host.size() * sizeof(float));
    check_cuda(cudaMemcpy(lse.data(), host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
    const Buffer stats = backend_->allocate(host.size() * kRowStats * sizeof(float));
    const Buffer dq = backend_->allocate(q.bytes()), dk = backend_->allocate(k.bytes()),
                 dv = backend_->allocate(v.bytes());
    const MutableTensorView dq_view = view(dq, heads, dim), dk_view = view(dk, kv_heads, dim),
                            dv_view = view(dv, kv_heads, dim_v);

    std::vector<BackwardSequence> sequences;
    std::vector<QueryRun> rows;
    for (std::int64_t s = 0; s < shape.sequences; ++s) {
      sequences.push_back({shape.length, shape.length, 0});
      rows.push_back({static_cast<std::int32_t>(s), 0, s * shape.length, shape.length});
    }
    const Tiles keys(shape, kernel_->key_tile()), queries(shape, kBackwardTile);
    BackwardLimits limits{tokens,          shape.sequences,
                          shape.sequences, static_cast<std::int64_t>(std::max(keys.tiles.size(), queries.tiles.size())),
                          shape.sequences, ScoreSharing::kIfFaster};
    kernel_->reserve(limits);

    RowStatsTask stats_task;
    stats_task.out = view(out, heads, dim_v);
    stats_task.dout = view(dout, heads, dim_v);
    stats_task.lse = {reinterpret_cast<float*>(lse.data()), heads, 1};
    stats_task.stats = reinterpret_cast<float*>(stats.data());
    const BackwardKeySource key_source{view(k, kv_heads, dim), view(v, kv_heads, dim_v)};
    DqTask dq_task;
    fill(dq_task, sequences, rows, keys);
    dq_task.q = view(q, heads, dim);
    dq_task.dout = view(dout, heads, dim_v);
    dq_task.stats = stats_task.stats;
    dq_task.sources = {&key_source, 1};
    dq_task.dq = &dq_view;
    const BackwardQuerySource query_source{view(q, heads, dim), view(dout, heads, dim_v), stats_task.stats};
    DkvTask dkv_task;
    fill(dkv_task, sequences, rows, queries);
    dkv_task.k = view(k, kv_heads, dim);
    dkv_task.v = view(v, kv_heads, dim_v);
    dkv_task.sources = {&query_source, 1};
    dkv_task.dk = &dk_view;
    dkv_task.dv = &dv_view;

    std::vector<double> times[4];
    for (int round = 0; round < kRounds; ++round) {
      time([&] { kernel_->row_stats(stats_task, backend_->stream(), {}); }, times[0]);
      time([&] { kernel_->add_dq(dq_task, backend_->stream(), {}); }, times[1]);
      time([&] { kernel_->add_dkv(dkv_task, backend_->stream(), {}); }, times[2]);
      time([&] { kernel_->add_dq_and_dkv(dq_task, dkv_task, backend_->stream(), {}); }, times[3]);
    }
    const double counted = 2.5 * shape.flops(1, 1);
    const double flops[4] = {0.0, shape.flops(2, 1), shape.flops(2, 2), counted};
    constexpr std::string_view kNames[4] = {"row_stats", "dq", "dkv", "dq_dkv"};
    const std::string name = fmt::format(
        "\"kernel\":\"{}\",\"dtype\":\"{}\",\"heads\":\"{}/{}\",\"dims\":\"{}/"
        "{}\",\"mask\":\"{}\",\"sequences\":{},\"length\":{}",
        row_.name, dtype_name(dtype), heads, kv_heads, dim, dim_v, shape.mask(), shape.sequences, shape.length);
    double ms[4];
    for (int i = 0; i < 4; ++i) {
      std::sort(times[i].begin(), times[i].end());
      ms[i] = quantile(times[i], 0.5);
      fmt::print("{{{},\"part\":\"{}\",\"ms\":{:.4f},\"raw_tflops\":{:.1f}}}\n", name, kNames[i], ms[i],
                 flops[i] / ms[i] * 1e-9);
    }
    const double two_calls = ms[0] + ms[1] + ms[2], one_call = ms[0] + ms[3];
    fmt::print("{{{},\"part\":\"all\",\"ms\":{:.4f},\"tflops\":{:.1f}}}\n", name, two_calls,
               counted / two_calls * 1e-9);
    fmt::print("{{{},\"part\":\"all of one call\",\"ms\":{:.4f},\"tflops\":{:.1f}}}\n", name, one_call,
               counted / one_call * 1e-9);
    std::fflush(stdout);
  }

 private:
  // All tiles of the batch, in one source.
  struct Tiles {
    std::vector<KeyRun> runs;
    std::vector<PageRun> tiles;
    Tiles(const Shape& shape, int size) {
      const std::int64_t count = (shape.length + size - 1) / size;
      for (std::int64_t s = 0; s < shape.sequences; ++s) {
        runs.push_back({static_cast<std::int32_t>(s), 0, count, s * count});
        for (std::int64_t i = 0; i < count; ++i) tiles.push_back({0, s * shape.length + i * size});
      }
    }
  };

  static void fill(BackwardTask& task, const std::vector<BackwardSequence>& sequences,
                   const std::vector<QueryRun>& rows, const Tiles& tiles) {
    task.sequences = sequences;
    task.rows = rows;
    task.runs = tiles.runs;
    task.tiles = tiles.tiles;
    task.save = false;
  }

  Buffer random(std::uint64_t seed, SyntheticTensor tensor, Dtype dtype, std::int64_t tokens, int heads, int dim) {
    Buffer memory = backend_->allocate(static_cast<std::size_t>(tokens * heads * dim) * size_of(dtype));
    const PackedRun all{0, tokens};
    backend_->fill_synthetic(seed, tensor, {&all, 1},
                             dense_view(static_cast<void*>(memory.data()), dtype, tokens, heads, dim),
                             backend_->stream());
    return memory;
  }

  template <class Enqueue>
  void time(const Enqueue& enqueue, std::vector<double>& times) {
    const auto marks = backend_->make_events(2, true);
    enqueue();
    for (int i = 0; i < kLaunches; ++i) {
      marks->record(0, backend_->stream());
      enqueue();
      marks->record(1, backend_->stream());
      marks->synchronize(1, Deadline::after(60.0), {});
      times.push_back(marks->elapsed(0, 1) * 1e3);
    }
  }

  const KernelRow<AttentionBackwardSpec>& row_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<AttentionBackwardKernel> kernel_;
};

// "a/b", or "a" for both.
void read_pair(std::string_view text, int& first, int& second) {
  const std::size_t slash = text.find('/');
  first = std::atoi(text.data());
  second = slash == std::string_view::npos ? first : std::atoi(text.data() + slash + 1);
}

int run(int argc, char** argv) {
  std::vector<Shape> shapes;
  Shape shape;
  for (int i = 1; i < argc; ++i) {
    const std::string_view text = argv[i];
    const std::string_view value = i + 1 < argc ? argv[i + 1] : "";
    if (text == "--kernel") {
      shape.kernel = value;
    } else if (text == "--dtype") {
      const std::optional<Dtype> dtype = parse_dtype(value);
      if (!dtype) {
        std::fprintf(stderr, "unknown dtype %s\n", argv[i + 1] == nullptr ? "" : argv[i + 1]);
        return 2;
      }
      shape.dtype = *dtype;
    } else if (text == "--heads") {
      read_pair(value, shape.heads, shape.kv_heads);
    } else if (text == "--dims") {
      read_pair(value, shape.head_dim, shape.head_dim_v);
    } else if (text == "--mask") {
      shape.causal = value != "full";
      shape.window = value == "causal" || value == "full" ? -1 : std::atoll(argv[i + 1]);
    } else if (const std::size_t cross = text.find('x'); cross != std::string_view::npos) {
      shape.sequences = std::atoll(argv[i]);
      shape.length = std::atoll(argv[i] + cross + 1);
      shapes.push_back(shape);
      continue;
    } else {
      std::fprintf(stderr, "unknown argument %s (shapes are written as sequences x length, e.g. 2x8192)\n", argv[i]);
      return 2;
    }
    ++i;
  }
  if (shapes.empty()) {
    for (const auto& [sequences, length] : {std::pair{2, 8192}, {1, 16384}, {1, 32768}}) {
      shape.sequences = sequences;
      shape.length = length;
      shapes.push_back(shape);
    }
  }
  for (const auto& row : kernel_table<AttentionBackwardSpec>()) {
    if (row.backend != "cuda" || !row.unavailable().empty()) continue;
    for (const Shape& of : shapes) {
      const AttentionBackwardSpec spec{
          make_spec(of.dtype, of.heads, of.kv_heads, of.head_dim, {of.window, of.causal ? 0 : -1}, of.head_dim_v),
          of.dtype};
      const bool unasked = of.dtype != Dtype::kF32 && row.name == "sm80_simt_backward";
      if ((of.kernel.empty() ? !unasked : of.kernel == row.name) && row.missing(spec).empty()) {
        Bench(row, spec).measure(of);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  try {
    return ringattn::run(argc, argv);
  } catch (const ringattn::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.code());
  }
}
