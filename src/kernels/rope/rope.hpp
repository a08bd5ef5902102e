// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding (RoPE) of rows of queries and keys. A head's first rotary_dim elements form pairs, and pair
// i of a token at position p is rotated by the angle p · frequency[i]:
//
//   y[a] = x[a] · cos − x[b] · sin        half-split:  (a, b) = (i, i + rotary_dim / 2)      Llama, Qwen, Gemma
//   y[b] = x[b] · cos + x[a] · sin        interleaved: (a, b) = (2i, 2i + 1)                 GPT-J, GLM, Cohere
//
// The elements from rotary_dim on are copied. The inverse has −sin in place of sin. It maps gradients of y to gradients
// of x: the transpose, which keeps attention_factor.
//
// A row of y is a pure function of the row of x, its positions and the spec. Its bits are defined as follows (except
// for NaNs):
// - Frequencies are numbers of the spec (rope_frequencies.hpp): fp32 values or, if `exact`, fp64.
// - angle = fl32(fl32(p) · frequency), as Hugging Face computes it: at 2M positions it is up to 0.06 rad from the exact
//   product. If `exact`: fl64(p · frequency), within 2^-22 rad for |p| up to 2^31.
// - cos and sin: sin_cos() (rope_angle.hpp) in fp64, rounded to fp32, and multiplied by attention_factor in fp32. No
//   function of libm or of a GPU's is called, so every SIMD target, thread, GPU and build has the same bits.
// - Each product above is rounded to fp32, then their sum, then y once to its dtype: the operations of Hugging Face's
//   apply_rotary_pos_emb in fp32, in its order. So its fp32 results are equal if its cos and sin are.
// NaN and ∞ reach the other element of their pair, at angle 0 too, and no other element.
//
// cos and sin are computed in the kernel, once for each token and pair of all heads: a table of 2M positions would be
// 1 GiB and would bind positions to a range. With few heads a token's fp64 operations take longer than its memory
// traffic.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"
#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

class RopeKernel;

enum class RopePairs : std::uint8_t { kHalfSplit, kInterleaved };

inline constexpr int kMaxRopeDim = 512;
inline constexpr int kMaxRopeAxes = 3;  // mrope: time, height, width

struct RopeSpec {
  using Kernel = RopeKernel;

  Dtype dtype = Dtype::kBf16;  // dtype of x and y
  int head_dim = 128;          // even, at most kMaxRopeDim
  int rotary_dim = 128;        // even, at most head_dim
  RopePairs pairs = RopePairs::kHalfSplit;
  bool exact = false;
  float attention_factor = 1.0F;
  std::vector<double> frequencies;  // [rotary_dim / 2]; fp32 values unless exact
  // [rotary_dim / 2] the axis of positions that turns each pair. Empty: one axis turns all.
  std::vector<std::uint8_t> axes;

  int pair_count() const { return rotary_dim / 2; }
  // Axes of positions: 1, or one more than the last one in `axes`.
  int axis_count() const;
  bool operator==(const RopeSpec&) const = default;
};

// Parameters of the rotation of a row, as plain data for launches.
struct RowRotation {
  const double* frequencies = nullptr;  // [pairs], in the kernel's kind of memory
  std::int32_t pairs = 0;
  std::int32_t head_dim = 0;
  float factor = 1.0F;
  Dtype dtype = Dtype::kBf16;
  RopePairs layout = RopePairs::kHalfSplit;
  bool exact = false;
};
// `frequencies`: those of the spec, in the kernel's kind of memory.
RowRotation row_rotation(const RopeSpec& spec, const double* frequencies);

// Position of each token. Any int64 value is possible; the accuracy above holds up to ±2^31.
struct RopePositions {
  // [axes, tokens] int32 or int64, in the kernel's kind of memory, tokens contiguous. Null: token t is at first + t,
  // on every axis.
  const void* values = nullptr;
  bool is_int64 = false;
  std::int64_t axis_stride = 0;  // elements from axis to axis
  std::int64_t first = 0;
};

// x: [tokens, heads, head_dim]. y has the same shape. It may be x itself, and overlaps nothing else.
struct RopeTensor {
  TensorView x;
  MutableTensorView y;
};

inline constexpr std::size_t kMaxRopeTensors = 2;  // of a task: q and k

// The views' memory must live until the stream has completed the task.
struct RopeTask {
  RopePositions positions;
  std::span<const RopeTensor> tensors;  // of the same tokens; their heads may differ
  bool inverse = false;
};

// cos and sin of tokens, for kernels that rotate rows as they load them. angle_basis() is a row whose pairs are all (1,
// 0). RoPE by angle_spec() rotates these to (cos, sin), without rounding. So the rotated row is a token's angles:
// [rotary_dim] in fp32, with cos and sin of a pair in the places that the spec gives the pair's elements.
RopeSpec angle_spec(const RopeSpec& spec);
std::vector<float> angle_basis(const RopeSpec& spec);  // [rotary_dim]

// A RoPE kernel for one spec on one backend.
class RopeKernel {
 public:
  virtual ~RopeKernel() = default;

  // Bytes that the kernel has allocated.
  virtual std::size_t memory_bytes() const = 0;
  // Enqueues the task (device) or runs it (host). Allocates nothing.
  virtual void rotate(const RopeTask& task, Stream stream, const Progress& progress) = 0;
};

// One line that says what a spec needs, e.g. "bf16, head_dim 128, rotary_dim 64, interleaved, exact angles".
std::string describe(const RopeSpec& spec);

// Throws kUsage if the spec contradicts itself.
void check_rope(const RopeSpec& spec);
// Throws kInternal if the task does not match the spec.
void check_rope_task(const RopeSpec& spec, const RopeTask& task);

template <>
std::span<const KernelRow<RopeSpec>> kernel_table<RopeSpec>();

}  // namespace ringattn
