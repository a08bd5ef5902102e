// SPDX-License-Identifier: Apache-2.0
// Measures linear layers with int8 and int4 weights on a GPU, by the method of linear_gpu.cpp: many consecutive
// launches in a CUDA graph, over copies of the weights in turn, which are no longer in L2 when they are used again.
// Prints one JSON line per shape (schema "ringattn.linear/1"). For int8, "part" says what was measured: the whole
// layer, the quantization of x, or the product alone with its epilogue.
//   linear_quantized_gpu_bench --shapes 1x4096x8192:int8,4096x8192x8192:int4,4096x14336x4096:int4:swiglu
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
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
#include "kernels/linear/cuda/quantized_params.hpp"
#include "kernels/linear/linear.hpp"
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/linear/sm90/int8.hpp"
#endif

namespace ringattn {
namespace {

constexpr BenchArguments kQuantizedArguments{
    "linear_quantized_gpu_bench",
    "linear_quantized_gpu_bench [--shapes ROWSxNxK:int8|int4[:activation[:none|row]],…] [--git SHA]"};

struct QuantizedShape {
  std::int64_t rows = 1;
  LinearSpec spec;

  bool int8() const { return spec.weights == WeightFormat::kInt8; }
  double flops() const {
    return 2.0 * static_cast<double>(rows) * static_cast<double>(spec.sum_columns()) *
           static_cast<double>(spec.in_features);
  }
  std::int64_t weight_bytes() const { return spec.sum_columns() * spec.in_features / (int8() ? 1 : 2); }
  // Copies of the weights, used in turn. The L2 cache has 50 MB.
  std::int64_t copies() const {
    constexpr std::int64_t kFarBeyondCache = std::int64_t{320} << 20;
    return (kFarBeyondCache + weight_bytes() - 1) / weight_bytes();
  }
  // Launches in one graph, a multiple of copies().
  std::int64_t launches() const {
    constexpr std::int64_t kMinLaunches = 20;
    return copies() * ((kMinLaunches + copies() - 1) / copies());
  }
};

// "4096x14336x4096:int4:swiglu:row"
QuantizedShape quantized_shape(std::string_view entry) {
  std::vector<std::string_view> parts;
  for (std::string_view rest = entry;;) {
    const std::size_t colon = rest.find(':');
    parts.push_back(rest.substr(0, colon));
    if (colon == std::string_view::npos) break;
    rest.remove_prefix(colon + 1);
  }
  const std::size_t first = parts[0].find('x');
  const std::size_t second = first == std::string_view::npos ? first : parts[0].find('x', first + 1);
  if (second == std::string_view::npos || parts.size() < 2) {
    kQuantizedArguments.refuse(entry, "a shape is rows x N x K, and a format of weights");
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  QuantizedShape shape;
  shape.rows = kQuantizedArguments.number(parts[0].substr(0, first), 1, kMost);
  shape.spec.dtype = Dtype::kBf16;
  shape.spec.out_features = kQuantizedArguments.number(parts[0].substr(first + 1, second - first - 1), 1, kMost);
  shape.spec.in_features = kQuantizedArguments.number(parts[0].substr(second + 1), 1, kMost);
  if (parts[1] != "int8" && parts[1] != "int4") kQuantizedArguments.refuse(entry, "weights are int8 or int4");
  shape.spec.weights = parts[1] == "int8" ? WeightFormat::kInt8 : WeightFormat::kInt4;
  if (parts.size() > 2 && !parse_activation(parts[2], shape.spec.activation, shape.spec.gated)) {
    kQuantizedArguments.refuse(entry, "it has no activation of linear layers");
  }
  if (parts.size() > 3) {
    if (parts[3] != "none" && parts[3] != "row")
      kQuantizedArguments.refuse(entry, "a layer is parallel by none or row");
    if (parts[3] == "row") shape.spec.parallel = LinearParallel::kRow;
  }
  return shape;
}

class QuantizedBench {
 public:
  QuantizedBench(QuantizedShape shape, std::string git)
      : shape_(std::move(shape)),
        git_(std::move(git)),
        row_(*choose_kernel(shape_.spec, {"cuda", "auto"}).row),
        backend_(row_.make_backend({1, 0})),
        kernel_(row_.make_kernel(shape_.spec, *backend_)) {}

  void measure() {
    const LinearSpec& spec = shape_.spec;
    kernel_->reserve(shape_.rows);
    make_operands();
    print_line("whole", time_graph(*backend_, shape_.launches(), [&](std::int64_t i) {
                 kernel_->multiply({x_view(), operands(i), y_view()}, backend_->stream(), {});
               }));
    if (!shape_.int8()) return;
    const Buffer quantized =
        backend_->allocate(static_cast<std::size_t>(shape_.rows * cuda::int8_row_bytes(spec.in_features)));
    const Buffer row_scales = floats(std::vector<float>(static_cast<std::size_t>(shape_.rows)));
    cuda::Int8Rows rows{};
    rows.x = {reinterpret_cast<const char*>(x_.data()), spec.in_features * 2, true};
    rows.dtype = spec.dtype;
    rows.rows = static_cast<std::int32_t>(shape_.rows);
    rows.features = static_cast<std::int32_t>(spec.in_features);
    rows.quantized = reinterpret_cast<signed char*>(quantized.data());
    rows.scales = reinterpret_cast<float*>(row_scales.data());
    print_line("quantization", time_graph(*backend_, shape_.launches(),
                                          [&](std::int64_t) { cuda::launch_int8_rows(rows, backend_->stream()); }));
#ifdef RINGATTN_HAVE_HOPPER
    if (row_.name == "sm90_linear_int8") measure_product(rows);
#endif
  }

 private:
  Buffer floats(const std::vector<float>& values) {
    Buffer memory = backend_->allocate(values.size() * sizeof(float));
    const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(float));
    backend_->copy_rows(memory.data(), bytes, values.data(), bytes, bytes, 1, backend_->stream());
    backend_->synchronize(backend_->stream(), Deadline::after(60.0), {});
    return memory;
  }

  void make_operands() {
    const LinearSpec& spec = shape_.spec;
    std::mt19937_64 random(1);
    const auto fill = [&](Buffer& memory, const std::vector<std::byte>& pattern) {
      for (std::size_t at = 0; at < memory.bytes(); at += pattern.size()) {
        const auto bytes = static_cast<std::int64_t>(std::min(pattern.size(), memory.bytes() - at));
        backend_->copy_rows(memory.data() + at, bytes, pattern.data(), bytes, bytes, 1, backend_->stream());
      }
      backend_->synchronize(backend_->stream(), Deadline::after(60.0), {});
    };
    std::vector<std::byte> pattern(std::size_t{16} << 20);
    std::normal_distribution<float> normal;
    for (std::size_t at = 0; at < pattern.size(); at += 2)
      store_element(pattern.data() + at, spec.dtype, normal(random));
    x_ = backend_->allocate(static_cast<std::size_t>(shape_.rows * spec.in_features * 2));
    fill(x_, pattern);
    for (std::byte& value : pattern) value = static_cast<std::byte>(random());
    y_ = backend_->allocate(static_cast<std::size_t>(shape_.rows * spec.out_features * 2));
    const std::int64_t groups = spec.in_features / kInt4Group;
    scales_ = floats(std::vector<float>(
        static_cast<std::size_t>(spec.out_features * (shape_.int8() ? std::int64_t{1} : groups)), 0x1p-10F));
    weights_ = backend_->allocate(
        static_cast<std::size_t>(shape_.int8() ? shape_.copies() * shape_.weight_bytes() : shape_.weight_bytes()));
    fill(weights_, pattern);
    if (shape_.int8()) return;
    packed_bytes_ = kernel_->packed_bytes({});
    packed_ = backend_->allocate(packed_bytes_ * static_cast<std::size_t>(shape_.copies()));
    for (std::int64_t i = 0; i < shape_.copies(); ++i) {
      kernel_->pack(matrices(0), {}, packed_.data() + static_cast<std::size_t>(i) * packed_bytes_, backend_->stream());
    }
  }

  TensorView x_view() const {
    return dense_view(static_cast<const void*>(x_.data()), shape_.spec.dtype, shape_.rows, 1, shape_.spec.in_features);
  }
  MutableTensorView y_view() const {
    return dense_view(static_cast<void*>(y_.data()), shape_.spec.dtype, shape_.rows, 1, shape_.spec.out_features);
  }

  LinearWeights matrices(std::int64_t copy) const {
    const LinearSpec& spec = shape_.spec;
    const std::int64_t row_bytes = shape_.weight_bytes() / spec.sum_columns();
    LinearWeights weights;
    weights.matrix.data = weights_.data() + copy * shape_.weight_bytes();
    weights.matrix.row_stride = row_bytes;
    weights.matrix.scales = reinterpret_cast<const float*>(scales_.data());
    weights.matrix.group_stride = spec.in_features / kInt4Group;
    if (!spec.gated) return weights;
    weights.up = weights.matrix;
    weights.up.data = static_cast<const std::byte*>(weights.matrix.data) + spec.out_features * row_bytes;
    return weights;
  }
  LinearOperands operands(std::int64_t launch) const {
    const std::int64_t copy = launch % shape_.copies();
    if (shape_.int8()) return {matrices(copy), nullptr};
    return {matrices(0), packed_.data() + static_cast<std::size_t>(copy) * packed_bytes_};
  }

#ifdef RINGATTN_HAVE_HOPPER
  void measure_product(const cuda::Int8Rows& rows) {
    const LinearSpec& spec = shape_.spec;
    constexpr int kMultiprocessors = 132;
    cuda::Int8Gemm gemm{};
    const Buffer sums = floats(
        std::vector<float>(static_cast<std::size_t>(sm90::int8_tile_sums(shape_.rows, kMultiprocessors))));  // zeros
    const Buffer counters = floats(std::vector<float>(static_cast<std::size_t>(sm90::int8_counters(kMultiprocessors))));
    gemm.x = rows.quantized;
    gemm.features = rows.features;
    gemm.multiprocessors = kMultiprocessors;
    gemm.tile_sums = reinterpret_cast<std::int32_t*>(sums.data());
    gemm.counters = reinterpret_cast<std::uint32_t*>(counters.data());
    cuda::QuantizedOutput& out = gemm.out;
    out.y = reinterpret_cast<char*>(y_.data());
    out.y_stride = spec.out_features * 2;
    out.rows = rows.rows;
    out.columns = static_cast<std::int32_t>(spec.out_features);
    out.matrices = spec.gated ? 2 : 1;
    out.dtype = spec.dtype;
    out.activation = spec.activation;
    out.row_scales = rows.scales;
    out.scales[0] = out.scales[1] = reinterpret_cast<const float*>(scales_.data());
    const sm90::Int8Form form =
        sm90::choose_int8_form(out.rows, out.columns, out.matrices, gemm.features, kMultiprocessors);
    print_line("product", time_graph(*backend_, shape_.launches(), [&](std::int64_t i) {
                 const LinearWeights weights = matrices(i % shape_.copies());
                 gemm.weights[0] = {static_cast<const char*>(weights.matrix.data), weights.matrix.row_stride, true};
                 gemm.weights[1] = {static_cast<const char*>(weights.up.data), weights.up.row_stride, true};
                 sm90::launch_int8_wgmma(gemm, form, backend_->stream());
               }));
  }
#endif

  void print_line(std::string_view part, std::vector<double> times) const {
    std::sort(times.begin(), times.end());
    JsonWriter line(false);
    begin_linear_line(line, git_, backend_->identity(), row_.name, shape_.rows, shape_.spec);
    line.member("part", part);
    add_linear_times(line, times, shape_.copies(), shape_.launches());
    const double median = quantile(times, 0.5);
    if (part != "quantization") {
      line.member("tflops", shape_.flops() / median * 1e-6);
      line.member("weight_gbytes_per_second", static_cast<double>(shape_.weight_bytes()) / median * 1e-3);
    }
    fmt::print("{}\n", line.end_object().text());
    std::fflush(stdout);
  }

  const QuantizedShape shape_;
  const std::string git_;
  const KernelRow<LinearSpec>& row_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<LinearKernel> kernel_;
  Buffer x_, y_, weights_, scales_, packed_;
  std::size_t packed_bytes_ = 0;  // int4, of a copy
};

int run_quantized_linear(const std::vector<std::string_view>& words) {
  std::string_view shapes = "1x4096x8192:int8,2048x4096x8192:int8,1x8192x8192:int4,4096x8192x8192:int4";
  std::string git = std::string(git_revision()) + (git_dirty() ? "-dirty" : "");
  for (std::size_t i = 0; i < words.size(); i += 2) {
    if (i + 1 == words.size()) kQuantizedArguments.refuse(words[i], "it has no value");
    if (words[i] == "--shapes") {
      shapes = words[i + 1];
    } else if (words[i] == "--git") {
      git = words[i + 1];
    } else {
      kQuantizedArguments.refuse(words[i], "it is none of the words that it knows");
    }
  }
  for (const std::string_view entry : list_entries(shapes)) QuantizedBench(quantized_shape(entry), git).measure();
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int count, char** words) { return ringattn::run_main(ringattn::run_quantized_linear, count, words); }
