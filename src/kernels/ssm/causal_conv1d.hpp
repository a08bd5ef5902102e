// SPDX-License-Identifier: Apache-2.0
// Causal depthwise conv1d before an SSM layer: each channel of a token is a weighted sum of the channel's last `width`
// tokens,
//
//   y_t = act(bias + Σ_k weight[k] · x_{t − width + 1 + k}),   act(v) = v, or silu(v) = v / (1 + exp(−v))
//
// in fp32, starting from the bias or zero, by fused multiply-adds with k ascending, so oldest token first. So a row of
// y is a pure function of its channels' inputs. It does not depend on the task's runs, and update() gives a token the
// same bits as a run does. Names are those of causal_conv1d.
//
// Gradients, with v_t the sum before act, g_t = dy_t · act'(v_t) and silu'(v) = s · (1 + v · (1 − s)), s = sigmoid(v):
//
//   dx_s = dfinal_s + Σ_t weight[width − 1 − (t − s)] · g_t, t = s … s + width − 1
//   dweight[k] = Σ_t g_t · x_{t − width + 1 + k}
//   dbias = Σ_t g_t
//
// Tokens before the sequence, those of the initial halo, have the same dx_s. dx_s starts from dfinal_s, the gradient of
// the final halo if token s is in it, or zero, by fused multiply-adds with t ascending. Tokens after the sequence have
// no term. dx is a pure function of the sequence. dweight and dbias are sums over units of tokens
// (kernels/common/token_units.hpp). In a unit, tiles of kConv1dGradientTile tokens are added ascending, the first one
// stored; a tile's sum is fused multiply-adds from zero, tokens ascending.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

class CausalConv1dKernel;

inline constexpr int kMaxConv1dWidth = 4;

struct CausalConv1dSpec {
  using Kernel = CausalConv1dKernel;  // the interface that computes this spec (common/registry.hpp)

  Dtype dtype = Dtype::kBf16;  // dtype of x, y and halos; weight and bias are fp32
  int channels = 8;
  int width = 4;  // 2 to kMaxConv1dWidth
  bool bias = false;
  bool silu = false;

  // Tokens before a run that its first rows need, and that a cache keeps for each sequence.
  int halo_tokens() const { return width - 1; }
  std::int64_t halo_bytes() const {
    return std::int64_t{halo_tokens()} * channels * static_cast<std::int64_t>(size_of(dtype));
  }
  bool operator==(const CausalConv1dSpec&) const = default;
};

std::string describe(const CausalConv1dSpec& spec);  // "conv1d, bf16, 8448 channels, width 4, bias, silu"

// Throws kUsage for an unsupported width or number of channels.
void check_causal_conv1d(const CausalConv1dSpec& spec);

// Consecutive tokens of one sequence: rows [row, row + tokens) of x and y. Halos are dense [width − 1, channels],
// oldest token first, in the kernel's memory kind.
struct CausalConv1dRun {
  std::int64_t row = 0;
  std::int64_t tokens = 0;
  const void* initial_halo = nullptr;  // the tokens before the run; null: zeros, at the beginning of the sequence
  // Receives the last width − 1 tokens of the sequence up to the run's end, for the next runs and updates. Null: not
  // written.
  void* final_halo = nullptr;
};

// The views' memory must live until the stream has completed the task. The runs are read before the call returns.
struct CausalConv1dTask {
  TensorView x;                   // [rows, 1, channels]
  const float* weight = nullptr;  // [channels, width]; in the kernel's memory kind
  const float* bias = nullptr;  // [channels], non-null exactly when CausalConv1dSpec::bias; in the kernel's memory kind
  std::span<const CausalConv1dRun> runs;
  MutableTensorView y;  // [rows, 1, channels]
};

// A decode step: one token of each sequence, updating `halos` in place, dense [slots, width − 1, channels].
struct CausalConv1dUpdate {
  TensorView x;  // [sequences, 1, channels]
  const float* weight = nullptr;
  const float* bias = nullptr;
  void* halos = nullptr;
  MutableTensorView y;                  // [sequences, 1, channels]
  const std::int32_t* slots = nullptr;  // as in SsmUpdate
};

// Tokens whose terms of dweight and dbias are summed in one chain.
inline constexpr std::int64_t kConv1dGradientTile = 128;

// Consecutive tokens of one sequence, which begin at a unit of tokens: rows [row, row + tokens) of x, dy and dx. Halos
// are dense, oldest token first, of the spec's dtype, in the kernel's memory kind.
struct CausalConv1dGradientRun {
  std::int64_t row = 0;
  std::int64_t tokens = 0;
  const void* initial_halo = nullptr;  // as in CausalConv1dRun
  // Tokens of the sequence after the run, in its next run: width − 1, or all that there are if they are fewer.
  std::int64_t next_tokens = 0;
  const void* next_x = nullptr;   // [next_tokens, channels]
  const void* next_dy = nullptr;  // [next_tokens, channels]
  // [width − 1, channels], gradient of the final halo of a sequence that ends with the next tokens. Null: zeros.
  const void* dfinal_halo = nullptr;
  void* dinitial_halo = nullptr;  // [width − 1, channels], written: the gradient of initial_halo. Null: not wanted
};

// As CausalConv1dTask.
struct CausalConv1dGradientTask {
  TensorView x;                   // [rows, 1, channels]
  TensorView dy;                  // [rows, 1, channels]
  const float* weight = nullptr;  // [channels, width]
  const float* bias = nullptr;    // [channels]
  std::span<const CausalConv1dGradientRun> runs;
  MutableTensorView dx;  // [rows, 1, channels]
  // [units of the runs, width + 1, channels], written: each unit's dweight by tap, then its dbias.
  float* units = nullptr;
};

// Adds units in order: dweight [channels, width] and, unless null, dbias [channels]. Zeros without units.
struct CausalConv1dUnitSum {
  const float* units = nullptr;  // [count, width + 1, channels]
  std::int64_t count = 0;
  std::int64_t channels = 0;  // any number: ranks sum a part of the channels
  float* dweight = nullptr;
  float* dbias = nullptr;
};

// A conv1d kernel for one spec on one backend. On a device its calls only launch kernels.
class CausalConv1dKernel {
 public:
  virtual ~CausalConv1dKernel() = default;

  virtual void convolve(const CausalConv1dTask& task, Stream stream, const Progress& progress) = 0;
  virtual void update(const CausalConv1dUpdate& update, Stream stream) = 0;
  virtual void differentiate(const CausalConv1dGradientTask& task, Stream stream, const Progress& progress) = 0;
  virtual void sum_units(const CausalConv1dUnitSum& sum, Stream stream) = 0;
};

// Requirements of `spec` that kernels with vectors of eight channels do not support (KernelRow::missing).
std::vector<std::string> vectorized_conv1d_missing(const CausalConv1dSpec& spec);

// Validation, shared by all kernels. Throws kInternal if views or runs do not match the spec or each other.
void check_causal_conv1d_task(const CausalConv1dSpec& spec, const CausalConv1dTask& task);
void check_causal_conv1d_update(const CausalConv1dSpec& spec, const CausalConv1dUpdate& update);
void check_causal_conv1d_gradient(const CausalConv1dSpec& spec, const CausalConv1dGradientTask& task);

}  // namespace ringattn
