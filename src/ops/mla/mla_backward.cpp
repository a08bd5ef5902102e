// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/ring/copy_tensor.hpp"
#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/tokens/cost.hpp"
#include "base/aligned.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "comm/exchange.hpp"
#include "kernels/gemm/weight_gradient.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/mla/mla_checks.hpp"
#include "ops/mla/mla_ring_steps.hpp"
#include "ops/mla/mla_work.hpp"
#include "ops/reshard/reshard.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kExpandedBytes = std::int64_t{256} << 20;

[[noreturn]] void refuse(std::string_view what, std::string_view why, std::string_view suggestion) {
  fail(ErrorCode::kUnsupported, fmt::format("no gradients for {}", what), why, suggestion);
}

void check_differentiable(const MlaJob& job, const MlaOptions& options) {
  check_mla_job(job);
  if (!job.format.is_plain()) {
    refuse("FP8 latents", "quantization has no gradient", "Give latent and k_rope uncompressed.");
  }
  if (choose_form(job).form == MlaForm::kAbsorbed) {
    refuse("the absorbed form", "gradients are those of the expanded form",
           "Name the expanded form, in the forward too.");
  }
  if (options.ring.memory_budget > 0) {
    refuse("MLA within a memory budget", "the backward pass has no plan for one", "Leave the memory budget out.");
  }
}

// Consecutive heads.
struct MlaHeads {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// The heads for whose matrices a rank sums the gradients.
MlaHeads heads_of_rank(std::int64_t heads, int rank, int size) {
  const std::int64_t first = heads * rank / size;
  return {first, heads * (rank + 1) / size - first};
}

// The layout in which one rank has all tokens.
Layout layout_of_one(const Batch& batch, int owner, int size) {
  std::vector<std::int64_t> lengths;
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(size));
  for (const Sequence& sequence : batch.sequences) {
    if (sequence.k_len > 0) {
      runs[static_cast<std::size_t>(owner)].push_back({static_cast<std::int32_t>(lengths.size()), 0, sequence.k_len});
    }
    lengths.push_back(sequence.k_len);
  }
  return {lengths, std::move(runs)};
}

template <class View>
View heads_of(View view, const MlaHeads& heads) {
  if (view.data != nullptr) view.data = view.at(0, heads.first);
  view.heads = heads.count;
  return view;
}

RowView heads_of(RowView rows, const MlaHeads& heads) {
  if (rows.data != nullptr) rows.data = &rows.at(0, heads.first);
  return rows;
}

}  // namespace

MlaOptions mla_backward_options(const Mla& mla) {
  MlaOptions options = mla.options();
  options.heads_at_a_time = 0;
  options.ring = backward_options(options.ring, mla.layout());
  return options;
}

struct MlaBackward::Impl {
  // Offsets of the parts of a workspace, in bytes.
  struct Places {
    std::size_t attention = 0;  // of AttentionBackward
    std::size_t k = 0;          // [k_rows, heads at a time, head_dim + rope_dim]; dk likewise
    std::size_t v = 0;          // [k_rows, heads at a time, head_dim_v]; dv likewise
    std::size_t dk = 0;
    std::size_t dv = 0;
    std::size_t dkv = 0;      // [k_rows, heads, head_dim + head_dim_v]: dK without its rotary part, and dV
    std::size_t dk_rope = 0;  // [k_rows, heads, rope_dim]
    std::size_t weights = 0;  // [heads, head_dim + head_dim_v, latent_dim]: w_uk and w_uv of each head
    std::size_t packed = 0;   // several ranks: rows of `dkv` for one rank's heads, each followed by its latent
    std::size_t arrived = 0;  // several ranks: the same of all tokens, for this rank's heads
    std::size_t bytes = 0;
  };

  Impl(MlaJob the_job, Transport& the_transport, MlaOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.ring.timeout_seconds)) {}

  const MlaSpec& spec() const { return job.spec; }
  Backend& backend() { return attention->backend(); }
  std::int64_t q_rows() const { return attention->q_rows(); }
  std::int64_t k_rows() const { return attention->k_rows(); }
  std::int64_t head_row() const { return std::int64_t{spec().head_dim} + spec().head_dim_v; }
  std::int64_t element() const { return static_cast<std::int64_t>(size_of(spec().dtype)); }
  MlaHeads heads_of(int rank) const { return heads_of_rank(spec().heads, rank, transport.size()); }
  // Elements of a packed row for these heads.
  std::int64_t packed_dim(const MlaHeads& range) const { return range.count * head_row() + spec().latent_dim; }
  std::size_t matrix_floats() const { return static_cast<std::size_t>(spec().heads * head_row() * spec().latent_dim); }
  Progress progress() {
    return [this] { transport.progress(); };
  }

  void choose();
  void choose_backend();
  void allocate();
  Exchange gradients_of_matrices() const;
  Places places() const;
  void check(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs, std::span<std::byte> space) const;
  void differentiate_heads(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs, const MlaHeads& range,
                           std::span<std::byte> space, Stream stream, bool waits);
  void stack_weights(const MlaBackwardInputs& inputs, std::byte* to, Stream stream);
  void sum_over_heads(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs, std::byte* space,
                      Stream stream);
  void sum_over_tokens(const MlaBackwardInputs& inputs, std::byte* space, Stream stream);
  void enqueue(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs, std::span<std::byte> space,
               Stream stream, bool waits);
  void wait();

  MlaJob job;
  MlaOptions options;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  int heads_at_a_time = 1;
  std::vector<std::int64_t> lengths;  // [sequences] keys
  std::optional<AttentionBackward> attention;
  std::unique_ptr<BatchedGemmKernel> expand_keys, expand_values;
  std::unique_ptr<BatchedGemmKernel> sum_latent, sum_rope;  // over heads and dims, as K
  std::unique_ptr<WeightGradientKernel> key_matrices, value_matrices;
  std::vector<Reshard> to_rank;  // [ranks], several ranks: packed rows to the rank of their heads
  Buffer identities;             // [heads, rope_dim, rope_dim]
  Buffer matrices;               // fp32 [heads, head_dim, latent_dim], then [heads, head_dim_v, latent_dim]
  std::int64_t announced = kNotAnnounced;
  std::optional<EnqueuedRuns> enqueued;
  double seconds = 0.0;  // estimated duration of a run
};

void MlaBackward::Impl::choose() {
  check_differentiable(job, options);
  job.form = MlaForm::kExpanded;
  choose_backend();
  for (const Sequence& sequence : job.batch.sequences) lengths.push_back(sequence.k_len);
  if (options.heads_at_a_time < 0) {
    fail(ErrorCode::kUsage, fmt::format("{} heads at a time", options.heads_at_a_time), "heads are counted from 1",
         "Use 0 for as many as fit.");
  }
  const std::int64_t rows = std::max<std::int64_t>(1, job.batch.k_tokens() / transport.size());
  const std::int64_t head_bytes = 2 * rows * (head_row() + spec().rope_dim) * element();
  const std::int64_t most =
      options.heads_at_a_time > 0 ? options.heads_at_a_time : std::max<std::int64_t>(1, kExpandedBytes / head_bytes);
  heads_at_a_time = static_cast<int>(std::min<std::int64_t>(most, spec().heads));
  while (spec().heads % heads_at_a_time != 0) --heads_at_a_time;
}

// As in the forward, a backend that can't run the GEMMs is skipped, or refused if it was requested.
void MlaBackward::Impl::choose_backend() {
  KernelRequest& request = options.ring.kernel;
  if (request.kernel != "auto") return;  // allocate() finds no GEMM kernel
  const MlaChoice forward = choose_mla_kernels(spec(), MlaForm::kExpanded, compatible_request(request, transport));
  request.backend = forward.attention.row->backend;
}

void MlaBackward::Impl::allocate() {
  const std::string backend_name(attention->kernel().row->backend);
  const auto gemm = [&](std::int64_t dim_k, int dim_n, int heads) {
    const BatchedGemmSpec product{spec().dtype, static_cast<int>(dim_k), dim_n};
    auto kernel = choose_kernel(product, {backend_name, "auto"}).row->make_kernel(product, backend());
    kernel->reserve(heads);
    return kernel;
  };
  expand_keys = gemm(spec().latent_dim, spec().head_dim, heads_at_a_time);
  expand_values = gemm(spec().latent_dim, spec().head_dim_v, heads_at_a_time);
  sum_latent = gemm(spec().heads * head_row(), spec().latent_dim, 1);
  sum_rope = gemm(std::int64_t{spec().heads} * spec().rope_dim, spec().rope_dim, 1);
  const auto gradient = [&](int dim_n) {
    const WeightGradientSpec product{spec().dtype, dim_n, spec().latent_dim};
    return choose_kernel(product, {backend_name, "auto"}).row->make_kernel(product, backend());
  };
  key_matrices = gradient(spec().head_dim);
  value_matrices = gradient(spec().head_dim_v);
  matrices = backend().allocate(matrix_floats() * sizeof(float));

  const int rope = spec().rope_dim;
  std::vector<std::byte> identity(static_cast<std::size_t>(spec().heads * rope * rope * element()));
  for (std::int64_t i = 0; i < std::int64_t{spec().heads} * rope; ++i) {
    store_element(identity.data() + (i * rope + i % rope) * element(), spec().dtype, 1.0F);
  }
  identities = backend().allocate(identity.size());
  const auto bytes = static_cast<std::int64_t>(identity.size());
  backend().copy_rows(identities.data(), bytes, identity.data(), bytes, bytes, 1, backend().stream());
  backend().synchronize(backend().stream(), collective.timeouts().for_peer(), {});
  enqueued.emplace(backend(), transport, collective.timeouts());
  const double flops = 3.0 * static_cast<double>(job.batch.k_tokens()) * mla_gemm_flops(spec());
  const auto passes = static_cast<double>(spec().heads) / heads_at_a_time;
  seconds = passes * attention->time_estimate().seconds +
            flops / transport.size() / attention->kernel().row->flops_per_second(backend());
}

// Every rank sends the gradients of its heads' matrices to all others.
Exchange MlaBackward::Impl::gradients_of_matrices() const {
  const auto spans = [&](int rank, const auto& add) {
    const MlaHeads range = heads_of(rank);
    std::size_t before = 0;
    for (const std::int64_t dim : {spec().head_dim, spec().head_dim_v}) {
      const auto matrix = static_cast<std::size_t>(dim * spec().latent_dim) * sizeof(float);
      const std::size_t first = before + static_cast<std::size_t>(range.first) * matrix;
      if (range.count > 0) add(matrices.data() + first, static_cast<std::size_t>(range.count) * matrix);
      before += static_cast<std::size_t>(spec().heads) * matrix;
    }
  };
  OneRound round;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer == transport.rank()) continue;
    spans(transport.rank(), [&](const std::byte* data, std::size_t bytes) { round.send(peer, {data, bytes}); });
    spans(peer, [&](std::byte* data, std::size_t bytes) { round.receive(peer, {data, bytes}); });
  }
  Exchange exchange = std::move(round).exchange("gradients of matrices");
  exchange.announced = announced;
  return exchange;
}

MlaBackward::Impl::Places MlaBackward::Impl::places() const {
  Places at;
  const auto place = [&](std::int64_t rows, std::int64_t dim) {
    const std::size_t offset = at.bytes;
    at.bytes += aligned(static_cast<std::size_t>(rows * dim * element()));
    return offset;
  };
  at.bytes = aligned(attention->workspace_bytes(false));
  at.k = place(k_rows(), std::int64_t{heads_at_a_time} * (spec().head_dim + spec().rope_dim));
  at.v = place(k_rows(), std::int64_t{heads_at_a_time} * spec().head_dim_v);
  at.dk = place(k_rows(), std::int64_t{heads_at_a_time} * (spec().head_dim + spec().rope_dim));
  at.dv = place(k_rows(), std::int64_t{heads_at_a_time} * spec().head_dim_v);
  at.dkv = place(k_rows(), spec().heads * head_row());
  at.dk_rope = place(k_rows(), std::int64_t{spec().heads} * spec().rope_dim);
  at.weights = place(spec().heads * head_row(), spec().latent_dim);
  if (transport.size() == 1) return at;
  std::int64_t packed = 0;
  for (int rank = 0; rank < transport.size(); ++rank) packed = std::max(packed, packed_dim(heads_of(rank)));
  at.packed = place(k_rows(), packed);
  at.arrived = place(job.batch.k_tokens(), packed_dim(heads_of(transport.rank())));
  return at;
}

void MlaBackward::Impl::check(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs,
                              std::span<std::byte> space) const {
  const MlaSpec& s = spec();
  const ShardShape queries{s.dtype, q_rows(), s.heads, s.head_dim + s.rope_dim};
  const ShardShape results{s.dtype, q_rows(), s.heads, s.head_dim_v};
  const ShardShape latents{s.dtype, k_rows(), 1, s.latent_dim};
  const ShardShape rotary{s.dtype, k_rows(), 1, s.rope_dim};
  check_shard("MlaBackward", "q", inputs.q, queries);
  check_shard("MlaBackward", "latent", inputs.latent, latents);
  check_shard("MlaBackward", "k_rope", inputs.k_rope, rotary);
  check_shard("MlaBackward", "out", inputs.out, results);
  check_shard("MlaBackward", "dout", inputs.dout, results);
  check_shard("MlaBackward", "dq", outputs.dq, queries);
  check_shard("MlaBackward", "dlatent", outputs.dlatent, latents);
  check_shard("MlaBackward", "dk_rope", outputs.dk_rope, rotary);
  const std::pair<std::string_view, const TensorView*> read[] = {{"q", &inputs.q},
                                                                 {"latent", &inputs.latent},
                                                                 {"k_rope", &inputs.k_rope},
                                                                 {"out", &inputs.out},
                                                                 {"dout", &inputs.dout}};
  const std::pair<std::string_view, const MutableTensorView*> written[] = {
      {"dq", &outputs.dq}, {"dlatent", &outputs.dlatent}, {"dk_rope", &outputs.dk_rope}};
  for (const auto& [name, view] : written) {
    for (const auto& [other, input] : read) check_apart(name, *view, other, *input);
    for (const auto& [other, output] : written) {
      if (output != view) check_apart(name, *view, other, *output);
    }
  }
  check_matrices(inputs.w_uk, inputs.w_uv, s);
  for (const auto& [name, matrix] : {std::pair("w_uk", &inputs.w_uk), std::pair("w_uv", &inputs.w_uv)}) {
    check_given("MlaBackward", name, matrix->data, true);
    if (matrix->k_stride == 1) continue;
    fail(ErrorCode::kUsage, fmt::format("{} has columns in memory", name), "gradients need rows of latent_dim elements",
         "Give matrices whose last axis is contiguous.");
  }
  if (q_rows() > 0) check_given("MlaBackward", "lse", inputs.lse.data, true);
  check_given("MlaBackward", "dw_uk", outputs.dw_uk, true);
  check_given("MlaBackward", "dw_uv", outputs.dw_uv, true);
  check_sinks("MlaSpec", inputs.sinks, s.sinks);
  check_given("MlaBackward", "dsinks", outputs.dsinks, s.sinks);
  if (space.size() >= places().bytes) return;
  fail(ErrorCode::kUsage, fmt::format("the workspace has {} bytes", space.size()),
       fmt::format("{} are needed", places().bytes), "Ask MlaBackward::workspace_bytes().");
}

// Writes dQ of these heads to the outputs, and dK and dV to the workspace's rows of all heads.
void MlaBackward::Impl::differentiate_heads(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs,
                                            const MlaHeads& range, std::span<std::byte> space, Stream stream,
                                            bool waits) {
  const MlaSpec& s = spec();
  const Places at = places();
  const auto rows = [&](std::size_t offset, std::int64_t heads, std::int64_t dim) {
    return dense_view(static_cast<void*>(space.data() + offset), s.dtype, k_rows(), heads, dim);
  };
  const MutableTensorView k = rows(at.k, range.count, s.head_dim + s.rope_dim);
  const MutableTensorView v = rows(at.v, range.count, s.head_dim_v);
  const MutableTensorView dk = rows(at.dk, range.count, s.head_dim + s.rope_dim);
  const MutableTensorView dv = rows(at.dv, range.count, s.head_dim_v);
  if (k_rows() > 0) {
    expand_keys->multiply({inputs.latent, inputs.w_uk.slice(range.first, range.count), columns_of(k, 0, s.head_dim)},
                          stream, progress());
    copy_tensor(backend(), columns_of(k, s.head_dim, s.rope_dim), inputs.k_rope, stream);
    expand_values->multiply({inputs.latent, inputs.w_uv.slice(range.first, range.count), v}, stream, progress());
  }
  BackwardInputs given{ringattn::heads_of(inputs.q, range),
                       k,
                       v,
                       ringattn::heads_of(inputs.out, range),
                       ringattn::heads_of(inputs.lse, range),
                       ringattn::heads_of(inputs.dout, range),
                       ringattn::heads_of(inputs.dlse, range)};
  BackwardOutputs made{ringattn::heads_of(outputs.dq, range), dk, dv};
  if (s.sinks) {
    given.sinks = inputs.sinks + range.first;
    made.dsinks = outputs.dsinks + range.first;
  }
  const std::span<std::byte> ring = space.subspan(at.attention, aligned(attention->workspace_bytes(false)));
  waits ? static_cast<void>(attention->run(given, made, ring, stream)) : attention->enqueue(given, made, ring, stream);

  const MutableTensorView dkv = ringattn::heads_of(rows(at.dkv, s.heads, head_row()), range);
  copy_tensor(backend(), columns_of(dkv, 0, s.head_dim), columns_of(dk, 0, s.head_dim), stream);
  copy_tensor(backend(), columns_of(dkv, s.head_dim, s.head_dim_v), dv, stream);
  copy_tensor(backend(), ringattn::heads_of(rows(at.dk_rope, s.heads, s.rope_dim), range),
              columns_of(dk, s.head_dim, s.rope_dim), stream);
}

// Copies the matrices of each head one after the other, so that one GEMM sums over both.
void MlaBackward::Impl::stack_weights(const MlaBackwardInputs& inputs, std::byte* to, Stream stream) {
  const std::int64_t row_bytes = spec().latent_dim * element();
  for (std::int64_t head = 0; head < spec().heads; ++head) {
    for (const GemmWeights* matrix : {&inputs.w_uk, &inputs.w_uv}) {
      backend().copy_rows(to, row_bytes, matrix->at(head), matrix->n_stride * element(), row_bytes, matrix->dim_n,
                          stream);
      to += matrix->dim_n * row_bytes;
    }
  }
}

void MlaBackward::Impl::sum_over_heads(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs,
                                       std::byte* space, Stream stream) {
  if (k_rows() == 0) return;
  const MlaSpec& s = spec();
  const Places at = places();
  stack_weights(inputs, space + at.weights, stream);
  // [1, dim_n, dim_k], read transposed: `dim_k` rows of `dim_n` elements.
  const auto transposed = [&](const std::byte* data, std::int64_t dim_n, std::int64_t dim_k) {
    return GemmWeights{data, s.dtype, 1, dim_n, dim_k, dim_n * dim_k, 1, dim_n};
  };
  const auto rows = [&](std::size_t offset, std::int64_t dim) {
    return dense_view(static_cast<const void*>(space + offset), s.dtype, k_rows(), 1, dim);
  };
  const std::int64_t all = s.heads * head_row();
  sum_latent->multiply({rows(at.dkv, all), transposed(space + at.weights, s.latent_dim, all), outputs.dlatent}, stream,
                       progress());
  const std::int64_t rotary = std::int64_t{s.heads} * s.rope_dim;
  sum_rope->multiply({rows(at.dk_rope, rotary), transposed(identities.data(), s.rope_dim, rotary), outputs.dk_rope},
                     stream, progress());
}

// Computes the gradients of the matrices of this rank's heads into `matrices`.
void MlaBackward::Impl::sum_over_tokens(const MlaBackwardInputs& inputs, std::byte* space, Stream stream) {
  const MlaSpec& s = spec();
  const Places at = places();
  const MlaHeads own = heads_of(transport.rank());
  TensorView dkv = dense_view(static_cast<const void*>(space + at.dkv), s.dtype, k_rows(), s.heads, head_row());
  TensorView latent = inputs.latent;
  if (transport.size() > 1) {
    for (int rank = 0; rank < transport.size(); ++rank) {
      const MlaHeads theirs = heads_of(rank);
      if (theirs.count == 0) continue;
      MutableTensorView packed =
          dense_view(static_cast<void*>(space + at.packed), s.dtype, k_rows(), theirs.count, head_row());
      packed.token_stride = packed_dim(theirs);
      copy_tensor(backend(), packed, ringattn::heads_of(dkv, theirs), stream);
      MutableTensorView after = packed;
      after.data = packed.at(0, theirs.count);
      after.heads = 1;
      after.dim = s.latent_dim;
      copy_tensor(backend(), after, inputs.latent, stream);
      to_rank[static_cast<std::size_t>(rank)].enqueue(space + at.packed, space + at.arrived, stream);
    }
    dkv =
        dense_view(static_cast<const void*>(space + at.arrived), s.dtype, job.batch.k_tokens(), own.count, head_row());
    dkv.token_stride = packed_dim(own);
    latent = {dkv.at(0, own.count), s.dtype, dkv.tokens, 1, s.latent_dim, dkv.token_stride, s.latent_dim};
  }
  if (own.count == 0) return;
  auto* const keys = reinterpret_cast<float*>(matrices.data());
  float* const values = keys + std::int64_t{s.heads} * s.head_dim * s.latent_dim;
  key_matrices->compute({columns_of(dkv, 0, s.head_dim), latent, lengths, keys + own.first * s.head_dim * s.latent_dim},
                        stream, progress());
  value_matrices->compute(
      {columns_of(dkv, s.head_dim, s.head_dim_v), latent, lengths, values + own.first * s.head_dim_v * s.latent_dim},
      stream, progress());
}

// `waits`: wait for the attention of each range of heads. Everything else is enqueued.
void MlaBackward::Impl::enqueue(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs,
                                std::span<std::byte> space, Stream stream, bool waits) {
  for (std::int64_t head = 0; head < spec().heads; head += heads_at_a_time) {
    differentiate_heads(inputs, outputs, {head, heads_at_a_time}, space, stream, waits);
  }
  enqueued->enqueue(stream, seconds, [&] {
    sum_over_heads(inputs, outputs, space.data(), stream);
    sum_over_tokens(inputs, space.data(), stream);
    if (transport.size() > 1) {
      const Ticket ticket = transport.post(gradients_of_matrices(), stream);
      transport.wait(ticket, stream, collective.timeouts().for_work(seconds));
    }
    std::byte* from = matrices.data();
    for (const auto& [to, dim] :
         {std::pair(outputs.dw_uk, spec().head_dim), std::pair(outputs.dw_uv, spec().head_dim_v)}) {
      const auto bytes = static_cast<std::int64_t>(sizeof(float)) * spec().heads * dim * spec().latent_dim;
      backend().copy_rows(to, bytes, from, bytes, bytes, 1, stream);
      from += bytes;
    }
  });
}

void MlaBackward::Impl::wait() {
  attention->wait();
  for (Reshard& rows : to_rank) rows.wait();
  if (enqueued->any()) enqueued->wait_all();
}

MlaBackward::MlaBackward(MlaJob job, Transport& transport, MlaOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  impl.collective.run_collectively([&impl] { impl.choose(); });
  impl.config_hash = handshake(
      impl.collective, {{"MLA job", describe(impl.job)}, {"heads at a time", fmt::format("{}", impl.heads_at_a_time)}});
  Job forward;
  forward.spec = expanded_spec(impl.spec(), impl.heads_at_a_time);
  forward.batch = impl.job.batch;
  impl.attention.emplace(BackwardJob{std::move(forward), impl.spec().dtype}, transport, impl.options.ring);
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  if (transport.size() == 1) return;
  for (int rank = 0; rank < transport.size(); ++rank) {
    const std::int64_t token_bytes = impl.packed_dim(impl.heads_of(rank)) * impl.element();
    impl.to_rank.emplace_back(impl.attention->layout().keys, layout_of_one(impl.job.batch, rank, transport.size()),
                              token_bytes, transport, impl.backend(), impl.options.ring.timeout_seconds);
  }
  const Exchange exchanges[] = {impl.gradients_of_matrices()};
  impl.announced = transport.announce(exchanges, impl.collective.timeouts().for_peer());
}

MlaBackward::~MlaBackward() = default;
MlaBackward::MlaBackward(MlaBackward&&) noexcept = default;

const MlaJob& MlaBackward::job() const { return impl_->job; }
int MlaBackward::heads_at_a_time() const { return impl_->heads_at_a_time; }
const KernelChoice<AttentionBackwardSpec>& MlaBackward::kernel() const { return impl_->attention->kernel(); }
Backend& MlaBackward::backend() { return impl_->backend(); }
const JobLayout& MlaBackward::layout() const { return impl_->attention->layout(); }
std::int64_t MlaBackward::q_rows() const { return impl_->q_rows(); }
std::int64_t MlaBackward::k_rows() const { return impl_->k_rows(); }
std::size_t MlaBackward::workspace_bytes() const { return impl_->places().bytes; }

void MlaBackward::run(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs,
                      std::span<std::byte> workspace, Stream stream) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, "gradients of " + describe(impl.job), [&] {
    check_not_captured(impl.backend(), stream);
    impl.check(inputs, outputs, workspace);
  });
  impl.enqueue(inputs, outputs, workspace, stream, true);
  impl.wait();
  impl.collective.barrier(impl.seconds);
}

void MlaBackward::enqueue(const MlaBackwardInputs& inputs, const MlaBackwardOutputs& outputs,
                          std::span<std::byte> workspace, Stream stream) {
  impl_->check(inputs, outputs, workspace);
  impl_->enqueue(inputs, outputs, workspace, stream, false);
}

void MlaBackward::wait() { impl_->wait(); }

}  // namespace ringattn
