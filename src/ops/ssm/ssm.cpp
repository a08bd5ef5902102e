// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm.hpp"

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
#include "comm/collective.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/owned_states.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/common/staging.hpp"
#include "ops/conv1d/causal_conv1d.hpp"
#include "ops/rank_config.hpp"
#include "ops/ssm/state_exchange.hpp"
#include "ops/ssm/state_relay.hpp"

namespace ringattn {

namespace {

// The names of the class and its tensors in messages.
struct RowNames {
  const char *op, *x, *dt, *b, *c, *y, *a, *initial;
};

[[noreturn]] void refuse(const std::string& what, const std::string& why, const std::string& suggestion) {
  fail(ErrorCode::kUsage, what, why, suggestion);
}

}  // namespace

SsmJobChoice choose_kernel(const SsmJob& job, const KernelRequest& request, KernelScope scope) {
  if (job.conv1d_only) {
    CausalConv1dChoice choice = choose_kernel(*job.convolution, request, scope);
    return {choice.row, nullptr, std::move(choice.reason)};
  }
  SsmChoice choice = choose_kernel(job.spec, request, scope);
  return {choice.row, choice.row, std::move(choice.reason)};
}

double ssm_rate(const SsmJob& job, const SsmJobChoice& choice, const Backend& backend, std::int64_t tokens,
                const MachineModel& given) {
  if (choice.ssm != nullptr) return machine_speed(given, *choice.ssm, job.spec, job.spec.dtype, backend, tokens);
  const auto& row = static_cast<const KernelRow<CausalConv1dSpec>&>(*choice.row);
  return machine_speed(given, row, *job.convolution, job.convolution->dtype, backend, tokens);
}

double conv1d_rate(const SsmJob& job, const SsmJobChoice& choice, const Backend& backend, KernelScope scope,
                   const MachineModel& given) {
  if (job.conv1d_only || !job.convolution) return 0.0;
  const KernelRequest same_backend{std::string(choice.row->backend), "auto"};
  const KernelRow<CausalConv1dSpec>& row = *choose_kernel(*job.convolution, same_backend, scope).row;
  return machine_speed(given, row, *job.convolution, job.convolution->dtype, backend, kManyTokens);
}

struct Ssm::Impl {
  Impl(SsmJob the_job, Transport& the_transport, SsmOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.timeout_seconds)) {}

  std::int64_t own_tokens() const { return layout->tokens(transport.rank()); }
  std::int64_t state_floats() const { return state_bytes(job.spec) / static_cast<std::int64_t>(sizeof(float)); }

  void choose();
  void allocate();
  void make_convolution();
  void check(const SsmInputs& inputs, const SsmOutputs& outputs) const;
  void convolve_into(void* rows, std::int64_t token_stride, const SsmInputs& inputs, const SsmOutputs& outputs,
                     Stream stream);
  SsmInputs convolve(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream);
  SsmInputs rotate(const SsmInputs& inputs, Stream stream);
  SsmRotation rotation() const;
  void update(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream);
  void wait_all();
  SsmTask task_of(const SsmInputs& inputs, const SsmOutputs& outputs);
  // `clock`: records phases; may be null.
  void enqueue(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream, SsmTimeline* clock);

  SsmJob job;
  SsmOptions options;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  SsmJobChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<SsmKernel> kernel;  // null for a convolution only
  std::optional<Layout> layout;
  StateHops hops;
  std::vector<HeadRange> ranges;
  SsmMemory memory;
  double seconds = 0.0;  // estimated duration of a run
  OwnedStates owned;
  std::vector<SsmRun> runs;  // of this rank; runs that receive or send states have their buffers
  std::optional<CausalConv1d> convolution;
  Buffer convolved;                  // [own tokens, channels] output of the convolution
  std::unique_ptr<RopeKernel> rope;  // null without; of B and C, or of their angles if the kernel rotates them
  Buffer rotated;    // [2, own tokens, groups, state_dim]: B, then C; or angles, [own tokens, rotary_dim]
  Buffer basis;      // angle_basis(), with angles
  Buffer positions;  // [own tokens] in their sequences
  std::optional<StateExchange> exchange;
  std::optional<StateRelay> relay;
  std::optional<SsmTimeline> own_clock;
  std::optional<EnqueuedRuns> enqueued;
};

void Ssm::Impl::choose() {
  check_ssm_job(job);
  if (options.head_ranges < 0 || options.head_ranges > 2) {
    refuse(fmt::format("{} ranges of heads", options.head_ranges), fmt::format("{} has one or two", op_noun(job)),
           "Leave it at 0 to let the op choose.");
  }
  choice = choose_kernel(job, compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  check_compatible(*choice.row, *backend, transport);
  if (choice.ssm != nullptr) kernel = choice.ssm->make_kernel(job.spec, *backend);
  if (job.rope) {
    const KernelRequest same_backend{std::string(choice.row->backend), "auto"};
    const RopeSpec spec = kernel->rotates_rows() ? angle_spec(*job.rope) : *job.rope;
    rope = choose_kernel(spec, same_backend).row->make_kernel(spec, *backend);
  }
  check_ssm_budget(job, transport.size(), options.memory_budget);
  SsmPlanSummary summary =
      summarize_ssm_plan(job, options.runs, transport.size(), kernel.get(), default_machine(*choice.row, *backend),
                         conv1d_rate(job, choice, *backend),
                         [this](std::int64_t tokens) { return ssm_rate(job, choice, *backend, tokens); });
  memory = summary.max_memory();
  seconds = summary.seconds;
  layout = std::move(summary.layout);
  hops = std::move(summary.hops);
  ranges = std::move(summary.ranges);
  if (!job.conv1d_only && options.head_ranges != 0) ranges = head_ranges(job.spec.heads, *kernel, options.head_ranges);
  owned = OwnedStates(*layout, transport.rank());
  check_budget(memory, options.memory_budget);
}

void Ssm::Impl::allocate() {
  enqueued.emplace(*backend, transport, collective.timeouts());
  if (job.conv1d_only) {
    own_clock.emplace(*backend, ranges.size(), 0, options.timeline);
    return;
  }
  runs = ssm_runs(*layout, hops, transport.rank());
  if (!job.update) kernel->reserve(limits_of(runs));
  if (job.convolution) {
    convolved = backend->allocate(static_cast<std::size_t>(own_tokens() * conv1d_row_bytes(*job.convolution)));
  }
  if (job.rope) {
    const std::vector<std::int64_t> own = layout->positions(transport.rank());
    positions = upload(*backend, std::span(own));
    rotated = backend->allocate(static_cast<std::size_t>(own_tokens() * rope_token_bytes(job, kernel->rotates_rows())));
    const std::vector<float> row = angle_basis(*job.rope);
    if (kernel->rotates_rows()) basis = upload(*backend, std::span(row));
    await(*backend, collective.timeouts());
  }
  exchange.emplace(job.spec, hops, ranges, transport, *backend);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i].initial = exchange->received(static_cast<std::int64_t>(i));
    runs[i].final = exchange->sent(static_cast<std::int64_t>(i));
  }
  relay.emplace(ranges, *exchange, transport, *backend, collective.timeouts());
  own_clock.emplace(*backend, ranges.size(), StateRelay::max_waits(ranges.size(), exchange->steps()), options.timeline);
}

// The convolution has the same runs and the same backend as the SSM.
void Ssm::Impl::make_convolution() {
  if (!job.convolution) return;
  CausalConv1dOptions given;
  given.kernel.backend = choice.row->backend;
  if (job.conv1d_only) given.kernel.kernel = choice.row->name;
  given.runs = options.runs;
  given.threads = options.threads;
  given.timeout_seconds = options.timeout_seconds;
  convolution.emplace(CausalConv1dJob{*job.convolution, job.lengths, job.initial_halos, job.final_halos}, transport,
                      std::move(given));
}

void Ssm::Impl::check(const SsmInputs& inputs, const SsmOutputs& outputs) const {
  const SsmSpec& spec = job.spec;
  const std::int64_t rows = own_tokens();
  const RowNames names =
      spec.decay == SsmDecay::kDt
          ? RowNames{"Ssm", "x", "dt", "B", "C", "y", "A", "initial_states"}
          : RowNames{"LinearAttention", "v", "log_decay", "k", "q", "out", "log_decay", "initial_state"};
  if (job.convolution) {
    check_shard(names.op, names.x, inputs.x, {spec.dtype, rows, 1, job.convolution->channels});
  } else {
    check_shard(names.op, names.x, inputs.x, {spec.dtype, rows, spec.heads, spec.head_dim});
  }
  if (const SsmDtRows dt = dt_rows(spec); !job.conv1d_only && dt.dim > 0) {
    check_shard(names.op, names.dt, inputs.dt, {dt.dtype, rows, spec.heads, dt.dim});
  }
  if (!job.convolution || (spec.state_decays && !job.conv1d_only)) {
    check_shard(names.op, names.b, inputs.b, {spec.dtype, rows, spec.groups, spec.state_dim});
    check_shard(names.op, names.c, inputs.c, {spec.dtype, rows, spec.groups, spec.state_dim});
  }
  if (spec.gate) check_shard("Ssm", "z", inputs.z, {spec.dtype, rows, spec.heads, spec.head_dim});
  check_shard(names.op, names.y, outputs.y, {spec.dtype, rows, spec.heads, spec.head_dim});
  if (job.conv1d_only && outputs.y.head_stride != 1) {
    refuse("y has channels that are not contiguous", "a convolution writes contiguous channels",
           "Give rows that are dense.");
  }
  for (const auto& [name, view] : {std::pair{names.x, inputs.x},
                                   {names.dt, inputs.dt},
                                   {names.b, inputs.b},
                                   {names.c, inputs.c},
                                   {"z", inputs.z}}) {
    check_apart(names.y, outputs.y, name, view);
  }
  check_given(names.op, names.a, inputs.a, !job.conv1d_only && spec.decay <= SsmDecay::kHead);
  if (inputs.positions.values == nullptr ? job.rope && job.update && rows > 0 : !job.rope) {
    refuse(job.rope ? "a decode step with RoPE has no positions" : "positions are given, but the job has no RoPE",
           job.rope ? "a state does not say how many tokens it has seen" : "nothing else depends on them",
           job.rope ? "Give the position of each sequence's token." : "Leave them out.");
  }
  check_given("Ssm", "D", inputs.d, spec.skip);
  check_given("Ssm", "dt_bias", inputs.dt_bias, spec.dt_bias);
  check_given(names.op, names.initial, inputs.initial_states, job.initial_states && !owned.beginning.empty());
  check_given(names.op, "final_states", outputs.final_states, job.final_states && !owned.ending.empty());
  check_given("Ssm", "conv_weight", inputs.conv_weight, job.convolution.has_value());
  check_given("Ssm", "conv_bias", inputs.conv_bias, job.convolution && job.convolution->bias);
  check_given("Ssm", "initial_halos", inputs.initial_halos, job.initial_halos && !owned.beginning.empty());
  check_given("Ssm", "final_halos", outputs.final_halos, job.final_halos && !owned.ending.empty());
  if (inputs.slots == nullptr || (job.update && !job.convolution && inputs.initial_states == outputs.final_states)) {
    return;
  }
  refuse("slots are given",
         job.update && !job.convolution ? "initial_states and final_states differ"
                                        : "the job is not an update, or has a convolution",
         "Slots are those of an update in place, without a convolution.");
}

// Enqueues the convolution with output `rows`.
void Ssm::Impl::convolve_into(void* rows, std::int64_t token_stride, const SsmInputs& inputs, const SsmOutputs& outputs,
                              Stream stream) {
  const std::int64_t channels = job.convolution->channels;
  const MutableTensorView y{rows, job.spec.dtype, own_tokens(), 1, channels, token_stride, channels};
  convolution->enqueue({inputs.x, inputs.conv_weight, inputs.conv_bias, inputs.initial_halos}, {y, outputs.final_halos},
                       stream);
}

// Enqueues the convolution. Returns the inputs of the SSM, with x, B and C from its output.
SsmInputs Ssm::Impl::convolve(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream) {
  const SsmSpec& spec = job.spec;
  const std::int64_t channels = job.convolution->channels;
  convolve_into(convolved.data(), channels, inputs, outputs, stream);
  const auto part = [&](std::int64_t first, std::int64_t heads, std::int64_t dim) {
    const std::byte* const data = convolved.data() + first * static_cast<std::int64_t>(size_of(spec.dtype));
    return TensorView{data, spec.dtype, own_tokens(), heads, dim, channels, dim};
  };
  SsmInputs after_convolution = inputs;
  after_convolution.x = part(0, spec.heads, spec.head_dim);
  if (spec.state_decays) return after_convolution;
  const std::int64_t dims = std::int64_t{spec.heads} * spec.head_dim;
  after_convolution.b = part(dims, spec.groups, spec.state_dim);
  after_convolution.c = part(dims + std::int64_t{spec.groups} * spec.state_dim, spec.groups, spec.state_dim);
  return after_convolution;
}

// Enqueues RoPE. Returns the inputs of the SSM, with rotated B and C unless the kernel rotates them.
SsmInputs Ssm::Impl::rotate(const SsmInputs& inputs, Stream stream) {
  const SsmSpec& spec = job.spec;
  if (own_tokens() == 0) return inputs;
  const RopePositions own{positions.data(), true};
  const RopePositions& given = inputs.positions.values != nullptr ? inputs.positions : own;
  if (kernel->rotates_rows()) {
    const MutableTensorView angles =
        dense_view(static_cast<void*>(rotated.data()), Dtype::kF32, own_tokens(), 1, job.rope->rotary_dim);
    TensorView same_rows = angles;
    same_rows.data = basis.data();
    same_rows.token_stride = 0;
    const RopeTensor tensors[] = {{same_rows, angles}};
    rope->rotate({given, tensors}, stream, {});
    return inputs;
  }
  MutableTensorView b =
      dense_view(static_cast<void*>(rotated.data()), spec.dtype, own_tokens(), spec.groups, spec.state_dim);
  MutableTensorView c = b;
  c.data = b.at(own_tokens(), 0);
  const RopeTensor tensors[] = {{inputs.b, b}, {inputs.c, c}};
  rope->rotate({given, tensors}, stream, {});
  SsmInputs after_rope = inputs;
  after_rope.b = b;
  after_rope.c = c;
  return after_rope;
}

// The rotation that the kernel applies to B and C, if it does.
SsmRotation Ssm::Impl::rotation() const {
  if (!rope || !kernel->rotates_rows()) return {};
  return {&*job.rope, reinterpret_cast<const float*>(rotated.data())};
}

void Ssm::Impl::update(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream) {
  if (own_tokens() == 0) return;
  const std::int64_t bytes = own_tokens() * state_bytes(job.spec);
  if (inputs.initial_states != outputs.final_states) {
    backend->copy_rows(outputs.final_states, bytes, inputs.initial_states, bytes, bytes, 1, stream);
  }
  kernel->update({inputs.x, inputs.dt, inputs.b, inputs.c, inputs.z, inputs.a, inputs.d, inputs.dt_bias, rotation(),
                  outputs.final_states, outputs.y, inputs.slots},
                 stream);
}

SsmTask Ssm::Impl::task_of(const SsmInputs& inputs, const SsmOutputs& outputs) {
  owned.bind(*layout, transport.rank(), inputs.initial_states, outputs.final_states, state_floats(), runs);
  SsmTask task;
  task.x = inputs.x;
  task.dt = inputs.dt;
  task.b = inputs.b;
  task.c = inputs.c;
  task.z = inputs.z;
  task.a = inputs.a;
  task.d = inputs.d;
  task.dt_bias = inputs.dt_bias;
  task.rotation = rotation();
  task.runs = runs;
  task.y = outputs.y;
  return task;
}

void Ssm::Impl::enqueue(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream, SsmTimeline* clock) {
  check_capture(*backend, stream, "this scan", transport, "sends states to other ranks");
  enqueued->enqueue(stream, seconds, [&] {
    if (clock != nullptr) clock->begin(stream);
    if (job.conv1d_only) {
      convolve_into(outputs.y.data, outputs.y.token_stride, inputs, outputs, stream);
    } else {
      const SsmInputs after_convolution = convolution ? convolve(inputs, outputs, stream)
                                          : rope      ? rotate(inputs, stream)
                                                      : inputs;
      if (job.update) {
        update(after_convolution, outputs, stream);
      } else {
        pass_states_through(owned.empty, inputs.initial_states, outputs.final_states, state_bytes(job.spec), *backend,
                            stream);
        relay->run(*kernel, task_of(after_convolution, outputs), stream, seconds, clock);
      }
    }
    if (clock != nullptr) clock->end(stream);
  });
}

void Ssm::Impl::wait_all() {
  enqueued->wait_all();
  if (convolution) convolution->wait();
}

Ssm::Ssm(SsmJob job, Transport& transport, SsmOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
  impl.config_hash = handshake(impl.collective, rank_config(impl.job, impl.options, impl.choice, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  if (impl.exchange) impl.exchange->connect(impl.collective, *impl.backend);
  impl.make_convolution();
}

Ssm::~Ssm() = default;
Ssm::Ssm(Ssm&&) noexcept = default;

const SsmJob& Ssm::job() const { return impl_->job; }
const SsmOptions& Ssm::options() const { return impl_->options; }
const SsmJobChoice& Ssm::kernel() const { return impl_->choice; }
Backend& Ssm::backend() { return *impl_->backend; }
const Layout& Ssm::layout() const { return *impl_->layout; }
const SsmMemory& Ssm::memory() const { return impl_->memory; }
double Ssm::estimated_seconds() const { return impl_->seconds; }
std::int64_t Ssm::token_bytes() const {
  const SsmJob& job = impl_->job;
  const std::int64_t rope = job.rope ? 2 * rope_token_bytes(job, impl_->kernel->rotates_rows()) : 0;
  return ssm_token_bytes(job) + rope;
}
std::int64_t Ssm::bytes_received() const {
  return states_received(impl_->hops, impl_->transport.rank()) * carried_bytes(impl_->job);
}
const std::vector<std::int32_t>& Ssm::beginning() const { return impl_->owned.beginning; }
const std::vector<std::int32_t>& Ssm::ending() const { return impl_->owned.ending; }

SsmStats Ssm::run(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, describe(impl.job), [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(inputs, outputs);
  });
  impl.enqueue(inputs, outputs, stream, &*impl.own_clock);
  impl.wait_all();
  const SsmStats stats = impl.own_clock->stats();
  impl.collective.barrier(impl.seconds);
  return stats;
}

void Ssm::enqueue(const SsmInputs& inputs, const SsmOutputs& outputs, Stream stream) {
  impl_->check(inputs, outputs);
  impl_->enqueue(inputs, outputs, stream, nullptr);
}

void Ssm::wait() {
  if (impl_->enqueued->any()) impl_->wait_all();
}

}  // namespace ringattn
