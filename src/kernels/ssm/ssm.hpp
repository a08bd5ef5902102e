// SPDX-License-Identifier: Apache-2.0
// The SSM layer interface (Mamba-1 and Mamba-2). For every sequence and head, with x_t [head_dim], B_t and C_t
// [state_dim], and state S [head_dim, state_dim]:
//
//   S_t = exp(dt_t · A) · S_{t−1} + dt_t · x_t ⊗ B_t        y_t = S_t · C_t + D · x_t, times silu(z_t) if there is a z
//
// Mamba-2 (SSD) has one A per head. Mamba-1 (selective scan) has an A for each state of each channel: a head is then a
// channel, head_dim is 1, and SsmSpec::state_decays is set. Names are those of mamba_ssm.
//
// Linear attention is the same scheme with x = v, B = k, C = q and, in place of dt · A, a log-decay g of each head, of
// each token and head, or of each token, head and state (SsmDecay). Its tokens are not multiplied by a dt:
//
//   S_t = exp(g_t) · S_{t−1} + v_t ⊗ k_t        y_t = scale · S_t · q_t
//
// Its q and k may be rotated by RoPE. Kernels with rotates_rows() do so as they load rows, and round them to the dtype
// once, so the bits are those of rows that were rotated before.
//
// Numerics. A sequence's tokens are divided into chunks of 64, segments of 2,048 and super-segments of 65,536 tokens,
// counted from its first token. All arithmetic is fp32 except where stated. a(T) is the decay over the tokens T: exp2
// of the sum of dt · (A · log2 e), or with state_decays exp2 of (A · log2 e) times the sum of dt. fma(a, S, L) is one
// fused multiply-add per element of a state (two roundings on processors without FMA).
//
//   1. The local state of a segment is computed from zero over its tokens, in ascending order. Chunk by chunk,
//      S ← fma(a(chunk), S, Σ_j a(tokens after j) · dt_j · x_j ⊗ B_j), with the sum ascending in j. With state_decays:
//      token by token.
//   2. The local state M before a segment is computed from zero at the start of its super-segment:
//      M ← fma(a(segment), M, local state of the segment). After the last segment it is the super-segment's local
//      state.
//   3. The state T before a super-segment is computed from the sequence's initial state, or zero:
//      T ← fma(a(super-segment), T, local state of the super-segment). After the last one it is the final state.
//   4. The state before a segment is fma(a(segments between), T, M). Its rows are computed from there. Chunk by chunk,
//      y_i = a(tokens up to i) · C_i · S + Σ_{j ≤ i} (C_i · B_j) · a(tokens j + 1 … i) · dt_j · x_j. With state_decays:
//      token by token.
//
// With a log-decay g, a(T) is exp2 of the sum of g · log2 e, dt is 1, and rows of y are multiplied by the scale in
// fp32: at the end, or as sm80_ssd and sm90_ssd do, both of the terms of y before they are added. With SsmDecay::kDim,
// a(T) has an element for each state, and the intra-chunk scores are sums over the states n of C_i[n] · B_j[n] ·
// a(tokens j + 1 … i)[n] (cpu/cpu_gla.cpp). sm80_gla evaluates a(T) within a chunk as the product of its tokens'
// decays, and sums logarithms of longer spans by fours of sub-chunks (sm80/gla.cuh), and so does cpu_gla_amx, which
// sums logarithms over tokens, then chunks.
//
// The sums in decays are also ascending: over tokens, from zero in each chunk (state_decays: segment); over chunks,
// from zero in each segment; over segments, from zero in each super-segment. Decays within a chunk are exp2 of the
// difference of two sums. To keep these finite, the log-decay of one token is clamped to at least −150, where the decay
// is 0. After tokens that clear the state, the decays of their chunk are only as exact as sums of up to 64 · 150 are in
// fp32. Decays below 2^−126 are 0.
//
// Each kernel chooses how it evaluates exp2, softplus and sums over state_dim, but always in the same way: results are
// bitwise equal for one kernel on one kind of device. A kernel also chooses whether a chunk's sum starts with zero or,
// as in sm90_ssd, with a(chunk) · S. And in 4 it chooses whether it rounds the factors of products to the dtype
// (rounds_factors()): the state before a chunk, the intra-chunk scores, and for states within the segment the factor of
// x and its product with x. With kDim these are the decayed elements of C and B in place of the latter.
//
// So a row of y and a final state are pure functions of the sequence's inputs up to there, its initial state and the
// SsmSpec. They do not depend on where the SsmTask's runs lie in memory, how a sequence is cut into runs, which other
// rows are computed with it, which heads are computed at a time, or how many threads run. A sequence that is cut at a
// super-segment boundary and continued from the first part's final state has the same bits as the uncut sequence. Cut
// elsewhere, or continued token by token (update()), results are equal except for rounding.
//
// A non-finite value affects the rows after it, and may affect rows before it in the same chunk, but never another
// sequence. States that overflow fp32 (A positive) are also not finite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

class SsmKernel;
struct RopeSpec;

inline constexpr std::int64_t kChunkTokens = 64;
inline constexpr std::int64_t kSegmentTokens = 2048;
inline constexpr std::int64_t kSuperSegmentTokens = 65'536;

// The decay of a token.
enum class SsmDecay : std::uint8_t {
  kDt,     // exp(dt · A), and x is multiplied by dt
  kHead,   // exp(A): a log-decay of each head
  kToken,  // exp(log-decay of each token and head)
  kDim,    // exp(log-decay of each token, head and state), which is a row of a state
};

// The computation: everything that the choice of a kernel and its arithmetic may depend on. Lengths and ranks are not
// part of it.
struct SsmSpec {
  using Kernel = SsmKernel;  // the interface that computes this spec (common/registry.hpp)

  Dtype dtype = Dtype::kBf16;  // dtype of x, dt, B, C, z and y; A, D, dt_bias and states are fp32
  int heads = 1;
  int head_dim = 64;
  int state_dim = 128;
  int groups = 1;                  // divides heads: heads [g · heads / groups, …) share row g of B and C
  bool state_decays = false;       // A is [heads, state_dim], else [heads]; needs head_dim 1
  SsmDecay decay = SsmDecay::kDt;  // the others are linear attention: no dt, D, gate or state_decays
  float scale = 1.0F;              // of y; 1 with kDt
  bool skip = false;               // D · x is added to y
  bool gate = false;               // y is multiplied by silu(z)
  // Transformations of dt, in this order.
  bool dt_bias = false;                                    // one per head is added
  bool dt_softplus = false;                                // dt ← log(1 + exp(dt))
  float dt_min = -std::numeric_limits<float>::infinity();  // mamba_ssm's dt_limit
  float dt_max = std::numeric_limits<float>::infinity();

  bool operator==(const SsmSpec&) const = default;
};

// "SSD, bf16, 80 heads of 64, state 128, 1 group, D, z, dt bias, dt softplus"
// "linear attention, bf16, 64 heads of 128, a decay per head, scale 0.0884"
std::string describe(const SsmSpec& spec);

// The rows of dt or, in their place, of log-decays.
struct SsmDtRows {
  Dtype dtype;
  int dim;  // of a head; 0: there are none
};
SsmDtRows dt_rows(const SsmSpec& spec);

// Throws kUsage if heads, dims, groups or limits contradict each other.
void check_ssm(const SsmSpec& spec);

// Tokens [begin, begin + tokens) of one sequence, at rows row, row + 1, … of the task's tensors. `begin` is a multiple
// of kSuperSegmentTokens, and so is the end, unless the sequence ends there.
struct SsmRun {
  std::int64_t begin = 0;
  std::int64_t tokens = 0;
  std::int64_t row = 0;
  // States of all heads, dense [heads, head_dim, state_dim], in the kernel's memory kind.
  const float* initial = nullptr;  // before the run; null: zero
  float* final = nullptr;          // after the run; null: not written
  int step = 0;                    // the carry() step of this run
};

// RoPE of the rows of B and C, only for linear attention by a kernel with rotates_rows().
struct SsmRotation {
  const RopeSpec* rope = nullptr;  // null: none
  const float* angles = nullptr;   // [rows, rotary_dim] (angle_spec(), rope.hpp), in the kernel's memory kind
};

// Inputs and outputs of one prefill. The views' memory must live until the stream has completed the task. The runs are
// read before calls return.
struct SsmTask {
  TensorView x;   // [rows, heads, head_dim]
  TensorView dt;  // [rows, heads, dt_rows()]: dt or log-decays, which are fp32; absent with kHead
  TensorView b;   // [rows, groups, state_dim]
  TensorView c;   // [rows, groups, state_dim]
  TensorView z;   // [rows, heads, head_dim], present exactly when SsmSpec::gate
  // [heads], or [heads, state_dim] with state_decays; null with kToken and kDim; in the kernel's memory kind
  const float* a = nullptr;
  const float* d = nullptr;        // [heads], non-null exactly when SsmSpec::skip; in the kernel's memory kind
  const float* dt_bias = nullptr;  // [heads], non-null exactly when SsmSpec::dt_bias; in the kernel's memory kind
  SsmRotation rotation;
  std::span<const SsmRun> runs;
  MutableTensorView y;  // [rows, heads, head_dim]
};

// A decode step: one token of each sequence, updating `states` in place, dense [slots, heads, head_dim, state_dim] in
// the kernel's memory kind. Row s is sequence s, and its state is in slot s, or in slots[s] of a larger cache. Slots
// must be distinct. States then equal those of a prefill over all tokens except for rounding.
struct SsmUpdate {
  TensorView x;   // [sequences, heads, head_dim]
  TensorView dt;  // same shapes as in SsmTask, also below
  TensorView b;
  TensorView c;
  TensorView z;
  const float* a = nullptr;
  const float* d = nullptr;
  const float* dt_bias = nullptr;
  SsmRotation rotation;
  float* states = nullptr;
  MutableTensorView y;  // [sequences, heads, head_dim]
  // [sequences] in the kernel's memory kind; null: row s uses slot s. A negative slot marks padding: its y is zero and
  // no state is written. Results do not depend on padding inputs, but their memory, and slot 0's, may be read.
  const std::int32_t* slots = nullptr;
};

// Heads [first, first + count).
struct HeadRange {
  int first = 0;
  int count = 0;

  int end() const { return first + count; }
};

// Upper bounds over all tasks.
struct SsmLimits {
  std::int64_t runs = 0;
  std::int64_t segments = 0;        // complete or not
  std::int64_t super_segments = 0;  // complete or not
};

SsmLimits limits_of(std::span<const SsmRun> runs);

// An SSM kernel for one SsmSpec on one backend. A task runs accumulate_states(), carry() for each step, then finish(),
// in this order, with the same heads and runs. Several head ranges may be in flight, and carry() of one may overlap
// accumulate_states() and finish() of others: on another stream, or on a host from `progress`. On devices these calls
// only launch kernels.
class SsmKernel {
 public:
  virtual ~SsmKernel() = default;

  // Whether the kernel rotates rows of B and C as it loads them. For other kernels they are rotated before.
  virtual bool rotates_rows() const = 0;
  // Head ranges must begin at multiples of this.
  virtual int heads_together() const = 0;
  // Extra seconds for computing a task in two head ranges instead of one that takes `seconds`.
  virtual double cost_of_two_ranges(double seconds) const = 0;
  // Bytes that reserve() allocates for tasks within `limits`.
  virtual std::size_t scratch_bytes(const SsmLimits& limits) const = 0;
  // Called before the first accumulate_states().
  virtual void reserve(const SsmLimits& limits) = 0;
  // Computes the local states of all runs, which do not need an initial state: 1 and 2 above.
  virtual void accumulate_states(const SsmTask& task, const HeadRange& heads, Stream stream,
                                 const Progress& progress) = 0;
  // Computes the states of this step's runs, from their initial to their final states: 3 above. A run whose initial
  // state is the final state of another run, here or on another rank, has a later step.
  virtual void carry(const SsmTask& task, const HeadRange& heads, int step, Stream stream) = 0;
  // Computes rows of y: 4 above.
  virtual void finish(const SsmTask& task, const HeadRange& heads, Stream stream, const Progress& progress) = 0;

  // Updates one token of each sequence. Does not need reserve().
  virtual void update(const SsmUpdate& update, Stream stream) = 0;
};

// Validation of a task, shared by all SSM kernels. Throws kInternal if views, runs or the rotation do not match the
// spec, the limits or rotates_rows().
void check_ssm_task(const SsmSpec& spec, const SsmLimits& limits, const SsmTask& task, bool rotates_rows);
// Validation of an update.
void check_ssm_update(const SsmSpec& spec, const SsmUpdate& update, bool rotates_rows);

}  // namespace ringattn
