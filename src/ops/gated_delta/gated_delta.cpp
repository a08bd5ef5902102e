// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_delta/gated_delta.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/warm_up.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "base/error.hpp"
#include "base/size.hpp"
#include "comm/collective.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/owned_states.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/rank_config.hpp"
#include "ops/ssm/state_exchange.hpp"
#include "ops/ssm/state_relay.hpp"

namespace ringattn {

namespace {

StateSize state_of(const GatedDeltaSpec& spec) {
  return {spec.value_heads, std::int64_t{spec.key_dim} * spec.value_dim};
}

// The runs of a rank, without addresses of states. A run that begins a sequence with an initial state, or ends a
// sequence whose final state is written, needs M of more segments.
std::vector<GatedDeltaRun> runs_of_rank(const Layout& layout, const StateHops& hops, int rank) {
  std::vector<GatedDeltaRun> all;
  for (const SsmRun& run : ssm_runs(layout, hops, rank)) {
    all.push_back({run.begin, run.tokens, run.row, nullptr, nullptr, run.step});
  }
  return all;
}

// Called before the plan is summarized, because the tables of a job that is far too large would not fit into memory.
void check_row_budget(const GatedDeltaJob& job, int world, std::size_t budget) {
  const double min_bytes = static_cast<double>(job.tokens()) * static_cast<double>(gated_delta_token_bytes(job.spec)) /
                           static_cast<double>(world);
  if (budget == 0 || min_bytes <= static_cast<double>(budget)) return;
  fail(ErrorCode::kMemory, fmt::format("a memory budget of {} a rank is too small", counted(budget, "byte")),
       fmt::format("one rank needs at least {:.0f} bytes for its rows", min_bytes), "Use more ranks or fewer tokens.");
}

}  // namespace

SsmPlanSummary summarize_gated_delta_plan(const GatedDeltaJob& job,
                                          const std::optional<std::vector<std::vector<TokenRun>>>& runs, int world,
                                          const GatedDeltaKernel& kernel, const MachineModel& machine,
                                          const RateOfTokens& rate, double carry_scale) {
  Layout layout = ssm_layout(job.lengths, runs, world, kGatedDeltaUnit);
  StateHops hops = state_hops(layout);
  SsmPlanSummary summary{std::move(layout), std::move(hops), {}, 0.0, {{0, job.spec.value_heads}}};
  const std::size_t state_tensors = (job.initial_states ? 1 : 0) + (job.final_states ? 1 : 0);
  std::vector<std::size_t> empty(static_cast<std::size_t>(world));  // [ranks] number of empty sequences it owns
  const StateOwners owners = state_owners(summary.layout);
  for (std::size_t s = 0; s < job.lengths.size(); ++s) {
    if (job.lengths[s] == 0) ++empty[static_cast<std::size_t>(owners.final[s])];
  }
  std::int64_t max_tokens = 0;
  double carry = 0.0;
  for (int rank = 0; rank < world; ++rank) {
    const std::vector<GatedDeltaRun> own = runs_of_rank(summary.layout, summary.hops, rank);
    const std::int64_t tokens = summary.layout.tokens(rank);
    SsmMemory bytes;
    bytes.states = (own.size() + empty[static_cast<std::size_t>(rank)]) * state_tensors *
                   static_cast<std::size_t>(state_bytes(job.spec));
    bytes.rows = static_cast<std::size_t>(tokens * gated_delta_token_bytes(job.spec));
    if (!job.update) bytes.scratch = kernel.scratch_bytes(limits_of(own));
    bytes.exchange = StateExchange::bytes(state_of(job.spec), summary.hops, rank);
    summary.memory.push_back(bytes);
    max_tokens = std::max(max_tokens, tokens);
    if (!own.empty()) {
      const GatedDeltaLimits limits = limits_of(own);
      carry = std::max(carry, kernel.carry_seconds(limits.runs, (limits.segments + limits.runs - 1) / limits.runs));
    }
  }
  summary.seconds = gated_delta_token_flops(job.spec) * static_cast<double>(max_tokens) /
                    (rate ? rate(max_tokens) : machine.flops_per_second);
  if (!summary.hops.hops.empty() && passing_seconds(job.spec.value_heads, state_bytes(job.spec), summary, machine) >
                                        kernel.cost_of_two_ranges(summary.seconds)) {
    summary.ranges = head_ranges(job.spec.value_heads, kernel.heads_together(), 2);
  }
  // A state passes through all segments of its sequence in order, on whichever ranks they are.
  if (!job.lengths.empty()) {
    const std::int64_t longest = *std::ranges::max_element(job.lengths);
    carry = std::max(carry, kernel.carry_seconds(1, (longest + kSegmentTokens - 1) / kSegmentTokens));
  }
  if (!job.update) summary.seconds += carry * carry_scale;
  return summary;
}

struct GatedDelta::Impl {
  Impl(GatedDeltaJob the_job, Transport& the_transport, SsmOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.timeout_seconds)) {}

  std::int64_t own_tokens() const { return layout->tokens(transport.rank()); }

  void choose();
  void allocate();
  void check(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs) const;
  void update(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs, Stream stream);
  GatedDeltaTask task_of(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs);
  // `clock`: records phases; may be null.
  void enqueue(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs, Stream stream, SsmTimeline* clock);

  GatedDeltaJob job;
  SsmOptions options;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  GatedDeltaChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<GatedDeltaKernel> kernel;
  std::optional<Layout> layout;
  StateHops hops;
  std::vector<HeadRange> ranges;
  SsmMemory memory;
  double seconds = 0.0;  // estimated duration of a run
  OwnedStates owned;
  std::vector<GatedDeltaRun> runs;  // of this rank; runs that receive or send states have their buffers
  std::optional<StateExchange> exchange;
  std::optional<StateRelay> relay;
  std::optional<SsmTimeline> own_clock;
  std::optional<EnqueuedRuns> enqueued;
};

void GatedDelta::Impl::choose() {
  check_gated_delta_job(job);
  if (options.head_ranges < 0 || options.head_ranges > 2) {
    fail(ErrorCode::kUsage, fmt::format("{} ranges of heads", options.head_ranges), "a gated delta rule has one or two",
         "Leave it at 0 to let the op choose.");
  }
  choice = choose_kernel(job.spec, compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  check_compatible(*choice.row, *backend, transport);
  kernel = choice.row->make_kernel(job.spec, *backend);
  check_row_budget(job, transport.size(), options.memory_budget);
  SsmPlanSummary summary =
      summarize_gated_delta_plan(job, options.runs, transport.size(), *kernel, default_machine(*choice.row, *backend));
  memory = summary.max_memory();
  seconds = summary.seconds;
  layout = std::move(summary.layout);
  hops = std::move(summary.hops);
  ranges = std::move(summary.ranges);
  if (options.head_ranges != 0) {
    ranges = head_ranges(job.spec.value_heads, kernel->heads_together(), options.head_ranges);
  }
  owned = OwnedStates(*layout, transport.rank());
  check_budget(memory, options.memory_budget);
}

void GatedDelta::Impl::allocate() {
  enqueued.emplace(*backend, transport, collective.timeouts());
  runs = runs_of_rank(*layout, hops, transport.rank());
  if (!job.update) kernel->reserve(limits_of(runs));
  exchange.emplace(state_of(job.spec), hops, ranges, transport, *backend);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i].initial = exchange->received(static_cast<std::int64_t>(i));
    runs[i].final = exchange->sent(static_cast<std::int64_t>(i));
  }
  relay.emplace(ranges, *exchange, transport, *backend, collective.timeouts());
  own_clock.emplace(*backend, ranges.size(), StateRelay::max_waits(ranges.size(), exchange->steps()), options.timeline);
}

void GatedDelta::Impl::check(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs) const {
  const GatedDeltaSpec& spec = job.spec;
  const std::int64_t rows = own_tokens();
  check_shard("GatedDelta", "q", inputs.q, {spec.dtype, rows, spec.key_heads, spec.key_dim});
  check_shard("GatedDelta", "k", inputs.k, {spec.dtype, rows, spec.key_heads, spec.key_dim});
  check_shard("GatedDelta", "v", inputs.v, {spec.dtype, rows, spec.value_heads, spec.value_dim});
  check_shard("GatedDelta", "log_decay", inputs.log_decay, {Dtype::kF32, rows, spec.value_heads, spec.decay_dim()});
  check_shard("GatedDelta", "beta", inputs.beta, {Dtype::kF32, rows, spec.value_heads, 1});
  check_shard("GatedDelta", "out", outputs.out, {spec.dtype, rows, spec.value_heads, spec.value_dim});
  for (const auto& [name, view] : {std::pair{"q", inputs.q},
                                   {"k", inputs.k},
                                   {"v", inputs.v},
                                   {"log_decay", inputs.log_decay},
                                   {"beta", inputs.beta}}) {
    check_apart("out", outputs.out, name, view);
  }
  check_given("GatedDelta", "initial_states", inputs.initial_states, job.initial_states && !owned.beginning.empty());
  check_given("GatedDelta", "final_states", outputs.final_states, job.final_states && !owned.ending.empty());
  if (inputs.slots == nullptr || (job.update && inputs.initial_states == outputs.final_states)) return;
  fail(ErrorCode::kUsage, "slots are given",
       job.update ? "initial_states and final_states differ" : "the job is not an update",
       "Slots are those of an update in place.");
}

void GatedDelta::Impl::update(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs, Stream stream) {
  if (own_tokens() == 0) return;
  const std::int64_t bytes = own_tokens() * state_bytes(job.spec);
  if (inputs.initial_states != outputs.final_states) {
    backend->copy_rows(outputs.final_states, bytes, inputs.initial_states, bytes, bytes, 1, stream);
  }
  kernel->update(
      {inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, outputs.final_states, outputs.out, inputs.slots},
      stream);
}

GatedDeltaTask GatedDelta::Impl::task_of(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs) {
  owned.bind(*layout, transport.rank(), inputs.initial_states, outputs.final_states, state_floats(job.spec), runs);
  return {inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, runs, outputs.out};
}

void GatedDelta::Impl::enqueue(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs, Stream stream,
                               SsmTimeline* clock) {
  check_capture(*backend, stream, "this gated delta rule", transport, "sends states to other ranks");
  enqueued->enqueue(stream, seconds, [&] {
    if (clock != nullptr) clock->begin(stream);
    if (job.update) {
      update(inputs, outputs, stream);
    } else {
      pass_states_through(owned.empty, inputs.initial_states, outputs.final_states, state_bytes(job.spec), *backend,
                          stream);
      relay->run(*kernel, task_of(inputs, outputs), stream, seconds, clock);
    }
    if (clock != nullptr) clock->end(stream);
  });
}

GatedDelta::GatedDelta(GatedDeltaJob job, Transport& transport, SsmOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
  impl.config_hash = handshake(impl.collective, rank_config(impl.job, impl.options, impl.choice, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  impl.exchange->connect(impl.collective, *impl.backend);
}

GatedDelta::~GatedDelta() = default;
GatedDelta::GatedDelta(GatedDelta&&) noexcept = default;

const GatedDeltaJob& GatedDelta::job() const { return impl_->job; }
const SsmOptions& GatedDelta::options() const { return impl_->options; }
const GatedDeltaChoice& GatedDelta::kernel() const { return impl_->choice; }
Backend& GatedDelta::backend() { return *impl_->backend; }
const Layout& GatedDelta::layout() const { return *impl_->layout; }
const SsmMemory& GatedDelta::memory() const { return impl_->memory; }
double GatedDelta::estimated_seconds() const { return impl_->seconds; }
std::int64_t GatedDelta::bytes_received() const {
  return states_received(impl_->hops, impl_->transport.rank()) * state_bytes(impl_->job.spec);
}
const std::vector<std::int32_t>& GatedDelta::beginning() const { return impl_->owned.beginning; }
const std::vector<std::int32_t>& GatedDelta::ending() const { return impl_->owned.ending; }

SsmStats GatedDelta::run(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs, Stream stream) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, describe(impl.job), [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(inputs, outputs);
  });
  impl.enqueue(inputs, outputs, stream, &*impl.own_clock);
  impl.enqueued->wait_all();
  const SsmStats stats = impl.own_clock->stats();
  impl.collective.barrier(impl.seconds);
  return stats;
}

void GatedDelta::enqueue(const GatedDeltaInputs& inputs, const GatedDeltaOutputs& outputs, Stream stream) {
  impl_->check(inputs, outputs);
  impl_->enqueue(inputs, outputs, stream, nullptr);
}

void GatedDelta::wait() {
  if (impl_->enqueued->any()) impl_->enqueued->wait_all();
}

}  // namespace ringattn
