// SPDX-License-Identifier: Apache-2.0
// The tensors of a scan (kernels/scan.hpp) in a safetensors file, by mamba_ssm's names. Mamba-2 (SSD):
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
// Mamba-1 (selective scan), whose heads are channels of one number each:
//
//   u, delta, z     [tokens, channels]
//   A               [channels, state_dim]
//   B, C            [tokens, state_dim] or [tokens, groups, state_dim]
//   D, delta_bias   [channels]
//   initial_states  [sequences, channels, state_dim]
//
// Rows have one dtype. A, D, biases and states may have another; they are computed with in fp32.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention/files/input_tensors.hpp"

namespace ringattn {

struct ScanTensors {
  bool selective = false;
  Dtype dtype = Dtype::kBf16;
  int heads = 0;  // or channels
  int head_dim = 1;
  int groups = 1;
  int state_dim = 0;
  bool batched = false;
  TensorSource x, dt, b, c;
  std::optional<TensorSource> z, initial_states;
  RowGrid x_grid;  // of z and y too
  RowGrid dt_grid;
  RowGrid b_grid;  // of C too
  std::vector<std::int64_t> lengths;
  std::vector<float> a;        // [heads], or [channels, state_dim]
  std::vector<float> d;        // [heads], or empty
  std::vector<float> dt_bias;  // [heads], or empty
  std::vector<TensorSource> used;
};

// Whether the input is a scan: its tensors are named, or x and dt, or u and delta are there while nothing of another op
// was named; or one of these is, and no q. Throws kFile where q is there besides and nothing says which is meant.
bool holds_scan(const SafetensorsFile& file, const InputNames& names);

// `order`: kThd, kBthd, or by the number of axes. Throws kFile, naming the tensor, its shape and what it disagrees
// with, and kUsage for another order.
ScanTensors find_scan(const SafetensorsFile& file, const InputNames& names, std::optional<AxisOrder> order);

// The initial states of these sequences, [sequences, heads, head_dim, state_dim]. Throws kFile.
void read_states(const ScanTensors& tensors, std::span<const std::int32_t> sequences, std::span<float> states);

}  // namespace ringattn
