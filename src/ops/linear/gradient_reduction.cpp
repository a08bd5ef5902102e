// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/gradient_reduction.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

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
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kNumberBytes = sizeof(float);

// add_nodes() is the same for every spec, so this is the smallest one that all devices have.
constexpr LinearSpec kNodesSpec{
    .dtype = Dtype::kBf16, .in_features = 128, .out_features = 8, .parallel = LinearParallel::kRow};

// Longer texts are shortened in messages, with a hash of the whole text.
constexpr std::size_t kMaxParametersText = 160;

std::string one_line(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' '; }, ' ');
  if (text.size() <= kMaxParametersText) return text;
  const XXH64_hash_t hash = XXH3_64bits(text.data(), text.size());
  return fmt::format("{}... (hash {:016x})", text.substr(0, kMaxParametersText), hash);
}

std::int64_t nodes_of_rank(int ranks, int rank) { return std::ssize(aligned_nodes(linear_leaves(ranks, rank))); }

// The nodes that are held while a range of leaves is added in order. Two siblings become their parent at once, so at
// the end the nodes are aligned_nodes().
class NodeStack {
 public:
  // The node that `node` may be added to, which is the last one held.
  bool has_sibling(int node) const { return node % 2 == 1 && !nodes_.empty() && nodes_.back() == node - 1; }
  void push(int node) { nodes_.push_back(node); }
  void pop() { nodes_.pop_back(); }
  void clear() { nodes_.clear(); }
  std::int64_t size() const { return std::ssize(nodes_); }

 private:
  std::vector<int> nodes_;
};

// The largest number of nodes held at once.
std::int64_t most_nodes(LeafRange leaves) {
  NodeStack stack;
  std::int64_t most = 0;
  for (int leaf = leaves.begin; leaf < leaves.end; ++leaf) {
    int node = kLinearLeaves + leaf;
    for (; stack.has_sibling(node); node /= 2) stack.pop();
    stack.push(node);
    most = std::max(most, stack.size());
  }
  return most;
}

}  // namespace

struct GradientReduction::Impl {
  Impl(std::int64_t the_elements, Transport& the_transport, LinearOptions the_options, std::string the_parameters)
      : elements(the_elements),
        parameters(one_line(std::move(the_parameters))),
        options(std::move(the_options)),
        transport(the_transport),
        ranks(transport.size()),
        self(transport.rank()),
        collective(transport, Timeouts(options.timeout_seconds)),
        leaves(linear_leaves(ranks, self)),
        next_leaf(leaves.begin) {}

  void prepare();
  void announce();
  void add(const float* gradient, Stream stream);
  void reset() {
    next_leaf = leaves.begin;
    stack.clear();
  }
  void check(const float* sum) const;
  void enqueue(float* sum, Stream stream);

  std::string text() const {
    return fmt::format("gradients of {} elements{}{}", elements, parameters.empty() ? "" : ": ", parameters);
  }
  FeatureRange part_of(int rank) const { return linear_tokens(elements, ranks, rank); }
  float* held(std::int64_t index) const { return reinterpret_cast<float*>(nodes.data()) + index * elements; }
  // Where the nodes of a peer are received, for this rank's part of the elements.
  float* received_from(int peer) const {
    std::int64_t before = 0;
    for (int rank = 0; rank < peer; ++rank) before += rank == self ? 0 : nodes_of_rank(ranks, rank);
    return reinterpret_cast<float*>(received.data()) + before * part_of(self).size();
  }
  void add_nodes(const LinearSumTask& task, Stream stream) {
    kernel->add_nodes(task, stream, [this] { transport.progress(); });
  }
  Exchange node_exchange() const;
  Exchange sum_exchange(float* sum) const;
  void move(Exchange exchange, Stream stream) {
    transport.wait(transport.post(std::move(exchange), stream), stream, collective.timeouts().for_peer());
  }

  std::int64_t elements;
  std::string parameters;
  LinearOptions options;
  Transport& transport;
  int ranks;
  int self;
  Collective collective;
  LeafRange leaves;
  std::uint64_t config_hash = 0;  // of handshake()
  LinearChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<LinearKernel> kernel;
  Buffer nodes;     // [most_nodes(), elements] fp32: those held
  Buffer received;  // the other ranks' nodes, [nodes, this rank's part] each
  std::int64_t announced = kNotAnnounced;
  int next_leaf;
  NodeStack stack;
  std::optional<EnqueuedRuns> enqueued;
};

void GradientReduction::Impl::prepare() {
  if (elements < 1) fail(ErrorCode::kUsage, text(), "there is nothing to add", "Give their number, at least 1.");
  choice = choose_kernel(kNodesSpec, compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  check_compatible(*choice.row, *backend, transport);
  kernel = choice.row->make_kernel(kNodesSpec, *backend);
  kernel->reserve(1);  // loads device code
  if (const std::int64_t most = most_nodes(leaves); most > 0) {
    nodes = backend->allocate(static_cast<std::size_t>(most * elements * kNumberBytes));
  }
  std::int64_t others = 0;
  for (int rank = 0; rank < ranks; ++rank) others += rank == self ? 0 : nodes_of_rank(ranks, rank);
  // At least a byte for each rank, for warm_up_transport().
  const std::int64_t bytes = others * part_of(self).size() * kNumberBytes;
  if (ranks > 1) received = backend->allocate(static_cast<std::size_t>(std::max<std::int64_t>(bytes, ranks)));
  enqueued.emplace(*backend, transport, collective.timeouts());
}

void GradientReduction::Impl::announce() {
  if (ranks == 1) return;
  Exchange exchange = node_exchange();
  announced = transport.announce(std::span(&exchange, 1), collective.timeouts().for_peer());
  if (backend->memory() == MemoryKind::kDevice) warm_up_transport(collective, transport, *backend, received.data());
}

void GradientReduction::Impl::add(const float* gradient, Stream stream) {
  if (next_leaf == leaves.end) {
    fail(ErrorCode::kUsage, "the gradient of one leaf too many is added",
         leaves.begin == leaves.end
             ? fmt::format("rank {} of {} has none of the {} leaves", self, ranks, kLinearLeaves)
             : fmt::format("rank {} of {} has leaves {} to {}", self, ranks, leaves.begin, leaves.end - 1),
         "Add one for each leaf of this rank, and then run().");
  }
  enqueued->enqueue(stream, 0.0, [&] {
    const float* from = gradient;
    int node = kLinearLeaves + next_leaf;
    for (; stack.has_sibling(node); node /= 2) {
      stack.pop();
      LinearSumTask task{.count = elements, .sum = held(stack.size())};
      task.nodes[2] = task.sum;
      task.nodes[3] = from;
      add_nodes(task, stream);
      from = task.sum;
    }
    if (from != held(stack.size())) {
      LinearSumTask copy{.count = elements, .sum = held(stack.size())};
      copy.nodes[1] = from;
      add_nodes(copy, stream);
    }
    stack.push(node);
  });
  ++next_leaf;
}

Exchange GradientReduction::Impl::node_exchange() const {
  OneRound parts;
  const FeatureRange mine = part_of(self);
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self) continue;
    const FeatureRange theirs = part_of(peer);
    for (std::int64_t node = 0; theirs.size() > 0 && node < nodes_of_rank(ranks, self); ++node) {
      parts.send(peer, {reinterpret_cast<const std::byte*>(held(node) + theirs.begin),
                        static_cast<std::size_t>(theirs.size() * kNumberBytes)});
    }
    for (std::int64_t node = 0; mine.size() > 0 && node < nodes_of_rank(ranks, peer); ++node) {
      parts.receive(peer, {reinterpret_cast<std::byte*>(received_from(peer) + node * mine.size()),
                           static_cast<std::size_t>(mine.size() * kNumberBytes)});
    }
  }
  return std::move(parts).exchange("sums of gradients");
}

Exchange GradientReduction::Impl::sum_exchange(float* sum) const {
  OneRound parts;
  const auto bytes_of = [&](int rank) {
    const FeatureRange part = part_of(rank);
    return std::pair{reinterpret_cast<std::byte*>(sum + part.begin),
                     static_cast<std::size_t>(part.size() * kNumberBytes)};
  };
  const auto [mine, my_bytes] = bytes_of(self);
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self) continue;
    const auto [theirs, their_bytes] = bytes_of(peer);
    if (my_bytes > 0) parts.send(peer, {mine, my_bytes});
    if (their_bytes > 0) parts.receive(peer, {theirs, their_bytes});
  }
  return std::move(parts).exchange("reduced gradients");
}

void GradientReduction::Impl::check(const float* sum) const {
  if (next_leaf < leaves.end) {
    fail(ErrorCode::kUsage,
         fmt::format("gradients of {} of {} leaves were added", next_leaf - leaves.begin, leaves.end - leaves.begin),
         fmt::format("rank {} of {} has leaves {} to {}", self, ranks, leaves.begin, leaves.end - 1),
         "Add one for each, without a gradient for a leaf without tokens.");
  }
  if (sum == nullptr)
    fail(ErrorCode::kUsage, "sum is not given", "the reduced gradients are written to it", "Give it.");
}

void GradientReduction::Impl::enqueue(float* sum, Stream stream) {
  if (ranks > 1) check_capture(*backend, stream, "this sum", transport, "exchanges gradients with other ranks");
  reset();
  enqueued->enqueue(stream, 0.0, [&] {
    if (ranks > 1) {
      Exchange exchange = node_exchange();
      exchange.announced = announced;
      move(std::move(exchange), stream);
    }
    const FeatureRange mine = part_of(self);
    LinearSumTask task{.count = mine.size(), .sum = sum + mine.begin};
    for (int rank = 0; rank < ranks; ++rank) {
      std::int64_t index = 0;
      for (const int node : aligned_nodes(linear_leaves(ranks, rank))) {
        task.nodes[node] = rank == self ? held(index) + mine.begin : received_from(rank) + index * mine.size();
        ++index;
      }
    }
    if (mine.size() > 0) add_nodes(task, stream);
    if (ranks > 1) move(sum_exchange(sum), stream);
  });
}

GradientReduction::GradientReduction(std::int64_t elements, Transport& transport, LinearOptions options,
                                     std::string parameters)
    : impl_(std::make_unique<Impl>(elements, transport, std::move(options), std::move(parameters))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.prepare(); });
  std::vector<RankConfigEntry> config = rank_config(LinearJob{.spec = kNodesSpec}, impl.choice, *impl.backend);
  config.back() = {"job", impl.text()};
  impl.config_hash = handshake(impl.collective, config);
  impl.announce();
}

GradientReduction::~GradientReduction() = default;
GradientReduction::GradientReduction(GradientReduction&&) noexcept = default;

std::int64_t GradientReduction::elements() const { return impl_->elements; }
const LinearChoice& GradientReduction::kernel() const { return impl_->choice; }
std::size_t GradientReduction::memory_bytes() const { return impl_->nodes.bytes() + impl_->received.bytes(); }
LeafRange GradientReduction::leaves() const { return impl_->leaves; }

void GradientReduction::add(const float* gradient, Stream stream) { impl_->add(gradient, stream); }

void GradientReduction::reset() { impl_->reset(); }

void GradientReduction::run(float* sum, Stream stream) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, impl.text(), [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(sum);
  });
  impl.enqueue(sum, stream);
  wait();
  impl.collective.barrier();
}

void GradientReduction::enqueue(float* sum, Stream stream) {
  impl_->check(sum);
  impl_->enqueue(sum, stream);
}

void GradientReduction::wait() {
  if (impl_->enqueued->any()) impl_->enqueued->wait_all();
}

}  // namespace ringattn
