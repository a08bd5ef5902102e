// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/cuda/cuda_linear.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "base/cuda.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"
#include "kernels/linear/cuda/activation_gradient.hpp"
#include "kernels/linear/cuda/finish.hpp"
#include "kernels/linear/cuda/finish_params.hpp"

namespace ringattn::cuda {

namespace {

constexpr std::int64_t kMaxLinearRows = std::int64_t{1} << 24;  // per launch, so that tiles are counted in 32 bits

// The leaves of an aligned node of the tree.
LeafRange leaves_of_node(int node) {
  int first = node;
  int leaves = 1;
  for (; first < kLinearLeaves; first *= 2) leaves *= 2;
  return {first - kLinearLeaves, first - kLinearLeaves + leaves};
}

class CudaLinear final : public LinearKernel {
 public:
  CudaLinear(const LinearSpec& spec, const LinearLauncher& launcher, CudaBackend& backend)
      : spec_(spec), launcher_(launcher), backend_(backend), multiprocessors_(multiprocessors_of(backend.device())) {}

  std::size_t packed_bytes(LeafRange) const override { return 0; }
  void pack(const LinearWeights&, LeafRange, void*, Stream) override {}

  std::size_t scratch_bytes(std::int64_t rows) const override {
    std::size_t bytes = launcher_.scratch_bytes(shape({}), rows);
    if (spec_.parallel == LinearParallel::kRow) {
      LinearGemm sums = shape({});  // of all leaves, more than of a node
      sums.gated = false;
      bytes = std::max(bytes, launcher_.scratch_bytes(sums, rows));
    }
    return bytes;
  }
  void reserve(std::int64_t rows) override {
    const DeviceGuard guard(backend_.device());
    launcher_.prepare(spec_.dtype);
    prepare_finish();
    prepare_activation_gradient();
    if (const std::size_t bytes = scratch_bytes(rows); bytes > scratch_.bytes()) {
      scratch_ = backend_.allocate(bytes);
      check_cuda(cudaMemset(scratch_.data(), 0, bytes), "cudaMemset");
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // tasks have streams of their own
    }
  }

  void multiply(const LinearTask& task, Stream stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    if (progress) progress();
    if (task.x.tokens == 0 || spec_.out_features == 0) return;
    const DeviceGuard guard(backend_.device());
    LinearGemm gemm = shape({});
    set_operands(gemm, task.weights.weights);
    gemm.activation = spec_.activation;
    gemm.out = static_cast<char*>(task.y.data);
    gemm.out_stride = task.y.token_stride * element_bytes();
    launch(gemm, task.x, stream);
  }

  void find_absmax(const TensorView&, float*, Stream, const Progress&) override {}  // kInt8 only

  void add_leaves(const LinearPartialTask& task, Stream stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    if (progress) progress();
    if (task.x.tokens == 0 || spec_.out_features == 0) return;
    const DeviceGuard guard(backend_.device());
    auto* sums = static_cast<char*>(task.sums);
    const std::int64_t row_bytes = spec_.sum_columns() * static_cast<std::int64_t>(sizeof(float));
    for (const int node : aligned_nodes(task.leaves)) {
      const LeafRange leaves = leaves_of_node(node);
      const std::int64_t before = features_of(spec_, {task.leaves.begin, leaves.begin}) * element_bytes();
      TensorView x = task.x;
      x.data = static_cast<const char*>(x.data) + before;
      for (int m = 0; m < (spec_.gated ? 2 : 1); ++m) {
        LinearGemm gemm = shape(leaves);
        gemm.gated = false;
        gemm.writes_sums = true;
        set_matrix(gemm, 0, m == 0 ? task.weights.weights.matrix : task.weights.weights.up);
        gemm.bias[0] = nullptr;
        gemm.weights[0] += before;
        gemm.activation = LinearActivation::kNone;
        gemm.out = sums + m * spec_.out_features * static_cast<std::int64_t>(sizeof(float));
        gemm.out_stride = row_bytes;
        launch(gemm, x, stream);
      }
      sums += task.x.tokens * row_bytes;
    }
  }

  void finish(const LinearFinishTask& task, Stream stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    if (progress) progress();
    const DeviceGuard guard(backend_.device());
    enqueue_finish(spec_, task, stream);
  }

  void add_nodes(const LinearSumTask& task, Stream stream, const Progress& progress) override {
    if (progress) progress();
    const DeviceGuard guard(backend_.device());
    NodeSumParams p{};
    std::copy(std::begin(task.nodes), std::end(task.nodes), std::begin(p.sums));
    p.count = task.count;
    p.sum = task.sum;
    launch_node_sum(p, stream);
  }

  void activation_gradient(const LinearGradientTask& task, Stream stream, const Progress& progress) override {
    check_linear_task(spec_, task);
    if (progress) progress();
    const DeviceGuard guard(backend_.device());
    launch_activation_gradient(
        {spec_.dtype, spec_.activation, spec_.gated, task.dy.tokens, spec_.out_features, task.dy.data,
         task.dy.token_stride, task.z.data, task.z.token_stride, task.dz.data, task.dz.token_stride},
        stream);
  }

 private:
  std::int64_t element_bytes() const { return static_cast<std::int64_t>(size_of(spec_.dtype)); }

  // The sizes and chains of a product with the leaves' part of K.
  LinearGemm shape(LeafRange leaves) const {
    LinearGemm gemm{};
    gemm.columns = static_cast<std::int32_t>(spec_.out_features);
    gemm.dtype = spec_.dtype;
    gemm.gated = spec_.gated;
    gemm.multiprocessors = multiprocessors_;
    LinearChains& chains = gemm.chains;
    chains.leaves = spec_.parallel == LinearParallel::kRow;
    if (!chains.leaves) {
      chains.features = static_cast<std::int32_t>(spec_.in_features);
      chains.count = static_cast<std::int32_t>((spec_.in_features + kLinearSplit - 1) / kLinearSplit);
      return gemm;
    }
    chains.features = static_cast<std::int32_t>(features_of(spec_, leaves));
    chains.count = leaves.end - leaves.begin;
    for (int leaf = leaves.begin; leaf < leaves.end; ++leaf) {
      chains.leaf_ends[leaf - leaves.begin] = static_cast<std::int32_t>(features_of(spec_, {leaves.begin, leaf + 1}));
    }
    return gemm;
  }

  static void set_matrix(LinearGemm& gemm, int to, const LinearMatrix& matrix) {
    gemm.weights[to] = static_cast<const char*>(matrix.data);
    gemm.weight_strides[to] = matrix.row_stride;
    gemm.bias[to] = matrix.bias;
  }
  void set_operands(LinearGemm& gemm, const LinearWeights& weights) const {
    set_matrix(gemm, 0, weights.matrix);
    if (spec_.gated) set_matrix(gemm, 1, weights.up);
  }

  void launch(LinearGemm gemm, const TensorView& x, Stream stream) {
    gemm.scratch = reinterpret_cast<char*>(scratch_.data());
    gemm.x_stride = x.token_stride * element_bytes();
    char* const out = gemm.out;
    for (std::int64_t begin = 0; begin < x.tokens; begin += kMaxLinearRows) {
      gemm.rows = static_cast<std::int32_t>(std::min(kMaxLinearRows, x.tokens - begin));
      gemm.x = static_cast<const char*>(x.data) + begin * gemm.x_stride;
      gemm.out = out + begin * gemm.out_stride;
      launcher_.launch(gemm, stream);
    }
  }

  LinearSpec spec_;
  const LinearLauncher& launcher_;
  CudaBackend& backend_;
  int multiprocessors_;
  Buffer scratch_;
};

std::vector<std::string> missing_but_dtype(const LinearSpec& spec) {
  std::vector<std::string> missing = missing_in_linear(spec);
  if (spec.weights != WeightFormat::kFloat) {
    missing.push_back(std::string(format_name(spec.weights)) + " weights (supported: those of the dtype of x)");
  }
  return missing;
}

}  // namespace

std::vector<std::string> float_linear_missing(const LinearSpec& spec) {
  std::vector<std::string> missing = missing_but_dtype(spec);
  if (spec.dtype == Dtype::kF32) missing.emplace_back("fp32 (supported: bf16, fp16)");
  return missing;
}

std::vector<std::string> simt_linear_missing(const LinearSpec& spec) {
  std::vector<std::string> missing = missing_but_dtype(spec);
  if (spec.dtype != Dtype::kF32) missing.push_back(std::string(dtype_name(spec.dtype)) + " (supported: fp32)");
  return missing;
}

std::unique_ptr<LinearKernel> make_cuda_linear(const LinearSpec& spec, const LinearLauncher& launcher,
                                               Backend& backend) {
  return std::make_unique<CudaLinear>(spec, launcher, static_cast<CudaBackend&>(backend));
}

}  // namespace ringattn::cuda
