// SPDX-License-Identifier: Apache-2.0
// The gated delta rule: Gated DeltaNet (GDN) and Kimi Delta Attention (KDA). For every sequence and value head, with
// q_t and k_t [key_dim] of the key head that it shares, v_t [value_dim], and state S [key_dim, value_dim]:
//
//   S'_t = Diag(α_t) · S_{t−1}          S_t = S'_t + β_t · k_t ⊗ (v_t − S'_tᵀ · k_t)          o_t = scale · S_tᵀ · q_t
//
// so S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ. The decay α_t = exp(log_decay_t) is one number per
// token and value head in GDN, where it commutes with the rest, and one per key dim in KDA
// (GatedDeltaSpec::key_decays). Names are those of fla (flash-linear-attention) and Hugging Face.
//
// Numerics. A sequence's tokens are divided into chunks of 64 and segments of 2,048 tokens (kChunkTokens and
// kSegmentTokens of kernels/ssm/ssm.hpp), counted from its first token. States are fp32, and all arithmetic is fp32
// except where stated. g_t = max(log_decay_t · log2 e, −150); NaN stays NaN. G_t is the sum over the chunk's tokens up
// to t. Decays are exp2 of G, or of differences of two of them, and 0 below 2^−126: with log-decays of at most 0 no
// exponent is positive. After tokens that clear the state, the decays of their chunk are only as exact as sums of up to
// 64 · 150 are in fp32.
//
//   1. A segment is an affine map of the state before it, S ← M · S + U with M [key_dim, key_dim] and U [key_dim,
//      value_dim]. U is computed over the segment's tokens from the state zero, and M from the state I with values of
//      zero, chunk by chunk as in 3.
//   2. The state before a segment is computed from the sequence's initial state, segment by segment:
//      S ← M · S + U. Each element is one chain of fused multiply-adds that begins with U and is ascending in the key
//      dim (two roundings on processors without FMA). After the last segment it is the final state. Before a sequence
//      without an initial state it is zero, and the first segment's result is U itself.
//   3. The rows of a segment are computed from the state before it. Chunk by chunk, with i and j from the chunk's first
//      token on, and · denoting the product over key dims:
//        u_i = β_i · (v_i − (k_i exp2(G_i)) · S − Σ_{j < i} (k_i · k_j exp2(G_i − G_j)) u_j)
//        o_i = scale · ((q_i exp2(G_i)) · S + Σ_{j ≤ i} (q_i · k_j exp2(G_i − G_j)) u_j)
//        S   ← Diag(exp2(G_last)) · S + Σ_j (k_j exp2(G_last − G_j)) ⊗ u_j
//      The triangular system is solved in fp32 by substitution, ascending in j; a kernel may invert it (T, so that
//      u = T · …), also by substitution.
//   4. In KDA, where decays are within the products over key dims, a chunk has sub-chunks of 16 tokens. For i and j in
//      different sub-chunks q_i or k_i is scaled by exp2(G_i − G_s) and k_j by exp2(G_s − G_j), with s the last token
//      before the sub-chunk of i. In the same sub-chunk the decay multiplies each term.
//      `cpu_gated_delta_amx` evaluates all decays of KDA within a chunk as products of the tokens' decays.
//
// With GatedDeltaSpec::qk_l2norm each row of q and of k is first multiplied by 1 / sqrt(Σ x² + 1e-6), in fp32.
//
// Each kernel chooses how it evaluates exp2, the norm, sums over key dims and tokens within a chunk (as G), and where
// scale is applied, but always in the same way: results are bitwise equal for one kernel on one kind of device. A
// kernel also chooses whether it rounds the factors of chunk products (1 and 3, not 2) to the dtype
// (rounds_delta_factors()): q, k, their decayed forms, T, u and what it is made of, and the state before a chunk; each
// is rounded once, except that `cpu_gated_delta_amx` has T as a hi/lo pair, and sums are fp32. On x86, CPU kernels
// treat subnormals as zero in 1 and 3.
//
// So a row of o and a final state are pure functions of the sequence's inputs up to there, its initial state and the
// GatedDeltaSpec. They do not depend on where the task's runs lie in memory, how a sequence is cut into runs, which
// other rows are computed with it, which heads are computed at a time, how many threads run, or whether M was also
// computed for segments that do not need it. A sequence that is cut at a multiple of 2,048 tokens and continued from
// the first part's final state has the same bits as the uncut sequence. Cut elsewhere, or continued token by token
// (update()), results are equal except for rounding. An initial state of zeros gives the same values as none (zeros may
// differ in sign).
//
// With |k| = 1 and β in [0, 2], M does not expand (‖M‖ ≤ 1), so that errors do not grow from segment to segment.
// Rounded factors are not quite those of such an M. Where keys repeat, terms of T add up to as much as β / (1 − |1 −
// β|) and cancel. So with a rounded T, as in sm90_gated_delta, M may expand from a β of about 1.8 on. With T as a hi/lo
// pair M may expand only if β is 2, because rounded keys may be longer than 1. A non-finite value affects the rows
// after it, and may affect rows before it in the same chunk, but never another sequence, nor a value head that does not
// read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

class GatedDeltaKernel;

inline constexpr std::int64_t kSubChunkTokens = 16;
inline constexpr float kQkL2NormEps = 1e-6F;

// The computation: everything that the choice of a kernel and its arithmetic may depend on. Lengths and ranks are not
// part of it.
struct GatedDeltaSpec {
  using Kernel = GatedDeltaKernel;  // the interface that computes this spec (common/registry.hpp)

  Dtype dtype = Dtype::kBf16;  // dtype of q, k, v and o; log_decay, beta and states are fp32
  int key_heads = 16;          // of q and k; divides value_heads
  int value_heads = 32;        // heads [h · value_heads / key_heads, …) share q and k of key head h
  int key_dim = 128;
  int value_dim = 128;
  bool key_decays = false;  // KDA: log_decay is [tokens, value_heads, key_dim]; GDN: [tokens, value_heads]
  bool qk_l2norm = false;   // rows of q and k are divided by their norm
  float scale = 0.0F;       // multiplies o; 0: 1 / sqrt(key_dim)

  bool operator==(const GatedDeltaSpec&) const = default;

  int decay_dim() const { return key_decays ? key_dim : 1; }  // log-decays of a token and value head
  int heads_per_key() const { return value_heads / key_heads; }
};

// "GDN, bf16, 32 value heads of 128, 16 key heads of 128, qk norm, scale 0.125"
std::string describe(const GatedDeltaSpec& spec);

// Throws kUsage if heads, dims or the scale contradict each other.
void check_gated_delta(const GatedDeltaSpec& spec);

// The scale that o is multiplied by.
float scale_of(const GatedDeltaSpec& spec);
// Floats of a sequence's state, all value heads.
std::int64_t state_floats(const GatedDeltaSpec& spec);

// Tokens [begin, begin + tokens) of one sequence, at rows row, row + 1, … of the task's tensors. `begin` is a multiple
// of kSegmentTokens, and so is the end, unless the sequence ends there.
struct GatedDeltaRun {
  std::int64_t begin = 0;
  std::int64_t tokens = 0;  // at least 1
  std::int64_t row = 0;
  // States of all value heads, dense [value_heads, key_dim, value_dim], in the kernel's memory kind.
  const float* initial = nullptr;  // before the run; null: zero
  float* final = nullptr;          // after the run; null: not written
  int step = 0;                    // the carry() step of this run

  std::int64_t segments() const { return (tokens + kSegmentTokens - 1) / kSegmentTokens; }
  // Whether U of a segment is read: by the next segment, or for the final state.
  bool needs_state(std::int64_t segment) const { return segment + 1 < segments() || final != nullptr; }
  // Whether M is read: U is, and the state before the segment isn't zero. Otherwise M is not computed.
  bool needs_transition(std::int64_t segment) const {
    return needs_state(segment) && (segment > 0 || initial != nullptr);
  }
};

// Inputs and outputs of one prefill. The views' memory must live until the stream has completed the task. The runs are
// read before calls return. Strides of tokens and heads are free.
struct GatedDeltaTask {
  TensorView q;          // [rows, key_heads, key_dim]
  TensorView k;          // [rows, key_heads, key_dim]
  TensorView v;          // [rows, value_heads, value_dim]
  TensorView log_decay;  // fp32 [rows, value_heads, decay_dim()], natural logarithms
  TensorView beta;       // fp32 [rows, value_heads, 1]
  std::span<const GatedDeltaRun> runs;
  MutableTensorView o;  // [rows, value_heads, value_dim]
};

// A decode step: one token of each sequence, updating `states` in place, dense [slots, value_heads, key_dim, value_dim]
// in the kernel's memory kind. Row s is sequence s, and its state is in slot s, or in slots[s] of a larger cache. Slots
// must be distinct. The token is computed by the recurrence at the top, all in fp32.
struct GatedDeltaUpdate {
  TensorView q;  // [sequences, …]; shapes as in GatedDeltaTask
  TensorView k;
  TensorView v;
  TensorView log_decay;
  TensorView beta;
  float* states = nullptr;
  MutableTensorView o;
  // [sequences] in the kernel's memory kind; null: row s uses slot s. A negative slot marks padding: its o is zero and
  // no state is written. Results do not depend on padding inputs, but their memory, and slot 0's, may be read.
  const std::int32_t* slots = nullptr;
};

// Upper bounds over all tasks.
struct GatedDeltaLimits {
  std::int64_t runs = 0;
  std::int64_t segments = 0;  // complete or not
};

GatedDeltaLimits limits_of(std::span<const GatedDeltaRun> runs);

// A kernel for one GatedDeltaSpec on one backend. A task runs accumulate_states(), carry() for each step, then
// finish(), in this order, with the same heads and runs. `heads` are value heads. Several head ranges may be in flight,
// and carry() of one may overlap accumulate_states() and finish() of others: on another stream, or on a host from
// `progress`. On devices these calls only launch kernels.
class GatedDeltaKernel {
 public:
  virtual ~GatedDeltaKernel() = default;

  // Head ranges must begin at multiples of this.
  virtual int heads_together() const = 0;
  // Extra seconds for computing a task in two head ranges instead of one that takes `seconds`.
  virtual double cost_of_two_ranges(double seconds) const = 0;
  // Estimated seconds of carry() for `runs` runs of `segments` segments each. The kernel's rate does not contain them.
  virtual double carry_seconds(std::int64_t runs, std::int64_t segments) const = 0;
  // Bytes that reserve() allocates for tasks within `limits`.
  virtual std::size_t scratch_bytes(const GatedDeltaLimits& limits) const = 0;
  // Called before the first accumulate_states().
  virtual void reserve(const GatedDeltaLimits& limits) = 0;
  // Computes M and U of all segments where they are needed: 1 above. Reads of a run only whether `initial` and `final`
  // are null.
  virtual void accumulate_states(const GatedDeltaTask& task, const HeadRange& heads, Stream stream,
                                 const Progress& progress) = 0;
  // Computes the states before this step's segments, and the final states: 2 above. A run whose initial state is the
  // final state of another run, here or on another rank, has a later step.
  virtual void carry(const GatedDeltaTask& task, const HeadRange& heads, int step, Stream stream) = 0;
  // Computes rows of o: 3 above.
  virtual void finish(const GatedDeltaTask& task, const HeadRange& heads, Stream stream, const Progress& progress) = 0;

  // Updates one token of each sequence. Does not need reserve().
  virtual void update(const GatedDeltaUpdate& update, Stream stream) = 0;
};

// Validation of a task, shared by all kernels. Throws kInternal if views or runs do not match the spec or the limits.
void check_gated_delta_task(const GatedDeltaSpec& spec, const GatedDeltaLimits& limits, const GatedDeltaTask& task);
// Validation of an update.
void check_gated_delta_update(const GatedDeltaSpec& spec, const GatedDeltaUpdate& update);

template <>
std::span<const KernelRow<GatedDeltaSpec>> kernel_table<GatedDeltaSpec>();

// Whether a kernel rounds the factors of chunk products to the dtype.
bool rounds_delta_factors(const KernelEntry& kernel);

}  // namespace ringattn
