// SPDX-License-Identifier: Apache-2.0
// Arithmetic of the CPU SSM kernels, one function table per SIMD target like tile_ops.hpp. Each element of a result is
// one chain of operations in a stated order, so its bits do not depend on the vector length.
#pragma once

#include <cstddef>

namespace ringattn::cpu {

inline constexpr int kChannelBlock = 8;  // channels of a selective scan computed in parallel lanes

// Inputs of a block of channels for the tokens of a chunk.
struct ChannelTokens {
  int tokens = 0;
  int states = 0;
  const float* rates = nullptr;  // [states, kChannelBlock]: A · log2 e
  const float* dt = nullptr;     // [tokens, kChannelBlock]
  const float* x = nullptr;      // [tokens, kChannelBlock]
  const float* b = nullptr;      // [tokens, states]
  const float* c = nullptr;      // [tokens, states], or null if y is not needed
};

// Arrays need no alignment. `width` is a multiple of `lanes`.
struct SsmOps {
  int lanes;                // floats per vector
  double flops_per_second;  // default speed estimate of one thread

  // values ← 2^values; `count` is a multiple of kChannelBlock. 0 below −126, NaN for NaN.
  void (*exp2)(float* values, int count);
  // Rounds to bf16, to nearest even; `count` is a multiple of kChannelBlock.
  void (*round_to_bf16)(const float* values, int count, std::byte* target);
  // values ← log(1 + exp(values)), within 3 ulp; `count` is a multiple of kChannelBlock.
  void (*softplus)(float* values, int count);
  // values ← 1 / (1 + exp(−values)); `count` is a multiple of kChannelBlock.
  void (*logistic)(float* values, int count);
  // out[r, i] = Σ_k a[r, k] · m[k, i]: from zero, k ascending to depth. a: [rows, a_stride], m: [depth, width],
  // out: [rows, width].
  void (*product)(const float* a, std::ptrdiff_t a_stride, int rows, int depth, const float* m, int width, float* out);
  // out[r, i] ← out[r, i] · scale[r], then + a[r, k] · m[k, i] for k = 0, 1, …, r. a: [rows, a_stride].
  void (*add_lower)(const float* a, std::ptrdiff_t a_stride, int rows, const float* scale, const float* m, int width,
                    float* out);
  // weights[i, j] = scores[i, j] · 2^(sums[i] − sums[j]) · dt[j], evaluated from left to right, for j ≤ i. Others are
  // unspecified. scores, weights: [kChunkTokens, kChunkTokens], of which `rows` rows; sums, dt: [kChunkTokens].
  void (*intra_chunk_scores)(int rows, const float* scores, const float* sums, const float* dt, float* weights);
  // target[r, j] = source[r, j] · scale[j]; [rows, kChunkTokens].
  void (*scale_columns)(int rows, const float* source, const float* scale, float* target);
  // result = fma(decay, before, local) for `count` elements, a multiple of kChannelBlock. `result` may alias an input.
  void (*join)(float decay, const float* before, const float* local, int count, float* result);
  // result[n, i] = fma(2^(rates[n, i] · times[i]), before[n, i], local[n, i]); [states, kChannelBlock].
  void (*join_channels)(int states, const float* rates, const float* times, const float* before, const float* local,
                        float* result);
  // Token by token: state ← fma(2^(dt · rate), state, (dt · x) · b), and y = Σ_n c[n] · state[n], n ascending.
  // state: [states, kChannelBlock], y: [tokens, kChannelBlock] or null.
  void (*scan_channels)(const ChannelTokens& in, float* state, float* y);
  // y ← fma(d, x, y) if d is not null; d is [kChannelBlock], used cyclically. Then y ← y · z / (1 + exp(−z)) if z is
  // not null. `count` is a multiple of kChannelBlock.
  void (*finish)(int count, const float* d, const float* x, const float* z, float* y);
  // One token of a state update: state[n] ← fma(decays[n], state[n], input · b[n]); returns Σ c[n] · state[n], summed
  // in kChannelBlock columns. `states` is a multiple of kChannelBlock.
  float (*update)(int states, const float* decays, float input, const float* b, const float* c, float* state);
  // y[i] = bias[i] + Σ_k weights[k, i] · x[k, i], fused, k ascending; then silu(y) if `silu`. bias may be null. x,
  // weights: [width, channels]; `channels` is a multiple of kChannelBlock.
  void (*convolve)(int channels, int width, const float* x, const float* weights, const float* bias, bool silu,
                   float* y);
  // g[i] = dy[i] · silu'(v), v the sum of convolve(). Arguments as there; g may be dy.
  void (*convolve_gradient)(int channels, int width, const float* x, const float* weights, const float* bias,
                            const float* dy, float* g);
  // Σ_n a[n] · b[n] · 2^(to[n] − from[n]), summed in kChannelBlock columns. `count` is a multiple of kChannelBlock.
  float (*decayed_dot)(int count, const float* a, const float* b, const float* to, const float* from);
  // sums[i] ← fma(a[i], b[i], sums[i]); `count` is a multiple of kChannelBlock.
  void (*add_product)(int count, const float* a, const float* b, float* sums);

  // For the gated delta rule (kernels/gated_delta/gated_delta.hpp).

  // out[r, i] ← out[r, i] + a[r, k] · m[k, i] for k = 0, 1, …, depth − 1. Arguments as in product().
  void (*product_onto)(const float* a, std::ptrdiff_t a_stride, int rows, int depth, const float* m, int width,
                       float* out);
  // Substitution: u[r, i] ← beta[r] · (x[r, i] − u[r, i] − Σ_{k < r} a[r, k] · u[k, i]), from left to right, k
  // ascending, r ascending. a: [rows, kChunkTokens], x, u: [rows, width].
  void (*solve_lower)(int rows, const float* a, const float* beta, const float* x, int width, float* u);
  // kk[i, j] = Σ_d k[i, d] · k[j, d] · 2^(sums[i, d] − sums[j, d]), and qk with q[i, d], for j ≤ i; summed in
  // kChannelBlock columns. q, k, sums: [rows, dims], dims a multiple of kChannelBlock; kk, qk: [rows, kChunkTokens].
  void (*decayed_scores)(int rows, int dims, const float* q, const float* k, const float* sums, float* kk, float* qk);
};

// The table of the best SIMD target that this machine has (and that set_simd_target() leaves).
const SsmOps& best_ssm_ops();

}  // namespace ringattn::cpu
