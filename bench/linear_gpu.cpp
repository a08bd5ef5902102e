// SPDX-License-Identifier: Apache-2.0
// Measures linear layers on a GPU: many consecutive launches in a CUDA graph, over copies of x and the weights in turn,
// which are no longer in L2 when they are used again. As in PyTorch, all launches have the same y. Prints one JSON line
// per shape, as bench/peers/linear.py writes them (schema "ringattn.linear/1").
//   linear_gpu_bench --shapes 8192x4096x4096,64x12288x5376,8192x14336x4096:swiglu,8192x4096x14336:none:row
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "bench/arguments.hpp"
#include "bench/graph_time.hpp"
#include "bench/linear_line.hpp"
#include "bench/quantile.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn {
namespace {

constexpr BenchArguments kLinearArguments{"linear_gpu_bench",
                                          "linear_gpu_bench [--kernel NAME] [--shapes "
                                          "ROWSxNxK[:activation[:none|row]],…] [--dtype bf16|fp16|fp32] [--git SHA]"};
constexpr std::int64_t kCopyElements = 4096;  // row of the synthetic tensors from which operands are cut

struct LinearShape {
  std::int64_t rows = 1;
  LinearSpec spec;

  double flops() const {
    return 2.0 * static_cast<double>(rows) * static_cast<double>(spec.sum_columns()) *
           static_cast<double>(spec.in_features);
  }
  std::int64_t x_elements() const { return rows * spec.in_features; }
  std::int64_t weight_elements() const { return spec.sum_columns() * spec.in_features; }
  std::int64_t y_elements() const { return rows * spec.out_features; }
  std::int64_t element() const { return static_cast<std::int64_t>(size_of(spec.dtype)); }
  std::int64_t bytes() const { return element() * (x_elements() + weight_elements() + y_elements()); }
  // Copies of x and the weights, used in turn. The L2 cache has 50 MB.
  std::int64_t copies() const {
    constexpr std::int64_t kFarBeyondCache = std::int64_t{320} << 20;
    return (kFarBeyondCache + bytes() - 1) / bytes();
  }
  // Launches in one graph, a multiple of copies().
  std::int64_t launches() const {
    constexpr std::int64_t kMinLaunches = 8;
    return copies() * ((kMinLaunches + copies() - 1) / copies());
  }
};

// "8192x14336x4096:swiglu:row"
LinearShape linear_shape(std::string_view entry, Dtype dtype) {
  LinearShape shape;
  std::vector<std::string_view> parts;
  for (std::string_view rest = entry;;) {
    const std::size_t colon = rest.find(':');
    parts.push_back(rest.substr(0, colon));
    if (colon == std::string_view::npos) break;
    rest.remove_prefix(colon + 1);
  }
  const std::size_t first = parts[0].find('x');
  const std::size_t second = first == std::string_view::npos ? first : parts[0].find('x', first + 1);
  if (second == std::string_view::npos) kLinearArguments.refuse(entry, "a shape is rows x N x K");
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  shape.rows = kLinearArguments.number(parts[0].substr(0, first), 1, kMost);
  shape.spec.dtype = dtype;
  shape.spec.out_features = kLinearArguments.number(parts[0].substr(first + 1, second - first - 1), 1, kMost);
  shape.spec.in_features = kLinearArguments.number(parts[0].substr(second + 1), 1, kMost);
  if (parts.size() > 1 && !parse_activation(parts[1], shape.spec.activation, shape.spec.gated)) {
    kLinearArguments.refuse(entry, "it has no activation of linear layers");
  }
  if (parts.size() > 2) {
    if (parts[2] != "none" && parts[2] != "row") kLinearArguments.refuse(entry, "a layer is parallel by none or row");
    if (parts[2] == "row") shape.spec.parallel = LinearParallel::kRow;
  }
  return shape;
}

class LinearBench {
 public:
  LinearBench(const KernelRow<LinearSpec>& row, std::string git)
      : row_(row), git_(std::move(git)), backend_(row.make_backend({1, 0})) {}

  void measure(const LinearShape& shape) {
    const auto kernel = row_.make_kernel(shape.spec, *backend_);
    kernel->reserve(shape.rows);
    const Buffer x = numbers(shape.copies() * shape.x_elements(), shape.spec.dtype, SyntheticTensor::kLatent);
    const Buffer weights =
        numbers(shape.copies() * shape.weight_elements(), shape.spec.dtype, SyntheticTensor::kWeightKeys);
    const std::int64_t element = shape.element();
    const Buffer y = backend_->allocate(static_cast<std::size_t>(shape.y_elements() * element));
    const std::int64_t n = shape.spec.out_features;
    const std::int64_t k = shape.spec.in_features;
    std::vector<double> times = time_graph(*backend_, shape.launches(), [&](std::int64_t i) {
      const std::int64_t copy = i % shape.copies();
      LinearTask task;
      task.x = dense_view(static_cast<const void*>(x.data() + copy * shape.x_elements() * element), shape.spec.dtype,
                          shape.rows, 1, k);
      task.weights.weights.matrix.data = weights.data() + copy * shape.weight_elements() * element;
      task.weights.weights.matrix.row_stride = k * element;
      if (shape.spec.gated) {
        task.weights.weights.up.data = weights.data() + (copy * shape.weight_elements() + n * k) * element;
        task.weights.weights.up.row_stride = k * element;
      }
      task.y = dense_view(static_cast<void*>(y.data()), shape.spec.dtype, shape.rows, 1, n);
      kernel->multiply(task, backend_->stream(), {});
    });
    print_line(shape, std::move(times));
  }

 private:
  // `elements` synthetic numbers.
  Buffer numbers(std::int64_t elements, Dtype dtype, SyntheticTensor tensor) {
    const std::int64_t rows = (elements + kCopyElements - 1) / kCopyElements;
    Buffer memory = backend_->allocate(static_cast<std::size_t>(rows * kCopyElements) * size_of(dtype));
    const PackedRun all{0, rows};
    backend_->fill_synthetic(1, tensor, {&all, 1},
                             dense_view(static_cast<void*>(memory.data()), dtype, rows, 1, kCopyElements),
                             backend_->stream());
    return memory;
  }

  void print_line(const LinearShape& shape, std::vector<double> times) const {
    std::sort(times.begin(), times.end());
    JsonWriter line(false);
    begin_linear_line(line, git_, backend_->identity(), row_.name, shape.rows, shape.spec);
    add_linear_times(line, times, shape.copies(), shape.launches());
    const double median = quantile(times, 0.5);
    line.member("tflops", shape.flops() / median * 1e-6);
    line.member("gbytes_per_second", static_cast<double>(shape.bytes()) / median * 1e-3);
    fmt::print("{}\n", line.end_object().text());
    std::fflush(stdout);
  }

  const KernelRow<LinearSpec>& row_;
  std::string git_;
  std::unique_ptr<Backend> backend_;
};

int run_linear(const std::vector<std::string_view>& words) {
  std::string_view kernel = "sm90_linear";
  std::string_view shapes = "8192x4096x4096,64x12288x5376";
  std::string git = std::string(git_revision()) + (git_dirty() ? "-dirty" : "");
  Dtype dtype = Dtype::kBf16;
  for (std::size_t i = 0; i < words.size(); i += 2) {
    if (i + 1 == words.size()) kLinearArguments.refuse(words[i], "it has no value");
    const std::string_view name = words[i], value = words[i + 1];
    if (name == "--kernel") {
      kernel = value;
    } else if (name == "--shapes") {
      shapes = value;
    } else if (name == "--git") {
      git = value;
    } else if (name == "--dtype") {
      if (value != "bf16" && value != "fp16" && value != "fp32") {
        kLinearArguments.refuse(value, "a dtype is bf16, fp16 or fp32");
      }
      dtype = value == "bf16" ? Dtype::kBf16 : value == "fp16" ? Dtype::kF16 : Dtype::kF32;
    } else {
      kLinearArguments.refuse(name, "it is none of the words that it knows");
    }
  }
  for (const KernelRow<LinearSpec>& row : kernel_table<LinearSpec>()) {
    if (row.name != kernel || row.backend != "cuda") continue;
    LinearBench bench(row, git);
    for (const std::string_view entry : list_entries(shapes)) bench.measure(linear_shape(entry, dtype));
    return 0;
  }
  fmt::print(stderr, "no linear kernel \"{}\" runs on a GPU\n", kernel);
  return 2;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) { return ringattn::run_main(ringattn::run_linear, count, words); }
