// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/linear.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/warm_up.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "comm/exchange.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/rank_config.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/linear/weight_source.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMaxFeatures = std::int64_t{1} << 24;
constexpr std::int64_t kSumBytes = 4;  // fp32 or int32

[[noreturn]] void refuse(const std::string& what, const std::string& why, const std::string& suggestion) {
  fail(ErrorCode::kUsage, what, why, suggestion);
}

std::int64_t column_unit(const LinearJob& job) {
  return job.column_unit > 0 ? job.column_unit : leaf_unit(job.spec.weights);
}

bool is_row(const LinearJob& job) { return job.spec.parallel == LinearParallel::kRow; }
bool is_column(const LinearJob& job) { return job.spec.parallel == LinearParallel::kColumn; }

// Whether ranks exchange parts of results. The same on every rank.
bool exchanges_parts(const LinearJob& job, int ranks) {
  return ranks > 1 && (is_row(job) || (is_column(job) && job.output != LinearOutput::kShard));
}

// Leaves of the features of K that a rank has.
LeafRange leaves_of_features(const LinearJob& job, int ranks, int rank) {
  return is_row(job) ? linear_leaves(ranks, rank) : LeafRange{};
}

// Sums that a rank sends for each token: of its aligned nodes or, of integers, one.
std::int64_t nodes_of(const LinearJob& job, LeafRange leaves) {
  return job.spec.weights == WeightFormat::kInt8 ? 1 : std::ssize(aligned_nodes(leaves));
}

// Bytes of a rank's buffers. A rank sends from `part` and receives into `received`.
struct ExchangeBytes {
  std::size_t absmax = 0;    // [ranks, tokens] fp32
  std::size_t part = 0;      // kRow: [nodes, tokens, sum columns]; kColumn: [tokens, columns]
  std::size_t received = 0;  // the same of the other ranks, for this rank's tokens
  std::size_t gathered = 0;  // kReplicated: [tokens, N]

  std::size_t total() const { return absmax + part + received + gathered; }
};

ExchangeBytes exchange_bytes(const LinearJob& job, int ranks, int rank) {
  ExchangeBytes bytes;
  const LinearSpec& spec = job.spec;
  if (!exchanges_parts(job, ranks)) return bytes;
  const std::int64_t tokens = job.max_tokens;
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  const auto per_token = [&](int of) {
    if (is_row(job)) return nodes_of(job, linear_leaves(ranks, of)) * spec.sum_columns() * kSumBytes;
    return linear_columns(job, ranks, of).size() * element;
  };
  std::int64_t others = 0;
  for (int peer = 0; peer < ranks; ++peer) others += peer == rank ? 0 : per_token(peer);
  // The largest share of the tokens.
  const std::int64_t mine = (tokens + ranks - 1) / ranks;
  if (is_row(job) && spec.weights == WeightFormat::kInt8) {
    bytes.absmax = static_cast<std::size_t>(ranks * tokens * kSumBytes);
  }
  bytes.part = static_cast<std::size_t>(tokens * per_token(rank));
  bytes.received = static_cast<std::size_t>(mine * others);
  if (job.output == LinearOutput::kReplicated) {
    bytes.gathered = static_cast<std::size_t>(tokens * spec.out_features * element);
  }
  return bytes;
}

// `features`: of this rank. A rank without some still adds the sums of the others, and so has scales and biases.
void check_matrix(const LinearSpec& spec, const LinearMatrix& matrix, std::string_view name, std::int64_t features) {
  check_given("Linear", fmt::format("bias of {}", name), matrix.bias, spec.bias);
  const bool scales = spec.weights == WeightFormat::kInt8 || (spec.weights == WeightFormat::kInt4 && features > 0);
  if (scales || spec.weights == WeightFormat::kFloat) {
    check_given("Linear", fmt::format("scales of {}", name), matrix.scales, scales);
  }
  if (features == 0) return;
  check_given("Linear", fmt::format("{} of the weights", name), matrix.data, true);
  const std::int64_t row_bytes = weight_row_bytes(spec.weights, spec.dtype, features);
  if (matrix.row_stride < row_bytes) {
    refuse(fmt::format("rows of {} are {} bytes apart", name, matrix.row_stride),
           fmt::format("a row of this rank's shard has {}", row_bytes), "Strides of weights count bytes.");
  }
  const std::int64_t groups = row_scales(spec.weights, features);
  if (spec.weights != WeightFormat::kInt4 || matrix.group_stride >= groups) return;
  refuse(fmt::format("the scales of rows of {} are {} elements apart", name, matrix.group_stride),
         fmt::format("a row of this rank's shard has {} groups", groups), "Give group_stride.");
}

}  // namespace

LeafRange linear_leaves(int ranks, int rank) {
  return {kLinearLeaves * rank / ranks, kLinearLeaves * (rank + 1) / ranks};
}

FeatureRange linear_features(const LinearJob& job, int ranks, int rank) {
  if (!is_row(job)) return {0, job.spec.in_features};
  const LeafRange leaves = linear_leaves(ranks, rank);
  const std::int64_t unit = leaf_unit(job.spec.weights);
  return {leaf_begin(job.spec.in_features, unit, leaves.begin), leaf_begin(job.spec.in_features, unit, leaves.end)};
}

FeatureRange linear_columns(const LinearJob& job, int ranks, int rank) {
  if (!is_column(job)) return {0, job.spec.out_features};
  const LeafRange leaves = linear_leaves(ranks, rank);
  return {leaf_begin(job.spec.out_features, column_unit(job), leaves.begin),
          leaf_begin(job.spec.out_features, column_unit(job), leaves.end)};
}

FeatureRange linear_tokens(std::int64_t tokens, int ranks, int rank) {
  const auto cut = [&](int r) { return tokens / ranks * r + tokens % ranks * r / ranks; };
  return {cut(rank), cut(rank + 1)};
}

void check_linear_job(const LinearJob& job, int ranks) {
  const LinearSpec& spec = job.spec;
  const auto fits = [](std::int64_t number) { return number >= 1 && number <= kMaxFeatures; };
  if (!fits(spec.in_features) || !fits(spec.out_features)) {
    refuse(fmt::format("a linear layer of {} to {} features", spec.in_features, spec.out_features),
           fmt::format("each is 1 to {}", kMaxFeatures), "Check the spec: weights are [out_features, in_features].");
  }
  if (job.max_tokens < 1) refuse("a linear layer of no tokens", "buffers are made for max_tokens", "Give at least 1.");
  if (job.column_unit < 0) {
    refuse(fmt::format("column_unit {}", job.column_unit), "columns are divided in units of it", "Give 16 or 128.");
  }
  if (spec.parallel == LinearParallel::kNone && job.output == LinearOutput::kReplicated && ranks > 1) {
    refuse("a replicated output of a layer that ranks don't share", "each rank computes the tokens that it has",
           "Use LinearOutput::kShard, or a column- or row-parallel layer.");
  }
  if (spec.parallel == LinearParallel::kNone || ranks <= kLinearLeaves) return;
  refuse(fmt::format("a {}-parallel layer over {} ranks", parallel_name(spec.parallel), ranks),
         fmt::format("its {} are dealt in {} parts, whatever the number of ranks", is_row(job) ? "features" : "columns",
                     kLinearLeaves),
         fmt::format("Use at most {} ranks for a layer.", kLinearLeaves));
}

std::size_t linear_rank_bytes(const LinearJob& job, const LinearChoice& choice, Backend& backend, int ranks, int rank) {
  LinearSpec spec = job.spec;
  spec.out_features = linear_columns(job, ranks, rank).size();
  const std::int64_t features = linear_features(job, ranks, rank).size();
  const std::int64_t rows = spec.sum_columns();
  const std::int64_t scales = rows * row_scales(spec.weights, features);
  std::int64_t weights = rows * weight_row_bytes(spec.weights, spec.dtype, features);
  weights += scales * static_cast<std::int64_t>(sizeof(float));
  if (spec.weights == WeightFormat::kInt4) weights += scales;  // zeros
  if (spec.bias) weights += rows * static_cast<std::int64_t>(size_of(spec.dtype));
  const std::unique_ptr<LinearKernel> kernel = choice.row->make_kernel(spec, backend);
  return static_cast<std::size_t>(weights) + kernel->scratch_bytes(job.max_tokens) +
         kernel->packed_bytes(leaves_of_features(job, ranks, rank)) + exchange_bytes(job, ranks, rank).total();
}

struct Linear::Impl {
  Impl(LinearJob the_job, Transport& the_transport, LinearOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        ranks(transport.size()),
        self(transport.rank()),
        collective(transport, Timeouts(options.timeout_seconds)) {}

  void choose();
  void allocate();
  void announce();
  void check(const TensorView& x, const MutableTensorView& y) const;
  void enqueue(const TensorView& x, const MutableTensorView& y, Stream stream);

  bool exchanges() const { return exchanges_parts(job, ranks); }
  bool gathers() const { return bytes.gathered > 0; }
  std::int64_t element() const { return static_cast<std::int64_t>(size_of(job.spec.dtype)); }
  FeatureRange columns(int rank) const { return linear_columns(job, ranks, rank); }
  // Bytes of a node's or part's rows, for each token.
  std::int64_t part_row(int rank) const {
    return is_row(job) ? job.spec.sum_columns() * kSumBytes : columns(rank).size() * element();
  }
  std::int64_t part_nodes(int rank) const { return is_row(job) ? nodes_of(job, linear_leaves(ranks, rank)) : 1; }

  // The n-th exchange of a run over `tokens` tokens: row maxima, parts, rows of y.
  enum : int { kAbsmax, kParts, kRows };
  Exchange absmax_exchange(std::int64_t tokens) const;
  Exchange part_exchange(std::int64_t tokens) const;
  Exchange row_exchange(std::int64_t tokens) const;
  void move(Exchange exchange, int kind, std::int64_t tokens, Stream stream);
  // Where a peer's part of this rank's tokens is received.
  std::byte* slot_of(int peer, std::int64_t tokens) const;
  // y for this rank's tokens, in the buffer of the gathered rows or in the caller's memory.
  MutableTensorView own_rows(const MutableTensorView& y, std::int64_t tokens) const;
  void add_leaves(const TensorView& x, const MutableTensorView& y, Stream stream);
  void multiply_columns(const TensorView& x, const MutableTensorView& y, Stream stream);

  LinearJob job;
  LinearOptions options;
  Transport& transport;
  int ranks;
  int self;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  LinearSpec spec;                // of the kernel: the columns of this rank
  LinearChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<LinearKernel> kernel;
  ExchangeBytes bytes;
  Buffer absmax, part, received, gathered, packed;
  std::optional<LinearWeights> weights;
  std::int64_t announced[3] = {kNotAnnounced, kNotAnnounced, kNotAnnounced};  // for max_tokens tokens
  double token_seconds = 0.0;                                                 // estimated
  std::optional<EnqueuedRuns> enqueued;
};

void Linear::Impl::choose() {
  check_linear_job(job, ranks);
  spec = job.spec;
  spec.out_features = columns(self).size();
  choice = choose_kernel(job.spec, compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  check_compatible(*choice.row, *backend, transport);
  kernel = choice.row->make_kernel(spec, *backend);
  const auto features = static_cast<double>(linear_features(job, ranks, self).size());
  token_seconds = 2.0 * features * static_cast<double>(spec.sum_columns()) / choice.row->flops_per_second(*backend);
}

void Linear::Impl::allocate() {
  kernel->reserve(job.max_tokens);
  bytes = exchange_bytes(job, ranks, self);
  const auto make = [&](Buffer& buffer, std::size_t size) {
    if (size > 0) buffer = backend->allocate(size);
  };
  make(absmax, bytes.absmax);
  make(part, bytes.part);
  // At least a byte for each rank, for warm_up_transport().
  if (exchanges()) make(received, std::max(bytes.received, static_cast<std::size_t>(ranks)));
  make(gathered, bytes.gathered);
  make(packed, kernel->packed_bytes(leaves_of_features(job, ranks, self)));
  enqueued.emplace(*backend, transport, collective.timeouts());
}

void Linear::Impl::announce() {
  if (!exchanges()) return;
  const auto tell = [&](int kind, Exchange exchange) {
    announced[kind] = transport.announce(std::span(&exchange, 1), collective.timeouts().for_peer());
  };
  if (bytes.absmax > 0) tell(kAbsmax, absmax_exchange(job.max_tokens));
  tell(kParts, part_exchange(job.max_tokens));
  if (gathers()) tell(kRows, row_exchange(job.max_tokens));
  if (backend->memory() == MemoryKind::kDevice) warm_up_transport(collective, transport, *backend, received.data());
}

Exchange Linear::Impl::absmax_exchange(std::int64_t tokens) const {
  OneRound rows;
  const auto size = static_cast<std::size_t>(tokens * kSumBytes);
  const auto of = [&](int rank) { return absmax.data() + static_cast<std::size_t>(rank) * size; };
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self) continue;
    rows.send(peer, {of(self), size});
    rows.receive(peer, {of(peer), size});
  }
  return std::move(rows).exchange("row maxima");
}

std::byte* Linear::Impl::slot_of(int peer, std::int64_t tokens) const {
  std::int64_t before = 0;
  for (int rank = 0; rank < peer; ++rank) before += rank == self ? 0 : part_nodes(rank) * part_row(rank);
  return received.data() + before * linear_tokens(tokens, ranks, self).size();
}

Exchange Linear::Impl::part_exchange(std::int64_t tokens) const {
  OneRound parts;
  const std::int64_t mine = linear_tokens(tokens, ranks, self).size();
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self) continue;
    const FeatureRange theirs = linear_tokens(tokens, ranks, peer);
    for (std::int64_t node = 0; theirs.size() * part_row(self) > 0 && node < part_nodes(self); ++node) {
      parts.send(peer, {part.data() + (node * tokens + theirs.begin) * part_row(self),
                        static_cast<std::size_t>(theirs.size() * part_row(self))});
    }
    for (std::int64_t node = 0; mine * part_row(peer) > 0 && node < part_nodes(peer); ++node) {
      parts.receive(peer, {slot_of(peer, tokens) + node * mine * part_row(peer),
                           static_cast<std::size_t>(mine * part_row(peer))});
    }
  }
  return std::move(parts).exchange("sums of a linear layer");
}

Exchange Linear::Impl::row_exchange(std::int64_t tokens) const {
  OneRound rows;
  const std::int64_t row = job.spec.out_features * element();
  const auto span_of = [&](int rank) {
    const FeatureRange range = linear_tokens(tokens, ranks, rank);
    return std::pair{gathered.data() + range.begin * row, static_cast<std::size_t>(range.size() * row)};
  };
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self) continue;
    const auto [mine, my_bytes] = span_of(self);
    const auto [theirs, their_bytes] = span_of(peer);
    if (my_bytes > 0) rows.send(peer, {mine, my_bytes});
    if (their_bytes > 0) rows.receive(peer, {theirs, their_bytes});
  }
  return std::move(rows).exchange("rows of a linear layer");
}

void Linear::Impl::move(Exchange exchange, int kind, std::int64_t tokens, Stream stream) {
  if (tokens == job.max_tokens) exchange.announced = announced[kind];
  const double seconds = token_seconds * static_cast<double>(tokens);
  transport.wait(transport.post(std::move(exchange), stream), stream, collective.timeouts().for_work(seconds));
}

MutableTensorView Linear::Impl::own_rows(const MutableTensorView& y, std::int64_t tokens) const {
  const FeatureRange mine = linear_tokens(tokens, ranks, self);
  if (!gathers()) return y;
  const std::int64_t n = job.spec.out_features;
  return dense_view(static_cast<void*>(gathered.data() + mine.begin * n * element()), job.spec.dtype, mine.size(), 1,
                    n);
}

void Linear::Impl::check(const TensorView& x, const MutableTensorView& y) const {
  const std::int64_t tokens = x.tokens;
  if (!weights) refuse("a linear layer without weights", "load() was not called", "Load this rank's weights first.");
  if (tokens < 0 || tokens > job.max_tokens) {
    refuse(fmt::format("x has {} tokens", tokens), fmt::format("the layer was made for up to {}", job.max_tokens),
           "Give fewer at a time, or make the layer for more.");
  }
  const FeatureRange features = linear_features(job, ranks, self);
  if (x.dim != features.size() && is_row(job)) {
    std::vector<std::int64_t> cuts;
    for (int rank = 1; rank < ranks; ++rank) cuts.push_back(linear_features(job, ranks, rank).begin);
    refuse(fmt::format("x has {} features", x.dim),
           fmt::format("rank {} has features {} to {} of the layer", self, features.begin, features.end),
           cuts.empty() ? "Give all features." : fmt::format("Cut x and the weights at {}.", fmt::join(cuts, ", ")));
  }
  check_shard("Linear", "x", x, {job.spec.dtype, tokens, 1, features.size()});
  const bool shard = job.output == LinearOutput::kShard;
  const bool all_tokens = job.spec.parallel == LinearParallel::kNone || (is_column(job) && shard) ||
                          job.output == LinearOutput::kReplicated;
  check_shard("Linear", "y", y,
              {job.spec.dtype, all_tokens ? tokens : linear_tokens(tokens, ranks, self).size(), 1,
               is_column(job) && shard ? columns(self).size() : job.spec.out_features});
  if (tokens > 0) check_apart("y", y, "x", x);
}

void Linear::Impl::multiply_columns(const TensorView& x, const MutableTensorView& y, Stream stream) {
  const LinearOperands operands{*weights, packed.data()};
  const Progress progress = [this] { transport.progress(); };
  if (!exchanges()) {
    if (spec.out_features > 0) kernel->multiply({x, operands, y}, stream, progress);
    return;
  }
  const std::int64_t tokens = x.tokens;
  const MutableTensorView mine = dense_view(static_cast<void*>(part.data()), spec.dtype, tokens, 1, spec.out_features);
  if (spec.out_features > 0) kernel->multiply({x, operands, mine}, stream, progress);
  move(part_exchange(tokens), kParts, tokens, stream);
  const FeatureRange own = linear_tokens(tokens, ranks, self);
  const MutableTensorView rows = own_rows(y, tokens);
  for (int rank = 0; rank < ranks; ++rank) {
    const FeatureRange range = columns(rank);
    if (range.size() == 0 || own.size() == 0) continue;
    const std::byte* const from = rank == self ? part.data() + own.begin * part_row(self) : slot_of(rank, tokens);
    backend->copy_rows(static_cast<std::byte*>(rows.data) + range.begin * element(), rows.token_stride * element(),
                       from, part_row(rank), part_row(rank), own.size(), stream);
  }
}

void Linear::Impl::add_leaves(const TensorView& x, const MutableTensorView& y, Stream stream) {
  const std::int64_t tokens = x.tokens;
  const Progress progress = [this] { transport.progress(); };
  LinearAbsmax maxima;
  if (bytes.absmax > 0) {
    auto* const values = reinterpret_cast<float*>(absmax.data());
    kernel->find_absmax(x, values + self * tokens, stream, progress);
    move(absmax_exchange(tokens), kAbsmax, tokens, stream);
    maxima = {values, ranks, tokens};
  }
  LinearPartialTask task;
  task.x = x;
  task.weights = {*weights, packed.data()};
  task.leaves = linear_leaves(ranks, self);
  task.absmax = maxima;
  task.sums = part.data();
  kernel->add_leaves(task, stream, progress);
  move(part_exchange(tokens), kParts, tokens, stream);

  const FeatureRange own = linear_tokens(tokens, ranks, self);
  if (own.size() == 0) return;
  const std::int64_t row_columns = job.spec.sum_columns();
  std::vector<LinearPartial> partials;
  for (int rank = 0; rank < ranks; ++rank) {
    const bool is_self = rank == self;
    const std::byte* const from = is_self ? part.data() + own.begin * part_row(self) : slot_of(rank, tokens);
    partials.push_back({from, (is_self ? tokens : own.size()) * row_columns, linear_leaves(ranks, rank)});
  }
  if (maxima.values != nullptr) maxima.values += own.begin;
  LinearFinishTask finish;
  finish.partials = partials;
  finish.weights = *weights;
  finish.absmax = maxima;
  finish.y = own_rows(y, tokens);
  kernel->finish(finish, stream, progress);
}

void Linear::Impl::enqueue(const TensorView& x, const MutableTensorView& y, Stream stream) {
  if (exchanges()) check_capture(*backend, stream, "this layer", transport, "exchanges sums with other ranks");
  if (x.tokens == 0) return;
  enqueued->enqueue(stream, token_seconds * static_cast<double>(x.tokens), [&] {
    if (is_row(job) && exchanges()) {
      add_leaves(x, y, stream);
    } else {
      multiply_columns(x, y, stream);
    }
    if (!gathers()) return;
    move(row_exchange(x.tokens), kRows, x.tokens, stream);
    const std::int64_t row = job.spec.out_features * element();
    backend->copy_rows(y.data, y.token_stride * element(), gathered.data(), row, row, x.tokens, stream);
  });
}

Linear::Linear(LinearJob job, Transport& transport, LinearOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
  impl.config_hash = handshake(impl.collective, rank_config(impl.job, impl.choice, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  impl.announce();
}

Linear::~Linear() = default;
Linear::Linear(Linear&&) noexcept = default;

const LinearJob& Linear::job() const { return impl_->job; }
const LinearChoice& Linear::kernel() const { return impl_->choice; }
Backend& Linear::backend() { return *impl_->backend; }
FeatureRange Linear::features() const { return linear_features(impl_->job, impl_->ranks, impl_->self); }
FeatureRange Linear::columns() const { return impl_->columns(impl_->self); }
FeatureRange Linear::tokens_of_rank(std::int64_t tokens) const {
  return linear_tokens(tokens, impl_->ranks, impl_->self);
}

std::size_t Linear::memory_bytes() const {
  return impl_->kernel->scratch_bytes(impl_->job.max_tokens) + impl_->bytes.total() + impl_->packed.bytes();
}

std::size_t Linear::packed_bytes() const { return impl_->packed.bytes(); }

void Linear::check_weights(const LinearWeights& weights) const {
  const LinearSpec& spec = impl_->spec;
  if (spec.out_features == 0) return;
  check_matrix(spec, weights.matrix, spec.gated ? "the gate matrix" : "the matrix", features().size());
  if (spec.gated) check_matrix(spec, weights.up, "the up matrix", features().size());
}

void Linear::load(const LinearWeights& weights, Stream stream) {
  Impl& impl = *impl_;
  check_weights(weights);
  impl.weights = weights;
  if (impl.packed.bytes() == 0) return;
  impl.kernel->pack(*impl.weights, leaves_of_features(impl.job, impl.ranks, impl.self), impl.packed.data(), stream);
}

void Linear::run(const TensorView& x, const MutableTensorView& y, Stream stream) {
  Impl& impl = *impl_;
  const auto check = [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(x, y);
  };
  const bool alone = impl.job.spec.parallel == LinearParallel::kNone;
  if (alone) {
    check();
  } else {
    begin_run(impl.collective, impl.config_hash + static_cast<std::uint64_t>(x.tokens),
              fmt::format("{}; {} tokens", describe(impl.job.spec), x.tokens), check);
  }
  impl.enqueue(x, y, stream);
  wait();
  if (alone) return;
  impl.collective.barrier(impl.token_seconds * static_cast<double>(x.tokens));
}

void Linear::enqueue(const TensorView& x, const MutableTensorView& y, Stream stream) {
  impl_->check(x, y);
  impl_->enqueue(x, y, stream);
}

void Linear::wait() {
  if (impl_->enqueued->any()) impl_->enqueued->wait_all();
}

}  // namespace ringattn
