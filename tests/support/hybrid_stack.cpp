// SPDX-License-Identifier: Apache-2.0
#include "tests/support/hybrid_stack.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "attention/tokens/packed_run.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/synthetic.hpp"
#include "ops/attention/attention.hpp"
#include "ops/gated_delta/gated_delta.hpp"
#include "ops/linear_attention/linear_attention.hpp"
#include "ops/reshard/reshard.hpp"
#include "ops/ssm/ssm.hpp"
#include "tests/support/device_array.hpp"

namespace ringattn::testing {

namespace {

using Bytes = std::vector<std::byte>;

Batch batch_of(const std::vector<std::int64_t>& lengths) {
  std::vector<Sequence> sequences;
  for (const std::int64_t length : lengths) sequences.push_back({length, length, 0});
  return sequences;
}

// Rows of a rank, [rows, heads, dim] of bf16, in the memory of a backend.
class Rows {
 public:
  Rows(Backend& backend, std::int64_t rows, int heads, int dim)
      : rows_(rows),
        heads_(heads),
        dim_(dim),
        memory_(backend, static_cast<std::size_t>(std::max<std::int64_t>(1, rows) * heads * dim) * 2) {}

  // Rows of a layer's own tensors, wherever they lie.
  static Rows made(Backend& backend, const Layout& layout, int rank, SyntheticTensor tensor, int heads, int dim) {
    const std::vector<PackedRun> runs = packed_runs(layout.runs(rank), layout.cu());
    const std::int64_t tokens = layout.tokens(rank);
    Bytes bytes(static_cast<std::size_t>(tokens * heads * dim) * 2);
    fill_synthetic(3, tensor, runs, dense_view(static_cast<void*>(bytes.data()), Dtype::kBf16, tokens, heads, dim), 1);
    Rows rows(backend, tokens, heads, dim);
    if (!bytes.empty()) rows.memory_.write(bytes);
    return rows;
  }

  std::byte* data() const { return memory_.data(); }
  MutableTensorView view() const {
    return dense_view(static_cast<void*>(memory_.data()), Dtype::kBf16, rows_, heads_, dim_);
  }
  Bytes read() const {
    Bytes bytes = memory_.read();
    bytes.resize(static_cast<std::size_t>(rows_ * heads_ * dim_) * 2);
    return bytes;
  }

 private:
  std::int64_t rows_;
  int heads_;
  int dim_;
  DeviceArray memory_;
};

// Numbers of a layer in the memory of a backend.
DeviceArray in_memory(Backend& backend, const std::vector<float>& numbers) {
  DeviceArray memory(backend, std::max<std::size_t>(1, numbers.size()) * sizeof(float));
  const auto* const bytes = reinterpret_cast<const std::byte*>(numbers.data());
  if (!numbers.empty()) memory.write({bytes, bytes + numbers.size() * sizeof(float)});
  return memory;
}

// Heads that remember whole units of tokens, and heads that don't. [heads] log-decays of a token
std::vector<float> slow_and_fast(int heads) {
  std::vector<float> decays;
  for (int head = 0; head < heads; ++head) decays.push_back(head % 2 == 0 ? -1e-5F : -0.5F);
  return decays;
}

SsmOptions state_options(const HybridStack& stack) {
  SsmOptions options;
  options.kernel.backend = stack.backend;
  options.threads = 1;
  return options;
}

// The layer between the two of attention, with its own tensors besides the rows that it gets.
class MiddleLayer {
 public:
  virtual ~MiddleLayer() = default;
  virtual const Layout& layout() const = 0;
  virtual Backend& backend() = 0;
  // [own tokens, state_heads, state_head_dim] each.
  virtual void enqueue(const TensorView& rows, const MutableTensorView& result, Stream stream) = 0;
  virtual void wait() = 0;
};

class SsdLayer final : public MiddleLayer {
 public:
  SsdLayer(const HybridStack& stack, Transport& transport)
      : ssm_(job_of(stack), transport, state_options(stack)),
        dt_(made(transport, SyntheticTensor::kSsmDt, stack.state_heads, 1)),
        b_(made(transport, SyntheticTensor::kSsmB, 1, stack.state_dim)),
        c_(made(transport, SyntheticTensor::kSsmC, 1, stack.state_dim)),
        a_(in_memory(ssm_.backend(), slow_and_fast(stack.state_heads))) {}

  const Layout& layout() const override { return ssm_.layout(); }
  Backend& backend() override { return ssm_.backend(); }
  void enqueue(const TensorView& rows, const MutableTensorView& result, Stream stream) override {
    ssm_.enqueue({.x = rows, .dt = dt_.view(), .b = b_.view(), .c = c_.view(), .a = a_.floats()}, {.y = result},
                 stream);
  }
  void wait() override { ssm_.wait(); }

 private:
  static SsmJob job_of(const HybridStack& stack) {
    SsmJob job;
    job.spec.heads = stack.state_heads;
    job.spec.head_dim = stack.state_head_dim;
    job.spec.state_dim = stack.state_dim;
    job.spec.dt_softplus = true;
    job.lengths = stack.lengths;
    return job;
  }
  Rows made(Transport& transport, SyntheticTensor tensor, int heads, int dim) {
    return Rows::made(ssm_.backend(), ssm_.layout(), transport.rank(), tensor, heads, dim);
  }

  Ssm ssm_;
  Rows dt_, b_, c_;
  DeviceArray a_;
};

class LinearAttentionLayer final : public MiddleLayer {
 public:
  LinearAttentionLayer(const HybridStack& stack, Transport& transport)
      : layer_(job_of(stack), transport, state_options(stack)),
        q_(made(stack, transport, SyntheticTensor::kSsmC)),
        k_(made(stack, transport, SyntheticTensor::kSsmB)),
        decays_(in_memory(layer_.backend(), slow_and_fast(stack.state_heads))) {}

  const Layout& layout() const override { return layer_.ssm().layout(); }
  Backend& backend() override { return layer_.backend(); }
  void enqueue(const TensorView& rows, const MutableTensorView& result, Stream stream) override {
    layer_.enqueue({.q = q_.view(), .k = k_.view(), .v = rows, .head_log_decay = decays_.floats()}, {.out = result},
                   stream);
  }
  void wait() override { layer_.wait(); }

 private:
  static LinearAttentionJob job_of(const HybridStack& stack) {
    LinearAttentionJob job;
    job.spec.heads = stack.state_heads;
    job.spec.dim = stack.state_dim;
    job.spec.dim_v = stack.state_head_dim;
    RopeSpec rope;
    rope.head_dim = rope.rotary_dim = stack.state_dim;
    rope.frequencies.assign(static_cast<std::size_t>(rope.pair_count()), 0.125);
    job.spec.rope = rope;
    job.lengths = stack.lengths;
    return job;
  }
  Rows made(const HybridStack& stack, Transport& transport, SyntheticTensor tensor) {
    return Rows::made(layer_.backend(), layout(), transport.rank(), tensor, stack.state_heads, stack.state_dim);
  }

  LinearAttention layer_;
  Rows q_, k_;
  DeviceArray decays_;
};

class GatedDeltaLayer final : public MiddleLayer {
 public:
  GatedDeltaLayer(const HybridStack& stack, Transport& transport)
      : stack_(stack),
        rule_(job_of(stack), transport, state_options(stack)),
        tokens_(rule_.layout().tokens(transport.rank())),
        q_(made(transport, SyntheticTensor::kSsmC)),
        k_(made(transport, SyntheticTensor::kSsmB)),
        log_decay_(numbers(slow_and_fast(stack.state_heads))),
        beta_(numbers(std::vector<float>(static_cast<std::size_t>(stack.state_heads), 0.4F))) {}

  const Layout& layout() const override { return rule_.layout(); }
  Backend& backend() override { return rule_.backend(); }
  void enqueue(const TensorView& rows, const MutableTensorView& result, Stream stream) override {
    rule_.enqueue(
        {.q = q_.view(), .k = k_.view(), .v = rows, .log_decay = each_head(log_decay_), .beta = each_head(beta_)},
        {.out = result}, stream);
  }
  void wait() override { rule_.wait(); }

 private:
  static GatedDeltaJob job_of(const HybridStack& stack) {
    GatedDeltaJob job;
    job.spec.key_heads = 1;
    job.spec.value_heads = stack.state_heads;
    job.spec.key_dim = stack.state_dim;
    job.spec.value_dim = stack.state_head_dim;
    job.spec.qk_l2norm = true;
    job.lengths = stack.lengths;
    return job;
  }
  Rows made(Transport& transport, SyntheticTensor tensor) {
    return Rows::made(rule_.backend(), layout(), transport.rank(), tensor, 1, stack_.state_dim);
  }
  // The same numbers for each token.
  DeviceArray numbers(const std::vector<float>& of_heads) {
    std::vector<float> all;
    for (std::int64_t token = 0; token < tokens_; ++token) all.insert(all.end(), of_heads.begin(), of_heads.end());
    return in_memory(rule_.backend(), all);
  }
  TensorView each_head(const DeviceArray& memory) const {
    return dense_view(static_cast<const void*>(memory.data()), Dtype::kF32, tokens_, stack_.state_heads, 1);
  }

  const HybridStack& stack_;
  GatedDelta rule_;
  std::int64_t tokens_;
  Rows q_, k_;
  DeviceArray log_decay_, beta_;
};

std::unique_ptr<MiddleLayer> make_middle(const HybridStack& stack, Transport& transport) {
  switch (stack.middle) {
    case StateLayer::kGatedDelta:
      return std::make_unique<GatedDeltaLayer>(stack, transport);
    case StateLayer::kLinearAttention:
      return std::make_unique<LinearAttentionLayer>(stack, transport);
    case StateLayer::kSsd:
      break;
  }
  return std::make_unique<SsdLayer>(stack, transport);
}

// The runs of all ranks, as Options take them.
std::vector<std::vector<TokenRun>> runs_of(const Layout& layout) {
  std::vector<std::vector<TokenRun>> runs;
  for (int rank = 0; rank < layout.world(); ++rank) {
    runs.emplace_back(layout.runs(rank).begin(), layout.runs(rank).end());
  }
  return runs;
}

}  // namespace

std::int64_t HybridStack::packed_bytes() const {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}) * row_bytes();
}

std::int64_t run_hybrid_rank(const HybridStack& stack, Transport& transport, Bytes& packed) {
  const int rank = transport.rank();
  const std::unique_ptr<MiddleLayer> middle = make_middle(stack, transport);
  Options options;
  options.kernel.backend = stack.backend;
  options.threads = 1;
  options.layout.kind = stack.layout;
  if (stack.shared_runs) options.query_runs = options.key_runs = runs_of(middle->layout());
  const AttentionSpec spec = make_spec(Dtype::kBf16, stack.heads, stack.heads, stack.dim, {15, 0});
  Attention attention(Job{spec, batch_of(stack.lengths)}, transport, options);
  const Layout& layout = attention.layout().queries;
  Reshard there(layout, middle->layout(), stack.row_bytes(), transport, middle->backend());
  Reshard back(middle->layout(), layout, stack.row_bytes(), transport, middle->backend());

  Backend& memory = attention.backend();
  const auto of_attention = [&](SyntheticTensor tensor) {
    return Rows::made(memory, layout, rank, tensor, stack.heads, stack.dim);
  };
  const Rows q = of_attention(SyntheticTensor::kQ);
  const Rows k = of_attention(SyntheticTensor::kK);
  const Rows v = of_attention(SyntheticTensor::kV);
  const std::int64_t rows = layout.tokens(rank);
  const Rows out(memory, rows, stack.heads, stack.dim);
  const DeviceArray lse(memory, static_cast<std::size_t>(rows * stack.heads + 1) * sizeof(float));
  const std::int64_t own = middle->layout().tokens(rank);
  const Rows x(memory, own, stack.state_heads, stack.state_head_dim);
  const Rows y(memory, own, stack.state_heads, stack.state_head_dim);
  // The same bytes, as each layer sees them.
  const auto as_states = [&](const Rows& of) {
    return dense_view(static_cast<void*>(of.data()), Dtype::kBf16, own, stack.state_heads, stack.state_head_dim);
  };
  const Buffer workspace = memory.allocate(attention.workspace_bytes());
  const std::span<std::byte> space(workspace.data(), workspace.bytes());
  const Stream stream = memory.stream();

  const Outputs outputs{out.view(), {lse.floats(), stack.heads, 1}, {}};
  attention.enqueue({q.view(), k.view(), v.view()}, outputs, space, stream);
  if (stack.shared_runs) {
    middle->enqueue(as_states(out), as_states(q), stream);  // in place of q, which is done with
  } else {
    there.enqueue(out.data(), x.data(), stream);
    middle->enqueue(as_states(x), as_states(y), stream);
    back.enqueue(y.data(), q.data(), stream);
  }
  attention.enqueue({q.view(), k.view(), v.view()}, outputs, space, stream);
  there.wait();
  middle->wait();
  back.wait();
  attention.wait();
  layout.unshard(rank, out.read().data(), packed.data(), stack.row_bytes());  // each rank writes its own rows
  transport.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
  return there.bytes_received() + back.bytes_received();
}

std::string what_is_empty(const HybridStack& stack, const Bytes& packed) {
  for (std::size_t at = 0; at < packed.size(); at += 2) {
    if (!std::isfinite(load_element(packed.data() + at, Dtype::kBf16))) return fmt::format("element {}", at / 2);
  }
  const auto row = static_cast<std::size_t>(stack.row_bytes());
  const std::byte* const end = packed.data() + packed.size();
  return std::memcmp(end - 2 * row, end - row, row) == 0 ? "the last two rows are the same" : "";
}

}  // namespace ringattn::testing
