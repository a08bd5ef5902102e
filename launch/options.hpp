// SPDX-License-Identifier: Apache-2.0
// What a user asked for, as plain values. flags.cpp fills it; nothing in here knows where a value came from.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "base/dtype.hpp"
#include "io/safetensors_rows.hpp"
#include "ops/common/input_tensors.hpp"
#include "ops/common/job_input.hpp"

namespace ringattn {

enum class MaskKind { kFull, kCausal };
enum class When { kAuto, kOn, kOff };

struct JobOptions {
  // Input
  std::string input;  // empty: none
  InputNames tensors;
  std::optional<std::uint64_t> synthetic;  // seed
  std::optional<AxisOrder> order;
  std::optional<AxisOrder> page_order;  // kThd or kHtd

  // Shape of synthetic input
  Op op = Op::kAttention;
  std::vector<std::int64_t> seq;  // one for a job, any number for `plan` and `bench`
  std::optional<std::int64_t> q_len;
  std::int64_t page_size = 0;  // 0: a cache without pages
  std::int64_t prefix = 0;     // keys that all sequences share
  std::int64_t batch = 1;
  std::vector<std::int64_t> batches;  // of `bench`
  int heads = 8;
  int kv_heads = 2;
  int head_dim = 128;
  std::optional<int> head_dim_v;  // absent: head_dim
  int rope_dim = 64;              // of mla, as the next
  int latent_dim = 512;
  int state_dim = 128;  // SSM ops only, as the next
  int groups = 1;
  int conv_width = 0;                 // 0: no convolution in front
  std::string model_config;           // file that the shape comes from; empty: none
  std::optional<std::int64_t> layer;  // of the model, where layers differ
  std::string model_assumed;          // how a model's config without model_type is read; empty: it has one
  bool model_sinks = false;           // the model's layer has attention sinks; no flag says it
  Dtype dtype = Dtype::kBf16;
  std::string cache_format;  // of attention: a method of compression, or a format; empty: none

  // Numerics
  MaskKind mask = MaskKind::kCausal;
  std::optional<std::int64_t> query_offset;
  std::string block_mask;       // a pattern or a file; empty: none
  std::optional<MlaForm> form;  // of mla; absent: by the shape
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::optional<double> softmax_scale;  // absent: 1 / √head_dim
  double softcap = 0.0;                 // 0: off
  std::optional<bool> dt_softplus;      // SSM ops only; absent: where dt has a bias
  float dt_min = -std::numeric_limits<float>::infinity();
  float dt_max = std::numeric_limits<float>::infinity();

  // Compression
  std::string method;           // of `compress`
  std::optional<double> ratio;  // share of bytes, or of tokens, that is removed; absent: the method's usual one
  bool compression_report = false;

  // Parallelism
  std::string backend = "auto";
  std::string kernel = "auto";
  std::string transport = "auto";
  std::optional<int> ranks;
  std::optional<LayoutKind> layout;  // absent: striped, or contiguous for a sliding window
  std::int64_t stripe = 0;           // 0: from the tiles
  std::int64_t block = 0;            // 0: from the machine and the memory budget
  std::int64_t memory = 0;           // 0: no limit
  bool overlap = true;
  int threads = 0;                  // 0: all
  std::vector<std::int64_t> world;  // of `plan`
  std::string machine;              // file of a machine model; empty: the default model

  // Output
  std::string output;         // empty: nothing is written
  bool final_states = false;  // SSM ops only
  bool force = false;
  std::string json;  // "-": stdout; empty: no report
  std::string trace;
  When progress = When::kAuto;
  When color = When::kAuto;
  bool quiet = false;
  bool verbose = false;
  std::string config;
  bool print_config = false;
  bool dry_run = false;

  // Failure
  double timeout = 60.0;  // seconds
  bool checksum = false;

  // Verification
  std::string against;  // "oracle" (`bench`: "compute", "sgemm"), a file, or empty
  bool decode = false;  // the last rows once more, by decode
  std::int64_t rows = 64;
  std::string record;
  std::string golden;
  std::string peer;  // a file of another system's result

  // Measurement
  bool measure = false;
  std::int64_t total_tokens = 0;     // of short sequences in a batch; 0: --batch says
  std::vector<std::int64_t> blocks;  // of `bench`; empty: as `block`
  std::int64_t samples = 0;          // 0: enough for a figure
  bool compute_only = false;
  std::string jsonl;  // "-": stdout; empty: no lines
  std::string baseline;
  double fail_above = 0.05;  // of the baseline's time
};

}  // namespace ringattn
