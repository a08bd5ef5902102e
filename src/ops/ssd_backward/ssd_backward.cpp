// SPDX-License-Identifier: Apache-2.0
#include "ops/ssd_backward/ssd_backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/warm_up.hpp"
#include "attention/tokens/cost.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "base/error.hpp"
#include "base/failpoint.hpp"
#include "comm/collective.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/owned_states.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/rank_config.hpp"
#include "ops/ssm/state_exchange.hpp"
#include "ops/ssm/state_relay.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(std::string_view what, std::string_view why, std::string_view suggestion) {
  fail(ErrorCode::kUnsupported, fmt::format("no gradients for {}", what), why, suggestion);
}

std::int64_t segments_of(const TokenRun& run) { return (run.tokens() + kSegmentTokens - 1) / kSegmentTokens; }

}  // namespace

SsdBackwardSpec backward_spec(const SsdBackwardJob& job) { return {job.forward.spec, job.gradients}; }

std::string describe(const SsdBackwardJob& job) {
  std::string text = fmt::format("backward of {}", describe(job.forward));
  if (job.final_gradients) text += ", gradients of final states";
  return text;
}

void check_ssd_backward_job(const SsdBackwardJob& job) {
  if (job.forward.conv1d_only || job.forward.convolution) {
    refuse("an SSM with a convolution", "the backward pass of SSD takes x, B and C after it",
           "Compute the convolution on its own, and its gradients from dx, dB and dC.");
  }
  if (job.forward.spec.state_decays) {
    refuse("selective scans (Mamba-1)", "only SSD (Mamba-2) has a backward pass", "Use SSD: one A for each head.");
  }
  if (job.forward.update) refuse("decode steps", "training has whole sequences", "Give x and dt of all tokens.");
  check_ssm_job(job.forward);
  if (job.gradients != job.forward.spec.dtype && job.gradients != Dtype::kF32) {
    fail(ErrorCode::kUsage, fmt::format("gradients in {}", dtype_name(job.gradients)),
         fmt::format("the inputs are {}", dtype_name(job.forward.spec.dtype)), "Use the dtype of the inputs, or fp32.");
  }
}

double ssd_backward_token_flops(const SsmSpec& spec) { return 2.5 * ssm_token_flops(spec); }

std::int64_t ssd_backward_token_bytes(const SsdBackwardJob& job) {
  const SsmSpec& spec = job.forward.spec;
  const std::int64_t gradients = std::int64_t{spec.heads} * spec.head_dim * (spec.gate ? 2 : 1) + spec.heads +
                                 std::int64_t{2} * spec.groups * spec.state_dim;
  return ssm_token_bytes(spec) + gradients * static_cast<std::int64_t>(size_of(job.gradients));
}

const SsmMemory& SsdBackwardPlan::max_memory() const {
  return *std::ranges::max_element(memory, {}, [](const SsmMemory& bytes) { return bytes.total(); });
}

std::int64_t SsdBackwardPlan::states_received(int rank) const {
  return ringattn::states_received(states, rank) + ringattn::states_received(gradients, rank);
}

std::int64_t SsdBackwardPlan::states_moved() const {
  std::int64_t moved = 0;
  for (int rank = 0; rank < layout.world(); ++rank) moved += states_received(rank);
  return moved;
}

SsdBackwardPlan plan_ssd_backward(const SsdBackwardJob& job,
                                  const std::optional<std::vector<std::vector<TokenRun>>>& runs, int world,
                                  const SsdBackwardKernel& kernel, const MachineModel& machine) {
  const SsmSpec& spec = job.forward.spec;
  Layout layout = ssm_layout(job.forward.lengths, runs, world);
  StateHops states = state_hops(layout);
  StateHops gradients = gradient_hops(layout);
  SsdBackwardPlan plan{std::move(layout), std::move(states), std::move(gradients), {}, 0.0};
  const StateOwners owners = state_owners(plan.layout);
  const auto state = static_cast<std::size_t>(state_bytes(spec));
  std::int64_t max_tokens = 0;
  for (int rank = 0; rank < world; ++rank) {
    const std::int64_t tokens = plan.layout.tokens(rank);
    max_tokens = std::max(max_tokens, tokens);
    SsdBackwardLimits limits{limits_of(ssm_runs(plan.layout, plan.states, rank)), tokens};
    const auto owned = [&](const std::vector<int>& of) {
      return static_cast<std::size_t>(std::ranges::count(of, rank));
    };
    SsmMemory bytes;
    bytes.rows = static_cast<std::size_t>(tokens * ssd_backward_token_bytes(job));
    bytes.states = (job.forward.initial_states ? 2 * owned(owners.initial) : 0) * state +
                   (job.final_gradients ? owned(owners.final) : 0) * state;
    bytes.scratch =
        kernel.scratch_bytes(limits) + static_cast<std::size_t>(limits.runs.segments * spec.heads) * sizeof(SsdTerms);
    bytes.exchange = StateExchange::bytes(spec, plan.states, rank) + StateExchange::bytes(spec, plan.gradients, rank);
    plan.memory.push_back(bytes);
  }
  plan.seconds = ssd_backward_token_flops(spec) * static_cast<double>(max_tokens) / machine.flops_per_second;
  return plan;
}

struct SsdBackward::Impl {
  Impl(SsdBackwardJob the_job, Transport& the_transport, SsmOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.timeout_seconds)) {}

  // One direction in which states, or their gradients, go from rank to rank.
  struct Direction {
    std::optional<StateExchange> exchange;
    std::optional<StateRelay> relay;
  };

  const SsmSpec& spec() const { return job.forward.spec; }
  std::span<const TokenRun> own_runs() const { return plan->layout.runs(transport.rank()); }
  std::int64_t own_tokens() const { return plan->layout.tokens(transport.rank()); }
  std::size_t own_terms() const {
    std::int64_t segments = 0;
    for (const TokenRun& run : own_runs()) segments += segments_of(run);
    return static_cast<std::size_t>(segments * spec().heads);
  }

  void choose();
  void allocate();
  void make_direction(Direction& direction, const StateHops& hops, std::string_view what);
  void check(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs) const;
  SsdBackwardTask task_of(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs);
  void enqueue(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs, Stream stream, SsmTimeline* clock);
  void differentiate(const SsdBackwardTask& task, Stream stream, SsmTimeline* clock);
  SsdParameterGradients sum_parameters();

  SsdBackwardJob job;
  SsmOptions options;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  KernelChoice<SsdBackwardSpec> choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<SsdBackwardKernel> kernel;
  std::optional<SsdBackwardPlan> plan;
  SsmMemory memory;
  std::vector<HeadRange> ranges;  // all heads as one range, for the relays
  OwnedStates owned;
  std::vector<SsdBackwardRun> runs;  // of this rank; those that receive or send states have their buffers
  Buffer terms;                      // [segments, heads] SsdTerms
  Direction states;
  Direction gradients;
  std::optional<SsmTimeline> own_clock;
  std::optional<EnqueuedRuns> enqueued;
};

void SsdBackward::Impl::choose() {
  check_ssd_backward_job(job);
  choice = choose_kernel(backward_spec(job), compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  check_compatible(*choice.row, *backend, transport);
  kernel = choice.row->make_kernel(backward_spec(job), *backend);
  check_ssm_budget(job.forward, transport.size(), options.memory_budget);
  plan = plan_ssd_backward(job, options.runs, transport.size(), *kernel, default_machine(*choice.row, *backend));
  memory = plan->max_memory();
  check_budget(memory, options.memory_budget);
  ranges = {{0, spec().heads}};
  owned = OwnedStates(plan->layout, transport.rank());
  // Gradients pass from the final state to the initial one.
  for (PassThroughStates& passed : owned.empty) std::swap(passed.initial, passed.final);
}

void SsdBackward::Impl::make_direction(Direction& direction, const StateHops& hops, std::string_view what) {
  direction.exchange.emplace(spec(), hops, ranges, transport, *backend, what);
  direction.relay.emplace(ranges, *direction.exchange, transport, *backend, collective.timeouts());
}

void SsdBackward::Impl::allocate() {
  enqueued.emplace(*backend, transport, collective.timeouts());
  make_direction(states, plan->states, "states");
  make_direction(gradients, plan->gradients, "gradients of states");
  const auto rank = static_cast<std::size_t>(transport.rank());
  for (const SsmRun& run : ssm_runs(plan->layout, plan->states, transport.rank())) {
    const auto i = static_cast<std::int64_t>(runs.size());
    runs.push_back({run.begin, run.tokens, run.row, states.exchange->received(i), states.exchange->sent(i),
                    gradients.exchange->received(i), gradients.exchange->sent(i), run.step,
                    plan->gradients.steps[rank][runs.size()]});
  }
  kernel->reserve(limits_of(runs, own_tokens()));
  terms = backend->allocate(std::max<std::size_t>(1, own_terms() * sizeof(SsdTerms)));
  const std::size_t waits = StateRelay::max_waits(1, states.exchange->steps());
  own_clock.emplace(*backend, ranges.size(), 2 * waits, false);
}

void SsdBackward::Impl::check(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs) const {
  const SsmSpec& s = spec();
  const std::int64_t rows = own_tokens();
  struct Named {
    std::string_view name;
    TensorView input;
    std::string_view gradient_name;
    MutableTensorView gradient;
    int heads;
    int dim;
  };
  std::vector<Named> all{{"x", inputs.x, "dx", outputs.dx, s.heads, s.head_dim},
                         {"dt", inputs.dt, "ddt", outputs.ddt, s.heads, 1},
                         {"B", inputs.b, "dB", outputs.db, s.groups, s.state_dim},
                         {"C", inputs.c, "dC", outputs.dc, s.groups, s.state_dim}};
  if (s.gate) all.push_back({"z", inputs.z, "dz", outputs.dz, s.heads, s.head_dim});
  check_shard("SsdBackward", "dy", inputs.dy, {s.dtype, rows, s.heads, s.head_dim});
  for (const Named& tensor : all) {
    check_shard("SsdBackward", tensor.name, tensor.input, {s.dtype, rows, tensor.heads, tensor.dim});
    check_shard("SsdBackward", tensor.gradient_name, tensor.gradient, {job.gradients, rows, tensor.heads, tensor.dim});
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    check_apart(all[i].gradient_name, all[i].gradient, "dy", inputs.dy);
    for (const Named& input : all) check_apart(all[i].gradient_name, all[i].gradient, input.name, input.input);
    for (std::size_t j = 0; j < i; ++j) {
      check_apart(all[i].gradient_name, all[i].gradient, all[j].gradient_name, all[j].gradient);
    }
  }
  const bool initial = job.forward.initial_states && !owned.beginning.empty();
  check_given("SsdBackward", "A", inputs.a, true);
  check_given("SsdBackward", "D", inputs.d, s.skip);
  check_given("SsdBackward", "dt_bias", inputs.dt_bias, s.dt_bias);
  check_given("SsdBackward", "initial_states", inputs.initial_states, initial);
  check_given("SsdBackward", "initial_gradients", outputs.initial_gradients, initial);
  check_given("SsdBackward", "final_gradients", inputs.final_gradients, job.final_gradients && !owned.ending.empty());
}

SsdBackwardTask SsdBackward::Impl::task_of(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs) {
  const std::int64_t state = state_bytes(spec()) / static_cast<std::int64_t>(sizeof(float));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const TokenRun& tokens = own_runs()[i];
    if (tokens.begin == 0 && job.forward.initial_states) {
      const std::int64_t at = owned.initial_index(tokens.sequence) * state;
      runs[i].initial = inputs.initial_states + at;
      runs[i].initial_gradient = outputs.initial_gradients + at;
    }
    if (tokens.end == job.forward.lengths[static_cast<std::size_t>(tokens.sequence)] && job.final_gradients) {
      runs[i].final_gradient = inputs.final_gradients + owned.final_index(tokens.sequence) * state;
    }
  }
  SsdBackwardTask task;
  task.x = inputs.x;
  task.dt = inputs.dt;
  task.b = inputs.b;
  task.c = inputs.c;
  task.z = inputs.z;
  task.dy = inputs.dy;
  task.a = inputs.a;
  task.d = inputs.d;
  task.dt_bias = inputs.dt_bias;
  task.runs = runs;
  task.dx = outputs.dx;
  task.ddt = outputs.ddt;
  task.db = outputs.db;
  task.dc = outputs.dc;
  task.dz = outputs.dz;
  if (!runs.empty()) task.terms = reinterpret_cast<SsdTerms*>(terms.data());
  return task;
}

void SsdBackward::Impl::enqueue(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs, Stream stream,
                                SsmTimeline* clock) {
  if (backend->is_capturing(stream)) {
    refuse("a graph", "the parameters' gradients are summed over the ranks after a run",
           "Run it outside of the graph.");
  }
  enqueued->enqueue(stream, plan->seconds, [&] {
    if (clock != nullptr) clock->begin(stream);
    pass_states_through(owned.empty, inputs.final_gradients, outputs.initial_gradients, state_bytes(spec()), *backend,
                        stream);
    differentiate(task_of(inputs, outputs), stream, clock);
    if (clock != nullptr) clock->end(stream);
  });
}

// States are in flight while the local gradients of segments are computed. Then gradients of states are sent.
void SsdBackward::Impl::differentiate(const SsdBackwardTask& task, Stream stream, SsmTimeline* clock) {
  const HeadRange& heads = ranges.front();
  const Progress progress = [this] {
    transport.progress();
    states.relay->advance();
  };
  StateCarry carry;
  StateCarry carry_back;
  for (const SsdBackwardRun& run : task.runs) {
    carry.steps.push_back(run.step);
    carry_back.steps.push_back(run.gradient_step);
  }
  carry.carry = [&](const HeadRange& own, int step, Stream on) { kernel->carry_states(task, own, step, on); };
  carry_back.carry = [&](const HeadRange& own, int step, Stream on) { kernel->carry_gradients(task, own, step, on); };

  states.relay->enter(std::move(carry), stream, plan->seconds, clock);
  kernel->accumulate_states(task, heads, stream, progress);
  states.relay->begin(0);
  if (!plan->states.hops.empty()) failpoint("states");
  kernel->accumulate_gradients(task, heads, stream, progress);
  states.relay->end();
  gradients.relay->enter(std::move(carry_back), stream, plan->seconds, clock);
  gradients.relay->begin(0);
  gradients.relay->end();
  states.relay->join(0);
  gradients.relay->join(0);
  kernel->finish(task, heads, stream, progress);
  kernel->sum_sets(task, stream, progress);
}

SsdParameterGradients SsdBackward::Impl::sum_parameters() {
  std::vector<SsdTerms> own(own_terms());
  const auto bytes = static_cast<std::int64_t>(own.size() * sizeof(SsdTerms));
  collective.run_collectively([&] {
    if (own.empty()) return;
    backend->copy_rows(own.data(), bytes, terms.data(), bytes, bytes, 1, backend->stream());
    backend->synchronize(backend->stream(), collective.timeouts().for_peer(), [this] { transport.progress(); });
  });
  return sum_ssd_terms(collective, spec(), own_runs(), own);
}

SsdBackward::SsdBackward(SsdBackwardJob job, Transport& transport, SsmOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
  impl.config_hash = handshake(impl.collective, rank_config(impl.job, impl.options, impl.choice, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  impl.states.exchange->announce(impl.collective.timeouts().for_peer());
  impl.gradients.exchange->connect(impl.collective, *impl.backend);
}

SsdBackward::~SsdBackward() = default;
SsdBackward::SsdBackward(SsdBackward&&) noexcept = default;

const SsdBackwardJob& SsdBackward::job() const { return impl_->job; }
const SsmOptions& SsdBackward::options() const { return impl_->options; }
const KernelChoice<SsdBackwardSpec>& SsdBackward::kernel() const { return impl_->choice; }
Backend& SsdBackward::backend() { return *impl_->backend; }
const Layout& SsdBackward::layout() const { return impl_->plan->layout; }
const SsmMemory& SsdBackward::memory() const { return impl_->memory; }
double SsdBackward::estimated_seconds() const { return impl_->plan->seconds; }
std::int64_t SsdBackward::bytes_received() const {
  return impl_->plan->states_received(impl_->transport.rank()) * state_bytes(impl_->spec());
}
const std::vector<std::int32_t>& SsdBackward::beginning() const { return impl_->owned.beginning; }
const std::vector<std::int32_t>& SsdBackward::ending() const { return impl_->owned.ending; }

SsdParameterGradients SsdBackward::run(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs,
                                       Stream stream, SsmStats* stats) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, describe(impl.job), [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(inputs, outputs);
  });
  impl.enqueue(inputs, outputs, stream, &*impl.own_clock);
  impl.enqueued->wait_all();
  if (stats != nullptr) *stats = impl.own_clock->stats();
  return impl.sum_parameters();
}

void SsdBackward::enqueue(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs, Stream stream) {
  impl_->check(inputs, outputs);
  impl_->enqueue(inputs, outputs, stream, nullptr);
}

void SsdBackward::wait() {
  if (impl_->enqueued->any()) impl_->enqueued->wait_all();
}

SsdParameterGradients SsdBackward::sum_parameters() { return impl_->sum_parameters(); }

}  // namespace ringattn
