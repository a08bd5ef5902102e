// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/warm_up.hpp"
#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "kernels/decode/block_choice.hpp"
#include "kernels/decode/cache_update.hpp"
#include "ops/attention/invalid_element_cells.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/decode/decode_inputs.hpp"
#include "ops/decode/head_results.hpp"
#include "ops/decode/partial_exchange.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

bool has_rows(const TensorView& view) { return view.data != nullptr; }

struct DecodeExtent {
  std::int64_t sequences = 0;  // of the step, over all ranks
  std::int64_t keys = 0;       // of the longest sequence that this rank reads
};

}  // namespace

struct Decode::Impl {
  Impl(DecodeJob the_job, Transport& the_transport, DecodeOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.timeout_seconds)) {}

  // True if ranks exchange partials or head results.
  bool several() const { return deal.exchanges_records(); }
  bool is_part() const { return deal.sequences > 1 || deal.heads > 1; }
  bool on_device() const { return backend->memory() == MemoryKind::kDevice; }
  // Tables in host memory are checked before a step is enqueued.
  bool checks_on_device() const { return on_device() && options.check_tables; }
  KvPartition partition() const { return kept_partition(deal, transport.rank()); }
  HeadRange kv_heads() const { return kept_heads(deal, job.spec, transport.rank()); }
  SequenceRange kept(std::int64_t sequences) const { return kept_sequences(deal, sequences, transport.rank()); }
  std::int64_t kv_split_keys() const { return kernel->kv_split_keys(); }
  SequenceRange owned(std::int64_t count) const { return owned_sequences(count, transport.rank(), transport.size()); }
  static std::int64_t sequences_of(const DecodeInputs& inputs) { return inputs.q.tokens / inputs.rows; }
  std::int32_t* checked_lengths() const { return reinterpret_cast<std::int32_t*>(checks.data() + entry_bytes()); }
  OutOfRangeEntry* entries() const { return reinterpret_cast<OutOfRangeEntry*>(checks.data()); }
  std::int32_t* lengths_of_step(const DecodeInputs& inputs) const {
    return inputs.update_lengths ? inputs.lengths_before : reinterpret_cast<std::int32_t*>(new_lengths.data());
  }
  RowRotation rotation() const { return row_rotation(*job.rope, reinterpret_cast<const double*>(frequencies.data())); }
  std::size_t entry_bytes() const { return static_cast<std::size_t>(part.limits.sequences) * sizeof(OutOfRangeEntry); }

  void choose();
  void allocate();
  void connect();
  void check(const DecodeInputs& inputs, const DecodeOutputs& outputs) const {
    check_step_shapes(job, inputs, outputs, owned(inputs.rows < 1 ? 0 : sequences_of(inputs)).count);
    check_caches(part, inputs);
    check_tables(own(inputs));
  }
  void check_tables(const DecodeInputs& inputs) const;
  void check_capture(const DecodeInputs& inputs) const;
  // The part of a step that this rank reads.
  DecodeInputs own(const DecodeInputs& inputs) const {
    return is_part() ? rank_step(job, inputs, kept(sequences_of(inputs)), kv_heads()) : inputs;
  }
  CacheUpdate update_of(const DecodeInputs& inputs) const;
  BlockChoice choice_of(const DecodeInputs& inputs, const std::int32_t* lengths) const;
  double step_seconds(const DecodeExtent& extent) const;
  void enqueue(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream);
  void enqueue_step(DecodeInputs inputs, const DecodeExtent& extent, const DecodeOutputs& outputs, Stream stream);
  void add_rows(const DecodeInputs& inputs, Stream stream);
  void add_rotated(CacheUpdate& update, DecodeInputs& inputs) const;
  void append(const DecodeInputs& inputs, CacheUpdate at, const std::int32_t* lengths, Stream stream);
  void finish_collectively(DecodeStep step, const DecodeExtent& extent, const AttentionOutput& output, Stream stream);
  void throw_reported_errors();

  DecodeJob job;
  DecodeOptions options;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  DecodeDeal deal;
  DecodeJob part;  // the job of this rank's kernel
  DecodeChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<DecodeKernel> kernel;
  DecodeMemory memory;
  Buffer means, scores, chosen, counts;      // of key blocks, if steps select them
  Buffer frequencies, rotated_q, rotated_k;  // with RoPE: rotated rows of a step, which is given them before
  Buffer checks;       // on devices: [sequences] OutOfRangeEntry, then [sequences] checked lengths
  Buffer new_lengths;  // [sequences] lengths including the step's tokens, if lengths_before is not updated
  std::unique_ptr<Events> errors_read;
  std::optional<InvalidElementCells> appended;  // compressed caches: cells for k_new and v_new
  std::optional<PartialExchange> exchange;      // with several ranks
  std::optional<EnqueuedRuns> runs;
};

void Decode::Impl::choose() {
  check_decode_job(job);
  deal = deal_of(job, transport.size());
  part = rank_job(job, transport.rank(), transport.size());
  choice = choose_kernel(job.decode_spec(), compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  check_compatible(*choice.row, *backend, transport);
  kernel = choice.row->make_kernel(part.decode_spec(), *backend);
  kernel->check(part.limits, deal.kv_splits);
  if (job.spec.block_mask.any() && !job.format.is_plain() && transport.size() > 1) {
    fail(ErrorCode::kUnsupported,
         fmt::format("{} ranks decode a cache of {} with a block mask", transport.size(), describe(job.format)),
         "its tables have all heads and sequences, but a rank keeps only some", "Use one rank, or plain caches.");
  }
  const DecodeJob largest = largest_rank_job(job, transport.size());
  memory = decode_memory(job, *choice.row->make_kernel(largest.decode_spec(), *backend), transport.size());
}

void Decode::Impl::allocate() {
  kernel->reserve(part.limits);
  new_lengths = backend->allocate(static_cast<std::size_t>(job.limits.sequences) * sizeof(std::int32_t));
  if (checks_on_device()) {
    checks = backend->allocate(entry_bytes() + static_cast<std::size_t>(part.limits.sequences) * sizeof(std::int32_t));
    backend->fill_bytes(checks.data(), std::byte{0}, checks.bytes(), backend->stream());
    backend->synchronize(backend->stream(), collective.timeouts().for_peer(), {});
    errors_read = backend->make_events(1, false);
  }
  if (!job.format.is_plain()) appended.emplace(*backend, collective, transport, 2);
  CacheUpdate none_updated;
  if (job.rope) {
    const RotatedRowsMemory bytes = rotated_rows_memory(part);
    frequencies = backend->allocate(bytes.frequencies);
    const auto count = static_cast<std::int64_t>(bytes.frequencies);
    backend->copy_rows(frequencies.data(), count, job.rope->frequencies.data(), count, count, 1, backend->stream());
    backend->synchronize(backend->stream(), collective.timeouts().for_peer(), {});
    rotated_q = backend->allocate(bytes.q);
    if (bytes.k > 0) rotated_k = backend->allocate(bytes.k);
    none_updated.rotation = rotation();
  }
  backend->update_cache(none_updated, backend->stream());  // loads the kernels
  if (job.top_k_blocks > 0) {
    const TopKMemory bytes = top_k_memory(part);
    means = backend->allocate(bytes.means);
    scores = backend->allocate(bytes.scores);
    chosen = backend->allocate(bytes.chosen);
    counts = backend->allocate(bytes.counts);
    DecodeInputs none;
    const AttentionSpec& spec = part.spec;
    none.q = dense_view(static_cast<const void*>(nullptr), spec.dtype, 0, spec.heads, spec.head_dim);
    none.k = cache_view(nullptr, spec.dtype, 0, 0, spec.kv_heads, spec.head_dim);
    const BlockChoice ready = choice_of(none, nullptr);
    backend->pool_keys(ready, backend->stream());
    backend->choose_blocks(ready, backend->stream());
  }
  if (several()) exchange.emplace(job, row_partials(job, *kernel, transport.size()), transport, *backend);
  runs.emplace(*backend, transport, collective.timeouts());
}

void Decode::Impl::connect() {
  exchange->announce(collective.timeouts().for_peer());
  if (on_device()) warm_up_transport(collective, transport, *backend, exchange->memory());
}

// Checks lengths and pages that are in host memory.
void Decode::Impl::check_tables(const DecodeInputs& inputs) const {
  CacheUpdate update = update_of(inputs);
  if (!on_device()) {
    refuse_out_of_range(update, ErrorCode::kUsage);
    return;
  }
  check_host_copies(job, inputs);
  if (inputs.host_lengths == nullptr) return;
  std::vector<std::int32_t> lengths(inputs.host_lengths, inputs.host_lengths + update.sequences);
  update.lengths = lengths.data();
  update.new_lengths = nullptr;  // host lengths include the step's tokens
  update.block_table = inputs.host_table;
  update.prefixes = inputs.host_prefixes;
  update.block_mask = {};  // the block mask is on the device, where DecodeOptions::check_tables checks it
  update.mask_heads = 0;
  refuse_out_of_range(update, ErrorCode::kUsage);
}

void Decode::Impl::check_capture(const DecodeInputs& inputs) const {
  if (several()) {
    refuse_capture("this step", transport,
                   fmt::format("exchanges partial results with {} other ranks", transport.size() - 1));
  }
  if (inputs.host_lengths != nullptr) {
    fail(ErrorCode::kUsage, "a captured step has host copies of lengths", "a replay would not read them",
         "Leave them out; DecodeOptions::check_tables checks on the device.");
  }
}

CacheUpdate Decode::Impl::update_of(const DecodeInputs& inputs) const {
  CacheUpdate update;
  update.sequences = sequences_of(inputs);
  update.rows = inputs.rows;
  update.lengths = given_lengths(inputs);
  if (inputs.lengths == nullptr) update.new_lengths = lengths_of_step(inputs);
  update.block_table = inputs.block_table;
  update.table_pages = inputs.table_pages;
  update.pages = cache_pages(job, inputs);
  update.page_size = cache_page_size(job, inputs);
  update.partition = partition();
  update.kv_split_keys = kv_split_keys();
  update.max_keys = job.limits.keys;
  update.prefixes = inputs.prefixes;
  if (inputs.block_mask.counts != nullptr) {
    update.block_mask = inputs.block_mask;
    update.mask_heads = part.spec.block_mask.heads;
  }
  if (has_rows(inputs.k_new)) {
    if (job.format.k.is_plain() && !job.rope) {
      update.appends[update.append_count++] = append_to_cache(inputs.k, inputs.k_new);
    }
    if (job.format.v.is_plain() && !job.decode_spec().quantized_values_in_keys())
      update.appends[update.append_count++] = append_to_cache(inputs.v, inputs.v_new);
  }
  return update;
}

// Rotates q, and k_new on its way into a plain cache, in the launch of the update. Keys that will be quantized have the
// bits of rotated keys that were stored first. `inputs` has the rotated rows afterwards.
void Decode::Impl::add_rotated(CacheUpdate& update, DecodeInputs& inputs) const {
  if (!job.rope) return;
  update.rotation = rotation();
  const AttentionSpec& spec = part.spec;
  const auto replaced_by = [&](TensorView& rows, const Buffer& buffer) {
    const MutableTensorView rotated =
        dense_view(static_cast<void*>(buffer.data()), spec.dtype, rows.tokens, rows.heads, rows.dim);
    update.rotated[update.rotated_count++] = store_rows(rotated, rows, update.rows);
    rows = rotated;
  };
  replaced_by(inputs.q, rotated_q);
  if (!has_rows(inputs.k_new)) return;
  if (job.format.k.is_plain()) {
    update.rotated[update.rotated_count++] = append_to_cache(inputs.k, inputs.k_new);
  } else {
    replaced_by(inputs.k_new, rotated_k);
  }
}

// The top-k selection of a step. `lengths` include the step's tokens.
BlockChoice Decode::Impl::choice_of(const DecodeInputs& inputs, const std::int32_t* lengths) const {
  BlockChoice of;
  of.spec = part.spec;
  of.q = inputs.q;
  of.rows = inputs.rows;
  of.max_rows = job.limits.rows;
  of.k = inputs.k;
  of.block_table = inputs.block_table;
  of.lengths = lengths;
  of.count = job.top_k_blocks;
  of.blocks = max_mask_blocks(job);
  of.means = reinterpret_cast<float*>(means.data());
  of.scores = reinterpret_cast<float*>(scores.data());
  of.chosen = reinterpret_cast<std::int32_t*>(chosen.data());
  of.counts = reinterpret_cast<std::int32_t*>(counts.data());
  return of;
}

double Decode::Impl::step_seconds(const DecodeExtent& extent) const {
  const double pairs = static_cast<double>(extent.sequences) * job.limits.rows * static_cast<double>(extent.keys);
  return pair_flops(job.spec) * pairs / transport.size() / choice.row->flops_per_second(*backend);
}

void Decode::Impl::enqueue(const DecodeInputs& all, const DecodeOutputs& outputs, Stream stream) {
  DecodeInputs inputs = own(all);
  const DecodeExtent extent{sequences_of(all), longest_sequence(job, inputs, on_device())};
  runs->enqueue(stream, step_seconds(extent), [&] {
    if (all.lengths_before != nullptr && deal.sequences > 1) {
      add_rows(all, stream);  // including the sequences of other ranks
      set_lengths(inputs, lengths_of_step(all) + kept(sequences_of(all)).first);
    }
    enqueue_step(inputs, extent, outputs, stream);
  });
}

void Decode::Impl::add_rows(const DecodeInputs& inputs, Stream stream) {
  CacheUpdate lengths;
  lengths.sequences = sequences_of(inputs);
  lengths.rows = inputs.rows;
  lengths.lengths = inputs.lengths_before;
  lengths.new_lengths = lengths_of_step(inputs);
  if (lengths.sequences > 0) backend->update_cache(lengths, stream);
}

void Decode::Impl::enqueue_step(DecodeInputs inputs, const DecodeExtent& extent, const DecodeOutputs& outputs,
                                Stream stream) {
  CacheUpdate update = update_of(inputs);
  if (checks_on_device()) {
    update.max_keys = std::min(update.max_keys, extent.keys);
    update.checked = checked_lengths();
    update.out_of_range = entries();
  }
  add_rotated(update, inputs);
  DecodeStep step;
  step.q = inputs.q;
  step.rows = inputs.rows;
  step.k = inputs.k;
  step.v = inputs.v;
  step.quantized_k = inputs.quantized_k;
  step.quantized_v = inputs.quantized_v;
  step.block_table = inputs.block_table;
  step.lengths = update.checked != nullptr       ? update.checked
                 : update.new_lengths != nullptr ? update.new_lengths
                                                 : update.lengths;
  step.partition = partition();
  step.prefixes = inputs.prefixes;
  step.block_mask = inputs.block_mask;
  const AttentionOutput output{outputs.out, outputs.lse, inputs.sinks};
  if (update.sequences > 0 && (update.new_lengths != nullptr || update.append_count > 0 || update.rotated_count > 0 ||
                               update.checked != nullptr)) {
    backend->update_cache(update, stream);
  }
  if (has_rows(inputs.k_new) && !job.format.is_plain()) append(inputs, update, step.lengths, stream);
  if (job.top_k_blocks > 0) {
    const BlockChoice choice_here = choice_of(inputs, step.lengths);
    if (update.sequences > 0) backend->choose_blocks(choice_here, stream);
    step.block_mask = choice_here.block_mask();
  }
  if (several()) {
    finish_collectively(step, extent, output, stream);
  } else {
    step.output = output;
    kernel->enqueue(step, stream);
  }
}

// Compresses and appends new tokens where the enqueued cache update `at` puts them. `lengths` include the step's
// tokens.
void Decode::Impl::append(const DecodeInputs& inputs, CacheUpdate at, const std::int32_t* lengths, Stream stream) {
  at.lengths = lengths;
  at.new_lengths = nullptr;
  at.checked = nullptr;
  at.out_of_range = nullptr;
  at.append_count = 0;
  at.rotated_count = 0;
  if (!job.format.k.is_plain()) backend->append({&at, inputs.quantized_k, inputs.k_new, appended->at(0)}, stream);
  if (!job.format.v.is_plain()) backend->append({&at, inputs.quantized_v, inputs.v_new, appended->at(1)}, stream);
}

// Attends to this rank's part for all rows, exchanges records, and finishes the rows that this rank owns.
void Decode::Impl::finish_collectively(DecodeStep step, const DecodeExtent& extent, const AttentionOutput& output,
                                       Stream stream) {
  const bool has_splits = deal.kv_splits > 1;
  const std::int64_t splits = splits_per_partition(extent.keys, deal.kv_splits, kv_split_keys());
  const ExchangeShape shape{extent.sequences, step.rows, has_splits ? exchange->exchanged_splits(splits) : 1};
  if (has_splits) {
    step.partials = {reinterpret_cast<float*>(exchange->own_partials()), shape.splits};
  } else {
    step.output = results_in(exchange->own_partials(), part.spec, step.q.tokens);
    step.output.sinks = output.sinks;
  }
  kernel->enqueue(step, stream);
  exchange->move(shape, stream, collective.timeouts().for_work(step_seconds(extent)));
  const SequenceRange mine = owned(extent.sequences);
  if (mine.count == 0) return;
  const std::vector<std::byte*> records = exchange->partials_of_owned(shape);
  if (!has_splits) return join_heads(*backend, job.spec, deal, records, output, stream);
  std::vector<const float*> shares;
  for (const std::byte* const partition : records) shares.push_back(reinterpret_cast<const float*>(partition));
  kernel->merge({shares, shape.splits, step.rows, step.lengths + mine.first, output}, stream);
}

// Throws for out-of-range entries and invalid elements that steps before the last wait have reported.
void Decode::Impl::throw_reported_errors() {
  const std::vector<InvalidElementCell> cells = appended ? appended->drain() : std::vector<InvalidElementCell>();
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const auto invalid = invalid_element_of(cells[i], {}, {});
    if (invalid) refuse_invalid_element(i == 0 ? "k_new" : "v_new", {}, {}, *invalid, ErrorCode::kUsage);
  }
  if (!checks_on_device()) return;
  const Stream stream = backend->stream();
  const auto bytes = static_cast<std::int64_t>(entry_bytes());
  const auto wait_all = [&] {
    errors_read->record(0, stream);
    errors_read->synchronize(0, collective.timeouts().for_peer(), [this] { transport.progress(); });
  };
  std::vector<OutOfRangeEntry> found(static_cast<std::size_t>(part.limits.sequences));
  backend->copy_rows(found.data(), bytes, entries(), bytes, bytes, 1, stream);
  wait_all();
  if (std::ranges::all_of(found, [](const OutOfRangeEntry& fault) { return fault == OutOfRangeEntry{}; })) return;
  backend->fill_bytes(entries(), std::byte{0}, entry_bytes(), stream);
  wait_all();
  refuse_out_of_range(found.data(), part.limits.sequences, ErrorCode::kUsage);
}

Decode::Decode(DecodeJob job, Transport& transport, DecodeOptions options)
    : Decode(std::move(job), transport, std::move(options), KernelOnly{}) {
  impl_->collective.run_collectively([this] { check_budget(impl_->memory, impl_->options.memory_budget); });
  prepare();
}

Decode::Decode(DecodeJob job, Transport& transport, DecodeOptions options, KernelOnly)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
}

void Decode::prepare() {
  Impl& impl = *impl_;
  impl.config_hash = handshake(impl.collective, rank_config(impl.job, impl.options, impl.choice, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  if (impl.several()) impl.connect();
}

Decode::~Decode() = default;
Decode::Decode(Decode&&) noexcept = default;

const DecodeJob& Decode::job() const { return impl_->job; }
const DecodeOptions& Decode::options() const { return impl_->options; }
const DecodeChoice& Decode::kernel() const { return impl_->choice; }
Backend& Decode::backend() { return *impl_->backend; }
const DecodeMemory& Decode::memory() const { return impl_->memory; }
int Decode::key_tile() const { return impl_->kernel->key_tile(); }
std::int64_t Decode::kv_split_keys() const { return impl_->kv_split_keys(); }
KvPartition Decode::partition() const { return impl_->partition(); }
std::int64_t Decode::cache_tokens(std::int64_t length) const {
  return keys_of_partition(impl_->partition(), impl_->kv_split_keys(), length);
}
HeadRange Decode::kv_heads() const { return impl_->kv_heads(); }
SequenceRange Decode::kept(std::int64_t sequences) const { return impl_->kept(sequences); }
SequenceRange Decode::owned(std::int64_t sequences) const { return impl_->owned(sequences); }

void Decode::run(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, describe(impl.job), [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(inputs, outputs);
  });
  impl.enqueue(inputs, outputs, stream);
  impl.runs->wait_all();
  impl.collective.run_collectively([&] { impl.throw_reported_errors(); });
}

void Decode::check(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream) const {
  impl_->check(inputs, outputs);
  if (impl_->backend->is_capturing(stream)) impl_->check_capture(inputs);
}

void Decode::enqueue_checked(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream) {
  impl_->enqueue(inputs, outputs, stream);
}

void Decode::enqueue(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream) {
  check(inputs, outputs, stream);
  enqueue_checked(inputs, outputs, stream);
}

void Decode::update_mean_keys(const DecodeInputs& all, Stream stream) {
  Impl& impl = *impl_;
  check_mean_keys(impl.job, all);
  if (all.rows < 1) return;
  check_caches(impl.part, all);
  const DecodeInputs inputs = impl.own(all);
  if (Impl::sequences_of(inputs) == 0) return;
  CacheUpdate update = impl.update_of(inputs);
  update.append_count = 0;
  if (impl.checks_on_device()) {
    update.checked = impl.checked_lengths();
    update.out_of_range = impl.entries();
  } else if (!impl.on_device()) {
    refuse_out_of_range(update, ErrorCode::kUsage);
  }
  impl.runs->enqueue(stream, impl.step_seconds({update.sequences, impl.job.limits.keys}), [&] {
    if (update.checked != nullptr) impl.backend->update_cache(update, stream);
    const std::int32_t* const lengths = update.checked != nullptr ? update.checked : inputs.lengths;
    impl.backend->pool_keys(impl.choice_of(inputs, lengths), stream);
  });
}

void Decode::wait() {
  if (impl_->runs->any()) impl_->runs->wait_all();
  impl_->throw_reported_errors();
}

}  // namespace ringattn
