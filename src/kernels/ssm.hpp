// SPDX-License-Identifier: Apache-2.0
// The scan of a state space layer. Of every sequence and head, with x_t [head_dim], B_t and C_t [state_dim], and a
// state S [head_dim, state_dim]:
//
//   S_t = exp(dt_t · A) · S_{t−1} + dt_t · x_t ⊗ B_t        y_t = S_t · C_t + D · x_t, times silu(z_t) where there is z
//
// Mamba-2 (SSD) has one A a head. Mamba-1 (selective scan) has an A for each state of each channel: there a head is a
// channel, head_dim is 1, and SsmSpec::state_decays is set. Names are those of mamba_ssm.
//
// Which numbers are computed. Tokens of a sequence lie in chunks of 64, segments of 2,048 and super-segments of 65,536,
// all counted from the sequence's first token. Everything is fp32 but for what is said below. a(T) is the decay over
// the tokens T: exp2 of the sum of their dt · (A · log2 e), or with state_decays of (A · log2 e) times the sum of their
// dt. fma(a, S, L) is one fused step for each element of a state (two roundings on processors that can't fuse).
//
//   1. The local state of a segment is folded from zero over its tokens, in ascending order: chunk by chunk, where
//      S ← fma(a(chunk), S, Σ_j a(tokens behind j) · dt_j · x_j ⊗ B_j), the sum ascending in j; or with state_decays
//      token by token.
//   2. The local state M in front of a segment is folded from zero at the beginning of its super-segment:
//      M ← fma(a(segment), M, local state of the segment). Behind the last segment it is that of the super-segment.
//   3. T in front of a super-segment is folded from the sequence's initial state, or zero: T ← fma(a(super-segment), T,
//      local state of the super-segment). Behind the last one it is the final state.
//   4. The state in front of a segment is fma(a(segments between), T, M). From there its rows are computed: chunk by
//      chunk, y_i = a(tokens up to i) · C_i · S + Σ_{j ≤ i} (C_i · B_j) · a(tokens j + 1 … i) · dt_j · x_j; or with
//      state_decays token by token.
//
// The sums in decays ascend, too: over tokens, from zero in each chunk (state_decays: segment), over chunks from zero
// in each segment, over segments from zero in each super-segment. Decays inside of a chunk are exp2 of the difference
// of two sums. So that these stay finite, the logarithm of one token is taken to be at least −150, where the decay is
// 0. Behind tokens that clear the state, the decays of their chunk are then as exact as sums of up to 64 · 150 are in
// fp32. Decays below 2^−126 are 0.
//
// How a kernel evaluates exp2, softplus and sums over state_dim is its own affair, but always the same: bits are those
// of one kernel on one kind of device. So is whether a chunk's sum begins with zero or, as in sm90_ssd, with
// a(chunk) · S; and whether in 4 the factors of products are rounded to the dtype once (rounds_factors()): the state in
// front of a chunk, the weights of its tokens, and for states within the segment the weight of x and x times that.
//
// So a row of y and a final state are pure functions of the sequence's inputs up to there, of its initial state and of
// the SsmSpec. They depend on nothing that a SsmTask says about where runs lie, how a sequence is cut into runs,
// which other rows are computed beside it, which heads are computed at a time, or how many threads run. A sequence that
// is cut behind whole super-segments, and goes on from the final state of its first part, has the bits of the whole
// one. Cut elsewhere it has the same values but for rounding, as has one that goes on token by token (update()).
//
// A value that isn't finite reaches the rows behind it, and may reach those before it in its own chunk; never those of
// another sequence. States that outgrow fp32 (A positive) aren't finite either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

class SsmKernel;

inline constexpr std::int64_t kChunkTokens = 64;
inline constexpr std::int64_t kSegmentTokens = 2048;
inline constexpr std::int64_t kSuperSegmentTokens = 65'536;

// What is computed: all that the choice of a kernel and its arithmetic may depend on. Lengths and ranks are absent.
struct SsmSpec {
  using Kernel = SsmKernel;  // what computes it (registry.hpp)

  Dtype dtype = Dtype::kBf16;  // of x, dt, B, C, z and y; A, D, dt_bias and states are fp32
  int heads = 1;
  int head_dim = 64;
  int state_dim = 128;
  int groups = 1;             // divides heads: heads [g · heads / groups, …) share row g of B and C
  bool state_decays = false;  // A is [heads, state_dim], else [heads]; needs head_dim 1
  bool skip = false;          // D · x is added to y
  bool gate = false;          // y is multiplied by silu(z)
  // What becomes of dt, in this order.
  bool dt_bias = false;                                    // one a head is added
  bool dt_softplus = false;                                // dt ← log(1 + exp(dt))
  float dt_min = -std::numeric_limits<float>::infinity();  // mamba_ssm's dt_limit
  float dt_max = std::numeric_limits<float>::infinity();

  bool operator==(const SsmSpec&) const = default;
};

// "scan, bf16, 80 heads of 64, state 128, 1 group, D, z, dt bias, dt softplus"
std::string describe(const SsmSpec& spec);

// Throws kUsage when heads, dims, groups or limits contradict each other.
void check_ssm(const SsmSpec& spec);

// Tokens [begin, begin + tokens) of one sequence, which are the rows row, row + 1, … of the task's tensors. `begin` is
// a multiple of kSuperSegmentTokens, and so is the end unless the sequence ends there.
struct SsmRun {
  std::int64_t begin = 0;
  std::int64_t tokens = 0;
  std::int64_t row = 0;
  // States of all heads, [heads, head_dim, state_dim] dense, in the kernel's kind of memory.
  const float* initial = nullptr;  // in front of the run; null: zero
  float* final = nullptr;          // behind it; null: not wanted
  int step = 0;                    // of carry()
};

// What is scanned. The views' memory lives until the stream has passed the task; the runs are read before calls return.
struct SsmTask {
  TensorView x;                    // [rows, heads, head_dim]
  TensorView dt;                   // [rows, heads, 1]
  TensorView b;                    // [rows, groups, state_dim]
  TensorView c;                    // [rows, groups, state_dim]
  TensorView z;                    // [rows, heads, head_dim], present exactly when SsmSpec::gate
  const float* a = nullptr;        // [heads], or [heads, state_dim] with state_decays; in the kernel's kind of memory,
  const float* d = nullptr;        // [heads], present exactly when SsmSpec::skip;     as are these
  const float* dt_bias = nullptr;  // [heads], present exactly when SsmSpec::dt_bias
  std::span<const SsmRun> runs;
  MutableTensorView y;  // [rows, heads, head_dim]
};

// One token of each sequence, which goes on in `states`: [slots, heads, head_dim, state_dim] dense, in place, in the
// kernel's kind of memory. Row s is sequence s, whose state is that of slot s or, of a cache of many sequences, of
// slots[s]; no two rows have the same. For decoding: a state then has the values of a scan over all tokens, but not its
// bits.
struct SsmUpdate {
  TensorView x;   // [sequences, heads, head_dim]
  TensorView dt;  // as in SsmTask, and so are those below
  TensorView b;
  TensorView c;
  TensorView z;
  const float* a = nullptr;
  const float* d = nullptr;
  const float* dt_bias = nullptr;
  float* states = nullptr;
  MutableTensorView y;  // [sequences, heads, head_dim]
  // [sequences], in the kernel's kind of memory; null: row s has slot s. Below 0 the row is padding: its y is zeros,
  // and no state is written. No result depends on its inputs, but their memory, and that of slot 0, may be read.
  const std::int32_t* slots = nullptr;
};

// Heads [first, first + count).
struct HeadRange {
  int first = 0;
  int count = 0;

  int end() const { return first + count; }
};

// The most of each kind that any task holds.
struct SsmLimits {
  std::int64_t runs = 0;
  std::int64_t segments = 0;        // whole or not
  std::int64_t super_segments = 0;  // whole or not
};

SsmLimits limits_of(std::span<const SsmRun> runs);

// One scan kernel for one SsmSpec on one backend. A task goes through fold(), carry() of every step and finish(), each
// behind the one before, with the same heads and runs. Several ranges of heads may be on their way, and carry() of one
// beside fold() and finish() of others: in another stream or, on a host, out of `progress`. Devices only launch.
class SsmKernel {
 public:
  virtual ~SsmKernel() = default;

  // Ranges of heads begin at multiples of it.
  virtual int heads_together() const = 0;
  // Seconds that a task takes longer in two ranges of heads than in one, which takes `seconds`.
  virtual double cost_of_two_ranges(double seconds) const = 0;
  // Bytes that reserve() allocates for tasks within `limits`.
  virtual std::size_t scratch_bytes(const SsmLimits& limits) const = 0;
  // Called before the first fold().
  virtual void reserve(const SsmLimits& limits) = 0;
  // Local states of all runs, which need no initial state: 1 and 2 above.
  virtual void accumulate_states(const SsmTask& task, const HeadRange& heads, Stream stream,
                                 const Progress& progress) = 0;
  // The states of the runs whose step is this one, from their initial states to their final ones: 3 above. So a run
  // whose initial state is another's final state, here or on another rank, has a later step.
  virtual void carry(const SsmTask& task, const HeadRange& heads, int step, Stream stream) = 0;
  // Rows of y: 4 above.
  virtual void finish(const SsmTask& task, const HeadRange& heads, Stream stream, const Progress& progress) = 0;

  // One token of each sequence. Needs no reserve().
  virtual void update(const SsmUpdate& update, Stream stream) = 0;
};

// What every scan kernel checks of a task. Throws kInternal where views or runs don't fit the spec or the limits.
void check_ssm_task(const SsmSpec& spec, const SsmLimits& limits, const SsmTask& task);
// The same of an update.
void check_ssm_update(const SsmSpec& spec, const SsmUpdate& update);

}  // namespace ringattn
