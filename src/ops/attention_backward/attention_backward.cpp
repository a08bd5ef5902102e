// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/attention_backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/warm_up.hpp"
#include "attention/tokens/cost.hpp"
#include "base/aligned.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "ops/attention_backward/backward_ring_step.hpp"
#include "ops/attention_backward/backward_work.hpp"
#include "ops/attention_backward/sink_gradient.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

// Offsets of the parts of a workspace, in bytes.
struct BackwardWorkspace {
  WorkspaceLayout ring;  // its state is that of dQ, then that of dK and dV
  std::size_t dkv_state = 0;
  std::size_t row_stats = 0;
  std::size_t sink_terms = 0;
  std::size_t bytes = 0;
};

// A view of a RowView's values that copies can read: [rows, heads, 1].
TensorView as_tensor(const RowView& rows, std::int64_t tokens, std::int64_t heads) {
  return {rows.data, Dtype::kF32, tokens, heads, 1, rows.token_stride, rows.head_stride};
}

[[noreturn]] void refuse(std::string_view what, std::string_view why, std::string_view suggestion) {
  fail(ErrorCode::kUnsupported, fmt::format("no gradients for {}", what), why, suggestion);
}

}  // namespace

std::string describe(const BackwardJob& job) { return fmt::format("backward of {}", describe(job.forward)); }

void check_backward_job(const BackwardJob& job) {
  check_job(job.forward);
  if (job.gradients != job.forward.spec.dtype && job.gradients != Dtype::kF32) {
    fail(ErrorCode::kUsage, fmt::format("gradients in {}", dtype_name(job.gradients)),
         fmt::format("the inputs are {}", dtype_name(job.forward.spec.dtype)), "Use the dtype of the inputs, or fp32.");
  }
  if (job.forward.page_size > 0) refuse("keys in pages", "pages are caches for decoding", "Give k and v in rows.");
  if (!job.forward.format.is_plain()) {
    refuse("compressed keys", "quantization has no gradient", "Give k and v uncompressed.");
  }
  if (job.forward.block_mask != nullptr) {
    refuse("block-sparse masks", "the backward pass has dense masks and windows only", "Leave the block mask out.");
  }
  if (job.forward.positions != nullptr) {
    refuse("keys with positions", "they come from caches from which tokens were evicted", "Give all keys.");
  }
}

Options options_over(Options options, const JobLayout& layout, std::string backend) {
  options.kernel = {std::move(backend), "auto"};
  options.machine = {};
  const auto runs_of = [](const Layout& side) {
    std::vector<std::vector<TokenRun>> runs;
    for (int rank = 0; rank < side.world(); ++rank) runs.emplace_back(side.runs(rank).begin(), side.runs(rank).end());
    return runs;
  };
  options.query_runs = runs_of(layout.queries);
  options.key_runs = runs_of(layout.keys);
  return options;
}

Options backward_options(Options forward, const JobLayout& layout) {
  std::string backend = forward.kernel.backend;
  Options options = options_over(std::move(forward), layout, std::move(backend));
  options.state_out = false;
  options.shorter_lengths = false;
  return options;
}

Options backward_options(const Attention& attention) {
  return backward_options(attention.options(), attention.layout());
}

struct AttentionBackward::Impl {
  Impl(BackwardJob the_job, Transport& the_transport, Options the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.timeout_seconds)) {}

  const AttentionSpec& spec() const { return job.forward.spec; }
  const Plan& plan() const { return summary->plan; }
  std::int64_t q_rows() const { return summary->layout().queries.tokens(transport.rank()); }
  std::int64_t k_rows() const { return summary->layout().keys.tokens(transport.rank()); }
  bool several() const { return transport.size() > 1; }
  static bool are_dense(const BackwardInputs& inputs) {
    return inputs.q.is_dense() && inputs.k.is_dense() && inputs.v.is_dense() && inputs.dout.is_dense();
  }

  void choose();
  void allocate();
  std::size_t state_bytes() const { return plan().keeps_state ? ring_job.state_bytes({k_rows(), q_rows()}) : 0; }
  BackwardWorkspace workspace(bool dense) const;
  void check(const BackwardInputs& inputs, const BackwardOutputs& outputs, std::span<std::byte> space) const;
  void check_outputs(const BackwardInputs& inputs, const BackwardOutputs& outputs) const;
  void enqueue(const BackwardInputs& inputs, const BackwardOutputs& outputs, std::span<std::byte> space, Stream stream,
               Timeline* timeline, const BlockDone& block_done, RunMode mode);
  BackwardKeySource keys_at(const StreamRows& rows, std::int64_t count) const;
  BackwardQuerySource queries_at(const StreamRows& rows, std::int64_t count) const;

  BackwardJob job;
  Options options;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  KernelChoice<AttentionBackwardSpec> choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<AttentionBackwardKernel> kernel;
  RingJob ring_job;
  std::optional<PlanSummary> summary;
  std::vector<BackwardSequence> sequences;
  std::vector<QueryRun> keys;  // the rank's keys, at their positions
  std::optional<PlannedRuns> runs;
  std::optional<RingRuns> ring;
  std::optional<SinkGradient> sinks;
};

void AttentionBackward::Impl::choose() {
  check_backward_job(job);
  if (options.state_out || options.shorter_lengths) {
    refuse(options.state_out ? "an attention state" : "shorter lengths", "a backward pass has neither",
           "Leave Options::state_out and Options::shorter_lengths off.");
  }
  choice = choose_kernel(backward_spec(job), compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  kernel = choice.row->make_kernel(backward_spec(job), *backend);
  check_compatible(*choice.row, *backend, transport);
  if (options.checksum) check_checksum(*backend);
  ring_job = backward_ring_job(job, *kernel, options);
  check_size(ring_job, options, transport.size());
}

void AttentionBackward::Impl::allocate() {
  summary.emplace(summarize_plan(ring_job, options, transport.route(), transport.size(), transport.rank()));
  sequences = backward_sequences(job.forward.batch);
  keys = plan().to_keys->queries;
  const std::span<const TokenRun> tokens = summary->layout().keys.runs(transport.rank());
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i].position = tokens[i].begin;
  kernel->reserve(backward_limits(plan(), options));
  ring.emplace(
      collective, transport, *backend,
      RingRuns::Settings{ring_job.work.streams, options.overlap, options.checksum, options.machine.flops_per_second});
  ring->allocate(plan().all_buffer_rows());
  runs.emplace(plan(), summary->time_estimate.seconds);
  ring->make_mover(*runs);
  if (spec().sinks) {
    sinks.emplace(job.forward.batch, summary->layout().queries, spec().heads, *kernel, *backend, transport,
                  collective.timeouts());
  }
}

BackwardWorkspace AttentionBackward::Impl::workspace(bool dense) const {
  const bool staged = several() && !dense;
  BackwardWorkspace all;
  all.dkv_state = aligned(plan().keeps_state ? kernel->dq_state_bytes(q_rows()) : 0);
  const std::size_t state = state_bytes();
  all.ring = ring->workspace(state, staged ? RowCounts{k_rows(), q_rows()} : RowCounts{});
  all.row_stats = all.ring.bytes;
  const auto row_bytes = static_cast<std::size_t>(q_rows() * lse_token_bytes(spec()));
  all.sink_terms = all.row_stats + aligned(kRowStats * row_bytes);
  all.bytes = all.sink_terms + (spec().sinks ? aligned(row_bytes) : 0);
  return all;
}

void AttentionBackward::Impl::check_outputs(const BackwardInputs& inputs, const BackwardOutputs& outputs) const {
  const AttentionSpec& s = spec();
  const auto check = [&](std::string_view name, const MutableTensorView& view, const ShardShape& shape) {
    check_shard("AttentionBackward", name, view, shape);
    check_apart(name, view, "q", inputs.q);
    check_apart(name, view, "k", inputs.k);
    check_apart(name, view, "v", inputs.v);
    check_apart(name, view, "out", inputs.out);
    check_apart(name, view, "dout", inputs.dout);
    check_apart(name, view, "lse", as_tensor(inputs.lse, q_rows(), s.heads));
    if (inputs.dlse.data != nullptr) check_apart(name, view, "dlse", as_tensor(inputs.dlse, q_rows(), s.heads));
  };
  check("dq", outputs.dq, {job.gradients, q_rows(), s.heads, s.head_dim});
  check("dk", outputs.dk, {job.gradients, k_rows(), s.kv_heads, s.head_dim});
  check("dv", outputs.dv, {job.gradients, k_rows(), s.kv_heads, s.head_dim_v});
  check_apart("dk", outputs.dk, "dq", outputs.dq);
  check_apart("dv", outputs.dv, "dq", outputs.dq);
  check_apart("dv", outputs.dv, "dk", outputs.dk);
  if ((outputs.dsinks != nullptr) != s.sinks) {
    fail(ErrorCode::kUsage, s.sinks ? "dsinks is missing" : "dsinks is given",
         s.sinks ? "the job has sinks, and their gradient is written" : "the job has no sinks",
         "Give BackwardOutputs::dsinks exactly where AttentionSpec::sinks is on.");
  }
}

void AttentionBackward::Impl::check(const BackwardInputs& inputs, const BackwardOutputs& outputs,
                                    std::span<std::byte> space) const {
  const AttentionSpec& s = spec();
  check_shard("AttentionBackward", "q", inputs.q, {s.dtype, q_rows(), s.heads, s.head_dim});
  check_shard("AttentionBackward", "k", inputs.k, {s.dtype, k_rows(), s.kv_heads, s.head_dim});
  check_shard("AttentionBackward", "v", inputs.v, {s.dtype, k_rows(), s.kv_heads, s.head_dim_v});
  check_shard("AttentionBackward", "out", inputs.out, {s.dtype, q_rows(), s.heads, s.head_dim_v});
  check_shard("AttentionBackward", "dout", inputs.dout, {s.dtype, q_rows(), s.heads, s.head_dim_v});
  if (inputs.lse.data == nullptr && q_rows() > 0) {
    fail(ErrorCode::kUsage, "lse is missing", "gradients need LSE of the forward",
         "Let the forward write Outputs::lse.");
  }
  check_sinks("AttentionSpec", inputs.sinks, s.sinks);
  check_outputs(inputs, outputs);
  const std::size_t needed = workspace(are_dense(inputs)).bytes;
  if (space.size() < needed) {
    fail(ErrorCode::kUsage, fmt::format("the workspace has {} bytes", space.size()),
         fmt::format("{} are needed", needed), "Ask AttentionBackward::workspace_bytes().");
  }
}

BackwardKeySource AttentionBackward::Impl::keys_at(const StreamRows& rows, std::int64_t count) const {
  const AttentionSpec& s = spec();
  const void* const k = rows[kKeyStream];
  const void* const v = rows[kValueStream];
  return {dense_view(k, s.dtype, count, s.kv_heads, s.head_dim),
          dense_view(v, s.dtype, count, s.kv_heads, s.head_dim_v)};
}

BackwardQuerySource AttentionBackward::Impl::queries_at(const StreamRows& rows, std::int64_t count) const {
  const AttentionSpec& s = spec();
  const void* const q = rows[kQueryStream];
  const void* const dout = rows[kDoutStream];
  return {dense_view(q, s.dtype, count, s.heads, s.head_dim), dense_view(dout, s.dtype, count, s.heads, s.head_dim_v),
          reinterpret_cast<const float*>(rows[kRowStatsStream])};
}

void AttentionBackward::Impl::enqueue(const BackwardInputs& inputs, const BackwardOutputs& outputs,
                                      std::span<std::byte> space, Stream stream, Timeline* times,
                                      const BlockDone& block_done, RunMode mode) {
  if (backend->is_capturing(stream)) {
    refuse_capture("the tables of a backward pass are made for one run", "Enqueue it outside of the capture.");
  }
  const BackwardWorkspace layout = workspace(are_dense(inputs));
  auto* const stats = reinterpret_cast<float*>(space.data() + layout.row_stats);
  BackwardRingStep::Memory memory;
  memory.stats = {inputs.out, inputs.dout, inputs.lse, inputs.dlse, stats, nullptr, nullptr};
  if (spec().sinks) {
    memory.stats.sinks = inputs.sinks;
    memory.stats.sink_terms = reinterpret_cast<float*>(space.data() + layout.sink_terms);
    memory.sinks = &*sinks;
    memory.dsinks = outputs.dsinks;
    memory.exchanges = mode == RunMode::kWhole;
    memory.seconds = summary->time_estimate.seconds;
  }
  memory.q = inputs.q;
  memory.dout = inputs.dout;
  memory.keys = {inputs.k, inputs.v};
  memory.queries = {inputs.q, inputs.dout, stats};
  memory.dq_state = space.data() + layout.ring.state;
  memory.dkv_state = space.data() + layout.ring.state + layout.dkv_state;
  memory.dq = outputs.dq;
  memory.dk = outputs.dk;
  memory.dv = outputs.dv;
  std::array<StreamRows, 2> buffers = ring->block_buffers(space.data(), layout.ring);
  for (std::size_t parity = 0; parity < 2; ++parity) {
    memory.key_buffers[parity] = keys_at(buffers[parity], ring->buffer_rows().keys);
    memory.query_buffers[parity] = queries_at(buffers[parity], ring->buffer_rows().queries);
  }
  const auto shard = [&] {
    const TensorView row_stats =
        dense_view(static_cast<const void*>(stats), Dtype::kF32, q_rows(), spec().heads, kRowStats);
    const TensorView views[] = {inputs.k, inputs.v, inputs.q, inputs.dout, row_stats};
    return ring->dense_shard(views, rows_at(space.data(), layout.ring.staged), stream);
  };
  BackwardRingStep step(plan(), sequences, keys, *kernel, memory);
  ring->enqueue({*runs, step, std::move(buffers), shard, mode}, stream, times, block_done);
}

AttentionBackward::AttentionBackward(BackwardJob job, Transport& transport, Options options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
  const MachineModel given = impl.options.machine;
  impl.options.machine = common_machine(impl.collective, given,
                                        backward_machine(given, *impl.choice.row, impl.job, *impl.backend,
                                                         tokens_of_rank(impl.job.forward.batch, transport.size())));
  impl.config_hash = handshake(impl.collective, rank_config(impl.job, impl.options, impl.choice, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  impl.ring->connect(*impl.runs);
  if (impl.sinks) impl.sinks->connect();
}

AttentionBackward::~AttentionBackward() = default;
AttentionBackward::AttentionBackward(AttentionBackward&&) noexcept = default;

const BackwardJob& AttentionBackward::job() const { return impl_->job; }
const Options& AttentionBackward::options() const { return impl_->options; }
const KernelChoice<AttentionBackwardSpec>& AttentionBackward::kernel() const { return impl_->choice; }
Backend& AttentionBackward::backend() { return *impl_->backend; }
const JobLayout& AttentionBackward::layout() const { return impl_->summary->layout(); }
const Plan& AttentionBackward::plan() const { return impl_->plan(); }
const TimeEstimate& AttentionBackward::time_estimate() const { return impl_->summary->time_estimate; }
std::int64_t AttentionBackward::q_rows() const { return impl_->q_rows(); }
std::int64_t AttentionBackward::k_rows() const { return impl_->k_rows(); }
std::size_t AttentionBackward::workspace_bytes(bool dense) const { return impl_->workspace(dense).bytes; }
std::size_t AttentionBackward::state_bytes() const { return impl_->state_bytes(); }

RunStats AttentionBackward::run(const BackwardInputs& inputs, const BackwardOutputs& outputs,
                                std::span<std::byte> workspace, Stream stream, const BlockDone& block_done,
                                RunMode mode) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, describe(impl.job), [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(inputs, outputs, workspace);
  });
  return impl.ring->run(
      *impl.runs,
      [&](Timeline* timeline) { impl.enqueue(inputs, outputs, workspace, stream, timeline, block_done, mode); },
      block_done);
}

void AttentionBackward::enqueue(const BackwardInputs& inputs, const BackwardOutputs& outputs,
                                std::span<std::byte> workspace, Stream stream) {
  impl_->check(inputs, outputs, workspace);
  impl_->enqueue(inputs, outputs, workspace, stream, nullptr, {}, RunMode::kWhole);
}

void AttentionBackward::wait() { impl_->ring->wait(); }

}  // namespace ringattn
