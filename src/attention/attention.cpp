// SPDX-License-Identifier: Apache-2.0
#include "attention/attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention_work.hpp"
#include "attention/fold_step.hpp"
#include "attention/identities.hpp"
#include "attention/lengths.hpp"
#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/first_contact.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/workspace.hpp"
#include "base/error.hpp"
#include "comm/meeting.hpp"

namespace ringattn {

namespace {

std::array<StreamRows, 2> buffers_at(std::byte* base, const WorkspaceLayout& layout) {
  return {rows_at(base, layout.buffers[0]), rows_at(base, layout.buffers[1])};
}

bool is_dense(const Inputs& inputs) { return inputs.k.is_dense() && inputs.v.is_dense(); }

void check_view(std::string_view name, const TensorView& view, const FoldSpec& spec, std::int64_t tokens, int heads,
                int dim) {
  if (view.dtype == spec.dtype && view.tokens == tokens && view.heads == heads && view.dim == dim) return;
  fail(ErrorCode::kUsage,
       fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads, view.dim),
       fmt::format("this rank's share of the job is {} [{}, {}, {}]", dtype_name(spec.dtype), tokens, heads, dim),
       "Rows follow Attention::layout().");
}

}  // namespace

void check_checksum(const Backend& backend) {
  if (backend.memory() != MemoryKind::kDevice) return;
  fail(ErrorCode::kUnsupported, "checksums of device memory are not computed",
       {setting("checksum"), " works on the host"}, {"Leave it out, or use ", setting("backend", "cpu"), "."});
}

KernelRequest fitting_request(const KernelRequest& request, const Transport& transport) {
  KernelRequest fitting = request;
  if (transport.size() > 1 && request.backend == "auto" && request.kernel == "auto") {
    fitting.backend = transport.memory() == MemoryKind::kDevice ? "cuda" : "cpu";
  }
  return fitting;
}

void check_fitting(const KernelEntry& kernel, const Backend& backend, const Transport& transport) {
  if (transport.size() == 1 || backend.memory() == transport.memory()) return;
  fail(ErrorCode::kUnsupported, fmt::format("kernel {} and transport {} don't fit", kernel.name, transport.name()),
       "one works in host memory, the other in device memory",
       {"Choose both with ", setting("backend"), " and ", setting("transport"), "."});
}

// What depends on the lengths of the sequences. A plan is made by every rank for itself.
struct Attention::Lengths {
  Lengths(const Job& job, const Options& options, const FoldKernel& kernel, const Transport& transport)
      : batch(job.batch),
        forecast(ringattn::forecast(job, options, kernel, transport.route(), transport.size(), transport.rank())),
        prepared(forecast.plan.blocks.size(), kNotPrepared) {}
  Lengths(const Lengths&) = delete;  // the mover refers to the plan
  Lengths& operator=(const Lengths&) = delete;

  const Plan& plan() const { return forecast.plan; }
  bool all_prepared() const { return std::ranges::find(prepared, kNotPrepared) == prepared.end(); }
  double longest_fold(const MachineModel& machine) const {
    double flops = 0.0;
    for (const BlockPlan& block : plan().blocks) flops = std::max(flops, block.flops);
    return flops / machine.flops_per_second;
  }

  Batch batch;
  Forecast forecast;
  std::vector<PreparedTask> prepared;  // [blocks]
  std::optional<BlockMover> mover;     // with several ranks
  std::optional<Timeline> timeline;    // of run()
};

struct Attention::Impl {
  Impl(Job the_job, Transport& the_transport, Options the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        meeting(transport, Patience(options.timeout_seconds)),
        streams(kv_streams(job.spec)) {}

  bool several() const { return transport.size() > 1; }
  // Peers write to a device's block buffers, so they are memory that transports may map: not the caller's.
  bool owns_block_buffers() const { return backend->memory() == MemoryKind::kDevice && several(); }
  const Lengths& now() const { return others != nullptr ? *others : *prepared; }
  Lengths& now() { return others != nullptr ? *others : *prepared; }
  const Plan& plan() const { return now().plan(); }
  std::int64_t q_rows() const { return now().forecast.layout().queries.tokens(transport.rank()); }
  std::int64_t k_rows() const { return now().forecast.layout().keys.tokens(transport.rank()); }
  double longest_fold() const { return now().longest_fold(options.machine); }

  WorkspaceLayout workspace(bool dense_kv) const {
    return workspace_layout(streams, plan().keeps_state ? kernel->state_bytes(q_rows()) : 0,
                            owns_block_buffers() ? 0 : buffer_rows, dense_kv || !several() ? 0 : k_rows());
  }

  void choose();
  void take_slowest_rate();
  void allocate();
  void connect();
  void set_lengths(const Batch& batch);
  void check(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace) const;
  void check_capture() const;
  void enqueue(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream,
               Timeline* timeline, const BlockDone& block_done, RunMode mode);
  StreamRows dense_shard(const Inputs& inputs, StreamRows staged, Stream stream) const;

  Job job;  // with the lengths of now()
  Options options;
  Transport& transport;
  Meeting meeting;
  RowStreams streams;
  FoldChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<FoldKernel> kernel;
  std::int64_t buffer_rows = 0;       // of each block buffer
  Buffer block_buffers;               // on devices
  std::unique_ptr<Lengths> prepared;  // those that the object was made with
  std::unique_ptr<Lengths> others;    // of set_lengths(), instead
  bool assumed_machine = false;       // nobody has given a machine model
  std::optional<EnqueuedRuns> runs;
};

void Attention::Impl::choose() {
  check_job(job);
  choice = choose_kernel(job.spec, fitting_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  assumed_machine = options.machine == MachineModel{};
  if (assumed_machine) options.machine = default_machine(*choice.row, *backend);
  kernel = choice.row->make_kernel(job.spec, *backend);
  check_fitting(*choice.row, *backend, transport);
  if (options.checksum) check_checksum(*backend);
  check_size(job, options, *kernel, transport.size());
}

// Ranks with unequal shares of their hosts make one plan.
void Attention::Impl::take_slowest_rate() {
  const std::vector<double> rates = meeting.gather_values(options.machine.flops_per_second);
  if (assumed_machine) options.machine.flops_per_second = *std::ranges::min_element(rates);
}

void Attention::Impl::allocate() {
  prepared = std::make_unique<Lengths>(job, options, *kernel, transport);
  const FoldLimits limits = reserved_limits(job, options, prepared->forecast.layout(), plan(), *kernel);
  kernel->reserve(limits);
  if (limits.prepared > 0) {
    prepared->prepared = prepare_tasks(plan(), job.spec, *kernel, options.state_out);
  }
  buffer_rows = plan().buffer_rows + spare_rows(job, options, *kernel, transport.size());
  if (owns_block_buffers()) {
    const std::size_t bytes = block_buffers_layout(streams, buffer_rows).bytes;
    block_buffers = backend->allocate(std::max(bytes, static_cast<std::size_t>(transport.size())));
  }
  if (several()) prepared->mover.emplace(plan(), streams, transport, *backend, options.checksum);
  runs.emplace(*backend, transport, meeting.patience());
}

// Tells peers where blocks will land.
void Attention::Impl::connect() {
  const WorkspaceLayout layout = block_buffers_layout(streams, buffer_rows);
  prepared->mover->announce(buffers_at(block_buffers.data(), layout), meeting.patience().for_peer());
  make_first_contact(meeting, transport, *backend, block_buffers.data());
}

void Attention::Impl::set_lengths(const Batch& batch) {
  if (batch == job.batch) return;
  if (batch == prepared->batch) {
    others.reset();
  } else {
    Job asked = job;
    asked.batch = prepared->batch;
    const Options within = options_within(asked, options, batch, *kernel, transport.route(), transport.size());
    asked.batch = batch;
    auto lengths = std::make_unique<Lengths>(asked, within, *kernel, transport);
    if (several()) lengths->mover.emplace(lengths->plan(), streams, transport, *backend, options.checksum);
    others = std::move(lengths);
  }
  job.batch = batch;
}

void Attention::Impl::check(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> space) const {
  const FoldSpec& spec = job.spec;
  check_view("q", inputs.q, spec, q_rows(), spec.heads, spec.head_dim);
  check_view("k", inputs.k, spec, k_rows(), spec.kv_heads, spec.head_dim);
  check_view("v", inputs.v, spec, k_rows(), spec.kv_heads, spec.head_dim_v);
  check_view("out", outputs.out, spec, q_rows(), spec.heads, spec.head_dim_v);
  if (spec.sinks != (inputs.sinks != nullptr)) {
    fail(ErrorCode::kUsage, spec.sinks ? "sinks are missing" : "sinks are given",
         spec.sinks ? "the job has them" : "the job has none", "FoldSpec::sinks says whether a job has sinks.");
  }
  if (options.state_out != outputs.state.has_value()) {
    fail(ErrorCode::kUsage, options.state_out ? "no place for the fold state" : "a place for the fold state",
         options.state_out ? "Options::state_out asks for it" : "Options::state_out is off",
         "Give Outputs::state exactly where Options::state_out is on.");
  }
  const std::size_t needed = workspace(is_dense(inputs)).bytes;
  if (space.size() < needed) {
    fail(ErrorCode::kUsage, fmt::format("the workspace has {} bytes", space.size()),
         fmt::format("{} are needed", needed), "Ask Attention::workspace_bytes().");
  }
}

void Attention::Impl::check_capture() const {
  const auto refuse = [](std::string_view why, std::string_view suggestion) {
    fail(ErrorCode::kUnsupported, "a graph can't hold this run", why, suggestion);
  };
  if (several()) {
    refuse(fmt::format("transport {} exchanges blocks with {} other ranks, which a replay would not do",
                       transport.name(), transport.size() - 1),
           "Enqueue it outside of the capture.");
  }
  if (others != nullptr) {
    refuse("the tables of other lengths than the prepared ones are made for one run",
           "Prepare an Attention for these lengths, or enqueue the run outside of the capture.");
  }
  if (!prepared->all_prepared()) {
    refuse(fmt::format("its {} blocks share memory for their tables", plan().blocks.size()),
           "Use larger blocks, or enqueue it outside of the capture.");
  }
}

// The rank's own K and V as dense rows, which transfers and assembled tiles need: the caller's memory where it is
// dense, else a copy in the workspace.
StreamRows Attention::Impl::dense_shard(const Inputs& inputs, StreamRows staged, Stream stream) const {
  const TensorView* const views[] = {&inputs.k, &inputs.v};
  for (std::size_t s = 0; s < staged.size(); ++s) {
    const TensorView& view = *views[s];
    if (view.is_dense()) {
      // Parts of the shard are only ever sent from here.
      staged[s] = static_cast<std::byte*>(const_cast<void*>(view.data));
      continue;
    }
    const auto element = static_cast<std::int64_t>(size_of(view.dtype));
    for (std::int64_t head = 0; head < view.heads; ++head) {
      backend->copy_rows(staged[s] + head * view.dim * element, view.heads * view.dim * element, view.at(0, head),
                         view.token_stride * element, view.dim * element, view.tokens, stream);
    }
  }
  return staged;
}

void Attention::Impl::enqueue(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> space, Stream stream,
                              Timeline* times, const BlockDone& block_done, RunMode mode) {
  const FoldSpec& spec = job.spec;
  const bool captured = backend->is_capturing(stream);
  if (captured) check_capture();
  const WorkspaceLayout layout = workspace(is_dense(inputs));
  FoldStep::Memory memory{
      inputs.q,     {inputs.k, inputs.v}, {}, space.data() + layout.state, {outputs.out, outputs.lse, inputs.sinks},
      outputs.state};
  std::array<StreamRows, 2> buffers = owns_block_buffers()
                                          ? buffers_at(block_buffers.data(), block_buffers_layout(streams, buffer_rows))
                                          : buffers_at(space.data(), layout);
  for (std::size_t parity = 0; parity < 2; ++parity) {
    const void* k = buffers[parity][0];
    const void* v = buffers[parity][1];
    memory.buffers[parity] = {dense_view(k, spec.dtype, buffer_rows, spec.kv_heads, spec.head_dim),
                              dense_view(v, spec.dtype, buffer_rows, spec.kv_heads, spec.head_dim_v)};
  }
  if (!captured) runs->begin(stream);
  const bool moves = several() && mode == RunMode::kWhole;
  if (moves) now().mover->bind(dense_shard(inputs, rows_at(space.data(), layout.staged), stream), std::move(buffers));
  FoldStep step(plan(), *kernel, now().prepared, memory);
  const RingLoop loop{plan(), transport,       *backend,           step,          moves ? &*now().mover : nullptr,
                      times,  options.overlap, meeting.patience(), longest_fold()};
  enqueue_blocks(loop, stream, block_done);
  if (!captured) runs->end(stream, now().forecast.prediction.seconds);
}

Attention::Attention(Job job, Transport& transport, Options options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = share_of_processors(impl.meeting);
  impl.meeting.together([&impl] { impl.choose(); });
  impl.take_slowest_rate();
  handshake(impl.meeting, identities(impl.job, impl.options, impl.choice, *impl.backend));
  impl.meeting.together([&impl] { impl.allocate(); });
  if (impl.owns_block_buffers()) impl.connect();
}

Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;

const Job& Attention::job() const { return impl_->job; }
const Options& Attention::options() const { return impl_->options; }
const FoldChoice& Attention::kernel() const { return impl_->choice; }
Backend& Attention::backend() { return *impl_->backend; }
const JobLayout& Attention::layout() const { return impl_->now().forecast.layout(); }
const Plan& Attention::plan() const { return impl_->plan(); }
const Prediction& Attention::prediction() const { return impl_->now().forecast.prediction; }
std::int64_t Attention::q_rows() const { return impl_->q_rows(); }
std::int64_t Attention::k_rows() const { return impl_->k_rows(); }
std::size_t Attention::workspace_bytes(bool dense_kv) const { return impl_->workspace(dense_kv).bytes; }

RunStats Attention::run(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream,
                        const BlockDone& block_done, RunMode mode) {
  Impl& impl = *impl_;
  impl.meeting.together([&] { impl.check(inputs, outputs, workspace); });
  wait();  // what was enqueued before: its time is none of this run's
  std::optional<Timeline>& timeline = impl.now().timeline;
  if (!timeline) timeline.emplace(*impl.backend, plan().blocks.size(), !impl.several());
  impl.enqueue(inputs, outputs, workspace, stream, &*timeline, block_done, mode);
  impl.runs->settle([&] {
    if (!impl.backend->enqueues()) return;
    const auto blocks = static_cast<std::int64_t>(plan().blocks.size());
    for (std::int64_t b = 0; b < blocks; ++b) {
      timeline->await_fold(b, impl.meeting.patience().for_work(impl.longest_fold()),
                           [&] { impl.transport.progress(); });
      if (block_done) block_done(b + 1, blocks);
    }
  });
  return timeline->stats();
}

void Attention::set_lengths(const Batch& batch) { impl_->set_lengths(batch); }

void Attention::enqueue(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream) {
  impl_->check(inputs, outputs, workspace);
  impl_->enqueue(inputs, outputs, workspace, stream, nullptr, {}, RunMode::kWhole);
}

void Attention::wait() {
  if (impl_->runs->any()) impl_->runs->settle();
}

}  // namespace ringattn
