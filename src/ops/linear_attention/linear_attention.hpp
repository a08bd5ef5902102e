// SPDX-License-Identifier: Apache-2.0
// Public API of linear attention with decays over sequences that are distributed over ranks. For every sequence and
// head, with q_t, k_t [dim], v_t [dim_v] and state S [dim_v, dim]:
//
//   S_t = exp(g_t) · S_{t−1} + v_t ⊗ k_t        out_t = scale · S_t · q_t
//
// The decay applies before the token is added. There is one constant log-decay g per head (lightning attention,
// RetNet), or one per token and head, or one per token, head and key dim, which decays that column of S (GLA).
//
//   LinearAttention layer({.spec = {.heads = 64, .dim = 128}, .lengths = {4096}}, transport, {});   // collective
//   layer.enqueue({.q = q, .k = k, .v = v, .head_log_decay = decays}, {.out = out}, stream);
//   layer.wait();
//
// It is an Ssm (ops/ssm/ssm.hpp) with other names: layout, plan, ranks, bits and decode steps are the same, and this
// class only maps the names.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/transport.hpp"
#include "kernels/rope/rope.hpp"
#include "ops/ssm/ssm.hpp"

namespace ringattn {

struct LinearAttentionSpec {
  Dtype dtype = Dtype::kBf16;  // of q, k, v and out; log-decays and states are fp32
  int heads = 1;
  int dim = 128;                      // of q and k
  int dim_v = 0;                      // of v and out; 0: dim
  SsmDecay decay = SsmDecay::kHead;   // kHead, kToken or kDim
  std::optional<float> scale = {};    // absent: 1 / √dim
  std::optional<RopeSpec> rope = {};  // rotates q and k first, by their tokens' positions
};

struct LinearAttentionJob {
  LinearAttentionSpec spec;
  std::vector<std::int64_t> lengths;  // [sequences] tokens; 0: the state passes through
  bool initial_state = false;         // initial states are given; else they are zero
  bool final_states = false;          // final states are written
  bool update = false;                // a decode step (SsmJob::update)
};

// The SSM job of the same arithmetic. Throws kUsage.
SsmJob ssm_job(const LinearAttentionJob& job);

// As SsmInputs.
struct LinearAttentionInputs {
  TensorView q;                           // [own tokens, heads, dim]
  TensorView k;                           // [own tokens, heads, dim]
  TensorView v;                           // [own tokens, heads, dim_v]
  TensorView log_decay{};                 // fp32 [own tokens, heads, 1 or dim], with SsmDecay::kToken or kDim
  const float* head_log_decay = nullptr;  // [heads], with SsmDecay::kHead
  const float* initial_state = nullptr;   // [Ssm::beginning() sequences, heads, dim_v, dim]
  RopePositions positions = {};           // only with RoPE
  const std::int32_t* slots = nullptr;    // for an update
};

struct LinearAttentionOutputs {
  MutableTensorView out;          // [own tokens, heads, dim_v]
  float* final_states = nullptr;  // [Ssm::ending() sequences, heads, dim_v, dim]
};

class LinearAttention {
 public:
  // Collective. Throws as Ssm does.
  LinearAttention(const LinearAttentionJob& job, Transport& transport, SsmOptions options)
      : ssm_(ssm_job(job), transport, std::move(options)) {}

  // Layout, sequences, kernel and memory.
  const Ssm& ssm() const { return ssm_; }
  Backend& backend() { return ssm_.backend(); }

  SsmStats run(const LinearAttentionInputs& inputs, const LinearAttentionOutputs& outputs, Stream stream = {}) {
    return ssm_.run(ssm_inputs(inputs), {outputs.out, outputs.final_states}, stream);
  }
  void enqueue(const LinearAttentionInputs& inputs, const LinearAttentionOutputs& outputs, Stream stream = {}) {
    ssm_.enqueue(ssm_inputs(inputs), {outputs.out, outputs.final_states}, stream);
  }
  void wait() { ssm_.wait(); }

 private:
  static SsmInputs ssm_inputs(const LinearAttentionInputs& inputs);

  Ssm ssm_;
};

}  // namespace ringattn
