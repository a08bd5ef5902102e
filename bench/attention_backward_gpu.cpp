// SPDX-License-Identifier: Apache-2.0
// Times attention's backward kernels on a GPU through their interface: causal, 32/8 heads of 128, one task with all
// tiles. Prints one JSON line per kernel and shape. Raw TFLOP/s count the matmuls of a kernel (dQ 3, dK/dV 4), the
// causal half. O is random and LSE that of random scores, so P has its usual size.
//   attention_backward_gpu_bench [sequences x length ...], e.g. 2x8192 1x16384 1x32768
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "bench/quantile.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

template <>
std::span<const KernelRow<AttentionBackwardSpec>> kernel_table<AttentionBackwardSpec>();

namespace {

constexpr int kHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr int kRounds = 6;      // the kernels take turns, so that a change of the clock affects all of them
constexpr int kLaunches = 4;    // timed launches of a kernel in a round
constexpr int kDqMatmuls = 3, kDkvMatmuls = 4, kCountedMatmuls = 5;

struct Shape {
  std::int64_t sequences, length;
  std::int64_t tokens() const { return sequences * length; }
  // Of one matmul, the causal half.
  double flops() const {
    const auto n = static_cast<double>(length);
    return static_cast<double>(sequences) * n * n * kHeadDim * kHeads;
  }
};

class Bench {
 public:
  explicit Bench(const KernelRow<AttentionBackwardSpec>& row)
      : row_(row),
        backend_(row.make_backend({1, 0})),
        spec_{make_spec(Dtype::kBf16, kHeads, kKvHeads, kHeadDim, {-1, 0}), Dtype::kBf16},
        kernel_(row.make_kernel(spec_, *backend_)) {}

  void measure(const Shape& shape) {
    const std::int64_t tokens = shape.tokens();
    const Buffer q = random(1, SyntheticTensor::kQ, tokens, kHeads), k = random(1, SyntheticTensor::kK, tokens, kKvHeads),
                 v = random(1, SyntheticTensor::kV, tokens, kKvHeads), out = random(2, SyntheticTensor::kQ, tokens, kHeads),
                 dout = random(3, SyntheticTensor::kQ, tokens, kHeads);
    const auto view = [tokens](const Buffer& rows, int heads) {
      return dense_view(static_cast<void*>(rows.data()), Dtype::kBf16, tokens, heads, kHeadDim);
    };
    std::vector<float> host(static_cast<std::size_t>(tokens * kHeads));
    for (std::size_t i = 0; i < host.size(); ++i) {
      const std::int64_t position = static_cast<std::int64_t>(i) / kHeads % shape.length;
      host[i] = std::log(static_cast<float>(position + 1)) + 0.5F;  // of normally distributed scores
    }
    const Buffer lse = backend_->allocate(host.size() * sizeof(float));
    check_cuda(cudaMemcpy(lse.data(), host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
    const Buffer stats = backend_->allocate(host.size() * kRowStats * sizeof(float));
    const Buffer dq = backend_->allocate(q.bytes()), dk = backend_->allocate(k.bytes()), dv = backend_->allocate(v.bytes());
    const MutableTensorView dq_view = view(dq, kHeads), dk_view = view(dk, kKvHeads), dv_view = view(dv, kKvHeads);

    std::vector<BackwardSequence> sequences;
    std::vector<QueryRun> rows;
    for (std::int64_t s = 0; s < shape.sequences; ++s) {
      sequences.push_back({shape.length, shape.length, 0});
      rows.push_back({static_cast<std::int32_t>(s), 0, s * shape.length, shape.length});
    }
    const Tiles keys(shape, kernel_->key_tile()), queries(shape, kBackwardTile);
    BackwardLimits limits{tokens, shape.sequences, shape.sequences,
                          static_cast<std::int64_t>(std::max(keys.tiles.size(), queries.tiles.size())), shape.sequences};
    kernel_->reserve(limits);

    RowStatsTask stats_task;
    stats_task.out = view(out, kHeads);
    stats_task.dout = view(dout, kHeads);
    stats_task.lse = {reinterpret_cast<float*>(lse.data()), kHeads, 1};
    stats_task.stats = reinterpret_cast<float*>(stats.data());
    const BackwardKeySource key_source{view(k, kKvHeads), view(v, kKvHeads)};
    DqTask dq_task;
    fill(dq_task, sequences, rows, keys);
    dq_task.q = view(q, kHeads);
    dq_task.dout = view(dout, kHeads);
    dq_task.stats = stats_task.stats;
    dq_task.sources = {&key_source, 1};
    dq_task.dq = &dq_view;
    const BackwardQuerySource query_source{view(q, kHeads), view(dout, kHeads), stats_task.stats};
    DkvTask dkv_task;
    fill(dkv_task, sequences, rows, queries);
    dkv_task.k = view(k, kKvHeads);
    dkv_task.v = view(v, kKvHeads);
    dkv_task.sources = {&query_source, 1};
    dkv_task.dk = &dk_view;
    dkv_task.dv = &dv_view;

    std::vector<double> times[3];
    for (int round = 0; round < kRounds; ++round) {
      time([&] { kernel_->row_stats(stats_task, backend_->stream(), {}); }, times[0]);
      time([&] { kernel_->add_dq(dq_task, backend_->stream(), {}); }, times[1]);
      time([&] { kernel_->add_dkv(dkv_task, backend_->stream(), {}); }, times[2]);
    }
    double total = 0.0;
    constexpr int kMatmuls[3] = {0, kDqMatmuls, kDkvMatmuls};
    constexpr std::string_view kNames[3] = {"row_stats", "dq", "dkv"};
    for (int i = 0; i < 3; ++i) {
      std::sort(times[i].begin(), times[i].end());
      const double ms = quantile(times[i], 0.5);
      total += ms;
      fmt::print("{{\"kernel\":\"{}\",\"part\":\"{}\",\"sequences\":{},\"length\":{},\"ms\":{:.4f},\"raw_tflops\":{:.1f}}}\n",
                 row_.name, kNames[i], shape.sequences, shape.length, ms, kMatmuls[i] * shape.flops() / ms * 1e-9);
    }
    fmt::print("{{\"kernel\":\"{}\",\"part\":\"all\",\"sequences\":{},\"length\":{},\"ms\":{:.4f},\"tflops\":{:.1f}}}\n",
               row_.name, shape.sequences, shape.length, total, kCountedMatmuls * shape.flops() / total * 1e-9);
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

  Buffer random(std::uint64_t seed, SyntheticTensor tensor, std::int64_t tokens, int heads) {
    Buffer memory = backend_->allocate(static_cast<std::size_t>(tokens * heads * kHeadDim) * size_of(Dtype::kBf16));
    const PackedRun all{0, tokens};
    backend_->fill_synthetic(seed, tensor, {&all, 1},
                             dense_view(static_cast<void*>(memory.data()), Dtype::kBf16, tokens, heads, kHeadDim),
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
  AttentionBackwardSpec spec_;
  std::unique_ptr<AttentionBackwardKernel> kernel_;
};

int run(int argc, char** argv) {
  std::vector<Shape> shapes;
  for (int i = 1; i < argc; ++i) {
    const std::string_view text = argv[i];
    const std::size_t cross = text.find('x');
    if (cross == std::string_view::npos) {
      std::fprintf(stderr, "shapes are written as sequences x length, e.g. 2x8192\n");
      return 2;
    }
    shapes.push_back({std::atoll(argv[i]), std::atoll(argv[i] + cross + 1)});
  }
  if (shapes.empty()) shapes = {{2, 8192}, {1, 16384}, {1, 32768}};
  for (const auto& row : kernel_table<AttentionBackwardSpec>()) {
    if (row.backend != "cuda" || !row.unavailable().empty()) continue;
    Bench bench(row);
    for (const Shape& shape : shapes) bench.measure(shape);
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
