// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
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
#include "kernels/common/registry.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "kernels/quant/tensor_compression.hpp"
#include "ops/attention/attention_ring_step.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/mla/gathered_blocks.hpp"
#include "ops/mla/mla_checks.hpp"
#include "ops/mla/mla_ring_steps.hpp"
#include "ops/mla/mla_work.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const MessageTemplate& problem, const MessageTemplate& why,
                         const MessageTemplate& suggestion) {
  fail(ErrorCode::kUsage, problem, why, suggestion);
}

// FP8 rows viewed as bf16 elements, for copies of bytes.
TensorView halves_of(const StreamView& rows, std::int64_t count, std::int64_t row_bytes) {
  constexpr auto kHalf = static_cast<std::int64_t>(size_of(Dtype::kBf16));
  TensorView view = dense_view(static_cast<const void*>(rows.data), Dtype::kBf16, count, 1, row_bytes / kHalf);
  if (count > 1) view.token_stride = rows.token_stride / kHalf;
  return view;
}

// Layout of the workspace: the ring's part, then the op's buffers.
struct MlaWorkspace {
  WorkspaceLayout ring;
  std::size_t keys = 0;
  std::size_t values = 0;
  std::size_t dequantized = 0;
  std::size_t queries = 0;
  std::size_t latents = 0;
  std::size_t bytes = 0;
};

}  // namespace

struct Mla::Impl {
  Impl(MlaJob the_job, Transport& the_transport, MlaOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.ring.timeout_seconds)) {}

  bool absorbed() const { return *job.form == MlaForm::kAbsorbed; }
  std::int64_t q_rows() const { return summary->layout().queries.tokens(transport.rank()); }
  std::int64_t k_rows() const { return summary->layout().keys.tokens(transport.rank()); }
  MlaKernels kernels() const { return {*attention, key_gemms.get(), value_gemms.get()}; }

  void choose();
  void allocate();
  MlaWorkspace mla_workspace(bool dense_rows) const;
  bool is_fp8() const { return !job.format.is_plain(); }
  // Views of the rank's rows that are exchanged, [streams].
  std::vector<TensorView> shard(const MlaInputs& inputs) const;
  bool is_dense(const MlaInputs& inputs) const;
  void set_sources(const MlaInputs& inputs, std::span<const StreamRows> buffers, MlaMemory& memory) const;
  void check_fp8_rows(const StreamView& rows) const;
  void check(const MlaInputs& inputs, const MlaOutputs& outputs, std::span<std::byte> workspace) const;
  void enqueue(const MlaInputs& inputs, const MlaOutputs& outputs, std::span<std::byte> workspace, Stream stream,
               Timeline* timeline, const BlockDone& block_done, RunMode mode);

  MlaJob job;  // with the chosen form
  MlaOptions options;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  MlaFormChoice form;
  AttentionChoice choice;
  std::string_view gemms;  // kernel name
  MlaBlockSize block_size;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<AttentionKernel> attention;
  std::unique_ptr<BatchedGemmKernel> key_gemms;    // of key_gemm(); may be null
  std::unique_ptr<BatchedGemmKernel> value_gemms;  // of value_gemm(); may be null
  std::optional<PlanSummary> summary;
  std::vector<GatheredBlock> blocks;   // [blocks of the plan]
  std::int64_t max_gathered = 0;       // maximum number of rows of a block
  std::vector<PreparedTask> prepared;  // [blocks]
  std::optional<PlannedRuns> runs;
  std::optional<RingRuns> ring;
};

void Mla::Impl::choose() {
  check_mla_job(job);
  if (options.ring.state_out || options.ring.shorter_lengths) {
    refuse(options.ring.state_out ? "the attention state is wanted" : "shorter lengths are wanted", "MLA has neither",
           "Leave Options::state_out and Options::shorter_lengths off.");
  }
  form = choose_form(job);
  job.form = form.form;
  const MlaChoice chosen = choose_mla_kernels(job.spec, form.form, compatible_request(options.ring.kernel, transport));
  choice = chosen.attention;
  backend = choice.row->make_backend({options.ring.threads, transport.device()});
  check_compatible(*choice.row, *backend, transport);
  if (options.ring.checksum) check_checksum(*backend);
  gemms = chosen.gemms();
  if (const auto of_keys = key_gemm(job.spec, form.form)) {
    key_gemms = chosen.keys->make_kernel(*of_keys, *backend);
  }
  if (const auto of_values = value_gemm(job.spec)) {
    value_gemms = chosen.values->make_kernel(*of_values, *backend);
  }
  const auto make_attention_kernel = [&](int heads) {
    return choice.row->make_kernel(form_spec(job.spec, form.form, heads), *backend);
  };
  block_size = choose_mla_block_size(job, options.ring, options.heads_at_a_time, transport.size(),
                                     {make_attention_kernel, key_gemms.get(), value_gemms.get()});
  attention = make_attention_kernel(block_size.heads);
  check_size(ring_job(job, options.ring, block_size, kernels()), options.ring, transport.size());
}

void Mla::Impl::allocate() {
  const Options& asked = options.ring;
  const RingJob ring_job = ringattn::ring_job(job, asked, block_size, kernels());
  summary = ringattn::summarize_plan(ring_job, asked, transport.route(), transport.size(), transport.rank());
  const Plan& plan = summary->plan;
  for (const BlockPlan& block : plan.blocks) {
    blocks.push_back(gather_block(plan, block));
    max_gathered = std::max(max_gathered, blocks.back().rows);
  }
  const AttentionLimits limits = reserved_limits(ring_job, asked, summary->layout(), plan);
  attention->reserve(limits);
  if (key_gemms) key_gemms->reserve(block_size.heads);
  if (value_gemms) value_gemms->reserve(block_size.heads);
  prepared.assign(plan.blocks.size(), kNotPrepared);
  if (limits.prepared > 0) {
    prepared = prepare_tasks(plan, form_spec(job.spec, form.form, block_size.heads), *attention, false,
                             [this](std::size_t block) { return std::span<const PageRun>(blocks[block].tiles); });
  }
  runs.emplace(plan, summary->time_estimate.seconds);
  ring.emplace(
      collective, transport, *backend,
      RingRuns::Settings{ring_job.work.streams, asked.overlap, asked.checksum, asked.machine.flops_per_second});
  ring->allocate({plan.buffer_rows});
  load_decompression(job.format, {job.spec.dtype, 1, job.spec.latent_dim + job.spec.rope_dim}, *backend);
  ring->make_mover(*runs);
}

MlaWorkspace Mla::Impl::mla_workspace(bool dense_rows) const {
  const MlaSpec& spec = job.spec;
  const std::size_t state =
      mla_state_stride(*attention, q_rows()) * static_cast<std::size_t>(spec.heads / block_size.heads);
  MlaWorkspace mla_workspace;
  mla_workspace.ring =
      ring->workspace(summary->plan.keeps_state ? state : 0, {transport.size() > 1 && !dense_rows ? k_rows() : 0});
  mla_workspace.bytes = mla_workspace.ring.bytes;
  const auto place = [&](std::int64_t rows, std::int64_t row_bytes) {
    const std::size_t at = mla_workspace.bytes;
    mla_workspace.bytes += aligned(static_cast<std::size_t>(rows * row_bytes));
    return at;
  };
  if (!absorbed()) {
    const AttentionSpec chunk = expanded_spec(spec, block_size.heads);
    mla_workspace.keys = place(max_gathered, k_token_bytes(chunk));
    mla_workspace.values = place(max_gathered, v_token_bytes(chunk));
    mla_workspace.dequantized = place(max_gathered, dequantized_row_bytes(job));
    return mla_workspace;
  }
  const AttentionSpec all = absorbed_spec(spec);
  mla_workspace.keys = place(max_gathered, k_token_bytes(all));
  if (!spec.q_in_latent) mla_workspace.queries = place(q_rows(), q_token_bytes(all));
  if (!spec.out_in_latent) mla_workspace.latents = place(q_rows(), out_token_bytes(all));
  return mla_workspace;
}

std::vector<TensorView> Mla::Impl::shard(const MlaInputs& inputs) const {
  if (is_fp8()) return {halves_of(inputs.fp8_rows, k_rows(), latent_row_bytes(job.spec))};
  return {inputs.latent, inputs.k_rope};
}

bool Mla::Impl::is_dense(const MlaInputs& inputs) const {
  return std::ranges::all_of(shard(inputs), [](const TensorView& view) { return view.is_dense(); });
}

void Mla::Impl::set_sources(const MlaInputs& inputs, std::span<const StreamRows> buffers, MlaMemory& memory) const {
  if (is_fp8()) {
    const std::int64_t bytes = latent_row_bytes(job.spec);
    memory.fp8_rows = {inputs.fp8_rows, StreamView{buffers[0][0], bytes, bytes},
                       StreamView{buffers[1][0], bytes, bytes}};
    return;
  }
  const auto dense_rows = [&](const StreamRows& rows) {
    const void* const latent = rows[0];
    const void* const k_rope = rows[1];
    return LatentRows{dense_view(latent, job.spec.dtype, ring->buffer_rows().keys, 1, job.spec.latent_dim),
                      dense_view(k_rope, job.spec.dtype, ring->buffer_rows().keys, 1, job.spec.rope_dim)};
  };
  memory.sources = {LatentRows{inputs.latent, inputs.k_rope}, dense_rows(buffers[0]), dense_rows(buffers[1])};
}

void Mla::Impl::check_fp8_rows(const StreamView& rows) const {
  const std::int64_t bytes = latent_row_bytes(job.spec);
  if (k_rows() == 0) return;
  check_given("Mla", "fp8_rows", rows.data, true);
  const bool apart = k_rows() == 1 || (rows.token_stride >= bytes && rows.token_stride % 2 == 0);
  if (!apart || reinterpret_cast<std::uintptr_t>(rows.data) % 2 != 0) {
    refuse(
        fmt::format("the FP8 rows lie at {}, {} bytes apart", static_cast<const void*>(rows.data), rows.token_stride),
        fmt::format("they have {} bytes, and begin at even addresses", bytes), "Lay them out so, or copy them.");
  }
}

void Mla::Impl::check(const MlaInputs& inputs, const MlaOutputs& outputs, std::span<std::byte> space) const {
  const MlaSpec& spec = job.spec;
  const bool has_w_uk = inputs.w_uk.data != nullptr;
  const bool has_w_uv = inputs.w_uv.data != nullptr;
  if (!absorbed() && !(has_w_uk && has_w_uv)) {
    refuse(fmt::format("{} is missing", has_w_uk ? "w_uv" : "w_uk"),
           "the expanded form computes keys and values from both",
           "Give both matrices, or name the absorbed form in MlaJob::form.");
  }
  check_matrices(inputs.w_uk, inputs.w_uv, spec);
  const int nope = has_w_uk ? spec.head_dim : spec.latent_dim;
  check_shard("Mla", "q", inputs.q, {spec.dtype, q_rows(), spec.heads, nope + spec.rope_dim});
  if (is_fp8()) {
    check_given("Mla", "latent", inputs.latent.data, false);
    check_given("Mla", "k_rope", inputs.k_rope.data, false);
    check_fp8_rows(inputs.fp8_rows);
  } else {
    check_given("Mla", "fp8_rows", inputs.fp8_rows.data, false);
    check_shard("Mla", "latent", inputs.latent, {spec.dtype, k_rows(), 1, spec.latent_dim});
    check_shard("Mla", "k_rope", inputs.k_rope, {spec.dtype, k_rows(), 1, spec.rope_dim});
  }
  check_shard("Mla", "out", outputs.out,
              {spec.dtype, q_rows(), spec.heads, has_w_uv ? spec.head_dim_v : spec.latent_dim});
  check_apart("out", outputs.out, "q", inputs.q);
  constexpr std::string_view kStreams[] = {"latent", "k_rope"};
  std::size_t at = 0;
  for (const TensorView& rows : shard(inputs))
    check_apart("out", outputs.out, is_fp8() ? "fp8_rows" : kStreams[at++], rows);
  check_sinks("MlaSpec", inputs.sinks, spec.sinks);
  const std::size_t needed = mla_workspace(is_dense(inputs)).bytes;
  if (space.size() < needed) {
    refuse(fmt::format("the workspace has {} bytes", space.size()), fmt::format("{} are needed", needed),
           "Ask Mla::workspace_bytes().");
  }
}

void Mla::Impl::enqueue(const MlaInputs& inputs, const MlaOutputs& outputs, std::span<std::byte> space, Stream stream,
                        Timeline* times, const BlockDone& block_done, RunMode mode) {
  if (backend->is_capturing(stream)) {
    ring->check_capture_alone();
    RingRuns::check_capture_of(prepared);
  }
  const MlaWorkspace mla_workspace = this->mla_workspace(is_dense(inputs));
  std::array<StreamRows, 2> buffers = ring->block_buffers(space.data(), mla_workspace.ring);
  MlaMemory memory;
  memory.q = inputs.q;
  set_sources(inputs, buffers, memory);
  memory.w_uk = inputs.w_uk;
  memory.w_uv = inputs.w_uv;
  if (summary->plan.keeps_state) memory.state = space.data() + mla_workspace.ring.state;
  memory.output = {outputs.out, outputs.lse, inputs.sinks};
  memory.keys = space.data() + mla_workspace.keys;
  memory.values = space.data() + mla_workspace.values;
  memory.dequantized = space.data() + mla_workspace.dequantized;
  memory.queries = space.data() + mla_workspace.queries;
  memory.latents = space.data() + mla_workspace.latents;
  const MlaTools tools{job.spec, job.format, summary->plan,   blocks,           prepared,
                       *backend, *attention, key_gemms.get(), value_gemms.get()};
  ExpandedRingStep expanded(tools, memory, block_size.heads, mla_state_stride(*attention, q_rows()));
  AbsorbedRingStep absorbed_step(tools, memory);
  const auto shard = [&] {
    return ring->dense_shard(this->shard(inputs), rows_at(space.data(), mla_workspace.ring.staged), stream);
  };
  RingStep& step = absorbed() ? static_cast<RingStep&>(absorbed_step) : expanded;
  ring->enqueue({*runs, step, std::move(buffers), shard, mode}, stream, times, block_done);
}

Mla::Mla(MlaJob job, Transport& transport, MlaOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  Options& asked = impl.options.ring;
  if (asked.threads == 0) asked.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
  const MachineModel given = asked.machine;
  asked.machine =
      common_machine(impl.collective, given,
                     job_machine(given, *impl.choice.row, form_spec(impl.job.spec, impl.form.form, impl.job.spec.heads),
                                 *impl.backend, tokens_of_rank(impl.job.batch, transport.size())));
  impl.config_hash =
      handshake(impl.collective, rank_config(impl.job, impl.options, impl.choice, impl.gemms, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  impl.ring->connect(*impl.runs);
}

Mla::~Mla() = default;
Mla::Mla(Mla&&) noexcept = default;

const MlaJob& Mla::job() const { return impl_->job; }
const MlaFormChoice& Mla::form() const { return impl_->form; }
const MlaOptions& Mla::options() const { return impl_->options; }
int Mla::heads_at_a_time() const { return impl_->block_size.heads; }
const AttentionChoice& Mla::kernel() const { return impl_->choice; }
Backend& Mla::backend() { return *impl_->backend; }
const JobLayout& Mla::layout() const { return impl_->summary->layout(); }
const Plan& Mla::plan() const { return impl_->summary->plan; }
const TimeEstimate& Mla::time_estimate() const { return impl_->summary->time_estimate; }
std::int64_t Mla::q_rows() const { return impl_->q_rows(); }
std::int64_t Mla::k_rows() const { return impl_->k_rows(); }
std::int64_t Mla::bytes_received() const { return plan().bytes_received(); }
std::int64_t Mla::expanded_bytes_received() const {
  return received_rows(plan()) * expanded_token_bytes(impl_->job.spec);
}
std::size_t Mla::workspace_bytes(bool dense_rows) const { return impl_->mla_workspace(dense_rows).bytes; }

RunStats Mla::run(const MlaInputs& inputs, const MlaOutputs& outputs, std::span<std::byte> workspace, Stream stream,
                  const BlockDone& block_done, RunMode mode) {
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

void Mla::enqueue(const MlaInputs& inputs, const MlaOutputs& outputs, std::span<std::byte> workspace, Stream stream) {
  impl_->check(inputs, outputs, workspace);
  impl_->enqueue(inputs, outputs, workspace, stream, nullptr, {}, RunMode::kWhole);
}

void Mla::wait() { impl_->ring->wait(); }

}  // namespace ringattn
