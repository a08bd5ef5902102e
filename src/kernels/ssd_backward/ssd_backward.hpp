// SPDX-License-Identifier: Apache-2.0
// The interface of SSD backward kernels (Mamba-2): gradients of x, dt, A, B, C, D, z, dt_bias and the initial state,
// from the gradient of y and, if there is one, of the final state. kernels/ssm/ssm.hpp has the forward, the names and
// the three levels of states: chunks of 64 tokens, segments of 2,048, super-segments of 65,536.
//
// With g_t the gradient of S_t · C_t + D · x_t (g = dy, times silu(z) if there is a z), a_t = exp(dt_t · A), and G_t
// [head_dim, state_dim] the gradient of the state S_t:
//
//   G_t = g_t ⊗ C_t + a_{t+1} · G_{t+1}            after the last token: the gradient of the final state, or zero
//   q_t = a_t · ⟨G_t, S_{t−1}⟩                     gradient of the log-decay dt_t · A; 0 where the log-decay is clamped
//   dx_t = dt_t · G_t · B_t + D · g_t              dB_t = Σ_heads dt_t · G_tᵀ · x_t      dC_t = Σ_heads S_tᵀ · g_t
//   e_t = ⟨x_t, G_t · B_t⟩ + A · q_t               dz_t = dy_t · (S_t · C_t + D · x_t) · silu'(z_t)
//   dA = Σ_t dt_t · q_t      dD = Σ_t ⟨g_t, x_t⟩    gradient of the initial state: a_1 · G_1
//   ddt_t = e_t, 0 if dt was below dt_min or above dt_max, times the logistic function of dt + dt_bias with dt_softplus
//   ddt_bias = Σ_t ddt_t, before ddt is rounded
//
// Numerics. All arithmetic is fp32 except where stated. Gradients of rows (dx, ddt, dB, dC, dz) are rounded once, to
// SsdBackwardSpec::gradients. Gradients of parameters and of states are fp32. States S are computed as ssm.hpp says, 1
// to 4, with the same decays. Gradients of states go from the end to the beginning:
//
//   1. The local gradient of a segment, that of the state before it, is computed from zero over its chunks, descending:
//      G ← fma(a(chunk), G, Σ_i a(tokens up to i) · g_i ⊗ C_i), with the sum ascending in i.
//   2. The local gradient N after a segment is computed from zero at the end of its super-segment, segments descending:
//      N ← fma(a(segment), N, local gradient of the segment). Before the first segment it is the super-segment's.
//   3. The gradient U after a super-segment is computed from the final state's gradient, or zero, super-segments
//      descending: U ← fma(a(super-segment), U, local gradient of the super-segment). Before the first one it is the
//      gradient of the initial state.
//   4. The gradient after a segment is fma(a(segments between), U, N), and the state before it is that of the forward.
//      The gradients of its rows, and its terms of the parameters' gradients, are functions of these two and of its
//      rows. Chunk by chunk, with S the state before the chunk, G the gradient after it, and w_ij = (C_i · B_j) · (g_i
//      · x_j) · a(tokens j + 1 … i) · dt_j:
//        dx_j = dt_j · (Σ_{i ≥ j} (C_i · B_j) · a(tokens j + 1 … i) · g_i + a(tokens after j) · G · B_j) + D · g_j
//        dB_j = Σ_heads dt_j · (Σ_{i ≥ j} (g_i · x_j) · a(tokens j + 1 … i) · C_i + a(tokens after j) · Gᵀ · x_j)
//        dC_i = Σ_heads (Σ_{j ≤ i} (g_i · x_j) · a(tokens j + 1 … i) · dt_j · B_j + a(tokens up to i) · Sᵀ · g_i)
//        q_t  = Σ_{j < t ≤ i} w_ij + Σ_{i ≥ t} a(tokens up to i) · g_i · S · C_i
//               + Σ_{j < t} a(tokens after j) · dt_j · x_j · G · B_j + a(chunk) · ⟨S, G⟩
//   q is a sum of these terms, each with its decay, and never a difference of long sums, so it stays exact for states
// that are forgotten. (The last term may be computed from that of the next chunk of the segment.)
//
// Sums of log-decays over segments in 2 start from zero at the end of the super-segment, descending. All others are
// those of ssm.hpp. Each kernel fixes its sums over tokens of a segment, over dims and over states, and which factors
// of a product are rounded to the dtype.
//
// Sums beyond a segment and a head have a fixed order:
// - dB and dC: the heads of a group are divided into sets of heads_together(). Within a set heads are added ascending,
//   from zero; a kernel may add their intra-chunk scores before it multiplies them with B or C. Sets are added in fp32,
//   ascending; the first one is stored.
// - dA, dD, ddt_bias: one fp32 term for each segment and head (SsdBackwardTask::terms), which the caller adds:
//   segments of a sequence ascending, then sequences in the order of the batch.
//
// So a gradient of a row or of an initial state is a pure function of its sequence's inputs, its initial state, the
// gradients of its outputs and the spec. It does not depend on where runs lie in memory, how a sequence is cut into
// runs (at super-segment boundaries), which other sequences and which heads are computed with it, or how many threads
// run. Gradients of parameters are functions of the whole batch.
//
// A non-finite value affects gradients of its own sequence and of the parameters, never those of another sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

class SsdBackwardKernel;

struct SsdBackwardSpec {
  using Kernel = SsdBackwardKernel;

  SsmSpec forward;                 // without state_decays
  Dtype gradients = Dtype::kBf16;  // dtype of dx, ddt, dB, dC and dz: forward.dtype or fp32

  bool operator==(const SsdBackwardSpec&) const = default;
};

// Tokens of one sequence, as SsmRun says, and gradients of states. Pointers are to states of all heads, dense [heads,
// head_dim, state_dim], in the kernel's memory kind.
struct SsdBackwardRun {
  std::int64_t begin = 0;
  std::int64_t tokens = 0;
  std::int64_t row = 0;
  const float* initial = nullptr;         // state before the run; null: zero
  float* final = nullptr;                 // state after the run; null: not written
  const float* final_gradient = nullptr;  // gradient of the state after the run; null: zero
  float* initial_gradient = nullptr;      // gradient of the state before the run; null: not written
  int step = 0;                           // the carry_states() step of this run
  int gradient_step = 0;                  // the carry_gradients() step of this run
};

// Terms of the parameters' gradients of one segment and head, in this order; 0 for a parameter that the spec lacks.
struct SsdTerms {
  float a = 0.0F;
  float d = 0.0F;
  float dt_bias = 0.0F;
};

// Inputs and outputs of one backward pass. The views' memory must live until the stream has completed the task. The
// runs are read before calls return. Rows that no run has are neither read nor written.
struct SsdBackwardTask {
  TensorView x;                    // [rows, heads, head_dim]
  TensorView dt;                   // [rows, heads, 1]
  TensorView b;                    // [rows, groups, state_dim]
  TensorView c;                    // [rows, groups, state_dim]
  TensorView z;                    // [rows, heads, head_dim], present exactly when SsmSpec::gate
  TensorView dy;                   // [rows, heads, head_dim]
  const float* a = nullptr;        // [heads], in the kernel's memory kind, as are d and dt_bias
  const float* d = nullptr;        // [heads], non-null exactly when SsmSpec::skip
  const float* dt_bias = nullptr;  // [heads], non-null exactly when SsmSpec::dt_bias
  std::span<const SsdBackwardRun> runs;
  MutableTensorView dx;       // [rows, heads, head_dim]
  MutableTensorView ddt;      // [rows, heads, 1]
  MutableTensorView db;       // [rows, groups, state_dim]
  MutableTensorView dc;       // [rows, groups, state_dim]
  MutableTensorView dz;       // [rows, heads, head_dim], present exactly when SsmSpec::gate
  SsdTerms* terms = nullptr;  // [segments of the runs, in their order; heads], in the kernel's memory kind
};

// Upper bounds over all tasks.
struct SsdBackwardLimits {
  SsmLimits runs;
  std::int64_t rows = 0;  // of the task's tensors
};

SsdBackwardLimits limits_of(std::span<const SsdBackwardRun> runs, std::int64_t rows);

// The backward kernels for one spec on one backend. A task runs, for a head range: accumulate_states(), carry_states()
// for each step, accumulate_gradients(), carry_gradients() for each step, then finish(). accumulate_gradients() may run
// before or between the steps of carry_states(). After the last head range, sum_sets() runs once. Calls of one task
// have the same runs. Several head ranges may be in flight; a carry of one may overlap the other calls of others: on
// another stream, or on a host from `progress`. On devices these calls only launch kernels.
class SsdBackwardKernel {
 public:
  virtual ~SsdBackwardKernel() = default;

  // Heads of a set: a function of the spec alone. Set s of group g has heads [s · heads_together(), (s + 1) ·
  // heads_together()) of the group, the last one those that are left. Head ranges begin and end where sets do.
  virtual int heads_together() const = 0;
  // Extra seconds for computing a task in two head ranges instead of one that takes `seconds`.
  virtual double cost_of_two_ranges(double seconds) const = 0;
  // Bytes that reserve() allocates for tasks within `limits`, the sets' partial dB and dC included.
  virtual std::size_t scratch_bytes(const SsdBackwardLimits& limits) const = 0;
  // Called before the first task, so that tasks never allocate.
  virtual void reserve(const SsdBackwardLimits& limits) = 0;

  // Computes the local states of all runs: 1 and 2 of ssm.hpp.
  virtual void accumulate_states(const SsdBackwardTask& task, const HeadRange& heads, Stream stream,
                                 const Progress& progress) = 0;
  // Computes the states of this step's runs, from their initial to their final states: 3 of ssm.hpp. A run whose
  // initial state is another run's final state, here or on another rank, has a later step.
  virtual void carry_states(const SsdBackwardTask& task, const HeadRange& heads, int step, Stream stream) = 0;
  // Computes the local gradients of all runs: 1 and 2 above.
  virtual void accumulate_gradients(const SsdBackwardTask& task, const HeadRange& heads, Stream stream,
                                    const Progress& progress) = 0;
  // Computes the gradients of states of this step's runs (gradient_step), from the final to the initial one: 3 above. A
  // run whose final state is another run's initial state has a later step.
  virtual void carry_gradients(const SsdBackwardTask& task, const HeadRange& heads, int step, Stream stream) = 0;
  // Computes dx, ddt, dz and the terms of the parameters' gradients of these heads, and their sets' partial dB and dC.
  virtual void finish(const SsdBackwardTask& task, const HeadRange& heads, Stream stream, const Progress& progress) = 0;
  // Adds the sets' partial dB and dC, and writes both.
  virtual void sum_sets(const SsdBackwardTask& task, Stream stream, const Progress& progress) = 0;
};

// One line that says what a spec needs, e.g. "backward of SSD, bf16, 80 heads of 64, state 128, 1 group, D".
std::string describe(const SsdBackwardSpec& spec);

// What no backward kernel supports, one string per requirement (KernelRow::missing).
std::vector<std::string> missing_in_ssd_backward(const SsdBackwardSpec& spec);

// The sets of all heads, ascending.
std::vector<HeadRange> head_sets(const SsmSpec& spec, int heads_together);

// Throws kInternal if a task does not match the spec or the limits.
void check_ssd_backward_task(const SsdBackwardSpec& spec, const SsdBackwardLimits& limits, const SsdBackwardTask& task);

}  // namespace ringattn
