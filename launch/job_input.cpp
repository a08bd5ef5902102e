// SPDX-License-Identifier: Apache-2.0
#include "launch/job_input.hpp"

#include <fmt/format.h>

#include <cmath>

#include "attention/synthetic.hpp"
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
         "it renames the tensors of a file");
  }
  if (!file) return;
  for (const std::string_view flag : kShapeFlags) {
    if (config.given(flag)) {
      fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(flag), config.origin("input")),
           "the file's header gives the shape", "Leave it out, or use --synthetic.");
    }
  }
}

// The tensor that `wanted` names, or nothing where the name is the default one and the file hasn't got it.
std::optional<TensorSource> optional_tensor(const SafetensorsFile& file, const std::string& wanted,
                                            std::string_view default_name) {
  if (wanted == default_name && !file.contains(wanted)) return std::nullopt;
  return file.tensor(wanted);
}

std::string file_shape(const TensorSource& tensor) { return shape_text(tensor.info->shape); }

[[noreturn]] void refuse_shape(std::string_view problem, std::string_view why, std::string_view name,
                               const TensorSource& tensor) {
  fail(ErrorCode::kFile, problem, why, fmt::format("Check the file's {} shape {}.", name, file_shape(tensor)));
}

void check_cumulative_end(std::string_view name, const std::vector<std::int64_t>& cumulative, std::string_view tensor,
                          std::int64_t tokens) {
  if (cumulative.empty() || cumulative.back() == tokens) return;
  fail(ErrorCode::kFile, fmt::format("{} ends at {}", name, cumulative.back()),
       fmt::format("{} has {} tokens", tensor, tokens), "Its last entry is the number of tokens.");
}

}  // namespace

JobInput::JobInput(const Config& config, bool require_source) : threads_(config.options.threads) {
  check_source(config, require_source);
  if (config.given("input")) {
    open_file(config);
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

JobInput JobInput::synthetic(Job job, std::uint64_t seed, int threads) {
  JobInput input;
  input.job_ = std::move(job);
  input.seed_ = seed;
  input.threads_ = threads;
  const FoldSpec& spec = input.job_.spec;
  input.out_grid_ = {AxisOrder::kThd, 1, input.job_.q_tokens(), spec.heads, spec.head_dim_v};
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
         "a tensor would have more than 2^60 elements");
  }
  job_.sequences = uniform_sequences(options.batch, seq, seq);
  const AxisOrder order = options.order.value_or(options.batch == 1 ? AxisOrder::kThd : AxisOrder::kBthd);
  const bool batched = order == AxisOrder::kBthd || order == AxisOrder::kBhtd;
  out_grid_ = {order, batched ? options.batch : 1, batched ? seq : seq * options.batch, spec.heads, spec.head_dim_v};
}

void JobInput::open_file(const Config& config) {
  const JobOptions& options = config.options;
  const TensorNames& names = options.tensors;
  const TensorNames defaults;
  path_ = options.input;
  file_ = std::make_shared<const SafetensorsFile>(options.input);
  const std::string* const wanted[] = {&names.q, &names.k, &names.v};
  Dtype dtypes[3];
  for (std::size_t i = 0; i < 3; ++i) {
    tensors_[i] = file_->tensor(*wanted[i]);
    grids_[i] = row_grid(tensors_[i], options.order);
    dtypes[i] = row_dtype(tensors_[i]);
    if (dtypes[i] != dtypes[0]) {
      fail(ErrorCode::kFile,
           fmt::format("{} is {}, {} is {}", tensors_[i].text(), dtype_name(dtypes[i]), tensors_[0].text(),
                       dtype_name(dtypes[0])),
           "q, k and v have one type", "Convert one of them.");
    }
  }
  const auto& [q, k, v] = grids_;
  if (k.order != q.order || v.order != q.order) {
    fail(ErrorCode::kFile,
         fmt::format("q, k and v have shapes {}, {} and {}", file_shape(tensors_[0]), file_shape(tensors_[1]),
                     file_shape(tensors_[2])),
         "all have a batch axis, or none has");
  }
  if (v.length != k.length || v.batch != k.batch) {
    refuse_shape(fmt::format("V has {} tokens, K has {}", v.tokens(), k.tokens()), "each key has one value", "v",
                 tensors_[2]);
  }
  if (v.heads != k.heads) {
    refuse_shape(fmt::format("V has {} heads, K has {}", v.heads, k.heads), "each K head has its V head", "v",
                 tensors_[2]);
  }
  if (k.batch != q.batch) {
    refuse_shape(fmt::format("K has a batch of {}, Q of {}", k.batch, q.batch), "both hold the same sequences", "k",
                 tensors_[1]);
  }
  if (k.dim != q.dim) {
    refuse_shape(fmt::format("K has head_dim {}, Q has {}", k.dim, q.dim), "scores are products of both", "k",
                 tensors_[1]);
  }
  constexpr std::int64_t kMostPerAxis = 1 << 16;
  for (std::size_t i = 0; i < 3; ++i) {
    if (grids_[i].heads < 1 || grids_[i].dim < 1 || grids_[i].heads > kMostPerAxis || grids_[i].dim > kMostPerAxis) {
      constexpr std::string_view kLetters[] = {"q", "k", "v"};
      refuse_shape(fmt::format("{} has {} heads of {} dimensions", tensors_[i].text(), grids_[i].heads, grids_[i].dim),
                   "each from 1 to 65536", kLetters[i], tensors_[i]);
    }
  }
  if (q.heads % k.heads != 0) {
    refuse_shape(fmt::format("K has {} heads, Q has {}", k.heads, q.heads),
                 fmt::format("{} is not a multiple of {}", q.heads, k.heads), "k", tensors_[1]);
  }
  FoldSpec& spec = job_.spec;
  spec.dtype = dtypes[0];
  spec.heads = static_cast<int>(q.heads);
  spec.kv_heads = static_cast<int>(k.heads);
  spec.head_dim = static_cast<int>(q.dim);
  spec.head_dim_v = static_cast<int>(v.dim);
  out_grid_ = q;
  out_grid_.dim = v.dim;

  const auto integers = [&](const std::string& name, std::string_view default_name) {
    const auto tensor = optional_tensor(*file_, name, default_name);
    return tensor ? read_integers(*tensor) : std::vector<std::int64_t>();
  };
  const std::vector<std::int64_t> cu_q = integers(names.cu_seqlens_q, defaults.cu_seqlens_q);
  std::vector<std::int64_t> cu_k = integers(names.cu_seqlens_k, defaults.cu_seqlens_k);
  const std::vector<std::int64_t> offsets = integers(names.q_offset, defaults.q_offset);
  const bool packed = optional_tensor(*file_, names.cu_seqlens_q, defaults.cu_seqlens_q).has_value();
  const bool packed_keys = optional_tensor(*file_, names.cu_seqlens_k, defaults.cu_seqlens_k).has_value();
  if ((packed || packed_keys) && q.has_batch()) {
    fail(ErrorCode::kFile, fmt::format("{} has cu_seqlens and a batch axis", path_),
         fmt::format("order {} makes each batch entry a sequence", axis_order_name(q.order)),
         "Pack the sequences on one token axis, or leave cu_seqlens out.");
  }
  if (packed_keys && !packed) {
    fail(ErrorCode::kFile, fmt::format("{} has cu_seqlens_k and no cu_seqlens_q", path_),
         "every sequence has queries and keys", "Add cu_seqlens_q.");
  }
  if (packed) {
    if (!packed_keys) {
      if (k.tokens() != q.tokens()) {
        fail(ErrorCode::kFile, fmt::format("{} has cu_seqlens_q and no cu_seqlens_k", path_),
             fmt::format("Q has {} tokens, K has {}", q.tokens(), k.tokens()), "Add cu_seqlens_k.");
      }
      cu_k = cu_q;
    }
    job_.sequences = packed_sequences(cu_q, cu_k, offsets);
    check_cumulative_end("cu_seqlens_q", cu_q, "q", q.tokens());
    check_cumulative_end("cu_seqlens_k", cu_k, "k", k.tokens());
  } else {
    job_.sequences = uniform_sequences(q.batch, q.length, k.length);
    if (!offsets.empty() && offsets.size() != job_.sequences.size()) {
      fail(ErrorCode::kFile, fmt::format("q_offset has {} entries", offsets.size()),
           fmt::format("the job has {} sequences", job_.sequences.size()), "It holds one position per sequence.");
    }
    for (std::size_t i = 0; i < offsets.size(); ++i) job_.sequences[i].q_offset = offsets[i];
  }
  if (const auto sinks = optional_tensor(*file_, names.sinks, defaults.sinks)) {
    sinks_ = read_floats(*sinks);
    if (static_cast<std::int64_t>(sinks_.size()) != q.heads) {
      fail(ErrorCode::kFile, fmt::format("sinks has {} entries", sinks_.size()), fmt::format("Q has {} heads", q.heads),
           "It holds one logit per query head.");
    }
    spec.sinks = true;
  }
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
    for (Sequence& sequence : job_.sequences) sequence.q_offset = *options.query_offset;
  }
  check_job(job_);
}

void JobInput::read(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows) const {
  if (seed_) {
    fill_synthetic(*seed_, tensor, runs, rows, threads_);
    return;
  }
  const auto index = static_cast<std::size_t>(tensor);
  read_rows(tensors_[index], grids_[index], runs, rows);
}

std::string JobInput::source() const {
  return seed_ ? fmt::format("synthetic input, seed {}", *seed_) : path_.empty() ? "no input" : path_;
}

}  // namespace ringattn
