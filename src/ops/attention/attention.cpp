// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/attention.hpp"

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
#include "kernels/quant/tensor_compression.hpp"
#include "ops/attention/attention_ring_step.hpp"
#include "ops/attention/compressed_ring_step.hpp"
#include "ops/attention/lengths.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

// The streams of a compressed tensor. A plain tensor is one stream.
CompressedRows stream_rows(const RowFormat& format, const CompressedRows& packed, const TensorView& plain) {
  if (!format.is_plain()) return packed;
  const auto element = static_cast<std::int64_t>(size_of(plain.dtype));
  CompressedRows rows;
  rows.streams[0] = {static_cast<std::byte*>(const_cast<void*>(plain.data)), plain.token_stride * element,
                     plain.head_stride * element};
  return rows;
}

bool is_dense(const RowFormat& format, const RowShape& shape, const CompressedRows& packed, const TensorView& plain) {
  return format.is_plain() ? plain.is_dense() : has_dense_streams(format, shape, packed);
}

void check_compressed_rows(std::string_view name, const RowFormat& format, const RowShape& shape,
                           const CompressedRows& packed, std::int64_t rows) {
  bool complete = true;
  for (std::size_t i = 0; i < format_streams(format, shape).size(); ++i) {
    complete = complete && (packed.streams[i].data != nullptr || rows == 0);
  }
  for (std::size_t i = 0; i < format_tables(format, shape, 1).size(); ++i) {
    complete = complete && packed.tables[i] != nullptr;
  }
  if (complete) return;
  fail(ErrorCode::kUsage, fmt::format("parts of {} are missing", name),
       fmt::format("the job stores it as {}", describe(format)),
       "format_streams() and format_tables() say what it has.");
}

}  // namespace

// Everything that depends on the lengths of the sequences. Each rank makes its own.
struct Attention::Lengths {
  Lengths(const RingJob& job, const Options& options, const Transport& transport)
      : batch(job.work.batch),
        summary(ringattn::summarize_plan(job, options, transport.route(), transport.size(), transport.rank())),
        prepared(summary.plan.blocks.size(), kNotPrepared),
        runs(summary.plan, summary.time_estimate.seconds) {}

  Batch batch;
  PlanSummary summary;
  std::vector<PreparedTask> prepared;  // [blocks]
  PlannedRuns runs;
};

struct Attention::Impl {
  Impl(Job the_job, Transport& the_transport, Options the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.timeout_seconds)) {}

  bool several() const { return transport.size() > 1; }
  bool is_compressed() const { return !job.format.is_plain(); }
  bool is_dense(const Inputs& inputs) const {
    return ringattn::is_dense(job.format.k, k_shape(job.spec), inputs.quantized_k, inputs.k) &&
           ringattn::is_dense(job.format.v, v_shape(job.spec), inputs.quantized_v, inputs.v);
  }
  bool reads_pages() const { return !is_compressed() && ringattn::reads_pages(job.page_size, transport.size()); }
  bool gathers_pages() const { return job.page_size > 0 && !reads_pages(); }
  const Lengths& now() const { return others != nullptr ? *others : *prepared; }
  Lengths& now() { return others != nullptr ? *others : *prepared; }
  const Plan& plan() const { return now().summary.plan; }
  std::int64_t q_rows() const { return now().summary.layout().queries.tokens(transport.rank()); }
  std::int64_t k_rows() const { return now().summary.layout().keys.tokens(transport.rank()); }
  std::vector<std::int64_t> key_rows_of_sequences() const {
    return rows_of_sequences(now().summary.layout().keys, transport.rank());
  }

  WorkspaceLayout workspace(bool dense_kv) const {
    const bool staged = gathers_pages() || (several() && !dense_kv);
    return ring->workspace(plan().keeps_state ? kernel->state_bytes(q_rows()) : 0, {staged ? k_rows() : 0});
  }
  // With compressed keys the decompressed rows of a block follow in the workspace.
  std::size_t decompressed_bytes(std::int64_t token_bytes) const {
    return aligned(static_cast<std::size_t>(max_decompressed * token_bytes));
  }
  std::size_t keys_bytes() const { return decompressed_bytes(k_token_bytes(job.spec)); }
  std::size_t values_bytes() const { return decompressed_bytes(v_token_bytes(job.spec)); }
  std::size_t workspace_bytes(bool dense_kv) const {
    return workspace(dense_kv).bytes + (is_compressed() ? keys_bytes() + values_bytes() : 0);
  }

  void choose();
  void allocate();
  void set_lengths(const Batch& batch);
  void check(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace) const;
  void check_keys(std::string_view name, const RowFormat& format, const RowShape& shape, const TensorView& plain,
                  const CompressedRows& packed) const;
  void check_capture() const;
  void enqueue(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream,
               Timeline* timeline, const BlockDone& block_done, RunMode mode);
  void enqueue_compressed(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream,
                          Timeline* timeline, const BlockDone& block_done, RunMode mode);
  void throw_invalid_elements();
  StreamRows dense_shard(const Inputs& inputs, StreamRows staged, Stream stream) const;
  KeySource key_source(const StreamRows& rows, std::int64_t count) const;

  Job job;  // with the lengths of now()
  Options options;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  AttentionChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<AttentionKernel> kernel;
  RingJob prepared_job;                                 // with the lengths at construction
  std::unique_ptr<Lengths> prepared;                    // of prepared_job
  std::unique_ptr<Lengths> others;                      // after set_lengths(); replaces `prepared`
  std::vector<PageRun> page_map;                        // of a block's tiles in pages
  LowRankGemms gemms;                                   // this and the following members: compressed jobs only
  std::vector<DecompressedBlock> decompressed;          // [blocks]
  std::int64_t max_decompressed = 0;                    // maximum number of rows of a block
  std::optional<InvalidElementCells> invalid_elements;  // two cells per block, for k and for v
  std::optional<RingRuns> ring;
};

void Attention::Impl::choose() {
  check_job(job);
  choice = choose_kernel(job.spec, compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  kernel = choice.row->make_kernel(job.spec, *backend);
  check_compatible(*choice.row, *backend, transport);
  if (options.checksum) check_checksum(*backend);
  if (is_compressed()) {
    check_compressed(job, options, kernel->key_tile());
    gemms = make_low_rank_gemms(job, choice.row->backend, *backend);
  }
  prepared_job = ring_job(job, options, *kernel, transport.size(), gemms.scratch_bytes(job));
  check_size(prepared_job, options, transport.size());
}

void Attention::Impl::allocate() {
  prepared = std::make_unique<Lengths>(prepared_job, options, transport);
  const AttentionLimits limits = reserved_limits(prepared_job, options, prepared->summary.layout(), plan());
  kernel->reserve(limits);
  if (reads_pages()) page_map.reserve(static_cast<std::size_t>(limits.tiles));
  if (is_compressed()) {
    for (const BlockPlan& block : plan().blocks) {
      decompressed.push_back(decompressed_block(plan(), block));
      max_decompressed = std::max(max_decompressed, decompressed.back().rows);
    }
    gemms.reserve(job);
    invalid_elements.emplace(*backend, collective, transport, 2 * decompressed.size());
  }
  if (limits.prepared > 0) {
    const TilesOf tiles = [this](std::size_t block) { return std::span<const PageRun>(decompressed[block].tiles); };
    prepared->prepared =
        prepare_tasks(plan(), job.spec, *kernel, options.state_out, is_compressed() ? tiles : TilesOf());
  }
  ring.emplace(collective, transport, *backend,
               RingRuns::Settings{prepared_job.work.streams, options.overlap, options.checksum,
                                  options.machine.flops_per_second});
  ring->allocate({plan().buffer_rows + spare_rows(prepared_job, options, transport.size())});
  load_decompression(job.format.k, k_shape(job.spec), *backend);
  load_decompression(job.format.v, v_shape(job.spec), *backend);
  ring->make_mover(prepared->runs);
}

void Attention::Impl::set_lengths(const Batch& batch) {
  if (batch == job.batch) return;
  if (batch == prepared->batch) {
    others.reset();
  } else {
    const Options within = options_within(prepared_job, options, batch, transport.route(), transport.size());
    RingJob asked = prepared_job;
    asked.work.batch = batch;
    auto lengths = std::make_unique<Lengths>(asked, within, transport);
    ring->make_mover(lengths->runs);
    others = std::move(lengths);
  }
  job.batch = batch;
}

void Attention::Impl::check(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> space) const {
  const AttentionSpec& spec = job.spec;
  check_shard("Attention", "q", inputs.q, {spec.dtype, q_rows(), spec.heads, spec.head_dim});
  if (job.page_size > 0) {
    check_paged_keys(inputs.pages, job, key_rows_of_sequences());
  } else {
    check_keys("k", job.format.k, k_shape(spec), inputs.k, inputs.quantized_k);
    check_keys("v", job.format.v, v_shape(spec), inputs.v, inputs.quantized_v);
  }
  const bool has_rows = inputs.k.data != nullptr || inputs.quantized_k.streams[0].data != nullptr;
  const bool has_pages = inputs.pages.k.data != nullptr || inputs.pages.quantized_k.streams[0].data != nullptr;
  if (job.page_size > 0 ? has_rows : has_pages) {
    fail(ErrorCode::kUsage, job.page_size > 0 ? "k is given" : "pages are given",
         job.page_size > 0 ? fmt::format("the job's keys lie in pages of {} tokens", job.page_size)
                           : "the job has no page size",
         "Job::page_size says whether keys lie in pages.");
  }
  check_shard("Attention", "out", outputs.out, {spec.dtype, q_rows(), spec.heads, spec.head_dim_v});
  check_apart("out", outputs.out, "q", inputs.q);
  check_apart("out", outputs.out, "k", inputs.k);
  check_apart("out", outputs.out, "v", inputs.v);
  check_sinks("AttentionSpec", inputs.sinks, spec.sinks);
  if (options.state_out != outputs.state.has_value()) {
    fail(ErrorCode::kUsage, options.state_out ? "Outputs::state is missing" : "Outputs::state is given",
         options.state_out ? "Options::state_out asks for it" : "Options::state_out is off",
         "Give Outputs::state exactly where Options::state_out is on.");
  }
  const std::size_t needed = workspace_bytes(is_dense(inputs));
  if (space.size() < needed) {
    fail(ErrorCode::kUsage, fmt::format("the workspace has {} bytes", space.size()),
         fmt::format("{} are needed", needed), "Ask Attention::workspace_bytes().");
  }
}

void Attention::Impl::check_keys(std::string_view name, const RowFormat& format, const RowShape& shape,
                                 const TensorView& plain, const CompressedRows& packed) const {
  if (format.is_plain()) {
    check_shard("Attention", name, plain, {shape.dtype, k_rows(), shape.heads, shape.dim});
  } else {
    check_compressed_rows(name, format, shape, packed, k_rows());
  }
  if ((format.is_plain() ? packed.streams[0].data : plain.data) == nullptr) return;
  fail(ErrorCode::kUsage, fmt::format("{} is given {}", name, format.is_plain() ? "compressed" : "uncompressed"),
       fmt::format("the job stores it as {}", describe(format)), "Job::format says how keys and values are stored.");
}

void Attention::Impl::check_capture() const {
  ring->check_capture_alone();
  if (others != nullptr) {
    refuse_capture("the tables of other lengths than the prepared ones are made for one run",
                   "Prepare an Attention for these lengths, or enqueue the run outside of the capture.");
  }
  if (job.page_size > 0) {
    refuse_capture("its block table lies in host memory, where a replay does not read it",
                   "Enqueue it outside of the capture.");
  }
  RingRuns::check_capture_of(prepared->prepared);
}

// The rank's own K and V as dense rows: in place, or copied to `staged`.
StreamRows Attention::Impl::dense_shard(const Inputs& inputs, StreamRows staged, Stream stream) const {
  if (gathers_pages()) {
    gather_pages(inputs.pages, job, key_rows_of_sequences(), *backend, staged, stream);
    return staged;
  }
  if (is_compressed()) {
    const CompressedRows k = stream_rows(job.format.k, inputs.quantized_k, inputs.k);
    const CompressedRows v = stream_rows(job.format.v, inputs.quantized_v, inputs.v);
    return dense_stream_rows(job, k, v, k_rows(), std::move(staged), *backend, stream);
  }
  const TensorView views[] = {inputs.k, inputs.v};
  return ring->dense_shard(views, std::move(staged), stream);
}

// `count` dense rows of K and V.
KeySource Attention::Impl::key_source(const StreamRows& rows, std::int64_t count) const {
  const AttentionSpec& spec = job.spec;
  const void* const k = rows[0];
  const void* const v = rows[1];
  return {dense_view(k, spec.dtype, count, spec.kv_heads, spec.head_dim),
          dense_view(v, spec.dtype, count, spec.kv_heads, spec.head_dim_v)};
}

void Attention::Impl::enqueue(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> space, Stream stream,
                              Timeline* times, const BlockDone& block_done, RunMode mode) {
  if (backend->is_capturing(stream)) check_capture();
  if (is_compressed()) {
    enqueue_compressed(inputs, outputs, space, stream, times, block_done, mode);
    return;
  }
  const WorkspaceLayout layout = workspace(is_dense(inputs));
  AttentionRingStep::Memory memory;
  memory.q = inputs.q;
  memory.own = {inputs.k, inputs.v};
  memory.state = space.data() + layout.state;
  memory.output = {outputs.out, outputs.lse, inputs.sinks};
  memory.exports = outputs.state;
  const StreamRows staged = rows_at(space.data(), layout.staged);
  if (reads_pages()) {
    const PoolSource pool = pool_source(inputs.pages.k, inputs.pages.v);
    memory.own = pool.source;
    memory.pages = &inputs.pages;
    memory.page_rows = pool.page_rows;
    memory.map = &page_map;
  } else if (job.page_size > 0) {
    memory.own = key_source(staged, k_rows());
  }
  std::array<StreamRows, 2> buffers = ring->block_buffers(space.data(), layout);
  for (std::size_t parity = 0; parity < 2; ++parity) {
    memory.buffers[parity] = key_source(buffers[parity], ring->buffer_rows().keys);
  }
  AttentionRingStep step(plan(), *kernel, now().prepared, memory);
  ring->enqueue({now().runs, step, std::move(buffers), [&] { return dense_shard(inputs, staged, stream); }, mode},
                stream, times, block_done);
}

void Attention::Impl::enqueue_compressed(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> space,
                                         Stream stream, Timeline* times, const BlockDone& block_done, RunMode mode) {
  const WorkspaceLayout layout = workspace(is_dense(inputs));
  std::array<StreamRows, 2> buffers = ring->block_buffers(space.data(), layout);
  CompressedRingStep::Memory memory;
  memory.q = inputs.q;
  const StreamRows staged = rows_at(space.data(), layout.staged);
  memory.k.own = stream_rows(job.format.k, inputs.quantized_k, inputs.k);
  memory.v.own = stream_rows(job.format.v, inputs.quantized_v, inputs.v);
  const auto dense_rows = [&](const StreamRows& rows, CompressedRows& k, CompressedRows& v) {
    const std::span<std::byte* const> streams(rows);
    const std::size_t of_k = format_streams(job.format.k, k_shape(job.spec)).size();
    k = rows_at(streams.first(of_k), memory.k.own.tables, job.format.k, k_shape(job.spec));
    v = rows_at(streams.subspan(of_k), memory.v.own.tables, job.format.v, v_shape(job.spec));
  };
  if (gathers_pages()) {
    memory.k.own.tables = inputs.pages.quantized_k.tables;
    memory.v.own.tables = inputs.pages.quantized_v.tables;
    dense_rows(staged, memory.k.own, memory.v.own);
  }
  for (std::size_t parity = 0; parity < 2; ++parity) {
    dense_rows(buffers[parity], memory.k.buffers[parity], memory.v.buffers[parity]);
  }
  memory.keys = space.data() + layout.bytes;
  memory.values = memory.keys + keys_bytes();
  memory.state = space.data() + layout.state;
  memory.output = {outputs.out, outputs.lse, inputs.sinks};
  memory.exports = outputs.state;
  const CompressedRingStep::Tools tools{job,      plan(),  decompressed, prepared->prepared,
                                        *backend, *kernel, gemms,        *invalid_elements};
  CompressedRingStep step(tools, memory);
  const auto shard = [&] { return dense_shard(inputs, staged, stream); };
  ring->enqueue({now().runs, step, std::move(buffers), shard, mode, gathers_pages()}, stream, times, block_done);
}

// Throws for invalid elements that decompression has reported, named as in the caller's tensors. All runs have ended.
void Attention::Impl::throw_invalid_elements() {
  if (!invalid_elements) return;
  const std::vector<InvalidElementCell> cells = invalid_elements->drain();
  const auto refuse = [&](std::string_view name, const RowFormat& format, const RowShape& shape, std::size_t which) {
    InvalidElementCell first;
    for (std::size_t block = 0; block < decompressed.size(); ++block) {
      std::optional<InvalidElement> invalid = invalid_element_of(cells[2 * block + which], format, shape);
      if (invalid && invalid->kind != InvalidElement::Kind::kTable) {
        invalid->token = key_of_row(decompressed[block], job.batch, invalid->token);
      }
      note_invalid_element(first, invalid);
    }
    if (const auto invalid = invalid_element_of(first, format, shape)) {
      refuse_invalid_element(name, format, shape, *invalid, ErrorCode::kUsage);
    }
  };
  if (cells.empty()) return;
  refuse("k", job.format.k, k_shape(job.spec), 0);
  refuse("v", job.format.v, v_shape(job.spec), 1);
}

Attention::Attention(Job job, Transport& transport, Options options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
  const MachineModel given = impl.options.machine;
  impl.options.machine = common_machine(impl.collective, given,
                                        job_machine(given, *impl.choice.row, impl.job.spec, *impl.backend,
                                                    tokens_of_rank(impl.job.batch, transport.size())));
  impl.config_hash = handshake(impl.collective, rank_config(impl.job, impl.options, impl.choice, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  impl.ring->connect(impl.prepared->runs);
}

Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;

const Job& Attention::job() const { return impl_->job; }
const Options& Attention::options() const { return impl_->options; }
const AttentionChoice& Attention::kernel() const { return impl_->choice; }
Backend& Attention::backend() { return *impl_->backend; }
const JobLayout& Attention::layout() const { return impl_->now().summary.layout(); }
const Plan& Attention::plan() const { return impl_->plan(); }
const TimeEstimate& Attention::time_estimate() const { return impl_->now().summary.time_estimate; }
std::int64_t Attention::q_rows() const { return impl_->q_rows(); }
std::int64_t Attention::k_rows() const { return impl_->k_rows(); }
std::size_t Attention::workspace_bytes(bool dense_kv) const { return impl_->workspace_bytes(dense_kv); }

RunStats Attention::run(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream,
                        const BlockDone& block_done, RunMode mode) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, describe(impl.job), [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(inputs, outputs, workspace);
  });
  const RunStats stats = impl.ring->run(
      impl.now().runs,
      [&](Timeline* timeline) { impl.enqueue(inputs, outputs, workspace, stream, timeline, block_done, mode); },
      block_done);
  if (impl.invalid_elements) impl.collective.run_collectively([&] { impl.throw_invalid_elements(); });
  return stats;
}

void Attention::set_lengths(const Batch& batch) { impl_->set_lengths(batch); }

void Attention::enqueue(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream) {
  impl_->check(inputs, outputs, workspace);
  impl_->enqueue(inputs, outputs, workspace, stream, nullptr, {}, RunMode::kWhole);
}

void Attention::wait() {
  impl_->ring->wait();
  impl_->throw_invalid_elements();
}

}  // namespace ringattn
