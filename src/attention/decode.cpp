// SPDX-License-Identifier: Apache-2.0
#include "attention/decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/attention.hpp"
#include "attention/identities.hpp"
#include "attention/partial_exchange.hpp"
#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/first_contact.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "base/size.hpp"
#include "comm/failure.hpp"
#include "comm/meeting.hpp"
#include "kernels/cache_update.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why, const std::string& remedy) {
  fail(ErrorCode::kUsage, what, why, remedy);
}

void check_rows(std::string_view name, const TensorView& view, const FoldSpec& spec, std::int64_t rows, int heads,
                int dim) {
  if (view.dtype == spec.dtype && view.tokens == rows && view.heads == heads && view.dim == dim) return;
  refuse(fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads, view.dim),
         fmt::format("this step's is {} [{}, {}, {}]", dtype_name(spec.dtype), rows, heads, dim),
         "Rows lie sequence by sequence; this rank's results are those of Decode::owned().");
}

void check_cache(std::string_view name, const MutableCacheView& view, const FoldSpec& spec, int dim) {
  if (view.dtype == spec.dtype && view.heads == spec.kv_heads && view.dim == dim && view.pages >= 0) return;
  refuse(fmt::format("the cache of {} is {} [{}, {}, {}, {}]", name, dtype_name(view.dtype), view.pages, view.page_size,
                     view.heads, view.dim),
         fmt::format("the job's is {} [pages, page_size, {}, {}]", dtype_name(spec.dtype), spec.kv_heads, dim),
         "Check the job's heads and dims.");
}

bool has_rows(const TensorView& view) { return view.data != nullptr; }

void check_packed(std::string_view name, const CompressedCache& cache, const RowFormat& format, const RowShape& shape) {
  bool complete = cache.format == format && cache.shape == shape && cache.pages >= 0;
  for (std::size_t i = 0; complete && i < format_tables(format, shape, 1).size(); ++i) {
    complete = cache.tables[i] != nullptr;
  }
  if (complete) return;
  refuse(fmt::format("the cache of {} is {} of {} [{}, {}, {}, {}]", name, describe(cache.format),
                     dtype_name(cache.shape.dtype), cache.pages, cache.page_size, cache.shape.heads, cache.shape.dim),
         fmt::format("the job's is {} of {} [pages, page_size, {}, {}], with all its tables", describe(format),
                     dtype_name(shape.dtype), shape.heads, shape.dim),
         "DecodeJob::format says how k and v are stored.");
}

}  // namespace

struct Decode::Impl {
  Impl(DecodeJob the_job, Transport& the_transport, DecodeOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        meeting(transport, Patience(options.timeout_seconds)) {}

  bool several() const { return transport.size() > 1; }
  bool on_device() const { return backend->memory() == MemoryKind::kDevice; }
  // A host's tables are checked before anything is done.
  bool checks_on_device() const { return on_device() && options.check_tables; }
  GroupShare share() const { return share_of_rank(transport.rank(), transport.size()); }
  std::int64_t group_keys() const { return std::int64_t{kGroupTiles} * kernel->key_tile(); }
  SequenceRange owned(std::int64_t sequences) const {
    return owned_sequences(sequences, transport.rank(), transport.size());
  }
  bool values_in_codes() const { return job.decode_spec().values_in_codes(); }
  // Pages of k, and of v.
  std::int64_t k_pages(const DecodeInputs& inputs) const {
    return job.format.k.is_plain() ? inputs.k.pages : inputs.packed_k.pages;
  }
  std::int64_t v_pages(const DecodeInputs& inputs) const {
    if (values_in_codes()) return k_pages(inputs);
    return job.format.v.is_plain() ? inputs.v.pages : inputs.packed_v.pages;
  }
  // Tokens of a page.
  std::int64_t k_page(const DecodeInputs& inputs) const {
    return job.format.k.is_plain() ? inputs.k.page_size : inputs.packed_k.page_size;
  }
  std::int64_t v_page(const DecodeInputs& inputs) const {
    if (values_in_codes()) return k_page(inputs);
    return job.format.v.is_plain() ? inputs.v.page_size : inputs.packed_v.page_size;
  }
  static std::int64_t sequences_of(const DecodeInputs& inputs) { return inputs.q.tokens / inputs.rows; }
  std::int32_t* checked_lengths() const { return reinterpret_cast<std::int32_t*>(checks.data() + fault_bytes()); }
  CacheFault* faults() const { return reinterpret_cast<CacheFault*>(checks.data()); }
  std::size_t fault_bytes() const { return static_cast<std::size_t>(job.limits.sequences) * sizeof(CacheFault); }

  void choose();
  void allocate();
  void connect();
  void check(const DecodeInputs& inputs, const DecodeOutputs& outputs) const;
  void check_caches(const DecodeInputs& inputs) const;
  void check_tables(const DecodeInputs& inputs) const;
  void check_capture(const DecodeInputs& inputs) const;
  CacheUpdate update_of(const DecodeInputs& inputs) const;
  std::int64_t longest(const DecodeInputs& inputs) const;
  double step_seconds(std::int64_t sequences, std::int64_t keys) const;
  void enqueue(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream);
  void append(const DecodeInputs& inputs, CacheUpdate places, const std::int32_t* lengths, Stream stream);
  void finish_together(DecodeStep step, Stream stream, const FoldOutput& output, std::int64_t keys);
  void throw_faults();

  DecodeJob job;
  DecodeOptions options;
  Transport& transport;
  Meeting meeting;
  DecodeChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<DecodeKernel> kernel;
  DecodeMemory memory;
  Buffer checks;  // on devices: [sequences] faults, then [sequences] lengths
  std::unique_ptr<Marks> faults_read;
  std::optional<PartialExchange> exchange;  // with several ranks
  std::optional<EnqueuedRuns> runs;
};

void Decode::Impl::choose() {
  check_decode_job(job);
  choice = choose_kernel(job.decode_spec(), fitting_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  check_fitting(*choice.row, *backend, transport);
  kernel = choice.row->make_kernel(job.decode_spec(), *backend);
  kernel->check(job.limits, transport.size());
  memory = decode_memory(job, *kernel, transport.size());
  if (options.memory_budget == 0 || memory.total() <= options.memory_budget) return;
  fail(ErrorCode::kMemory,
       fmt::format("a memory budget of {} a rank is too small", counted(options.memory_budget, "byte")),
       fmt::format("{} are needed: {} of cache, {} of scratch and partial results, {} of rows and tables",
                   memory.total(), memory.cache, memory.own(), memory.rows + memory.tables),
       "Use more ranks, or allow for fewer or shorter sequences.");
}

void Decode::Impl::allocate() {
  kernel->reserve(job.limits);
  if (checks_on_device()) {
    checks = backend->allocate(fault_bytes() + static_cast<std::size_t>(job.limits.sequences) * sizeof(std::int32_t));
    backend->fill_bytes(checks.data(), std::byte{0}, checks.bytes(), backend->stream());
    backend->synchronize(backend->mark(backend->stream()), meeting.patience().for_peer(), {});
    faults_read = backend->make_marks(1, false);
  }
  backend->update_cache({}, backend->stream());  // makes it ready
  if (several()) exchange.emplace(job, *kernel, transport, *backend);
  runs.emplace(*backend, transport, meeting.patience());
}

void Decode::Impl::connect() {
  exchange->announce(meeting.patience().for_peer());
  if (on_device()) make_first_contact(meeting, transport, *backend, exchange->memory());
}

void Decode::Impl::check(const DecodeInputs& inputs, const DecodeOutputs& outputs) const {
  const FoldSpec& spec = job.spec;
  const DecodeLimits& limits = job.limits;
  if (inputs.rows < 1 || inputs.rows > limits.rows || inputs.q.tokens % inputs.rows != 0 ||
      sequences_of(inputs) > limits.sequences) {
    refuse(fmt::format("a step has {} query rows, {} a sequence", inputs.q.tokens, inputs.rows),
           fmt::format("steps were prepared for up to {} sequences of up to {} rows", limits.sequences, limits.rows),
           "Prepare for larger steps, or split this one.");
  }
  check_rows("q", inputs.q, spec, inputs.q.tokens, spec.heads, spec.head_dim);
  check_rows("out", outputs.out, spec, owned(sequences_of(inputs)).count * inputs.rows, spec.heads, spec.head_dim_v);
  if (has_rows(inputs.k_new) != has_rows(inputs.v_new)) {
    refuse("one of k_new and v_new is missing", "a token has a key and a value", "Give both, or neither.");
  }
  if (has_rows(inputs.k_new)) {
    check_rows("k_new", inputs.k_new, spec, inputs.q.tokens, spec.kv_heads, spec.head_dim);
    check_rows("v_new", inputs.v_new, spec, inputs.q.tokens, spec.kv_heads, spec.head_dim_v);
  }
  if (spec.sinks != (inputs.sinks != nullptr)) {
    refuse(spec.sinks ? "sinks are missing" : "sinks are given", spec.sinks ? "the job has them" : "the job has none",
           "FoldSpec::sinks says whether a job has sinks.");
  }
  check_caches(inputs);
  check_tables(inputs);
}

void Decode::Impl::check_caches(const DecodeInputs& inputs) const {
  const FoldSpec& spec = job.spec;
  if (job.format.k.is_plain()) {
    check_cache("k", inputs.k, spec, spec.head_dim);
  } else {
    check_packed("k", inputs.packed_k, job.format.k, {spec.dtype, spec.kv_heads, spec.head_dim});
  }
  if (values_in_codes()) {
    // They lie in k.
  } else if (job.format.v.is_plain()) {
    check_cache("v", inputs.v, spec, spec.head_dim_v);
  } else {
    check_packed("v", inputs.packed_v, job.format.v, {spec.dtype, spec.kv_heads, spec.head_dim_v});
  }
  if (k_pages(inputs) != v_pages(inputs) || k_page(inputs) != v_page(inputs)) {
    refuse(fmt::format("k has {} pages of {} tokens, v {} of {}", k_pages(inputs), k_page(inputs), v_pages(inputs),
                       v_page(inputs)),
           "a token's key and value lie at the same place of both", "Give k and v the same pages.");
  }
  const bool has_table = inputs.block_table.pages != nullptr;
  if (job.is_paged() != has_table) {
    refuse(has_table ? "a dense cache has a block table" : "a block table is missing",
           job.is_paged() ? fmt::format("the job has pages of {} tokens", job.page_size) : "the job has no pages",
           "DecodeJob::page_size says whether there are pages.");
  }
  if (!job.is_paged() && k_pages(inputs) < sequences_of(inputs)) {
    refuse(fmt::format("a dense cache of {} sequences", k_pages(inputs)),
           fmt::format("the step has {}", sequences_of(inputs)), "Each sequence has a page of its own.");
  }
  if (job.is_paged() && k_page(inputs) != job.page_size) {
    refuse(fmt::format("pages of {} tokens", k_page(inputs)), fmt::format("the job's have {}", job.page_size),
           "Prepare for pages of this size.");
  }
  const SharedPrefixes& prefixes = inputs.prefixes;
  if (prefixes.count < 0 || prefixes.count > job.limits.prefixes) {
    refuse(fmt::format("a step has {} shared prefixes", prefixes.count),
           fmt::format("steps were prepared for up to {}", job.limits.prefixes),
           "Prepare for more: DecodeLimits::prefixes.");
  }
  if (prefixes.count > 0 && (prefixes.of_sequence == nullptr || prefixes.keys == nullptr)) {
    refuse("shared prefixes are not complete", "each has a number of keys, and each sequence says which it has",
           "Give both, or no prefixes.");
  }
  if (inputs.table_pages < 0 || inputs.table_pages > inputs.block_table.stride) {
    refuse(fmt::format("a block table of {} pages a sequence", inputs.table_pages),
           fmt::format("its rows are {} apart", inputs.block_table.stride), "Give DecodeInputs::table_pages.");
  }
  if (inputs.lengths == nullptr && inputs.q.tokens > 0) {
    refuse("the lengths are missing", "every sequence has one", "Give DecodeInputs::lengths.");
  }
}

// What the host knows of lengths and pages.
void Decode::Impl::check_tables(const DecodeInputs& inputs) const {
  CacheUpdate update = update_of(inputs);
  if (!on_device()) {
    refuse_faults(update, ErrorCode::kUsage);
    return;
  }
  const bool has_host_table = inputs.host_table.pages != nullptr;
  if (inputs.host_lengths == nullptr ? has_host_table : has_host_table != job.is_paged()) {
    refuse("host copies of lengths and block table are not complete", "one is checked by the other",
           "Give host_lengths, and with pages host_table; or neither.");
  }
  if (inputs.host_prefixes.count != (inputs.host_lengths == nullptr ? 0 : inputs.prefixes.count)) {
    refuse("host copies of the shared prefixes are not complete", "they are checked by lengths and block table",
           "Give host_prefixes beside host_lengths where the step has prefixes; else leave them out.");
  }
  if (inputs.host_lengths == nullptr) return;
  std::vector<std::int32_t> lengths(inputs.host_lengths, inputs.host_lengths + update.sequences);
  update.lengths = lengths.data();
  update.grow = false;  // they have
  update.block_table = inputs.host_table;
  update.prefixes = inputs.host_prefixes;
  refuse_faults(update, ErrorCode::kUsage);
}

void Decode::Impl::check_capture(const DecodeInputs& inputs) const {
  if (several()) {
    fail(ErrorCode::kUnsupported, "a graph can't hold this step",
         fmt::format("transport {} exchanges partial results with {} other ranks, which a replay would not do",
                     transport.name(), transport.size() - 1),
         "Enqueue it outside of the capture.");
  }
  if (inputs.host_lengths != nullptr) {
    refuse("a captured step has host copies of lengths", "a replay would not look at them",
           "Leave them out; DecodeOptions::check_tables checks on the device.");
  }
}

CacheUpdate Decode::Impl::update_of(const DecodeInputs& inputs) const {
  CacheUpdate update;
  update.sequences = sequences_of(inputs);
  update.rows = inputs.rows;
  update.lengths = inputs.lengths;
  update.grow = inputs.grow;
  update.block_table = inputs.block_table;
  update.table_pages = inputs.table_pages;
  update.pages = k_pages(inputs);
  update.page_size = k_page(inputs);
  update.share = share();
  update.group_keys = group_keys();
  update.most_keys = job.limits.keys;
  update.prefixes = inputs.prefixes;
  if (has_rows(inputs.k_new)) {
    if (job.format.k.is_plain()) update.parts[update.part_count++] = cache_part(inputs.k, inputs.k_new);
    if (job.format.v.is_plain() && !values_in_codes())
      update.parts[update.part_count++] = cache_part(inputs.v, inputs.v_new);
  }
  return update;
}

// Keys of the longest sequence of the step, as far as the host knows. All ranks know the same.
std::int64_t Decode::Impl::longest(const DecodeInputs& inputs) const {
  const std::int32_t* const known = on_device() ? inputs.host_lengths : inputs.lengths;
  if (known == nullptr) return job.limits.keys;
  const std::int64_t more = !on_device() && inputs.grow ? inputs.rows : 0;
  std::int64_t most = 1;
  for (std::int64_t s = 0; s < sequences_of(inputs); ++s) most = std::max(most, known[s] + more);
  return most;
}

double Decode::Impl::step_seconds(std::int64_t sequences, std::int64_t keys) const {
  const double pairs = static_cast<double>(sequences) * job.limits.rows * static_cast<double>(keys);
  return pair_flops(job.spec) * pairs / transport.size() / choice.row->flops_per_second(*backend);
}

void Decode::Impl::enqueue(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream) {
  const bool captured = backend->is_capturing(stream);
  if (captured) check_capture(inputs);
  const std::int64_t keys = longest(inputs);
  CacheUpdate update = update_of(inputs);
  if (checks_on_device()) {
    update.most_keys = std::min(update.most_keys, keys);
    update.checked = checked_lengths();
    update.faults = faults();
  }
  DecodeStep step;
  step.q = inputs.q;
  step.rows = inputs.rows;
  step.k = inputs.k;
  step.v = inputs.v;
  step.packed_k = inputs.packed_k;
  step.packed_v = inputs.packed_v;
  step.block_table = inputs.block_table;
  step.lengths = update.checked != nullptr ? update.checked : inputs.lengths;
  step.share = share();
  step.prefixes = inputs.prefixes;
  const FoldOutput output{outputs.out, outputs.lse, inputs.sinks};

  if (!captured) runs->begin(stream);
  if (update.grow || update.part_count > 0 || update.checked != nullptr) backend->update_cache(update, stream);
  if (has_rows(inputs.k_new) && !job.format.is_plain()) append(inputs, update, step.lengths, stream);
  if (several()) {
    finish_together(step, stream, output, keys);
  } else {
    step.output = output;
    kernel->enqueue(step, stream);
  }
  if (!captured) runs->end(stream, step_seconds(update.sequences, keys));
}

// New rows of compressed tensors, at the places of an update that has been enqueued. `lengths`: what the step takes.
void Decode::Impl::append(const DecodeInputs& inputs, CacheUpdate places, const std::int32_t* lengths, Stream stream) {
  places.lengths = const_cast<std::int32_t*>(lengths);
  places.grow = false;
  places.checked = nullptr;
  places.faults = nullptr;
  places.part_count = 0;
  if (!job.format.k.is_plain()) backend->append({&places, inputs.packed_k, inputs.k_new}, stream);
  if (!job.format.v.is_plain()) backend->append({&places, inputs.packed_v, inputs.v_new}, stream);
}

// Folds this rank's share for all rows, and merges the rows that it owns.
void Decode::Impl::finish_together(DecodeStep step, Stream stream, const FoldOutput& output, std::int64_t keys) {
  const std::int64_t sequences = step.q.tokens / step.rows;
  const PartialShape shape{sequences, step.rows, exchange->groups_of(keys)};
  const SequenceRange mine = owned(sequences);
  try {
    step.partials = exchange->partials(shape);
    kernel->enqueue(step, stream);
    exchange->move(shape, stream, meeting.patience().for_work(step_seconds(sequences, keys)));
    if (mine.count == 0) return;
    const std::vector<const float*> shares = exchange->shares(shape);
    kernel->merge({shares, shape.groups, step.rows, step.lengths + mine.first, output}, stream);
  } catch (...) {
    note_failure();
    transport.abandon();
    throw;
  }
}

// What checks on the device have found since the last call. The device has passed them.
void Decode::Impl::throw_faults() {
  if (!checks_on_device()) return;
  const Stream stream = backend->stream();
  const auto bytes = static_cast<std::int64_t>(fault_bytes());
  const auto settle = [&] {
    faults_read->record(0, stream);
    faults_read->synchronize(0, meeting.patience().for_peer(), [this] { transport.progress(); });
  };
  std::vector<CacheFault> found(static_cast<std::size_t>(job.limits.sequences));
  backend->copy_rows(found.data(), bytes, faults(), bytes, bytes, 1, stream);
  settle();
  if (std::ranges::all_of(found, [](const CacheFault& fault) { return fault == CacheFault{}; })) return;
  backend->fill_bytes(faults(), std::byte{0}, fault_bytes(), stream);
  settle();
  refuse_faults(found.data(), job.limits.sequences, ErrorCode::kUsage);
}

Decode::Decode(DecodeJob job, Transport& transport, DecodeOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = share_of_processors(impl.meeting);
  impl.meeting.together([&impl] { impl.choose(); });
  handshake(impl.meeting, identities(impl.job, impl.options, impl.choice, *impl.backend));
  impl.meeting.together([&impl] { impl.allocate(); });
  if (impl.several()) impl.connect();
}

Decode::~Decode() = default;
Decode::Decode(Decode&&) noexcept = default;

const DecodeJob& Decode::job() const { return impl_->job; }
const DecodeOptions& Decode::options() const { return impl_->options; }
const DecodeChoice& Decode::kernel() const { return impl_->choice; }
Backend& Decode::backend() { return *impl_->backend; }
const DecodeMemory& Decode::memory() const { return impl_->memory; }
std::int64_t Decode::group_keys() const { return impl_->group_keys(); }
GroupShare Decode::share() const { return impl_->share(); }
std::int64_t Decode::cache_tokens(std::int64_t length) const {
  return keys_of_share(impl_->share(), impl_->group_keys(), length);
}
SequenceRange Decode::owned(std::int64_t sequences) const { return impl_->owned(sequences); }

void Decode::run(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream) {
  Impl& impl = *impl_;
  impl.meeting.together([&] { impl.check(inputs, outputs); });
  impl.enqueue(inputs, outputs, stream);
  impl.runs->settle();
  impl.meeting.together([&] { impl.throw_faults(); });
}

void Decode::enqueue(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream) {
  impl_->check(inputs, outputs);
  impl_->enqueue(inputs, outputs, stream);
}

void Decode::wait() {
  if (impl_->runs->any()) impl_->runs->settle();
  impl_->throw_faults();
}

}  // namespace ringattn
