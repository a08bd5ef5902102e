// SPDX-License-Identifier: Apache-2.0
// Measures the batched GEMMs of MLA (each head with its own matrix) on a GPU: many consecutive launches in a CUDA
// graph, over tensors that are no longer in L2 (cold), or always the same ones (warm). Prints one JSON line per shape,
// as bench/peers/gemm.py writes them (schema "ringattn.gemm/1").
//   gemm_gpu_bench --shapes expand:32kx16,absorb:128x128,back:128x128 --cache cold,warm
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/build.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "bench/arguments.hpp"
#include "bench/gemm_gpu_arguments.hpp"
#include "bench/graph_time.hpp"
#include "bench/quantile.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {
namespace {

class Bench {
 public:
  Bench(const BatchedGemmRow& row, Dtype dtype) : row_(row), dtype_(dtype), backend_(row.make_backend({1, 0})) {}

  // Prints the shape's line; of one that can't run the line says why.
  void measure(const GemmShape& shape) {
    std::vector<double> times;
    std::string error;
    try {
      times = time_gemms(shape);
    } catch (const Error& refused) {
      if (refused.code() == ErrorCode::kInternal) throw;  // the device may be in no state to go on
      error = refused.what();
    }
    print_line(shape, std::move(times), error);
  }

 private:
  // `elements` synthetic numbers.
  Buffer numbers(std::int64_t elements, SyntheticTensor tensor) {
    const std::int64_t rows = (elements + kLatentDim - 1) / kLatentDim;
    Buffer memory = backend_->allocate(static_cast<std::size_t>(rows * kLatentDim * 2));
    const PackedRun all{0, rows};
    backend_->fill_synthetic(1, tensor, {&all, 1},
                             dense_view(static_cast<void*>(memory.data()), dtype_, rows, 1, kLatentDim),
                             backend_->stream());
    return memory;
  }

  // Microseconds of a GEMM in each replay.
  std::vector<double> time_gemms(const GemmShape& shape) {
    const BatchedGemmSpec spec{dtype_, shape.k(), shape.n()};
    if (const auto missing = row_.missing(spec); !missing.empty()) {
      fail(ErrorCode::kUnsupported, fmt::format("{} has no form for this shape", row_.name),
           fmt::format("it lacks {}", fmt::join(missing, ", ")), "Take another one.");
    }
    const auto kernel = row_.make_kernel(spec, *backend_);
    kernel->reserve(shape.heads);
    const std::int64_t row_elements = shape.rows * shape.row_heads() * shape.row_width();
    const std::int64_t weight_elements = shape.heads * kHeadDim * kLatentDim;
    const std::int64_t out_elements = shape.rows * shape.heads * shape.out_width();
    const Buffer rows = numbers(shape.copies() * row_elements, SyntheticTensor::kLatent);
    const Buffer weights = numbers(shape.copies() * weight_elements, SyntheticTensor::kWeightKeys);
    const Buffer out = backend_->allocate(static_cast<std::size_t>(shape.copies() * out_elements * 2));
    const auto task_of = [&](std::int64_t copy) {
      const GemmWeights matrices{weights.data() + copy * weight_elements * 2,
                                 dtype_,
                                 shape.heads,
                                 kHeadDim,
                                 kLatentDim,
                                 std::int64_t{kHeadDim} * kLatentDim,
                                 kLatentDim,
                                 1};
      BatchedGemmTask task;
      task.rows = {rows.data() + copy * row_elements * 2, dtype_,           shape.rows, shape.row_heads(), shape.k(),
                   shape.row_heads() * shape.row_width(), shape.row_width()};
      task.weights = shape.use == GemmUse::kAbsorb ? matrices.transposed() : matrices;
      task.out = {out.data() + copy * out_elements * 2, dtype_,           shape.rows, shape.heads, shape.n(),
                  shape.heads * shape.out_width(),      shape.out_width()};
      return task;
    };
    return time_graph(*backend_, shape.launches(),
                      [&](std::int64_t i) { kernel->multiply(task_of(i % shape.copies()), backend_->stream(), {}); });
  }

  void print_line(const GemmShape& shape, std::vector<double> times, std::string_view error) const {
    std::sort(times.begin(), times.end());
    JsonWriter line(false);
    line.begin_object().member("schema", "ringattn.gemm/1");
    line.key("tool").begin_object().member("name", "ringattn").member("version", version()).end_object();
    line.member("git", std::string(git_revision()) + (git_dirty() ? "-dirty" : ""));
    line.key("devices").begin_array().value(backend_->identity()).end_array();
    line.member("kernel", row_.name).member("form", "");
    line.key("job").begin_object().member("use", name_of(shape.use)).member("rows", shape.rows);
    line.member("heads", shape.heads).member("k", shape.k()).member("n", shape.n());
    line.member("dtype", dtype_name(dtype_)).end_object();
    line.member("cache", shape.cold ? "cold" : "warm").member("copies", shape.copies());
    line.member("launches", shape.launches()).member("samples", times.size());
    if (times.empty()) {
      line.key("ms").null().member("error", error);
    } else {
      const double median = quantile(times, 0.5);
      line.key("ms").begin_object().member("median", median * 1e-3);
      line.member("p10", quantile(times, 0.1) * 1e-3).member("p90", quantile(times, 0.9) * 1e-3).end_object();
      line.member("tflops", shape.flops() / median * 1e-6);
      line.member("gbytes_per_second", static_cast<double>(shape.bytes()) / median * 1e-3);
    }
    fmt::print("{}\n", line.end_object().text());
    std::fflush(stdout);
  }

  const BatchedGemmRow& row_;
  Dtype dtype_;
  std::unique_ptr<Backend> backend_;
};

int run(const std::vector<std::string_view>& arguments) {
  const GemmArguments words = parse_gemm_arguments(arguments);
  for (const BatchedGemmRow& row : kernel_table<BatchedGemmSpec>()) {
    if (row.name != words.kernel || row.backend != "cuda") continue;
    Bench bench(row, words.dtype);
    for (const GemmShape& shape : words.shapes) bench.measure(shape);
    return 0;
  }
  fmt::print(stderr, "no kernel \"{}\" multiplies heads by their matrices on a GPU\n", words.kernel);
  return 2;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) { return ringattn::run_main(ringattn::run, count, words); }
