// SPDX-License-Identifier: Apache-2.0
#include "attention/attention.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "attention/ring/engine.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/machine_model.hpp"
#include "attention/ring/workspace.hpp"
#include "base/error.hpp"
#include "base/host.hpp"
#include "comm/meeting.hpp"

namespace ringattn {

namespace {

JobLayout layout_of(const Job& job, const Options& options, const FoldKernel& kernel, int world) {
  JobLayout layout = make_layout(job, world, options.layout, kernel.query_tile(), kernel.key_tile());
  const auto state_runs = [world](Layout& dealt, const auto& stated, std::string_view side,
                                  const std::vector<std::int64_t>& lengths) {
    if (!stated) return;
    if (static_cast<int>(stated->size()) != world) {
      fail(ErrorCode::kUsage, fmt::format("{} runs are stated for {} ranks", side, stated->size()),
           fmt::format("the world has {}", world), "State one list of runs for each rank.");
    }
    dealt = Layout(lengths, *stated);
  };
  state_runs(layout.queries, options.query_runs, "query", job.batch.q_lengths());
  state_runs(layout.keys, options.key_runs, "key", job.batch.k_lengths());
  return layout;
}

// A task of everything, which no task of a plan exceeds.
FoldLimits largest_task(const Job& job, const JobLayout& layout, const FoldKernel& kernel, int rank) {
  FoldLimits limits;
  limits.rows = layout.queries.tokens(rank);
  limits.query_runs = static_cast<std::int64_t>(layout.queries.runs(rank).size());
  for (const Sequence& sequence : job.batch.sequences) {
    limits.tiles += (sequence.k_len + kernel.key_tile() - 1) / kernel.key_tile();
  }
  limits.key_runs = limits.tiles;
  limits.sources = 2;
  limits.sequences = static_cast<std::int64_t>(job.batch.sequences.size());
  return limits;
}

// What a rank needs whatever the blocks are: its shards, results, scratch and the dense copy.
std::size_t fixed_bytes(const Job& job, const JobLayout& layout, const FoldKernel& kernel, int rank, bool staged) {
  const FoldSpec& spec = job.spec;
  const std::int64_t q_rows = layout.queries.tokens(rank);
  const std::int64_t k_rows = layout.keys.tokens(rank);
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  const std::int64_t q_bytes = q_rows * spec.heads * spec.head_dim * element;
  const std::int64_t o_bytes = q_rows * spec.heads * (spec.head_dim_v * element + 4);
  const std::int64_t kv_bytes = k_rows * kv_token_bytes(spec);
  return static_cast<std::size_t>(q_bytes + o_bytes + (staged ? 2 : 1) * kv_bytes) +
         kernel.scratch_bytes(largest_task(job, layout, kernel, rank));
}

PlanOptions plan_options(const Job& job, const JobLayout& layout, const Options& options, const FoldKernel& kernel,
                         Route route, bool staged_kv) {
  PlanOptions result;
  result.route = route;
  result.block_tokens = options.block_tokens;
  result.memory_budget = options.memory_budget;
  result.state_out = options.state_out;
  result.checksum = options.checksum;
  const int world = layout.queries.world();
  for (int rank = 0; rank < world; ++rank) {  // ranks must cut the same blocks, so the neediest decides
    result.fixed_bytes = std::max(result.fixed_bytes, fixed_bytes(job, layout, kernel, rank, staged_kv && world > 1));
    result.state_bytes = std::max(result.state_bytes, kernel.state_bytes(layout.queries.tokens(rank)));
  }
  return result;
}

// Threads for a host kernel where the caller names none: this process's processors, shared with the ranks that have the
// same ones. Collective.
int share_of_processors(const Meeting& meeting) {
  const Processors processors = usable_processors();
  const std::string mine = host_name() + ' ' + processors.set;
  const std::vector<std::string> all = meeting.gather(mine);
  const auto sharing = std::count(all.begin(), all.end(), mine);
  return std::max(1, processors.count / static_cast<int>(sharing));
}

FoldLimits task_limits(const Plan& plan) {
  FoldLimits limits;
  for (const QueryRun& run : plan.queries) limits.rows += run.rows;
  limits.query_runs = static_cast<std::int64_t>(plan.queries.size());
  for (const BlockPlan& block : plan.blocks) {
    limits.key_runs = std::max(limits.key_runs, static_cast<std::int64_t>(block.key_runs.size()));
    limits.tiles = std::max(limits.tiles, static_cast<std::int64_t>(block.tiles.size()));
  }
  limits.sources = 2;
  limits.sequences = static_cast<std::int64_t>(plan.key_lengths.size());
  return limits;
}

void check_view(std::string_view name, const TensorView& view, const FoldSpec& spec, std::int64_t tokens, int heads,
                int dim) {
  if (view.dtype == spec.dtype && view.tokens == tokens && view.heads == heads && view.dim == dim) return;
  fail(ErrorCode::kUsage,
       fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads, view.dim),
       fmt::format("this rank's share of the job is {} [{}, {}, {}]", dtype_name(spec.dtype), tokens, heads, dim),
       "Rows follow Attention::layout().");
}

// Tables grow with a job before it is known what it needs; beyond this no machine has its tensors.
const Job& check_size(const Job& job, int key_tile, int world) {
  constexpr std::int64_t kMostTiles = std::int64_t{1} << 20;  // 134 million keys in tiles of 128
  constexpr std::int64_t kMostOfAllRanks = std::int64_t{1} << 26;
  std::int64_t tiles = 0;
  for (const Sequence& sequence : job.batch.sequences) {
    const std::int64_t longest = std::max<std::int64_t>({sequence.k_len, sequence.q_len, 1});
    tiles += (longest - 1) / key_tile + 1;
    if (tiles > kMostTiles) break;
  }
  if (tiles > kMostTiles || tiles > kMostOfAllRanks / std::max(world, 1)) {
    fail(ErrorCode::kMemory, fmt::format("the job is too large for {} {}", world, world == 1 ? "rank" : "ranks"),
         fmt::format("a plan holds at most {} tiles of {} keys, and {} in the tables of all its ranks", kMostTiles,
                     key_tile, kMostOfAllRanks),
         "Use fewer tokens or sequences, or fewer ranks.");
  }
  return job;
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

Forecasts::Forecasts(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world,
                     bool staged_kv)
    : job_(check_size(job, kernel.key_tile(), world)),
      layout_(layout_of(job_, options, kernel, world)),
      planner_(job_, layout_, {kernel.key_tile(), kernel.query_tile()}, options.machine,
               plan_options(job_, layout_, options, kernel, route, staged_kv)) {}

Forecast forecast(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world, int rank,
                  bool staged_kv) {
  const Forecasts all(job, options, kernel, route, world, staged_kv);
  Plan plan = all.plan(rank);
  const Prediction prediction = predict(plan, options.machine, options.overlap);
  return {all.layout(), std::move(plan), prediction};
}

struct Attention::Impl {
  Impl(Job the_job, Transport& the_transport, Options the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        meeting(transport, Patience(options.timeout_seconds)) {}

  Job job;
  Options options;
  Transport& transport;
  Meeting meeting;
  FoldChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<FoldKernel> kernel;
  std::optional<Forecast> forecast;
  Buffer block_buffers;  // on devices

  // Peers write to a device's block buffers, so they are memory that transports may map: not the caller's.
  bool owns_block_buffers() const { return backend->memory() == MemoryKind::kDevice && transport.size() > 1; }
  WorkspaceLayout workspace(std::int64_t q_rows, std::int64_t staged_rows) const {
    return workspace_layout(job.spec, forecast->plan.keeps_state ? kernel->state_bytes(q_rows) : 0,
                            owns_block_buffers() ? 0 : forecast->plan.buffer_rows, staged_rows);
  }

  Deadline deadline() const { return meeting.patience().for_peer(); }

  // A byte from everyone to everyone: transports map memory and build their channels when they first use them, which
  // takes far longer than a block should.
  void connect() {
    Exchange exchange;
    exchange.label = "first contact";
    std::byte* bytes = block_buffers.data();
    for (int peer = 0; peer < transport.size(); ++peer) {
      if (peer == transport.rank()) continue;
      exchange.sends.push_back({peer, 0, {{bytes + transport.rank(), 1}}});
      exchange.receives.push_back({peer, 0, {{bytes + peer, 1}}});
    }
    const Stream stream = backend->stream();
    constexpr std::byte kGreeting{1};
    backend->copy_rows(bytes + transport.rank(), 1, &kGreeting, 1, 1, 1, stream);
    transport.wait(transport.post(std::move(exchange), stream), stream, deadline());
    backend->synchronize(backend->mark(stream), deadline(), [this] { transport.progress(); });
  }
};

Attention::Attention(Job job, Transport& transport, Options options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = share_of_processors(impl.meeting);
  impl.meeting.together([&impl] {
    check_job(impl.job);
    impl.choice = choose_kernel(impl.job.spec, fitting_request(impl.options.kernel, impl.transport));
    impl.backend = impl.choice.row->make_backend({impl.options.threads, impl.transport.device()});
    if (impl.options.machine == MachineModel{}) impl.options.machine = default_machine(*impl.choice.row);
    impl.kernel = impl.choice.row->make_kernel(impl.job.spec, *impl.backend);
    if (impl.backend->memory() != impl.transport.memory() && impl.transport.size() > 1) {
      fail(ErrorCode::kUnsupported,
           fmt::format("kernel {} and transport {} don't fit", impl.choice.row->name, impl.transport.name()),
           "one works in host memory, the other in device memory",
           {"Choose both with ", setting("backend"), " and ", setting("transport"), "."});
    }
    if (impl.options.checksum) check_checksum(*impl.backend);
  });
  handshake(impl.meeting, identities(impl.job, impl.options, impl.choice, *impl.backend));
  impl.meeting.together([&impl] {
    impl.forecast = ringattn::forecast(impl.job, impl.options, *impl.kernel, impl.transport.route(),
                                       impl.transport.size(), impl.transport.rank());
    impl.kernel->reserve(task_limits(impl.forecast->plan));
    if (impl.owns_block_buffers()) {
      const std::size_t bytes = block_buffers_layout(impl.job.spec, impl.forecast->plan.buffer_rows).bytes;
      impl.block_buffers = impl.backend->allocate(std::max(bytes, static_cast<std::size_t>(impl.transport.size())));
    }
  });
  if (impl.owns_block_buffers()) impl.connect();
}

Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;

const Job& Attention::job() const { return impl_->job; }
const Options& Attention::options() const { return impl_->options; }
const FoldChoice& Attention::kernel() const { return impl_->choice; }
Backend& Attention::backend() { return *impl_->backend; }
const JobLayout& Attention::layout() const { return impl_->forecast->layout; }
const Plan& Attention::plan() const { return impl_->forecast->plan; }
const Prediction& Attention::prediction() const { return impl_->forecast->prediction; }
std::int64_t Attention::q_rows() const { return layout().queries.tokens(impl_->transport.rank()); }
std::int64_t Attention::k_rows() const { return layout().keys.tokens(impl_->transport.rank()); }

std::size_t Attention::workspace_bytes(bool dense_kv) const {
  const std::int64_t staged_rows = dense_kv || impl_->transport.size() == 1 ? 0 : k_rows();
  return impl_->workspace(q_rows(), staged_rows).bytes;
}

RunStats Attention::run(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream,
                        const BlockDone& block_done, RunMode mode) {
  Impl& impl = *impl_;
  const FoldSpec& spec = impl.job.spec;
  const bool dense_kv = inputs.k.is_dense() && inputs.v.is_dense();
  impl.meeting.together([&] {
    check_view("q", inputs.q, spec, q_rows(), spec.heads, spec.head_dim);
    check_view("k", inputs.k, spec, k_rows(), spec.kv_heads, spec.head_dim);
    check_view("v", inputs.v, spec, k_rows(), spec.kv_heads, spec.head_dim_v);
    check_view("out", outputs.out, spec, q_rows(), spec.heads, spec.head_dim_v);
    if (spec.sinks != (inputs.sinks != nullptr)) {
      fail(ErrorCode::kUsage, spec.sinks ? "sinks are missing" : "sinks are given",
           spec.sinks ? "the job has them" : "the job has none", "FoldSpec::sinks says whether a job has sinks.");
    }
    if (impl.options.state_out != outputs.state.has_value()) {
      fail(ErrorCode::kUsage, impl.options.state_out ? "no place for the fold state" : "a place for the fold state",
           impl.options.state_out ? "Options::state_out asks for it" : "Options::state_out is off",
           "Give Outputs::state exactly where Options::state_out is on.");
    }
    if (workspace.size() < workspace_bytes(dense_kv)) {
      fail(ErrorCode::kUsage, fmt::format("the workspace has {} bytes", workspace.size()),
           fmt::format("{} are needed", workspace_bytes(dense_kv)), "Ask Attention::workspace_bytes().");
    }
  });
  const std::int64_t staged_rows = dense_kv || impl.transport.size() == 1 ? 0 : k_rows();
  const WorkspaceLayout layout = impl.workspace(q_rows(), staged_rows);
  const auto rows_at = [](std::byte* base, const std::size_t(&at)[2]) { return KvRows{base + at[0], base + at[1]}; };
  const WorkspaceLayout own = block_buffers_layout(spec, plan().buffer_rows);
  std::array<KvRows, 2> buffers;
  for (std::size_t parity = 0; parity < 2; ++parity) {
    buffers[parity] = impl.owns_block_buffers() ? rows_at(impl.block_buffers.data(), own.buffers[parity])
                                                : rows_at(workspace.data(), layout.buffers[parity]);
  }
  return run_engine({plan(), spec, impl.options, impl.transport, *impl.backend, *impl.kernel, inputs, outputs,
                     workspace.data() + layout.state, buffers, rows_at(workspace.data(), layout.staged), stream,
                     block_done, mode});
}

}  // namespace ringattn
