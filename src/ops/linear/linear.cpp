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
#include "ops/common/shard_checks.hpp"
#include "ops/linear/token_blocks.hpp"
#include "ops/linear/weight_source.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMaxFeatures = std::int64_t{1} << 24;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;  // so that no number of bytes overflows
constexpr std::int64_t kSumBytes = 4;                       // fp32 or int32

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

// The leaves of the K features that a rank has.
LeafRange leaves_of_features(const LinearJob& job, int ranks, int rank) {
  return is_row(job) ? linear_leaves(ranks, rank) : LeafRange{};
}

// Number of sums that a rank sends for each token: one for each aligned node or, for integers, one.
std::int64_t nodes_of(const LinearJob& job, LeafRange leaves) {
  return job.spec.weights == WeightFormat::kInt8 ? 1 : std::ssize(aligned_nodes(leaves));
}

// Bytes of a rank's buffers: row maxima of all tokens, the rest of one pass (token_blocks.hpp). A rank sends from
// `part` and receives into `received`.
struct ExchangeBytes {
  std::size_t absmax = 0;    // [ranks, tokens] fp32
  std::size_t part = 0;      // for each product: kRow [nodes, tokens, sum columns], kColumn [tokens, columns]
  std::size_t received = 0;  // the same of the other ranks, for this rank's block
  std::size_t gathered = 0;  // kReplicated: [ranks, tokens of a block, N]

  std::size_t total() const { return absmax + part + received + gathered; }
};

ExchangeBytes exchange_bytes(const LinearJob& job, int ranks, int rank) {
  ExchangeBytes bytes;
  const LinearSpec& spec = job.spec;
  if (!exchanges_parts(job, ranks)) return bytes;
  const TokenBlockLimits limits = token_block_limits(job, ranks);
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  const auto per_token = [&](int of) {
    if (is_row(job)) return nodes_of(job, linear_leaves(ranks, of)) * spec.sum_columns() * kSumBytes;
    return linear_columns(job, ranks, of).size() * element;
  };
  std::int64_t others = 0;
  for (int peer = 0; peer < ranks; ++peer) others += peer == rank ? 0 : per_token(peer);
  if (is_row(job) && spec.weights == WeightFormat::kInt8) {
    bytes.absmax = static_cast<std::size_t>(ranks * job.max_tokens * kSumBytes);
  }
  bytes.part = static_cast<std::size_t>(limits.pass * per_token(rank));
  bytes.received = static_cast<std::size_t>(limits.block * others);
  if (job.output == LinearOutput::kReplicated) {
    bytes.gathered = static_cast<std::size_t>(limits.pass * spec.out_features * element);
  }
  return bytes;
}

// Rows of the kernel's largest task.
std::int64_t product_rows(const LinearJob& job, int ranks) {
  return exchanges_parts(job, ranks) ? token_block_limits(job, ranks).product : job.max_tokens;
}

// `features`: number of this rank's features. A rank without features still adds the sums of the others, so it has
// scales and biases.
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
  if (job.max_tokens > kMaxTokens) {
    refuse(fmt::format("a linear layer of {} tokens", job.max_tokens), "a call has up to 2^40",
           "Give as many as the largest call has.");
  }
  if (job.token_block < 0 || job.token_block > kMaxTokens) {
    refuse(fmt::format("token_block {}", job.token_block),
           "so many tokens of a rank are computed at a time, up to 2^40", "Give at least 1, or 0 for blocks by size.");
  }
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
  return static_cast<std::size_t>(weights) + kernel->scratch_bytes(product_rows(job, ranks)) +
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
  // Bytes per token of the rows of a node or part.
  std::int64_t part_row(int rank) const {
    return is_row(job) ? job.spec.sum_columns() * kSumBytes : columns(rank).size() * element();
  }
  std::int64_t part_nodes(int rank) const { return is_row(job) ? nodes_of(job, linear_leaves(ranks, rank)) : 1; }

  // This rank's part of a block in `part`, until it is sent or added.
  struct PartRows {
    std::byte* data;
    std::int64_t node_bytes;  // stride between nodes
  };
  PartRows part_rows(const TokenBlocks& blocks, int rank, int pass) const;
  // The receive buffer of a peer's part of this rank's block.
  std::byte* received_rows(const TokenBlocks& blocks, int peer, int pass) const;
  // The gathered rows of a rank's block.
  std::byte* gathered_rows(const TokenBlocks& blocks, int rank) const {
    return gathered.data() + rank * blocks.size * job.spec.out_features * element();
  }
  MutableTensorView own_rows(const MutableTensorView& y, const TokenBlocks& blocks, int pass) const;

  Exchange absmax_exchange(std::int64_t tokens) const;
  // Exchanges parts: sends to the ranks at `distances` after this one, and receives from those at the same distances
  // before it.
  Exchange part_exchange(const TokenBlocks& blocks, int pass, FeatureRange distances) const;
  Exchange row_exchange(const TokenBlocks& blocks, int pass) const;
  // All exchanges of a call in the order in which compute() posts them.
  std::vector<Exchange> exchanges_of(const TokenBlocks& blocks) const;

  class Run;
  void multiply(const TensorView& x, const MutableTensorView& y, Stream stream);
  void compute(const TensorView& x, const MutableTensorView& y, Stream stream);
  void add_part(const TensorView& x, const LinearAbsmax& maxima, std::byte* sums, Stream stream);
  void complete(const TokenBlocks& blocks, int pass, const LinearAbsmax& maxima, const MutableTensorView& y,
                Stream stream);
  void copy_gathered(const TokenBlocks& blocks, int pass, const MutableTensorView& y, Stream stream);

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
  std::int64_t announced = kNotAnnounced;  // the first exchange of a call of max_tokens tokens
  double token_seconds = 0.0;              // estimated
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
  kernel->reserve(product_rows(job, ranks));
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
  announced =
      transport.announce(exchanges_of(token_blocks(job, ranks, job.max_tokens)), collective.timeouts().for_peer());
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

Linear::Impl::PartRows Linear::Impl::part_rows(const TokenBlocks& blocks, int rank, int pass) const {
  const FeatureRange block = blocks.block(rank, pass);
  const std::int64_t row = part_row(self);
  if (blocks.one_product) return {part.data() + block.begin * row, blocks.tokens * row};
  return {part.data() + rank * blocks.size * part_nodes(self) * row, block.size() * row};
}

std::byte* Linear::Impl::received_rows(const TokenBlocks& blocks, int peer, int pass) const {
  std::int64_t before = 0;
  for (int rank = 0; rank < peer; ++rank) before += rank == self ? 0 : part_nodes(rank) * part_row(rank);
  return received.data() + before * blocks.block(self, pass).size();
}

// The rows of y of this rank's block, in the buffer of gathered rows or in the caller's memory.
MutableTensorView Linear::Impl::own_rows(const MutableTensorView& y, const TokenBlocks& blocks, int pass) const {
  const FeatureRange block = blocks.block(self, pass);
  const std::int64_t n = job.spec.out_features;
  if (gathers()) {
    return dense_view(static_cast<void*>(gathered_rows(blocks, self)), job.spec.dtype, block.size(), 1, n);
  }
  MutableTensorView rows = y;
  const std::int64_t before = block.begin - blocks.block(self, 0).begin;
  rows.data = static_cast<std::byte*>(y.data) + before * y.token_stride * element();
  rows.tokens = block.size();
  return rows;
}

Exchange Linear::Impl::part_exchange(const TokenBlocks& blocks, int pass, FeatureRange distances) const {
  OneRound parts;
  const auto own = blocks.block(self, pass).size();
  for (std::int64_t distance = distances.begin; distance < distances.end; ++distance) {
    const int to = (self + static_cast<int>(distance)) % ranks;
    const int from = (self + ranks - static_cast<int>(distance)) % ranks;
    const auto send_bytes = static_cast<std::size_t>(blocks.block(to, pass).size() * part_row(self));
    const auto receive_bytes = static_cast<std::size_t>(own * part_row(from));
    const PartRows rows = part_rows(blocks, to, pass);
    for (std::int64_t node = 0; send_bytes > 0 && node < part_nodes(self); ++node) {
      parts.send(to, {rows.data + node * rows.node_bytes, send_bytes});
    }
    std::byte* const target = received_rows(blocks, from, pass);
    for (std::int64_t node = 0; receive_bytes > 0 && node < part_nodes(from); ++node) {
      parts.receive(from, {target + static_cast<std::size_t>(node) * receive_bytes, receive_bytes});
    }
  }
  return std::move(parts).exchange("sums of a linear layer");
}

Exchange Linear::Impl::row_exchange(const TokenBlocks& blocks, int pass) const {
  OneRound rows;
  const auto bytes_of = [&](int rank) {
    return static_cast<std::size_t>(blocks.block(rank, pass).size() * job.spec.out_features * element());
  };
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self) continue;
    if (bytes_of(self) > 0) rows.send(peer, {gathered_rows(blocks, self), bytes_of(self)});
    if (bytes_of(peer) > 0) rows.receive(peer, {gathered_rows(blocks, peer), bytes_of(peer)});
  }
  return std::move(rows).exchange("rows of a linear layer");
}

std::vector<Exchange> Linear::Impl::exchanges_of(const TokenBlocks& blocks) const {
  std::vector<Exchange> all;
  if (bytes.absmax > 0) all.push_back(absmax_exchange(blocks.tokens));
  for (int pass = 0; pass < blocks.passes; ++pass) {
    const int step = blocks.one_product ? ranks - 1 : 1;
    for (int distance = 1; distance < ranks; distance += step) {
      all.push_back(part_exchange(blocks, pass, {distance, distance + step}));
    }
    if (gathers()) all.push_back(row_exchange(blocks, pass));
  }
  return all;
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

// The exchanges of a call.
class Linear::Impl::Run {
 public:
  Run(const Impl& impl, const TokenBlocks& blocks, Stream stream)
      : impl_(impl), exchanges_(impl.exchanges_of(blocks)), stream_(stream), tokens_(blocks.tokens) {}

  void post_next() {
    Exchange& exchange = exchanges_[posted_];
    if (tokens_ == impl_.job.max_tokens && impl_.announced != kNotAnnounced) {
      exchange.announced = impl_.announced + static_cast<std::int64_t>(posted_);
    }
    tickets_.push_back(impl_.transport.post(std::move(exchange), stream_));
    ++posted_;
  }
  void wait_for_posted() {
    const double seconds = impl_.token_seconds * static_cast<double>(tokens_);
    for (const Ticket ticket : tickets_) {
      impl_.transport.wait(ticket, stream_, impl_.collective.timeouts().for_work(seconds));
    }
    tickets_.clear();
  }

 private:
  const Impl& impl_;
  std::vector<Exchange> exchanges_;
  Stream stream_;
  std::int64_t tokens_;
  std::size_t posted_ = 0;
  std::vector<Ticket> tickets_;  // not waited for
};

void Linear::Impl::multiply(const TensorView& x, const MutableTensorView& y, Stream stream) {
  if (spec.out_features == 0) return;
  kernel->multiply({x, {*weights, packed.data()}, y}, stream, [this] { transport.progress(); });
}

// Computes this rank's part of some tokens.
void Linear::Impl::add_part(const TensorView& x, const LinearAbsmax& maxima, std::byte* sums, Stream stream) {
  if (x.tokens == 0) return;
  if (!is_row(job)) {
    return multiply(x, dense_view(static_cast<void*>(sums), spec.dtype, x.tokens, 1, spec.out_features), stream);
  }
  LinearPartialTask task;
  task.x = x;
  task.weights = {*weights, packed.data()};
  task.leaves = linear_leaves(ranks, self);
  task.absmax = maxima;
  task.sums = sums;
  kernel->add_leaves(task, stream, [this] { transport.progress(); });
}

// Computes y of this rank's block from the parts of all ranks.
void Linear::Impl::complete(const TokenBlocks& blocks, int pass, const LinearAbsmax& maxima, const MutableTensorView& y,
                            Stream stream) {
  const FeatureRange block = blocks.block(self, pass);
  if (block.size() == 0) return;
  const MutableTensorView rows = own_rows(y, blocks, pass);
  std::vector<LinearPartial> partials;
  for (int rank = 0; rank < ranks; ++rank) {
    PartRows from = part_rows(blocks, self, pass);
    if (rank != self) from = {received_rows(blocks, rank, pass), block.size() * part_row(rank)};
    if (is_row(job)) {
      partials.push_back({from.data, from.node_bytes / kSumBytes, linear_leaves(ranks, rank)});
    } else if (const FeatureRange range = columns(rank); range.size() > 0) {
      backend->copy_rows(static_cast<std::byte*>(rows.data) + range.begin * element(), rows.token_stride * element(),
                         from.data, part_row(rank), part_row(rank), block.size(), stream);
    }
  }
  if (!is_row(job)) return;
  LinearFinishTask finish;
  finish.partials = partials;
  finish.weights = *weights;
  finish.absmax = maxima;
  if (maxima.values != nullptr) finish.absmax.values += block.begin;
  finish.y = rows;
  kernel->finish(finish, stream, [this] { transport.progress(); });
}

void Linear::Impl::copy_gathered(const TokenBlocks& blocks, int pass, const MutableTensorView& y, Stream stream) {
  const std::int64_t row = job.spec.out_features * element();
  const std::int64_t stride = y.token_stride * element();
  for (int rank = 0; rank < ranks; ++rank) {
    const FeatureRange block = blocks.block(rank, pass);
    if (block.size() == 0) continue;
    backend->copy_rows(static_cast<std::byte*>(y.data) + block.begin * stride, stride, gathered_rows(blocks, rank), row,
                       row, block.size(), stream);
  }
}

// Runs a layer whose ranks exchange parts (token_blocks.hpp).
void Linear::Impl::compute(const TensorView& x, const MutableTensorView& y, Stream stream) {
  const TokenBlocks blocks = token_blocks(job, ranks, x.tokens);
  Run run(*this, blocks, stream);
  LinearAbsmax maxima;
  if (bytes.absmax > 0) {
    auto* const values = reinterpret_cast<float*>(absmax.data());
    kernel->find_absmax(x, values + self * x.tokens, stream, [this] { transport.progress(); });
    run.post_next();
    run.wait_for_posted();
    maxima = {values, ranks, x.tokens};
  }
  const auto add = [&](FeatureRange tokens, std::byte* sums) {
    TensorView rows = x;
    rows.data = static_cast<const std::byte*>(x.data) + tokens.begin * x.token_stride * element();
    rows.tokens = tokens.size();
    LinearAbsmax of_rows = maxima;
    if (maxima.values != nullptr) of_rows.values += tokens.begin;
    add_part(rows, of_rows, sums, stream);
  };
  for (int pass = 0; pass < blocks.passes; ++pass) {
    if (blocks.one_product) {
      add({0, x.tokens}, part.data());
      run.post_next();
    } else {
      for (int distance = 1; distance < ranks; ++distance) {
        const int peer = (self + distance) % ranks;
        add(blocks.block(peer, pass), part_rows(blocks, peer, pass).data);
        run.post_next();
      }
      add(blocks.block(self, pass), part_rows(blocks, self, pass).data);
    }
    // The gathered rows of the previous pass were sent in the meantime.
    run.wait_for_posted();
    if (gathers() && pass > 0) copy_gathered(blocks, pass - 1, y, stream);
    complete(blocks, pass, maxima, y, stream);
    if (gathers()) run.post_next();
  }
  if (!gathers()) return;
  run.wait_for_posted();
  copy_gathered(blocks, blocks.passes - 1, y, stream);
}

void Linear::Impl::enqueue(const TensorView& x, const MutableTensorView& y, Stream stream) {
  if (exchanges()) check_capture(*backend, stream, "this layer", transport, "exchanges sums with other ranks");
  if (x.tokens == 0) return;
  enqueued->enqueue(stream, token_seconds * static_cast<double>(x.tokens), [&] {
    if (exchanges()) {
      compute(x, y, stream);
    } else {
      multiply(x, y, stream);
    }
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
  return impl_->kernel->scratch_bytes(product_rows(impl_->job, impl_->ranks)) + impl_->bytes.total() +
         impl_->packed.bytes();
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
