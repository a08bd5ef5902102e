// SPDX-License-Identifier: Apache-2.0
#include "launch/job_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kShapeFlags[] = {"seq", "batch", "heads", "kv-heads", "head-dim", "head-dim-v", "dtype"};

// How many elements the largest tensor may have: its bytes must stay countable.
constexpr double kMostElements = 0x1p60;

void check_source(const Config& config, bool require_source) {
  const bool file = config.given("input");
  const bool synthetic = config.given("synthetic");
  if (file && synthetic) {
    fail(ErrorCode::kUsage, fmt::format("{} and {} are both given", config.origin("input"), config.origin("synthetic")),
         "a job has one input", "Leave one of them out.");
  }
  if (require_source && !file && !synthetic) {
    fail(ErrorCode::kUsage, "the job has no input", "neither --input nor --synthetic is given",
         "Try --synthetic 7, or --input FILE.");
  }
  if (!file && config.given("tensors")) {
    fail(ErrorCode::kUsage, fmt::format("{} needs --input", config.origin("tensors")),
         "it renames the tensors of a file", "Add --input FILE, or leave it out.");
  }
  if (!file) return;
  for (const std::string_view flag : kShapeFlags) {
    if (config.given(flag)) {
      fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(flag), config.origin("input")),
           "the file's header gives the shape", "Leave it out, or use --synthetic.");
    }
  }
}

}  // namespace

JobInput::JobInput(const Config& config, bool require_source) {
  check_source(config, require_source);
  if (config.given("input")) {
    open_file(config.options);
  } else {
    make_synthetic(config.options, config.options.seq.front());
  }
  take_numerics(config);
}

JobInput::JobInput(const Config& config, std::int64_t seq) {
  check_source(config, false);
  make_synthetic(config.options, seq);
  take_numerics(config);
}

JobInput JobInput::synthetic(Job job, std::uint64_t seed) {
  JobInput input;
  input.job_ = std::move(job);
  input.seed_ = seed;
  const FoldSpec& spec = input.job_.spec;
  input.out_grid_ = {AxisOrder::kThd, 1, input.job_.batch.q_tokens(), spec.heads, spec.head_dim_v};
  return input;
}

void JobInput::make_synthetic(const JobOptions& options, std::int64_t seq) {
  seed_ = options.synthetic;
  FoldSpec& spec = job_.spec;
  spec.dtype = options.dtype;
  spec.heads = options.heads;
  spec.kv_heads = options.kv_heads;
  spec.head_dim = options.head_dim;
  spec.head_dim_v = options.head_dim_v.value_or(options.head_dim);
  if (spec.heads % spec.kv_heads != 0) {
    fail(ErrorCode::kUsage, fmt::format("K has {} heads, Q has {}", spec.kv_heads, spec.heads),
         fmt::format("{} is not a multiple of {}", spec.heads, spec.kv_heads), "Check --heads and --kv-heads.");
  }
  const double elements = static_cast<double>(seq) * static_cast<double>(options.batch) * spec.heads *
                          std::max(spec.head_dim, spec.head_dim_v);
  if (elements > kMostElements) {
    fail(ErrorCode::kUsage, fmt::format("--seq {} with --batch {} and {} heads", seq, options.batch, spec.heads),
         "a tensor would have more than 2^60 elements", "Use fewer tokens, sequences or heads.");
  }
  job_.batch = uniform_batch(options.batch, seq, seq);
  const AxisOrder order = options.order.value_or(options.batch == 1 ? AxisOrder::kThd : AxisOrder::kBthd);
  const bool batched = order == AxisOrder::kBthd || order == AxisOrder::kBhtd;
  out_grid_ = {order, batched ? options.batch : 1, batched ? seq : seq * options.batch, spec.heads, spec.head_dim_v};
}

void JobInput::open_file(const JobOptions& options) {
  path_ = options.input;
  file_ = std::make_shared<const SafetensorsFile>(options.input);
  InputTensors found = find_input(*file_, options.tensors, options.order);
  constexpr std::int64_t kMost = 1 << 16;
  const std::int64_t largest =
      std::max({found.q_grid.heads, found.q_grid.dim, found.k_grid.heads, found.v_grid.heads, found.v_grid.dim});
  if (largest > kMost) {
    fail(ErrorCode::kFile, fmt::format("{} has {} heads or dims", found.q.text(), largest),
         fmt::format("at most {} are possible", kMost), "--order says which axis is which.");
  }
  tensors_[0] = found.q;
  tensors_[1] = found.k;
  tensors_[2] = found.v;
  grids_[0] = found.q_grid;
  grids_[1] = found.k_grid;
  grids_[2] = found.v_grid;
  out_grid_ = found.out_grid();
  job_.batch.sequences = std::move(found.sequences);
  sinks_ = std::move(found.sinks);
  FoldSpec& spec = job_.spec;
  spec.dtype = found.dtype;
  spec.heads = static_cast<int>(found.q_grid.heads);
  spec.kv_heads = static_cast<int>(found.k_grid.heads);
  spec.head_dim = static_cast<int>(found.q_grid.dim);
  spec.head_dim_v = static_cast<int>(found.v_grid.dim);
  spec.sinks = !sinks_.empty();
}

void JobInput::take_numerics(const Config& config) {
  const JobOptions& options = config.options;
  FoldSpec& spec = job_.spec;
  spec.mask = {options.window_left, options.window_right};
  if (options.mask == MaskKind::kCausal) {
    if (options.window_right > 0) {
      fail(ErrorCode::kUsage, fmt::format("{} contradicts the causal mask", config.origin("window")),
           fmt::format("R is {}, and causal sets R = 0", options.window_right), "Use --mask full, or R = 0.");
    }
    spec.mask.right = 0;
  }
  spec.softmax_scale = options.softmax_scale ? static_cast<float>(*options.softmax_scale)
                                             : static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.head_dim)));
  spec.softcap = static_cast<float>(options.softcap);
  if (options.query_offset) {
    for (Sequence& sequence : job_.batch.sequences) sequence.q_offset = *options.query_offset;
  }
  check_job(job_);
}

void JobInput::read(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows,
                    int threads) const {
  if (seed_) {
    fill_synthetic(*seed_, tensor, runs, rows, threads);
    return;
  }
  const auto index = static_cast<std::size_t>(tensor);
  read_rows(tensors_[index], grids_[index], runs, rows);
}

std::string JobInput::source() const {
  return seed_ ? fmt::format("synthetic input, seed {}", *seed_) : path_.empty() ? "no input" : path_;
}

}  // namespace ringattn
