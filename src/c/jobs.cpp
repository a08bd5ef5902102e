// SPDX-License-Identifier: Apache-2.0
#include "c/jobs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/host.hpp"
#include "base/threads.hpp"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "c/world.hpp"
#include "kernels/attention/attention_spec.hpp"

namespace ringattn::c {

namespace {

// Sizes of the structs in their first interface version.
constexpr std::size_t kFirstSpec = 64, kFirstBatch = 40, kFirstSsmBatch = 32, kFirstOptions = 88, kFirstMlaSpec = 64,
                      kFirstLimits = 48;

ringattn_options read_all(const ringattn_options* given) {
  return given == nullptr ? ringattn_options{} : read_struct("ringattn_options", given, kFirstOptions);
}

// Throws kUsage if the caller set an option that the op doesn't have.
void refuse_option(bool given, const char* name, const char* op) {
  if (!given) return;
  fail(ErrorCode::kUsage, fmt::format("ringattn_options::{} is set", name), fmt::format("{} has no such option", op),
       "Leave it 0.");
}

// For all ops except decode.
void refuse_step_options(const ringattn_options& read, const char* op) {
  refuse_option(read.unchecked_tables != 0, "unchecked_tables", op);
}

void refuse_ring_options(const ringattn_options& read, const char* op) {
  refuse_option(read.stripe != 0, "stripe", op);
  refuse_option(read.block_tokens != 0, "block_tokens", op);
  refuse_option(read.checksum != 0, "checksum", op);
  refuse_option(read.key_run_count != 0 || read.key_runs != nullptr, "key_runs", op);
}

bool has_query_runs(const ringattn_options& read) { return read.query_run_count != 0 || read.query_runs != nullptr; }

// For ops that have no layout.
void refuse_rows_options(const ringattn_options& read, const char* op) {
  refuse_ring_options(read, op);
  refuse_option(has_query_runs(read), "query_runs", op);
  refuse_option(read.layout != 0, "layout", op);
}

// For ops that are not collective.
void refuse_shared_options(const ringattn_options& read, const char* op) {
  refuse_rows_options(read, op);
  refuse_step_options(read, op);
  refuse_option(read.timeout_seconds != 0.0, "timeout_seconds", op);
  refuse_option(read.memory_budget != 0, "memory_budget", op);
}

// Throws if stripe or runs are set but the layout ignores them. Otherwise rows would silently have another layout.
void refuse_unread_rows(const ringattn_options& read) {
  const auto refuse = [](bool given, const char* name, const char* layout) {
    if (!given) return;
    fail(ErrorCode::kUsage, fmt::format("ringattn_options::{} is set", name),
         fmt::format("it belongs to {}, which is not the layout", layout),
         fmt::format("Set ringattn_options::layout to {}, or leave {} 0.", layout, name));
  };
  refuse(read.layout != RINGATTN_STRIPED && read.stripe != 0, "stripe", "RINGATTN_STRIPED");
  if (read.layout == RINGATTN_RUNS) return;
  refuse(has_query_runs(read), "query_runs", "RINGATTN_RUNS");
  refuse(read.key_run_count != 0 || read.key_runs != nullptr, "key_runs", "RINGATTN_RUNS");
}

// For a mask without windows, equivalent to `all`. The given window must be the same, or 0.
Mask without_windows(const char* mask, const Mask& all, std::int64_t left, std::int64_t right) {
  const auto refuse = [&](const char* name, std::int64_t given, std::int64_t own) {
    if (given == 0 || given == own) return;
    fail(ErrorCode::kUsage, fmt::format("{} is {}", name, given), fmt::format("the mask is {}", mask),
         "Set the mask to RINGATTN_WINDOW, or leave the windows 0.");
  };
  refuse("window_left", left, all.left);
  refuse("window_right", right, all.right);
  return all;
}

std::shared_ptr<const KeyPositions> read_positions(const ringattn_batch& given, const Batch& batch, int kv_heads) {
  if (given.position_heads != 1 && given.position_heads != kv_heads) {
    fail(ErrorCode::kUsage, fmt::format("positions of keys for {} heads", given.position_heads),
         fmt::format("there are {} K/V heads", kv_heads),
         "Set ringattn_batch::position_heads to 1, for all heads together, or to their number.");
  }
  const std::span<const std::int32_t> rows(given.k_positions,
                                           static_cast<std::size_t>(batch.k_tokens() * given.position_heads));
  std::vector<KeptSequence> kept;
  std::size_t row = 0;
  for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
    const std::int64_t keys = batch.sequences[s].k_len;
    const auto own = rows.subspan(row, static_cast<std::size_t>(keys * given.position_heads));
    const std::int64_t last = own.empty() ? -1 : std::ranges::max(own);
    kept.push_back({keys, given.whole_lengths == nullptr ? last + 1 : given.whole_lengths[s]});
    row += own.size();
  }
  return std::make_shared<KeyPositions>("k_positions", static_cast<int>(given.position_heads), std::move(kept), rows);
}

// Options of SSM and conv1d.
template <class Wanted>
Wanted read_run_options(const ringattn_options& read, const char* op, const Transport& transport) {
  refuse_ring_options(read, op);
  refuse_step_options(read, op);
  refuse_unread_rows(read);
  refuse_option(read.layout != 0 && read.layout != RINGATTN_RUNS, "layout", op);
  Wanted options;
  options.kernel.backend = backend_of(transport);
  if (read.kernel != nullptr) options.kernel.kernel = read.kernel;
  options.threads = read.threads;
  if (read.timeout_seconds != 0.0) options.timeout_seconds = read.timeout_seconds;
  if (read.layout == RINGATTN_RUNS) {
    if (read.query_run_count > 0) need(read.query_runs, "ringattn_options::query_runs");
    options.runs = read_runs(read.query_runs, read.query_run_count, transport.size());
  }
  return options;
}

constexpr std::size_t kFirstSsmSpec = 64;  // in the interface version that it came with

// Without dt_limits, a bound must be 0 or equal to no limit.
void refuse_bound(const char* name, float bound, float none) {
  if (bound == 0.0F || bound == none) return;
  fail(ErrorCode::kUsage, fmt::format("{} is {}", name, bound),
       "ringattn_ssm_spec::dt_limits is 0, so dt has no bounds",
       fmt::format("Set dt_limits to 1, or leave {} 0.", name));
}

}  // namespace

std::vector<std::vector<TokenRun>> read_runs(const ringattn_run* runs, std::int64_t count, int world) {
  std::vector<std::vector<TokenRun>> of_ranks(static_cast<std::size_t>(world));
  for (std::int64_t i = 0; i < count; ++i) {
    const ringattn_run& run = runs[i];
    if (run.rank < 0 || run.rank >= world) {
      fail(ErrorCode::kUsage, fmt::format("run {} names rank {}", i, run.rank),
           fmt::format("the world has {}, counted from 0", world), "State runs only of the world's ranks.");
    }
    of_ranks[static_cast<std::size_t>(run.rank)].push_back({run.sequence, run.begin, run.end});
  }
  return of_ranks;
}

std::vector<std::int64_t> read_lengths(const char* name, std::int64_t sequences, const std::int64_t* lengths) {
  if (sequences < 0 || sequences > kMaxSequences) {
    fail(ErrorCode::kUsage, fmt::format("a batch of {} sequences is not possible", sequences),
         fmt::format("there may be up to {}", kMaxSequences), "Split the batch.");
  }
  if (sequences > 0) need(lengths, fmt::format("{}::lengths", name).c_str());
  std::vector<Sequence> read;
  for (std::int64_t s = 0; s < sequences; ++s) read.push_back({lengths[s], lengths[s], 0});
  check_batch(Batch(std::move(read)));
  return {lengths, lengths + sequences};
}

double read_reshard_timeout(const ringattn_options* given) {
  const ringattn_options read = read_all(given);
  const char* const op = "a reshard";
  refuse_rows_options(read, op);
  refuse_step_options(read, op);
  refuse_option(read.kernel != nullptr, "kernel", op);
  refuse_option(read.threads != 0, "threads", op);
  refuse_option(read.memory_budget != 0, "memory_budget", op);
  constexpr double kDefaultSeconds = 60.0;
  return read.timeout_seconds == 0.0 ? kDefaultSeconds : read.timeout_seconds;
}

Mask read_mask(std::int32_t mask, std::int64_t left, std::int64_t right) {
  if (mask == RINGATTN_CAUSAL) return without_windows("RINGATTN_CAUSAL", {-1, 0}, left, right);
  if (mask == RINGATTN_FULL) return without_windows("RINGATTN_FULL", {-1, -1}, left, right);
  if (mask == RINGATTN_WINDOW) return {left, right};
  fail(ErrorCode::kUsage, fmt::format("mask {} is not known", mask),
       "RINGATTN_CAUSAL is 0, RINGATTN_FULL 1, RINGATTN_WINDOW 2", "Choose one of these.");
}

AttentionSpec read_spec(const ringattn_spec* given, CacheFormat& format) {
  const ringattn_spec spec = read_struct("ringattn_spec", given, kFirstSpec);
  AttentionSpec attention;
  attention.dtype = read_dtype(spec.dtype);
  attention.heads = spec.heads;
  attention.kv_heads = spec.kv_heads == 0 ? spec.heads : spec.kv_heads;
  attention.head_dim = spec.head_dim;
  attention.head_dim_v = spec.head_dim_v == 0 ? spec.head_dim : spec.head_dim_v;
  attention.mask = read_mask(spec.mask, spec.window_left, spec.window_right);
  const bool default_scale = spec.softmax_scale == 0.0F && spec.scale_given == 0;
  attention.softmax_scale =
      default_scale && spec.head_dim > 0 ? default_softmax_scale(spec.head_dim) : spec.softmax_scale;
  attention.softcap = spec.softcap;
  attention.sinks = spec.sinks != 0;
  if (spec.k_format != nullptr) format.k = parse_row_format(spec.k_format);
  if (spec.v_format != nullptr) format.v = parse_row_format(spec.v_format);
  return attention;
}

Batch read_batch(const ringattn_batch* given, int kv_heads, std::shared_ptr<const KeyPositions>& positions) {
  const ringattn_batch batch = read_struct("ringattn_batch", given, kFirstBatch);
  if (batch.sequences < 0 || batch.sequences > kMaxSequences) {
    fail(ErrorCode::kUsage, fmt::format("a batch of {} sequences is not possible", batch.sequences),
         fmt::format("there may be up to {}", kMaxSequences), "Split the batch.");
  }
  if (batch.sequences > 0) need(batch.q_lengths, "ringattn_batch::q_lengths");
  const std::int64_t* k_lengths = batch.k_lengths == nullptr ? batch.q_lengths : batch.k_lengths;
  const std::int64_t* whole = k_lengths;
  if (batch.k_positions != nullptr) {
    if (batch.q_offsets == nullptr) need(batch.whole_lengths, "ringattn_batch::whole_lengths");
    whole = batch.whole_lengths;
  } else if (batch.whole_lengths != nullptr || batch.position_heads != 0) {
    fail(ErrorCode::kUsage, "ringattn_batch::k_positions is NULL", "whole_lengths and position_heads belong to it",
         "Pass the positions of the keys, or neither of these.");
  }
  std::vector<Sequence> sequences;
  for (std::int64_t s = 0; s < batch.sequences; ++s) {
    const std::int64_t q = batch.q_lengths[s];
    sequences.push_back({q, k_lengths[s], batch.q_offsets == nullptr ? whole[s] - q : batch.q_offsets[s]});
  }
  Batch read(std::move(sequences));
  if (batch.k_positions != nullptr) {
    check_batch(read);
    positions = read_positions(batch, read, kv_heads);
  }
  return read;
}

Job read_job(const ringattn_spec* spec, const ringattn_batch* batch) {
  Job job;
  job.spec = read_spec(spec, job.format);
  std::shared_ptr<const KeyPositions> positions;
  job.batch = read_batch(batch, job.spec.kv_heads, positions);
  check_mask(job.spec.mask);
  if (positions != nullptr) set_positions(job, std::move(positions));
  return job;
}

Batch read_batch(const ringattn_batch* given) {
  std::shared_ptr<const KeyPositions> positions;
  Batch batch = read_batch(given, 1, positions);
  if (positions == nullptr) return batch;
  fail(ErrorCode::kUsage, "ringattn_batch::k_positions is given", "the op has only keys without positions",
       "Leave it NULL, or use ringattn_attention.");
}

Dtype read_gradients(std::int32_t gradients, Dtype inputs) {
  if (gradients == RINGATTN_GRADIENTS_AS_INPUTS) return inputs;
  if (gradients == RINGATTN_GRADIENTS_FP32) return Dtype::kF32;
  fail(ErrorCode::kUsage, fmt::format("gradients {} are not known", gradients),
       "RINGATTN_GRADIENTS_AS_INPUTS is 0, RINGATTN_GRADIENTS_FP32 1", "Choose one of these.");
}

SsmSpec read_ssm_spec(const ringattn_ssm_spec* given) {
  const auto spec = read_struct("ringattn_ssm_spec", given, kFirstSsmSpec);
  SsmSpec ssm;
  ssm.dtype = read_dtype(spec.dtype);
  ssm.heads = spec.heads;
  ssm.head_dim = spec.head_dim;
  ssm.state_dim = spec.state_dim;
  if (spec.groups < 0 || spec.groups > spec.heads) {
    fail(ErrorCode::kUsage, fmt::format("there are {} groups of B and C", spec.groups),
         fmt::format("they divide the {} heads", spec.heads), "Check ringattn_ssm_spec::groups.");
  }
  ssm.groups = spec.groups == 0 ? 1 : static_cast<int>(spec.groups);
  ssm.state_decays = spec.state_decays != 0;
  ssm.skip = spec.skip != 0;
  ssm.gate = spec.gate != 0;
  ssm.dt_bias = spec.dt_bias != 0;
  ssm.dt_softplus = spec.dt_softplus != 0;
  if (spec.dt_limits != 0) {
    ssm.dt_min = spec.dt_min;
    ssm.dt_max = spec.dt_max;
  } else {
    refuse_bound("dt_min", spec.dt_min, ssm.dt_min);
    refuse_bound("dt_max", spec.dt_max, ssm.dt_max);
  }
  return ssm;
}

SsmBatch read_ssm_batch(const ringattn_ssm_batch* given) {
  const auto batch = read_struct("ringattn_ssm_batch", given, kFirstSsmBatch);
  if (batch.sequences < 0 || batch.sequences > kMaxSequences) {
    fail(ErrorCode::kUsage, fmt::format("a batch of {} sequences is not possible", batch.sequences),
         fmt::format("there may be up to {}", kMaxSequences), "Split the batch.");
  }
  SsmBatch read{{}, batch.initial_states != 0, batch.final_states != 0, batch.update != 0};
  if (batch.lengths == nullptr && read.update) {
    read.lengths.assign(static_cast<std::size_t>(batch.sequences), 1);
    return read;
  }
  if (batch.sequences > 0) need(batch.lengths, "ringattn_ssm_batch::lengths");
  read.lengths.assign(batch.lengths, batch.lengths + batch.sequences);
  return read;
}

Options read_options(const ringattn_options* given, const Batch& batch, const Transport& transport) {
  Options options;
  options.kernel.backend = backend_of(transport);
  const ringattn_options read = read_all(given);
  refuse_step_options(read, "attention");
  refuse_unread_rows(read);
  if (read.kernel != nullptr) options.kernel.kernel = read.kernel;
  options.threads = read.threads;
  options.block_tokens = read.block_tokens;
  options.checksum = read.checksum != 0;
  options.memory_budget = read.memory_budget;
  if (read.timeout_seconds != 0.0) options.timeout_seconds = read.timeout_seconds;
  options.layout.stripe = read.stripe;
  switch (read.layout) {
    case RINGATTN_STRIPED:
      options.layout.kind = LayoutKind::kStriped;
      break;
    case RINGATTN_ZIGZAG:
      options.layout.kind = LayoutKind::kZigzag;
      break;
    case RINGATTN_CONTIGUOUS:
      options.layout.kind = LayoutKind::kContiguous;
      break;
    case RINGATTN_RUNS: {
      if (read.query_run_count > 0) need(read.query_runs, "ringattn_options::query_runs");
      if (read.key_run_count != 0) need(read.key_runs, "ringattn_options::key_runs");
      if (read.key_runs == nullptr && batch.q_lengths() != batch.k_lengths()) {
        fail(ErrorCode::kUsage, "the runs of keys are missing", "sequences have other numbers of keys than of queries",
             "State ringattn_options::key_runs, too.");
      }
      options.query_runs = read_runs(read.query_runs, read.query_run_count, transport.size());
      options.key_runs = read.key_runs == nullptr ? options.query_runs
                                                  : read_runs(read.key_runs, read.key_run_count, transport.size());
      break;
    }
    default:
      fail(ErrorCode::kUsage, fmt::format("layout {} is not known", read.layout),
           "RINGATTN_STRIPED is 0, RINGATTN_ZIGZAG 1, RINGATTN_CONTIGUOUS 2, RINGATTN_RUNS 3", "Choose one of these.");
  }
  return options;
}

MlaSpec read_mla_spec(const ringattn_mla_spec* given, RowFormat& format) {
  const ringattn_mla_spec spec = read_struct("ringattn_mla_spec", given, kFirstMlaSpec);
  MlaSpec latent;
  latent.dtype = read_dtype(spec.dtype);
  latent.heads = spec.heads;
  latent.head_dim = spec.head_dim;
  latent.rope_dim = spec.rope_dim;
  latent.head_dim_v = spec.head_dim_v;
  latent.latent_dim = spec.latent_dim;
  latent.mask = read_mask(spec.mask, spec.window_left, spec.window_right);
  const bool default_scale = spec.softmax_scale == 0.0F && spec.scale_given == 0;
  latent.softmax_scale =
      default_scale && spec.head_dim + spec.rope_dim > 0 ? default_softmax_scale(latent) : spec.softmax_scale;
  latent.softcap = spec.softcap;
  latent.sinks = spec.sinks != 0;
  if (spec.format != nullptr) format = parse_row_format(spec.format);
  return latent;
}

DecodeLimits read_limits(const ringattn_decode_limits* given, std::int64_t& page_size, std::int64_t& pages) {
  const ringattn_decode_limits limits = read_struct("ringattn_decode_limits", given, kFirstLimits);
  page_size = limits.page_size;
  pages = limits.pages;
  if (limits.rows < 0 || limits.rows > kMaxDecodeRows) {
    fail(ErrorCode::kUsage, fmt::format("a step of {} rows a sequence is not possible", limits.rows),
         fmt::format("it has 1 to {}", kMaxDecodeRows), "Use ringattn_attention for more.");
  }
  return {limits.sequences, limits.rows == 0 ? 1 : static_cast<int>(limits.rows), limits.keys};
}

DecodeOptions read_decode_options(const ringattn_options* given, const Transport& transport) {
  const ringattn_options read = read_all(given);
  refuse_rows_options(read, "decoding");
  DecodeOptions options;
  options.kernel.backend = backend_of(transport);
  if (read.kernel != nullptr) options.kernel.kernel = read.kernel;
  options.threads = read.threads;
  options.memory_budget = read.memory_budget;
  options.check_tables = read.unchecked_tables == 0;
  if (read.timeout_seconds != 0.0) options.timeout_seconds = read.timeout_seconds;
  return options;
}

int read_threads(const ringattn_options* given) {
  const ringattn_options read = read_all(given);
  refuse_shared_options(read, "compression");
  refuse_option(read.kernel != nullptr, "kernel", "compression");
  return read_thread_count(read.threads);
}

namespace {

// The options of an op whose ranks work alone.
template <class OpOptions>
OpOptions read_lone_options(const ringattn_options* given, const Transport& transport, const char* op) {
  const ringattn_options read = read_all(given);
  refuse_shared_options(read, op);
  OpOptions options;
  options.kernel.backend = backend_of(transport);
  if (read.kernel != nullptr) options.kernel.kernel = read.kernel;
  options.threads = read_thread_count(read.threads);
  options.device = transport.device();
  return options;
}

}  // namespace

BatchedGemmOptions read_batched_gemm_options(const ringattn_options* given, const Transport& transport) {
  return read_lone_options<BatchedGemmOptions>(given, transport, "a batched GEMM");
}

RopeOptions read_rope_options(const ringattn_options* given, const Transport& transport) {
  return read_lone_options<RopeOptions>(given, transport, "RoPE");
}

LinearOptions read_linear_options(const ringattn_options* given, const Transport& transport) {
  const ringattn_options read = read_all(given);
  refuse_rows_options(read, "a linear layer");
  refuse_step_options(read, "a linear layer");
  refuse_option(read.memory_budget != 0, "memory_budget", "a linear layer");
  LinearOptions options;
  options.kernel.backend = backend_of(transport);
  if (read.kernel != nullptr) options.kernel.kernel = read.kernel;
  check_threads(read.threads);
  options.threads = read.threads;
  if (read.timeout_seconds != 0.0) options.timeout_seconds = read.timeout_seconds;
  return options;
}

int read_thread_count(std::int64_t threads) {
  check_threads(threads);
  return threads == 0 ? usable_processors().count : static_cast<int>(threads);
}

SsmOptions read_ssm_options(const ringattn_options* given, const Transport& transport, const char* op) {
  const ringattn_options read = read_all(given);
  auto options = read_run_options<SsmOptions>(read, op, transport);
  options.memory_budget = read.memory_budget;
  return options;
}

Options read_mla_backward_options(const ringattn_options* given, const Batch& batch, const Transport& transport) {
  Options options = read_options(given, batch, transport);
  refuse_option(options.memory_budget != 0, "memory_budget", "the backward pass of MLA");
  return options;
}

CausalConv1dOptions read_conv1d_options(const ringattn_options* given, const Transport& transport) {
  const ringattn_options read = read_all(given);
  refuse_option(read.memory_budget != 0, "memory_budget", "a convolution");
  return read_run_options<CausalConv1dOptions>(read, "a convolution", transport);
}

}  // namespace ringattn::c
