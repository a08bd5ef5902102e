// SPDX-License-Identifier: Apache-2.0
// The user's settings of a job of any op, as plain values: its input, its shape and its numerics. Programs fill them
// in; an op reads the settings that its entry lists (op_entry.hpp).
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"
#include "io/safetensors_rows.hpp"
#include "io/tensor_roles.hpp"
#include "ops/attention_jobs/job_input.hpp"

namespace ringattn {

enum class MaskKind { kFull, kCausal };

struct Settings {
  // Input
  std::string input;  // empty: none
  InputNames tensors;
  std::optional<std::uint64_t> synthetic;  // seed
  std::optional<AxisOrder> order;
  std::optional<AxisOrder> page_order;  // kThd or kHtd

  // Shape of synthetic input
  std::vector<std::int64_t> seq;  // one for a single job, several for a list of jobs
  std::optional<std::int64_t> q_len;
  std::int64_t page_size = 0;  // 0: a cache without pages
  std::int64_t prefix = 0;     // length of a prefix that all sequences share
  std::int64_t batch = 1;
  int heads = 8;
  int kv_heads = 2;
  int head_dim = 128;
  std::optional<int> head_dim_v;  // absent: head_dim
  int rope_dim = 64;              // MLA only, as the next
  std::optional<int> latent_dim;  // absent: 512 or, for a file, determined by its tensors
  int state_dim = 128;            // SSM ops only, as the next
  int groups = 1;
  int conv_width = 0;  // 0: no convolution before the SSM
  Dtype dtype = Dtype::kBf16;
  std::string cache_format;  // attention only: a compression method or a format; empty: none
  bool sinks = false;        // a logit for each query head
  bool dlse = false;         // gradients only: LSE has a gradient, too

  // Numerics
  MaskKind mask = MaskKind::kCausal;
  std::optional<std::int64_t> query_offset;
  std::string block_mask;       // a pattern or a file; empty: none
  std::optional<MlaForm> form;  // MLA only; absent: chosen by the shape
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::optional<double> softmax_scale;  // absent: 1 / √head_dim
  double softcap = 0.0;                 // 0: off
  std::optional<bool> dt_softplus;      // SSM ops only; absent: true if dt has a bias
  float dt_min = -std::numeric_limits<float>::infinity();
  float dt_max = std::numeric_limits<float>::infinity();

  // Compression
  std::string method;
  std::optional<double> ratio;  // share of bytes or tokens to remove; absent: the method's default

  // Quantization of a model's weights
  std::string weight_format;  // "int8", "int4"; empty: not given
  bool search_mse = false;
  std::vector<std::string> ignore{"lm_head"};

  bool final_states = false;  // SSM ops only: also compute final states
  bool with_forward = false;  // gradients only: a measured run also computes out and lse
  std::string backend = "auto";
  std::string kernel = "auto";
  std::int64_t memory = 0;   // bytes of a rank; 0: no limit
  std::optional<int> ranks;  // ranks in this process

  // Settings that only one op has, by name, as texts that its entry has checked.
  std::map<std::string, std::string, std::less<>> own;
};

inline constexpr int kDefaultLatentDim = 512;

// The mask of these settings. Throws kUsage if they contradict each other.
Mask mask_of(const Settings& settings);
Numerics numerics_of(const Settings& settings);
FileInput file_input(const Settings& settings);
// `tokens`: tokens of each sequence.
SyntheticInput synthetic_input(const Settings& settings, Op op, std::int64_t tokens);

}  // namespace ringattn
