// SPDX-License-Identifier: Apache-2.0
// The tensors of an SSM layer (kernels/ssm/ssm.hpp) in a safetensors file, by mamba_ssm's names. Mamba-2 (SSD):
//
//   x               [tokens, heads, head_dim]; [batch, tokens, …] gives all rows below that axis too
//   dt              [tokens, heads]
//   A               [heads]
//   B, C            [tokens, groups, state_dim]
//   D, dt_bias      [heads], optional
//   z               as x, optional
//   initial_states  [sequences, heads, head_dim, state_dim], optional
//   cu_seqlens      I32 or I64 [sequences + 1], optional; also where x has a batch of 1
//
// Mamba-1 (selective scan), whose heads are channels with one element each:
//
//   u, delta, z     [tokens, channels]
//   A               [channels, state_dim]
//   B, C            [tokens, state_dim] or [tokens, groups, state_dim]
//   D, delta_bias   [channels]
//   initial_states  [sequences, channels, state_dim]
//
// The causal convolution before it, over x, B and C concatenated along channels, or over u only, followed by silu. x, B
// and C, or u, are then the convolution's inputs:
//
//   conv1d_weight   [channels, width] or [channels, 1, width]; channels as conv1d_channels() counts them
//   conv1d_bias     [channels], optional
//   conv_state      [sequences, channels, width − 1], or of `width`, whose last ones are used; optional: earlier tokens
//
// known_names.hpp has other names for them.
//
// A convolution without an SSM layer has x, conv1d_weight and, optionally, the two tensors after it, but no dt. x is
// then [tokens, channels].
//
// An update has one token per sequence instead of whole sequences: `state`, with the shape of initial_states, replaces
// these. The tokens of x or u are then the sequences, or x has a batch of sequences of one token.
//
// Linear attention (SsmTensors::decay), by the names of its formula:
//
//   q, k            [tokens, heads, dim]; [batch, tokens, …] as above
//   v               [tokens, heads, dim_v]
//   log_decay       [heads], [tokens, heads] or [tokens, heads, dim]
//   initial_state   [sequences, heads, dim_v, dim], optional; `state` in its place makes it an update
//   q_offset        I32 or I64 [sequences], optional, for RoPE only: positions of the sequences' first tokens
//   cu_seqlens      as above
//
// Rows and conv_state have one dtype. Log-decays, A, D, biases and states may have others; they are converted to fp32.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/ssm/ssm.hpp"
#include "ops/common/input_tensors.hpp"
#include "ops/common/tensor_file.hpp"

namespace ringattn {

struct SsmTensors {
  bool selective = false;
  bool conv1d_only = false;  // only a convolution; `selective`: over the channels of u
  bool update = false;
  SsmDecay decay = SsmDecay::kDt;  // others: linear attention, with v as x, k as b, q as c, log_decay as a or dt
  Dtype dtype = Dtype::kBf16;
  int heads = 0;  // or channels
  int head_dim = 1;
  int groups = 1;
  int state_dim = 0;
  bool batched = false;
  TensorSource x, dt, b, c;  // dt: none with kHead
  std::optional<TensorSource> z, initial_states, conv_state;
  RowGrid x_grid;  // of z and y too
  RowGrid dt_grid;
  RowGrid b_grid;  // of C too
  std::vector<std::int64_t> lengths;
  std::vector<float> a;        // [heads], or [channels, state_dim]
  std::vector<float> d;        // [heads], or empty
  std::vector<float> dt_bias;  // [heads], or empty
  int conv_width = 0;          // 0: no convolution
  int conv_channels = 0;
  std::vector<float> conv_weight;     // [channels, width]
  std::vector<float> conv_bias;       // [channels], or empty
  std::vector<std::int64_t> offsets;  // q_offset, or empty
  std::vector<TensorSource> used;
};

// Whether the file has log-decays, or a tensor is named as them: a file of attention with a state, not of op attention.
bool holds_log_decays(const TensorFile& opened);
// Whether the file is one of linear attention: q, k, v and log_decay, but no beta, which the gated delta rule has.
bool holds_linear_attention(const TensorFile& opened);
// Throws as find_ssm().
SsmTensors find_linear_attention(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order);

// Whether the input is an SSM layer: its tensors are named; or the file has x and dt, or u and delta, while no tensor
// of another op is named; or it has one of these, and no q. Throws kFile if it also has q and the names do not select
// one of them.
bool holds_ssm(const SafetensorsFile& file, const InputNames& names);
// Whether the file has a convolution without an SSM layer.
bool holds_conv1d(const SafetensorsFile& file, const InputNames& names);

// `order`: kThd or kBthd; absent: by the number of axes. Throws kFile, naming the tensor, its shape and what
// contradicts it, and kUsage for another order.
SsmTensors find_ssm(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order);

// The initial states of these sequences, [sequences, heads, head_dim, state_dim]. Throws kFile.
void read_states(const SsmTensors& tensors, std::span<const std::int32_t> sequences, std::span<float> states);

// Fills `rows`, fp32, with log-decays of the tokens of `runs`. Throws kFile.
void read_log_decays(const SsmTensors& tensors, std::span<const PackedRun> runs, const MutableTensorView& rows);

// Reads the tokens before one sequence from conv_state: [width − 1, channels] of the rows' dtype, oldest first.
void read_halo(const SsmTensors& tensors, std::int32_t sequence, std::span<std::byte> halo);

// Transposes the last tokens of [channels, kept], the number that `halo` holds: [tokens, channels].
void turn_halo(const std::byte* from, std::int64_t channels, std::int64_t kept, Dtype dtype, std::span<std::byte> halo);

}  // namespace ringattn
