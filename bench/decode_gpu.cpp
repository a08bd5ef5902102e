// SPDX-License-Identifier: Apache-2.0
// Measures decoding on a GPU: one step a launch, launches in a graph, each over a cache that is in no L2 cache any
// more. One JSON line a shape.
//   decode_gpu_bench [kernel [batch keys [slices]]]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/decode.hpp"
#include "kernels/fold_spec.hpp"
#include "kernels/registry.hpp"

namespace ringattn {
namespace {

constexpr std::int64_t kPoolBytes = std::int64_t{2} << 30;         // of K, and of V
constexpr std::int64_t kFarBeyondCache = std::int64_t{512} << 20;  // bytes between two uses of a cache
constexpr int kReplays = 9;

struct Shape {
  std::int64_t batch;
  std::int64_t keys;
  int heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  std::int64_t page = 0;
  int rows = 1;
  int slices = 0;  // DecodeLimits::slices
};

void check_wait(Backend& backend) { backend.synchronize(backend.mark(backend.stream()), Deadline::after(600.0), {}); }

class Bench {
 public:
  explicit Bench(const KernelRow<DecodeSpec>& row) : row_(row), backend_(row.make_backend({1, 0})) {
    k_ = backend_->allocate(kPoolBytes);
    v_ = backend_->allocate(kPoolBytes);
    constexpr std::int64_t kTokens = kPoolBytes / 2 / 128 / 8;
    const PackedRun all{0, kTokens};
    for (const auto& [memory, tensor] : {std::pair{&k_, SyntheticTensor::kK}, {&v_, SyntheticTensor::kV}}) {
      backend_->fill_synthetic(1, tensor, {&all, 1},
                               dense_view(static_cast<void*>(memory->data()), Dtype::kBf16, kTokens, 8, 128),
                               backend_->stream());
    }
    check_wait(*backend_);
  }

  void measure(const Shape& shape) {
    const FoldSpec spec = make_spec(Dtype::kBf16, shape.heads, shape.kv_heads, shape.head_dim, {-1, 0});
    const auto kernel = row_.make_kernel({spec}, *backend_);
    kernel->reserve({shape.batch, shape.rows, shape.keys, shape.slices});
    const std::int64_t rows = shape.batch * shape.rows;
    const std::int64_t elements = rows * shape.heads * shape.head_dim;
    const Buffer q = backend_->allocate(static_cast<std::size_t>(elements * 2));
    const Buffer out = backend_->allocate(static_cast<std::size_t>(elements * 2));
    const Buffer lse = backend_->allocate(static_cast<std::size_t>(rows * shape.heads * 4));
    const PackedRun all{0, rows};
    backend_->fill_synthetic(1, SyntheticTensor::kQ, {&all, 1},
                             dense_view(static_cast<void*>(q.data()), Dtype::kBf16, rows, shape.heads, shape.head_dim),
                             backend_->stream());
    const Buffer lengths =
        upload(std::vector<std::int32_t>(static_cast<std::size_t>(shape.batch), static_cast<std::int32_t>(shape.keys)));
    const std::int64_t page = shape.page == 0 ? shape.keys : shape.page;
    const std::int64_t per_sequence = (shape.keys + page - 1) / page;
    std::vector<std::int32_t> order(static_cast<std::size_t>(per_sequence * shape.batch));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 generator(1);
    std::shuffle(order.begin(), order.end(), generator);
    const Buffer table = upload(order);

    const std::int64_t cache_bytes = shape.batch * per_sequence * page * shape.kv_heads * shape.head_dim * 2;
    const std::int64_t caches =
        std::clamp<std::int64_t>(kFarBeyondCache / (2 * cache_bytes), 1, kPoolBytes / cache_bytes);
    const int launches = static_cast<int>(std::max<std::int64_t>(caches, 4));
    const auto step_of = [&](std::int64_t cache) {
      const auto view = [&](const Buffer& pool) {
        return CacheView{pool.data() + cache * cache_bytes,
                         Dtype::kBf16,
                         shape.batch * per_sequence,
                         page,
                         shape.kv_heads,
                         shape.head_dim,
                         page * shape.kv_heads * shape.head_dim,
                         std::int64_t{shape.kv_heads} * shape.head_dim,
                         shape.head_dim};
      };
      DecodeStep step;
      step.q = dense_view(static_cast<const void*>(q.data()), Dtype::kBf16, rows, shape.heads, shape.head_dim);
      step.rows = shape.rows;
      step.k = view(k_);
      step.v = view(v_);
      if (shape.page > 0) step.block_table = {reinterpret_cast<const std::int32_t*>(table.data()), per_sequence};
      step.lengths = reinterpret_cast<const std::int32_t*>(lengths.data());
      step.output = {dense_view(static_cast<void*>(out.data()), Dtype::kBf16, rows, shape.heads, shape.head_dim),
                     {reinterpret_cast<float*>(lse.data()), shape.heads, 1},
                     nullptr};
      return step;
    };
    const double us = time_graph(launches, [&](int i) { kernel->enqueue(step_of(i % caches), backend_->stream()); });
    fmt::print(
        "{{\"what\":\"decode\",\"kernel\":\"{}\",\"batch\":{},\"keys\":{},\"rows\":{},\"heads\":{},\"kv_heads\":{},"
        "\"head_dim\":{},\"page\":{},\"us\":{:.2f},\"gb_per_s\":{:.0f}}}\n",
        row_.name, shape.batch, shape.keys, shape.rows, shape.heads, shape.kv_heads, shape.head_dim, shape.page, us,
        static_cast<double>(2 * shape.batch * shape.keys * shape.kv_heads * shape.head_dim * 2) / us * 1e-3);
    std::fflush(stdout);
  }

 private:
  Buffer upload(const std::vector<std::int32_t>& numbers) {
    const auto bytes = static_cast<std::int64_t>(numbers.size() * sizeof(std::int32_t));
    Buffer memory = backend_->allocate(static_cast<std::size_t>(bytes));
    backend_->copy_rows(memory.data(), bytes, numbers.data(), bytes, bytes, 1, backend_->stream());
    check_wait(*backend_);
    return memory;
  }

  // Microseconds of a launch: the median over replays of a graph of so many.
  template <class Enqueue>
  double time_graph(int launches, Enqueue enqueue) {
    const cudaStream_t stream = cuda_stream(backend_->stream());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < launches; ++i) enqueue(i);
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiateWithFlags(&executable, graph, 0), "cudaGraphInstantiate");
    // The GPU's clock takes its time to rise.
    for (const auto begun = std::chrono::steady_clock::now();
         std::chrono::steady_clock::now() - begun < std::chrono::milliseconds(300);) {
      check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
      check_wait(*backend_);
      backend_->forget_marks();
    }
    std::vector<double> times;
    for (int i = 0; i < kReplays; ++i) {
      const Mark begin = backend_->mark(backend_->stream());
      check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
      const Mark end = backend_->mark(backend_->stream());
      backend_->synchronize(end, Deadline::after(600.0), {});
      times.push_back(backend_->elapsed(begin, end) * 1e6 / launches);
      backend_->forget_marks();
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
    return times[kReplays / 2];
  }

  const KernelRow<DecodeSpec>& row_;
  std::unique_ptr<Backend> backend_;
  Buffer k_, v_;
};

int run(int count, char** words) {
  const std::string name = count > 1 ? words[1] : "sm90_fold";
  for (const KernelRow<DecodeSpec>& row : kernel_table<DecodeSpec>()) {
    if (row.name != name || row.backend != "cuda") continue;
    Bench bench(row);
    if (count > 3) {
      Shape shape{std::atoll(words[2]), std::atoll(words[3])};
      if (count > 4) shape.slices = std::atoi(words[4]);
      bench.measure(shape);
      return 0;
    }
    for (const int log : {10, 12, 13, 14, 15, 16, 17, 20}) bench.measure({1, std::int64_t{1} << log});
    for (const int log : {10, 12, 14}) bench.measure({32, std::int64_t{1} << log});
    for (const std::int64_t page : {64, 16}) {
      for (const Shape& shape : {Shape{1, 4096}, Shape{1, 65536}, Shape{32, 4096}}) {
        Shape paged = shape;
        paged.page = page;
        bench.measure(paged);
      }
    }
    bench.measure({32, 4096, 32, 4});
    bench.measure({8, 4096, 32, 32});
    bench.measure({32, 4096, 32, 8, 64});
    bench.measure({32, 4096, 32, 8, 128, 0, 4});
    return 0;
  }
  fmt::print(stderr, "no kernel \"{}\" decodes on a GPU\n", name);
  return 2;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) {
  try {
    return ringattn::run(count, words);
  } catch (const ringattn::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
