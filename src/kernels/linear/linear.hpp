// SPDX-License-Identifier: Apache-2.0
// The interface of linear kernels: y = activation(x · Wᵀ + b), in floating point, INT8 and INT4, whole or in parts.
//
//   plain   y = a(z)            z = x · Wᵀ + b, W [N, K]
//   gated   y = a(z) ∘ u        z from the gate matrix, u from the up matrix, both [N, K]: SwiGLU, GeGLU
//
// A row of y is a pure function of its row of x, the weights and the spec. It does not depend on the number of rows, on
// tiles, or on how many devices share the layer. All sums below are fp32 unless said otherwise.
//
// Order of the sums over K:
// - LinearParallel::kNone and kColumn: splits of kLinearSplit, the last one shorter. A split is summed in K order from
//   zero, and splits are added ascending. A column-parallel device has some of the N rows of W, so nothing changes.
// - LinearParallel::kRow: kLinearLeaves leaves (leaf_begin()), each summed in K order from zero. A fixed binary tree
//   adds them, ((0+1)+(2+3))+((4+5)+(6+7)); a leaf without elements is left out. So a device with some leaves sends one
//   sum for each largest aligned subtree of them (aligned_nodes()), and every number of devices gives the bits of one.
//   A row-parallel layer has other bits than an ordinary one.
// Each kernel fixes how products within a split or leaf are added (a chain of multiply-adds, or 16 at a time on tensor
// cores), because its instructions decide that.
//
// Formats of weights:
// - kFloat: W has the dtype of x.
// - kInt8, W8A8: x is quantized for each row. With amax = max |x| over all of K, s = amax / 127, or 1 where that is 0,
//   or NaN where the row has a NaN or ∞; the quantized value is clamp(rint(x / s), ±127), half to even. Sums are int32,
//   exact, over all of K (at most kMaxInt8K), before anything is dequantized: z = fma(float(sum) · s, scale, b), with
//   the scale of the row of W.
// - kInt4, W4A16: groups of kInt4Group along K, each with a scale and an integer zero. A group's sum of x · (q − zero)
//   is formed from zero like a split; q − zero is exact in bf16 and fp16. acc = fma(scale, group sum, acc), groups
//   ascending, from zero, within a split or leaf.
// - b is added once: z = sum + b.
//
// Activations, in fp32 with one reciprocal and one exp2: r = 1 / (1 + exp2(−t · log2 e)).
// - SiLU: x · r with t = x. GELU (tanh): x · r with t = √(8/π) · (x + 0.044715 · x³), as 1 + tanh(t/2) = 2r.
// - GELU (erf): x · Φ(x), with Φ as activation.hpp has it.
// y is rounded once. NaN and ∞ propagate as in fp32 arithmetic. A NaN of y has one canonical bit pattern.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"
#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/linear/linear_constants.hpp"

namespace ringattn {

class LinearKernel;

enum class WeightFormat : std::uint8_t { kFloat, kInt8, kInt4 };
enum class LinearParallel : std::uint8_t { kNone, kColumn, kRow };

struct LinearSpec {
  using Kernel = LinearKernel;

  Dtype dtype = Dtype::kBf16;  // dtype of x, y and biases
  WeightFormat weights = WeightFormat::kFloat;
  std::int64_t in_features = 0;   // K, of the whole layer
  std::int64_t out_features = 0;  // N, on this device if column-parallel
  LinearActivation activation = LinearActivation::kNone;
  bool gated = false;
  bool bias = false;
  LinearParallel parallel = LinearParallel::kNone;

  // Number of sums per row: the columns of the gate matrix, then those of the up matrix.
  std::int64_t sum_columns() const { return gated ? 2 * out_features : out_features; }
  bool operator==(const LinearSpec&) const = default;
};

// Largest K whose sums fit into int32; a file may have −128 as a weight.
inline constexpr std::int64_t kMaxInt8K = 0x7fffffff / (127 * 128);

// Elements of K that are never divided between leaves.
constexpr std::int64_t leaf_unit(WeightFormat weights) { return weights == WeightFormat::kInt4 ? kInt4Group : 16; }
// First element of a leaf out of `features` elements. For the leaf after the last one, `features`.
constexpr std::int64_t leaf_begin(std::int64_t features, std::int64_t unit, int leaf) {
  const std::int64_t units = (features + unit - 1) / unit;
  const std::int64_t begin = leaf * units / kLinearLeaves * unit;
  return begin < features ? begin : features;
}

// Leaves of a row-parallel layer that one device has.
struct LeafRange {
  int begin = 0;
  int end = kLinearLeaves;

  bool operator==(const LeafRange&) const = default;
};
// Elements of K in a range of leaves.
inline std::int64_t features_of(const LinearSpec& spec, LeafRange leaves) {
  const std::int64_t unit = leaf_unit(spec.weights);
  return leaf_begin(spec.in_features, unit, leaves.end) - leaf_begin(spec.in_features, unit, leaves.begin);
}

// The largest nodes of the tree (linear_constants.hpp) whose leaves all lie in the range, ascending by leaf.
std::vector<int> aligned_nodes(LeafRange leaves);

// A weight matrix in a kernel's kind of memory.
struct LinearMatrix {
  // kFloat: [N, K] of the spec's dtype. kInt8: int8 [N, K]. kInt4: [N, K / 2] bytes, the even element in the low half.
  const void* data = nullptr;
  std::int64_t row_stride = 0;          // bytes
  const float* scales = nullptr;        // kInt8: [N]; kInt4: [N, K / kInt4Group]
  const std::uint8_t* zeros = nullptr;  // kInt4: [N, K / kInt4Group]; null: all are 8
  std::int64_t group_stride = 0;        // elements of `scales` and `zeros` from row to row (kInt4)
  const void* bias = nullptr;           // [N] of the spec's dtype, where the spec has a bias
};

// A gated layer's matrices may be two tensors, or the halves of a stacked [2N, K] tensor with the gate first.
struct LinearWeights {
  LinearMatrix matrix;  // the gate matrix if gated
  LinearMatrix up;      // gated only
};

// The weights of a task: [N, K of the task's leaves] as given, and the output of pack().
struct LinearOperands {
  LinearWeights weights;
  const void* packed = nullptr;  // null if packed_bytes() is 0
};

// Views' memory must live until the stream has completed the task. Outputs must not overlap inputs.
struct LinearTask {
  TensorView x;  // [rows, 1, K]
  LinearOperands weights;
  MutableTensorView y;  // [rows, 1, N]
};

// Results of find_absmax() for the devices' parts of x. The row's value is the largest of them, or NaN if one is NaN.
struct LinearAbsmax {
  const float* values = nullptr;  // [parts, rows]
  int parts = 1;
  std::int64_t stride = 0;  // elements from part to part
};

// Sums of some leaves of a row-parallel layer.
struct LinearPartialTask {
  TensorView x;  // [rows, 1, K of the leaves]
  LinearOperands weights;
  LeafRange leaves;
  LinearAbsmax absmax;  // kInt8
  // Output: fp32 [nodes, rows, sum_columns()], with the nodes of aligned_nodes(leaves). kInt8: int32 [1, rows,
  // sum_columns()], the sum of all leaves.
  void* sums = nullptr;
};

// Sums of one device for the rows of a LinearFinishTask.
struct LinearPartial {
  const void* sums = nullptr;    // as LinearPartialTask::sums
  std::int64_t node_stride = 0;  // elements from node to node
  LeafRange leaves;
};

// Adds the sums of all leaves, and writes y.
struct LinearFinishTask {
  std::span<const LinearPartial> partials;  // ascending by leaf; together they have all leaves
  LinearWeights weights;                    // only scales (kInt8) and biases are read
  LinearAbsmax absmax;                      // kInt8
  MutableTensorView y;                      // [rows, 1, N]
};

// Adds fp32 sums of nodes by the tree, without bias and rounding: sums of leaves of tokens, in gradients of weights.
struct LinearSumTask {
  // [count] each. Null: the sum of its children, or a leaf without tokens, which is left out. With no node under the
  // root the result is −0.
  const float* nodes[kLinearNodes] = {};
  std::int64_t count = 0;
  float* sum = nullptr;  // [count], written: node 1. May be one of the nodes.
};

// The first step of the gradients of a floating-point layer: the gradients of z, from dy and from the z of a layer
// without activation and gate (rounded to the dtype). In fp32 with r as above, then rounded once:
// - plain: dz = dy · a'(z). Gated, with z of the gate matrix: dz = (dy · u) · a'(z), and du = dy · a(z).
// - SiLU: a' = r · (1 + z · (1 − r)). GELU (tanh): a' = r + z · r · (1 − r) · dt/dz. GELU (erf): a' = Φ(z) + z · φ(z).
struct LinearGradientTask {
  TensorView dy;         // [rows, 1, N]
  TensorView z;          // [rows, 1, sum_columns()]
  MutableTensorView dz;  // [rows, 1, sum_columns()], written; may be z
};

// Throw kInternal if a task does not match the spec.
void check_linear_task(const LinearSpec& spec, const LinearTask& task);
void check_linear_task(const LinearSpec& spec, const LinearPartialTask& task);
void check_linear_task(const LinearSpec& spec, const LinearFinishTask& task);
void check_linear_task(const LinearSpec& spec, const LinearGradientTask& task);

// A linear kernel for one spec on one backend.
class LinearKernel {
 public:
  virtual ~LinearKernel() = default;

  // Weights are repacked once, when they are loaded. 0 bytes: the kernel reads them as they are.
  virtual std::size_t packed_bytes(LeafRange leaves) const = 0;
  virtual void pack(const LinearWeights& weights, LeafRange leaves, void* packed, Stream stream) = 0;

  // Bytes that reserve() allocates for tasks of up to `rows` rows: all memory that the kernel needs.
  virtual std::size_t scratch_bytes(std::int64_t rows) const = 0;
  // Called before the first task, so that tasks never allocate.
  virtual void reserve(std::int64_t rows) = 0;

  // Enqueue a task on `stream` (device) or run it (host). A task has at most reserve()'s rows.
  virtual void multiply(const LinearTask& task, Stream stream, const Progress& progress) = 0;

  // The steps of a row-parallel layer on several devices. For kInt8, find_absmax() comes first, and each device gets
  // the results of all. Then every device runs add_leaves(), and finish() for the rows of y that it should have. One
  // device with all leaves has the bits of multiply(). absmax: [rows], max |x| over the given part of K, NaN if a value
  // is NaN or ∞.
  virtual void find_absmax(const TensorView& x, float* absmax, Stream stream, const Progress& progress) = 0;
  virtual void add_leaves(const LinearPartialTask& task, Stream stream, const Progress& progress) = 0;
  virtual void finish(const LinearFinishTask& task, Stream stream, const Progress& progress) = 0;

  // Throw kUnsupported unless the kernel has floating-point weights. add_nodes() has the same bits for every spec.
  virtual void add_nodes(const LinearSumTask& task, Stream stream, const Progress& progress);
  virtual void activation_gradient(const LinearGradientTask& task, Stream stream, const Progress& progress);
};

// "none", "gelu", "gelu_tanh", "silu"; gated "swiglu", "geglu", "geglu_tanh". Empty: a gate without an activation,
// which no kernel supports.
std::string_view activation_name(LinearActivation activation, bool gated);
// Sets both from a name. Returns false for an unknown name.
bool parse_activation(std::string_view name, LinearActivation& activation, bool& gated);
std::span<const std::string_view> activation_names();
std::string_view parallel_name(LinearParallel parallel);  // "none", "column", "row"
std::string_view format_name(WeightFormat format);        // "float", "int8", "int4"

// One line that says what a spec needs, e.g. "bf16, 4096 to 14336 features, swiglu, column-parallel, int4".
std::string describe(const LinearSpec& spec);

// What no linear kernel supports, one string per requirement (KernelRow::missing).
std::vector<std::string> missing_in_linear(const LinearSpec& spec);

template <>
std::span<const KernelRow<LinearSpec>> kernel_table<LinearSpec>();

}  // namespace ringattn
