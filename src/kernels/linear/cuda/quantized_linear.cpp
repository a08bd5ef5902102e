// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/cuda/quantized_linear.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"
#include "kernels/linear/cuda/finish.hpp"
#include "kernels/linear/cuda/finish_params.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::int64_t kElementBytes = 2;  // of bf16 and fp16
constexpr std::int64_t kChunkBytes = 16;   // bytes of one copy
constexpr std::int64_t kScratchAlignment = 256;

std::int64_t aligned_bytes(std::int64_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

QuantizedRows rows_at(const void* data, std::int64_t stride, std::int64_t count) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(kChunkBytes) == 0 &&
                       (count <= 1 || stride % kChunkBytes == 0);
  return {static_cast<const char*>(data), stride, aligned};
}
QuantizedRows rows_of_x(const TensorView& x) { return rows_at(x.data, x.token_stride * kElementBytes, x.tokens); }

std::int32_t to_int(std::int64_t value) { return static_cast<std::int32_t>(value); }

std::vector<std::string> missing_for(const LinearSpec& spec, WeightFormat format) {
  std::vector<std::string> missing = missing_in_linear(spec);
  if (spec.dtype == Dtype::kF32) missing.emplace_back("fp32 (supported: bf16, fp16)");
  if (spec.weights != format) {
    missing.push_back(fmt::format("{} weights (supported: {})", format_name(spec.weights), format_name(format)));
  }
  return missing;
}

// Code shared by both formats: scratch, outputs, and the last step with several devices.
template <class Gemm>
class QuantizedLinear : public LinearKernel {
 public:
  QuantizedLinear(const LinearSpec& spec, const QuantizedLauncher<Gemm>& launcher, CudaBackend& backend)
      : spec_(spec), launcher_(launcher), backend_(backend), multiprocessors_(multiprocessors_of(backend.device())) {}

  std::size_t scratch_bytes(std::int64_t rows) const override {
    return static_cast<std::size_t>(counter_bytes(rows) + shared_bytes(rows) + aligned_bytes(own_bytes(rows)));
  }

  void reserve(std::int64_t rows) override {
    const DeviceGuard guard(backend_.device());
    launcher_.prepare(spec_.dtype);
    prepare_finish();
    rows_ = rows;
    scratch_ = backend_.allocate(scratch_bytes(rows));
    // Kernels leave counters and shared sums at zero, as they found them. Tasks may run in another stream.
    backend_.fill_bytes(scratch_.data(), std::byte{0},
                        static_cast<std::size_t>(counter_bytes(rows) + shared_bytes(rows)), backend_.stream());
    check_cuda(cudaStreamSynchronize(cuda_stream(backend_.stream())), "cudaStreamSynchronize");
  }

  void finish(const LinearFinishTask& task, Stream stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    if (progress) progress();
    if (task.y.tokens == 0) return;
    const DeviceGuard guard(backend_.device());
    enqueue_finish(spec_, task, stream);
  }

 protected:
  // Bytes for `rows` rows that the format needs for itself.
  virtual std::int64_t own_bytes(std::int64_t rows) const = 0;

  int matrices() const { return spec_.gated ? 2 : 1; }
  std::uint32_t* counters() const { return reinterpret_cast<std::uint32_t*>(scratch_.data()); }
  std::byte* shared_sums() const { return scratch_.data() + counter_bytes(rows_); }
  std::byte* own_memory() const { return shared_sums() + shared_bytes(rows_); }

  void check_rows(std::int64_t rows) const {
    if (rows <= rows_ && rows <= std::numeric_limits<std::int32_t>::max()) return;
    fail(ErrorCode::kInternal, fmt::format("a linear layer of {} rows", rows), fmt::format("{} are reserved", rows_));
  }

  // Biases, and scales of columns for int8. No y and no sums yet.
  QuantizedOutput output_of(const LinearWeights& weights, std::int64_t rows) const {
    QuantizedOutput out{};
    out.rows = to_int(rows);
    out.columns = to_int(spec_.out_features);
    out.matrices = matrices();
    out.dtype = spec_.dtype;
    out.activation = spec_.activation;
    const LinearMatrix* const given[2] = {&weights.matrix, &weights.up};
    for (int m = 0; m < matrices(); ++m) {
      out.bias[m] = given[m]->bias;
      if (spec_.weights == WeightFormat::kInt8) out.scales[m] = given[m]->scales;
    }
    return out;
  }
  static void write_to(QuantizedOutput& out, const MutableTensorView& y) {
    out.y = static_cast<char*>(y.data);
    out.y_stride = y.token_stride * kElementBytes;
  }

  const LinearSpec spec_;
  const QuantizedLauncher<Gemm>& launcher_;
  CudaBackend& backend_;
  const int multiprocessors_;

 private:
  std::int64_t counter_bytes(std::int64_t rows) const {
    return aligned_bytes(launcher_.counters(spec_, rows, multiprocessors_) * std::int64_t{sizeof(std::uint32_t)});
  }
  std::int64_t shared_bytes(std::int64_t rows) const {
    return aligned_bytes(launcher_.shared_bytes(spec_, rows, multiprocessors_));
  }

  std::int64_t rows_ = 0;
  Buffer scratch_;
};

class Int8Linear final : public QuantizedLinear<Int8Gemm> {
 public:
  using QuantizedLinear::QuantizedLinear;

  std::size_t packed_bytes(LeafRange) const override { return 0; }
  void pack(const LinearWeights&, LeafRange, void*, Stream) override {}

  void multiply(const LinearTask& task, Stream stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    if (progress) progress();
    if (task.x.tokens == 0) return;
    const DeviceGuard guard(backend_.device());
    QuantizedOutput out = output_of(task.weights.weights, task.x.tokens);
    write_to(out, task.y);
    multiply_rows(task.x, {}, task.weights.weights, out, stream);
  }

  void find_absmax(const TensorView& x, float* absmax, Stream stream, const Progress& progress) override {
    if (progress) progress();
    if (x.tokens == 0) return;
    const DeviceGuard guard(backend_.device());
    Int8Rows rows = int8_rows(x, {});
    rows.found = absmax;
    launch_int8_rows(rows, stream);
  }

  void add_leaves(const LinearPartialTask& task, Stream stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    if (progress) progress();
    if (task.x.tokens == 0) return;
    const DeviceGuard guard(backend_.device());
    if (task.x.dim == 0) {
      const auto sums = static_cast<std::size_t>(task.x.tokens * spec_.sum_columns());
      return backend_.fill_bytes(task.sums, std::byte{0}, sums * sizeof(std::int32_t), stream);
    }
    QuantizedOutput out = output_of(task.weights.weights, task.x.tokens);
    out.sums = task.sums;
    multiply_rows(task.x, task.absmax, task.weights.weights, out, stream);
  }

 private:
  // Scales of rows, then quantized rows.
  static std::int64_t row_scale_bytes(std::int64_t rows) { return aligned_bytes(rows * std::int64_t{sizeof(float)}); }
  std::int64_t own_bytes(std::int64_t rows) const override {
    return row_scale_bytes(rows) + rows * int8_row_bytes(spec_.in_features);
  }

  static Int8Rows int8_rows(const TensorView& x, const LinearAbsmax& absmax) {
    Int8Rows rows{};
    rows.x = rows_of_x(x);
    rows.dtype = x.dtype;
    rows.rows = to_int(x.tokens);
    rows.features = to_int(x.dim);
    rows.absmax = absmax.values;
    rows.absmax_stride = absmax.stride;
    rows.absmax_parts = absmax.parts;
    return rows;
  }

  void multiply_rows(const TensorView& x, const LinearAbsmax& absmax, const LinearWeights& weights, QuantizedOutput out,
                     Stream stream) {
    check_rows(x.tokens);
    Int8Rows rows = int8_rows(x, absmax);
    rows.scales = reinterpret_cast<float*>(own_memory());
    rows.quantized = reinterpret_cast<signed char*>(own_memory() + row_scale_bytes(x.tokens));
    launch_int8_rows(rows, stream);
    out.row_scales = rows.scales;
    Int8Gemm gemm{};
    gemm.x = rows.quantized;
    gemm.weights[0] = rows_at(weights.matrix.data, weights.matrix.row_stride, spec_.out_features);
    if (spec_.gated) gemm.weights[1] = rows_at(weights.up.data, weights.up.row_stride, spec_.out_features);
    gemm.features = rows.features;
    gemm.out = out;
    gemm.multiprocessors = multiprocessors_;
    gemm.tile_sums = reinterpret_cast<std::int32_t*>(shared_sums());
    gemm.counters = counters();
    launcher_.launch(gemm, stream);
  }
};

class Int4Linear final : public QuantizedLinear<Int4Gemm> {
 public:
  using QuantizedLinear::QuantizedLinear;

  std::size_t packed_bytes(LeafRange leaves) const override {
    return static_cast<std::size_t>(matrices() * matrix_bytes(groups_of(leaves)));
  }

  void pack(const LinearWeights& weights, LeafRange leaves, void* packed, Stream stream) override {
    const DeviceGuard guard(backend_.device());
    const std::int64_t groups = groups_of(leaves);
    for (int m = 0; m < matrices(); ++m) {
      const LinearMatrix& matrix = m == 0 ? weights.matrix : weights.up;
      launch_int4_pack({static_cast<const unsigned char*>(matrix.data), matrix.row_stride, matrix.scales, matrix.zeros,
                        matrix.group_stride, to_int(spec_.out_features), to_int(groups),
                        static_cast<char*>(packed) + m * matrix_bytes(groups)},
                       stream);
    }
  }

  void multiply(const LinearTask& task, Stream stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    if (progress) progress();
    if (task.x.tokens == 0) return;
    const DeviceGuard guard(backend_.device());
    QuantizedOutput out = output_of(task.weights.weights, task.x.tokens);
    write_to(out, task.y);
    multiply_leaves(task.x, task.weights, LeafRange{}, LeafRange{}, out, stream);
  }

  void find_absmax(const TensorView&, float*, Stream, const Progress&) override {
    fail(ErrorCode::kInternal, "row maxima of a linear layer with int4 weights", "only int8 quantizes x");
  }

  void add_leaves(const LinearPartialTask& task, Stream stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    if (progress) progress();
    if (task.x.tokens == 0) return;
    const DeviceGuard guard(backend_.device());
    QuantizedOutput out = output_of(task.weights.weights, task.x.tokens);
    auto* sums = static_cast<float*>(task.sums);
    for (const int node : aligned_nodes(task.leaves)) {
      int leaves = 1;
      int first = node;
      for (; first < kLinearLeaves; first *= 2) leaves *= 2;
      first -= kLinearLeaves;
      out.sums = sums;
      multiply_leaves(task.x, task.weights, task.leaves, {first, first + leaves}, out, stream);
      sums += task.x.tokens * spec_.sum_columns();
    }
  }

 private:
  std::int64_t own_bytes(std::int64_t) const override { return 0; }

  std::int64_t groups_of(LeafRange leaves) const {
    return (spec_.parallel == LinearParallel::kRow ? features_of(spec_, leaves) : spec_.in_features) / kInt4Group;
  }
  std::int64_t matrix_bytes(std::int64_t groups) const {
    return int4_row_tiles(spec_.out_features) * groups * kInt4BlockBytes;
  }

  LinearChains chains_of(LeafRange leaves) const {
    LinearChains chains{};
    chains.leaves = spec_.parallel == LinearParallel::kRow;
    if (!chains.leaves) {
      chains.features = to_int(spec_.in_features);
      chains.count = to_int((spec_.in_features + kLinearSplit - 1) / kLinearSplit);
      return chains;
    }
    chains.count = leaves.end - leaves.begin;
    for (int leaf = 0; leaf < chains.count; ++leaf) {
      chains.leaf_ends[leaf] = to_int(features_of(spec_, {leaves.begin, leaves.begin + leaf + 1}));
    }
    chains.features = chains.leaf_ends[chains.count - 1];
    return chains;
  }

  // Sums over `leaves`, on a device that has the leaves `here`.
  void multiply_leaves(const TensorView& x, const LinearOperands& weights, LeafRange here, LeafRange leaves,
                       const QuantizedOutput& out, Stream stream) {
    check_rows(x.tokens);
    Int4Gemm gemm{};
    gemm.chains = chains_of(leaves);
    const std::int64_t before = gemm.chains.leaves ? features_of(spec_, {here.begin, leaves.begin}) : 0;
    TensorView columns = x;
    columns.data = static_cast<const char*>(x.data) + before * kElementBytes;
    gemm.x = rows_of_x(columns);
    gemm.packed = static_cast<const char*>(weights.packed);
    gemm.groups = to_int(x.dim / kInt4Group);
    gemm.first_group = to_int(before / kInt4Group);
    gemm.out = out;
    gemm.multiprocessors = multiprocessors_;
    gemm.partials = reinterpret_cast<float*>(shared_sums());
    gemm.counters = counters();
    launcher_.launch(gemm, stream);
  }
};

}  // namespace

std::vector<std::string> int8_linear_missing(const LinearSpec& spec) { return missing_for(spec, WeightFormat::kInt8); }
std::vector<std::string> int4_linear_missing(const LinearSpec& spec) { return missing_for(spec, WeightFormat::kInt4); }

std::unique_ptr<LinearKernel> make_int8_linear(const LinearSpec& spec, const QuantizedLauncher<Int8Gemm>& launcher,
                                               Backend& backend) {
  return std::make_unique<Int8Linear>(spec, launcher, static_cast<CudaBackend&>(backend));
}

std::unique_ptr<LinearKernel> make_int4_linear(const LinearSpec& spec, const QuantizedLauncher<Int4Gemm>& launcher,
                                               Backend& backend) {
  return std::make_unique<Int4Linear>(spec, launcher, static_cast<CudaBackend&>(backend));
}

}  // namespace ringattn::cuda
