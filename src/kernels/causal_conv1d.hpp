// SPDX-License-Identifier: Apache-2.0
// The causal depthwise convolution in front of a scan: each channel of a token is a sum over the channel's last `width`
// tokens,
//
//   y_t = act(bias + Σ_k weight[k] · x_{t − width + 1 + k}),   act(v) = v, or silu(v) = v / (1 + exp(−v))
//
// in fp32, from the bias or zero, fused steps with k ascending, so oldest token first. So a row of y is a pure function
// of its channels' inputs; it depends on nothing that a task says about runs, and the update of one token has the bits
// of the same token in a run. Names are those of causal_conv1d.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

class CausalConv1dKernel;

inline constexpr int kMaxConv1dWidth = 4;

struct CausalConv1dSpec {
  using Kernel = CausalConv1dKernel;  // what computes it (registry.hpp)

  Dtype dtype = Dtype::kBf16;  // of x, y and halos; weight and bias are fp32
  int channels = 8;
  int width = 4;  // 2 to kMaxConv1dWidth
  bool bias = false;
  bool silu = false;

  // Tokens in front of a run that its first rows need, and that a cache keeps of a sequence.
  int halo_tokens() const { return width - 1; }
  std::int64_t halo_bytes() const {
    return std::int64_t{halo_tokens()} * channels * static_cast<std::int64_t>(size_of(dtype));
  }
  bool operator==(const CausalConv1dSpec&) const = default;
};

std::string describe(const CausalConv1dSpec& spec);  // "convolution, bf16, 8448 channels, width 4, bias, silu"

// Throws kUsage for a width or channels that no convolution has.
void check_causal_conv1d(const CausalConv1dSpec& spec);

// Consecutive tokens of one sequence: rows [row, row + tokens) of x and y. Halos are [width − 1, channels] dense,
// oldest token first, in the kernel's kind of memory.
struct CausalConv1dRun {
  std::int64_t row = 0;
  std::int64_t tokens = 0;
  const void* before = nullptr;  // the tokens in front of the run; null: zeros, the sequence begins
  // The last width − 1 tokens of the sequence up to the run's end, for the runs and updates behind it; null: not
  // wanted.
  void* behind = nullptr;
};

// The views' memory lives until the stream has passed the task; the runs are read before the call returns.
struct CausalConv1dTask {
  TensorView x;                   // [rows, 1, channels]
  const float* weight = nullptr;  // [channels, width]; in the kernel's kind of memory, as is the bias
  const float* bias = nullptr;    // [channels], present exactly when CausalConv1dSpec::bias
  std::span<const CausalConv1dRun> runs;
  MutableTensorView y;  // [rows, 1, channels]
};

// One token of each sequence, which goes on in `halos`: [slots, width − 1, channels] dense, in place.
struct CausalConv1dUpdate {
  TensorView x;  // [sequences, 1, channels]
  const float* weight = nullptr;
  const float* bias = nullptr;
  void* halos = nullptr;
  MutableTensorView y;                  // [sequences, 1, channels]
  const std::int32_t* slots = nullptr;  // as of SsmUpdate
};

// One convolution kernel for one spec on one backend. On a device its calls only launch.
class CausalConv1dKernel {
 public:
  virtual ~CausalConv1dKernel() = default;

  virtual void convolve(const CausalConv1dTask& task, Stream stream, const Progress& progress) = 0;
  virtual void update(const CausalConv1dUpdate& update, Stream stream) = 0;
};

// What `spec` requires that kernels lack which take eight channels at a time; see KernelRow::missing.
std::vector<std::string> vectorized_conv1d_missing(const CausalConv1dSpec& spec);

// What every kernel checks. Throw kInternal where views or runs don't fit the spec or each other.
void check_causal_conv1d_task(const CausalConv1dSpec& spec, const CausalConv1dTask& task);
void check_causal_conv1d_update(const CausalConv1dSpec& spec, const CausalConv1dUpdate& update);

}  // namespace ringattn
