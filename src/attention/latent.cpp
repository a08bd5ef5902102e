// SPDX-License-Identifier: Apache-2.0
#include "attention/latent.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/fitting.hpp"
#include "attention/fold_step.hpp"
#include "attention/identities.hpp"
#include "attention/latent_blocks.hpp"
#include "attention/latent_checks.hpp"
#include "attention/latent_step.hpp"
#include "attention/latent_work.hpp"
#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/first_contact.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/shard_checks.hpp"
#include "attention/tokens/cost.hpp"
#include "base/aligned.hpp"
#include "base/error.hpp"
#include "comm/meeting.hpp"
#include "kernels/latent_rows.hpp"
#include "kernels/registry.hpp"
#include "kernels/tensor_compression.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const Wording& problem, const Wording& why, const Wording& remedy) {
  fail(ErrorCode::kUsage, problem, why, remedy);
}

// Rows of 8 bits as a tensor of as many halves, which is all that copies ask.
TensorView halves_of(const StreamView& rows, std::int64_t count, std::int64_t row_bytes) {
  constexpr auto kHalf = static_cast<std::int64_t>(size_of(Dtype::kBf16));
  TensorView view = dense_view(static_cast<const void*>(rows.data), Dtype::kBf16, count, 1, row_bytes / kHalf);
  if (count > 1) view.token_stride = rows.token_stride / kHalf;
  return view;
}

// Where things lie in the workspace, behind what every op of the ring has there.
struct Places {
  WorkspaceLayout ring;
  std::size_t keys = 0;
  std::size_t values = 0;
  std::size_t unpacked = 0;
  std::size_t queries = 0;
  std::size_t latents = 0;
  std::size_t bytes = 0;
};

}  // namespace

struct Latent::Impl {
  Impl(LatentJob the_job, Transport& the_transport, LatentOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        meeting(transport, Patience(options.ring.timeout_seconds)) {}

  bool absorbed() const { return *job.form == LatentForm::kAbsorbed; }
  std::int64_t q_rows() const { return forecast->layout().queries.tokens(transport.rank()); }
  std::int64_t k_rows() const { return forecast->layout().keys.tokens(transport.rank()); }
  LatentKernels kernels() const { return {*fold, key_products.get(), value_products.get()}; }

  void choose();
  void allocate();
  Places places(bool dense_rows) const;
  bool packed() const { return !job.format.is_plain(); }
  // What travels of the rank's rows, [streams].
  std::vector<TensorView> shard(const LatentInputs& inputs) const;
  bool is_dense(const LatentInputs& inputs) const;
  void set_sources(const LatentInputs& inputs, std::span<const StreamRows> buffers, LatentMemory& memory) const;
  void check_packed_rows(const StreamView& rows) const;
  void check(const LatentInputs& inputs, const LatentOutputs& outputs, std::span<std::byte> workspace) const;
  void enqueue(const LatentInputs& inputs, const LatentOutputs& outputs, std::span<std::byte> workspace, Stream stream,
               Timeline* timeline, const BlockDone& block_done, RunMode mode);

  LatentJob job;  // with its form
  LatentOptions options;
  Transport& transport;
  Meeting meeting;
  FormChoice form;
  FoldChoice choice;
  std::string_view products;  // the kernel's name
  LatentRoom room;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<FoldKernel> fold;
  std::unique_ptr<HeadProductKernel> key_products;    // of key_product(); null where there is none, as the next
  std::unique_ptr<HeadProductKernel> value_products;  // of value_product()
  std::optional<Forecast> forecast;
  std::vector<GatheredBlock> blocks;   // of the plan
  std::int64_t most_gathered = 0;      // rows of a block
  std::vector<PreparedTask> prepared;  // [blocks]
  std::optional<PlannedRuns> runs;
  std::optional<RingRuns> ring;
};

void Latent::Impl::choose() {
  check_latent_job(job);
  if (options.ring.state_out || options.ring.shorter_lengths) {
    refuse(options.ring.state_out ? "the state of the fold is wanted" : "shorter lengths are wanted",
           "latent attention has neither", "Leave Options::state_out and Options::shorter_lengths off.");
  }
  form = choose_form(job);
  job.form = form.form;
  const LatentChoice chosen =
      choose_latent_kernels(job.spec, form.form, fitting_request(options.ring.kernel, transport));
  choice = chosen.fold;
  backend = choice.row->make_backend({options.ring.threads, transport.device()});
  check_fitting(*choice.row, *backend, transport);
  if (options.ring.checksum) check_checksum(*backend);
  products = chosen.products();
  if (const auto of_keys = key_product(job.spec, form.form)) {
    key_products = chosen.keys->make_kernel(*of_keys, *backend);
  }
  if (const auto of_values = value_product(job.spec)) {
    value_products = chosen.values->make_kernel(*of_values, *backend);
  }
  const auto make_fold = [&](int heads) {
    return choice.row->make_kernel(form_spec(job.spec, form.form, heads), *backend);
  };
  room = latent_room(job, options.ring, options.heads_at_a_time, transport.size(),
                     {make_fold, key_products.get(), value_products.get()});
  fold = make_fold(room.heads);
  check_size(ring_job(job, options.ring, room, kernels()), options.ring, transport.size());
}

void Latent::Impl::allocate() {
  const Options& asked = options.ring;
  const RingJob ring_job = ringattn::ring_job(job, asked, room, kernels());
  forecast = ringattn::forecast(ring_job, asked, transport.route(), transport.size(), transport.rank());
  const Plan& plan = forecast->plan;
  for (const BlockPlan& block : plan.blocks) {
    blocks.push_back(gather_block(plan, block));
    most_gathered = std::max(most_gathered, blocks.back().rows);
  }
  const FoldLimits limits = reserved_limits(ring_job, asked, forecast->layout(), plan);
  fold->reserve(limits);
  if (key_products) key_products->reserve(room.heads);
  if (value_products) value_products->reserve(room.heads);
  prepared.assign(plan.blocks.size(), kNotPrepared);
  if (limits.prepared > 0) {
    prepared = prepare_tasks(plan, form_spec(job.spec, form.form, room.heads), *fold, false,
                             [this](std::size_t block) { return std::span<const KeyTile>(blocks[block].tiles); });
  }
  runs.emplace(plan, forecast->prediction.seconds);
  ring.emplace(
      meeting, transport, *backend,
      RingRuns::Settings{ring_job.work.streams, asked.overlap, asked.checksum, asked.machine.flops_per_second});
  ring->allocate(plan.buffer_rows);
  load_decompression(job.format, {job.spec.dtype, 1, job.spec.latent_dim + job.spec.rope_dim}, *backend);
  ring->make_mover(*runs);
}

Places Latent::Impl::places(bool dense_rows) const {
  const LatentSpec& spec = job.spec;
  const std::size_t state = latent_state_stride(*fold, q_rows()) * static_cast<std::size_t>(spec.heads / room.heads);
  Places places;
  places.ring =
      ring->workspace(forecast->plan.keeps_state ? state : 0, transport.size() > 1 && !dense_rows ? k_rows() : 0);
  places.bytes = places.ring.bytes;
  const auto place = [&](std::int64_t rows, std::int64_t row_bytes) {
    const std::size_t at = places.bytes;
    places.bytes += aligned(static_cast<std::size_t>(rows * row_bytes));
    return at;
  };
  if (!absorbed()) {
    const FoldSpec chunk = expanded_spec(spec, room.heads);
    places.keys = place(most_gathered, k_token_bytes(chunk));
    places.values = place(most_gathered, v_token_bytes(chunk));
    places.unpacked = place(most_gathered, unpacked_row_bytes(job));
    return places;
  }
  const FoldSpec all = absorbed_spec(spec);
  places.keys = place(most_gathered, k_token_bytes(all));
  if (!spec.q_in_latent) places.queries = place(q_rows(), q_token_bytes(all));
  if (!spec.out_in_latent) places.latents = place(q_rows(), out_token_bytes(all));
  return places;
}

std::vector<TensorView> Latent::Impl::shard(const LatentInputs& inputs) const {
  if (packed()) return {halves_of(inputs.packed, k_rows(), latent_row_bytes(job.spec))};
  return {inputs.latent, inputs.k_rope};
}

bool Latent::Impl::is_dense(const LatentInputs& inputs) const {
  return std::ranges::all_of(shard(inputs), [](const TensorView& view) { return view.is_dense(); });
}

void Latent::Impl::set_sources(const LatentInputs& inputs, std::span<const StreamRows> buffers,
                               LatentMemory& memory) const {
  if (packed()) {
    const std::int64_t bytes = latent_row_bytes(job.spec);
    memory.packed = {inputs.packed, StreamView{buffers[0][0], bytes, bytes}, StreamView{buffers[1][0], bytes, bytes}};
    return;
  }
  const auto dense_rows = [&](const StreamRows& rows) {
    const void* const latent = rows[0];
    const void* const k_rope = rows[1];
    return LatentRows{dense_view(latent, job.spec.dtype, ring->buffer_rows(), 1, job.spec.latent_dim),
                      dense_view(k_rope, job.spec.dtype, ring->buffer_rows(), 1, job.spec.rope_dim)};
  };
  memory.sources = {LatentRows{inputs.latent, inputs.k_rope}, dense_rows(buffers[0]), dense_rows(buffers[1])};
}

void Latent::Impl::check_packed_rows(const StreamView& rows) const {
  const std::int64_t bytes = latent_row_bytes(job.spec);
  if (k_rows() == 0) return;
  check_given("Latent", "packed", rows.data, true);
  const bool apart = k_rows() == 1 || (rows.token_stride >= bytes && rows.token_stride % 2 == 0);
  if (!apart || reinterpret_cast<std::uintptr_t>(rows.data) % 2 != 0) {
    refuse(fmt::format("the latents' rows lie at {}, {} bytes apart", static_cast<const void*>(rows.data),
                       rows.token_stride),
           fmt::format("they have {} bytes, and begin at even addresses", bytes), "Lay them out so, or copy them.");
  }
}

void Latent::Impl::check(const LatentInputs& inputs, const LatentOutputs& outputs, std::span<std::byte> space) const {
  const LatentSpec& spec = job.spec;
  const bool has_w_uk = inputs.w_uk.data != nullptr;
  const bool has_w_uv = inputs.w_uv.data != nullptr;
  if (!absorbed() && !(has_w_uk && has_w_uv)) {
    refuse(fmt::format("{} is missing", has_w_uk ? "w_uv" : "w_uk"), "the expanded form makes keys and values of both",
           "Give both matrices, or name the absorbed form in LatentJob::form.");
  }
  check_matrices(inputs.w_uk, inputs.w_uv, spec);
  const int nope = has_w_uk ? spec.head_dim : spec.latent_dim;
  check_shard("Latent", "q", inputs.q, {spec.dtype, q_rows(), spec.heads, nope + spec.rope_dim});
  if (packed()) {
    check_given("Latent", "latent", inputs.latent.data, false);
    check_given("Latent", "k_rope", inputs.k_rope.data, false);
    check_packed_rows(inputs.packed);
  } else {
    check_given("Latent", "packed", inputs.packed.data, false);
    check_shard("Latent", "latent", inputs.latent, {spec.dtype, k_rows(), 1, spec.latent_dim});
    check_shard("Latent", "k_rope", inputs.k_rope, {spec.dtype, k_rows(), 1, spec.rope_dim});
  }
  check_shard("Latent", "out", outputs.out,
              {spec.dtype, q_rows(), spec.heads, has_w_uv ? spec.head_dim_v : spec.latent_dim});
  check_apart("out", outputs.out, "q", inputs.q);
  constexpr std::string_view kStreams[] = {"latent", "k_rope"};
  std::size_t at = 0;
  for (const TensorView& rows : shard(inputs))
    check_apart("out", outputs.out, packed() ? "the latents' rows" : kStreams[at++], rows);
  check_sinks("LatentSpec", inputs.sinks, spec.sinks);
  const std::size_t needed = places(is_dense(inputs)).bytes;
  if (space.size() < needed) {
    refuse(fmt::format("the workspace has {} bytes", space.size()), fmt::format("{} are needed", needed),
           "Ask Latent::workspace_bytes().");
  }
}

void Latent::Impl::enqueue(const LatentInputs& inputs, const LatentOutputs& outputs, std::span<std::byte> space,
                           Stream stream, Timeline* times, const BlockDone& block_done, RunMode mode) {
  if (backend->is_capturing(stream)) {
    ring->check_capture_alone();
    RingRuns::check_capture_of(prepared);
  }
  const Places places = this->places(is_dense(inputs));
  std::array<StreamRows, 2> buffers = ring->block_buffers(space.data(), places.ring);
  LatentMemory memory;
  memory.q = inputs.q;
  set_sources(inputs, buffers, memory);
  memory.w_uk = inputs.w_uk;
  memory.w_uv = inputs.w_uv;
  if (forecast->plan.keeps_state) memory.state = space.data() + places.ring.state;
  memory.output = {outputs.out, outputs.lse, inputs.sinks};
  memory.keys = space.data() + places.keys;
  memory.values = space.data() + places.values;
  memory.unpacked = space.data() + places.unpacked;
  memory.queries = space.data() + places.queries;
  memory.latents = space.data() + places.latents;
  const LatentTools tools{job.spec, job.format,         forecast->plan,      blocks, prepared, *backend,
                          *fold,    key_products.get(), value_products.get()};
  ExpandedStep expanded(tools, memory, room.heads, latent_state_stride(*fold, q_rows()));
  AbsorbedStep absorbed_step(tools, memory);
  const auto shard = [&] {
    return ring->dense_shard(this->shard(inputs), rows_at(space.data(), places.ring.staged), stream);
  };
  BlockStep& step = absorbed() ? static_cast<BlockStep&>(absorbed_step) : expanded;
  ring->enqueue({*runs, step, std::move(buffers), shard, mode}, stream, times, block_done);
}

Latent::Latent(LatentJob job, Transport& transport, LatentOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  Options& asked = impl.options.ring;
  if (asked.threads == 0) asked.threads = share_of_processors(impl.meeting);
  impl.meeting.together([&impl] { impl.choose(); });
  asked.machine = common_machine(impl.meeting, asked.machine, *impl.choice.row, *impl.backend);
  handshake(impl.meeting, identities(impl.job, impl.options, impl.choice, impl.products, *impl.backend));
  impl.meeting.together([&impl] { impl.allocate(); });
  impl.ring->connect(*impl.runs);
}

Latent::~Latent() = default;
Latent::Latent(Latent&&) noexcept = default;

const LatentJob& Latent::job() const { return impl_->job; }
const FormChoice& Latent::form() const { return impl_->form; }
const LatentOptions& Latent::options() const { return impl_->options; }
int Latent::heads_at_a_time() const { return impl_->room.heads; }
const FoldChoice& Latent::kernel() const { return impl_->choice; }
Backend& Latent::backend() { return *impl_->backend; }
const JobLayout& Latent::layout() const { return impl_->forecast->layout(); }
const Plan& Latent::plan() const { return impl_->forecast->plan; }
const Prediction& Latent::prediction() const { return impl_->forecast->prediction; }
std::int64_t Latent::q_rows() const { return impl_->q_rows(); }
std::int64_t Latent::k_rows() const { return impl_->k_rows(); }
std::int64_t Latent::bytes_received() const { return plan().bytes_received(); }
std::int64_t Latent::expanded_bytes_received() const {
  return received_rows(plan()) * expanded_token_bytes(impl_->job.spec);
}
std::size_t Latent::workspace_bytes(bool dense_rows) const { return impl_->places(dense_rows).bytes; }

RunStats Latent::run(const LatentInputs& inputs, const LatentOutputs& outputs, std::span<std::byte> workspace,
                     Stream stream, const BlockDone& block_done, RunMode mode) {
  Impl& impl = *impl_;
  impl.meeting.together([&] {
    check_not_captured(*impl.backend, stream);
    impl.check(inputs, outputs, workspace);
  });
  return impl.ring->run(
      *impl.runs,
      [&](Timeline* timeline) { impl.enqueue(inputs, outputs, workspace, stream, timeline, block_done, mode); },
      block_done);
}

void Latent::enqueue(const LatentInputs& inputs, const LatentOutputs& outputs, std::span<std::byte> workspace,
                     Stream stream) {
  impl_->check(inputs, outputs, workspace);
  impl_->enqueue(inputs, outputs, workspace, stream, nullptr, {}, RunMode::kWhole);
}

void Latent::wait() { impl_->ring->wait(); }

}  // namespace ringattn
