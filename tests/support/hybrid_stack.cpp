// SPDX-License-Identifier: Apache-2.0
#include "tests/support/hybrid_stack.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "attention/tokens/packed_run.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/common/synthetic.hpp"
#include "ops/attention/attention.hpp"
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

}  // namespace

std::vector<std::int64_t> HybridStack::lengths() { return {kSuperSegmentTokens + 300, 517, 90}; }

std::int64_t HybridStack::packed_bytes() const {
  const std::vector<std::int64_t> all = lengths();
  return std::accumulate(all.begin(), all.end(), std::int64_t{0}) * row_bytes();
}

void run_hybrid_rank(const HybridStack& stack, Transport& transport, Bytes& packed) {
  const int rank = transport.rank();
  Options options;
  options.kernel.backend = stack.backend;
  options.threads = 1;
  options.layout.kind = stack.layout;
  const AttentionSpec fold = make_spec(Dtype::kBf16, stack.heads, stack.heads, stack.dim, {15, 0});
  Attention attention(Job{fold, batch_of(HybridStack::lengths())}, transport, options);
  SsmOptions ssm_options;
  ssm_options.kernel.backend = stack.backend;
  ssm_options.threads = 1;
  SsmJob scan_job;
  scan_job.spec.heads = stack.ssm_heads;
  scan_job.spec.head_dim = stack.ssm_dim;
  scan_job.spec.state_dim = stack.state_dim;
  scan_job.spec.dt_softplus = true;
  scan_job.lengths = HybridStack::lengths();
  Ssm scan(scan_job, transport, ssm_options);
  const Layout& striped = attention.layout().queries;
  Reshard there(striped, scan.layout(), stack.row_bytes(), transport, scan.backend());
  Reshard back(scan.layout(), striped, stack.row_bytes(), transport, scan.backend());

  Backend& memory = attention.backend();
  const auto of_attention = [&](SyntheticTensor tensor) {
    return Rows::made(memory, striped, rank, tensor, stack.heads, stack.dim);
  };
  const auto of_scan = [&](SyntheticTensor tensor, int heads, int dim) {
    return Rows::made(memory, scan.layout(), rank, tensor, heads, dim);
  };
  const Rows q = of_attention(SyntheticTensor::kQ);
  const Rows k = of_attention(SyntheticTensor::kK);
  const Rows v = of_attention(SyntheticTensor::kV);
  const std::int64_t rows = striped.tokens(rank);
  const Rows out(memory, rows, stack.heads, stack.dim);
  const DeviceArray lse(memory, static_cast<std::size_t>(rows * stack.heads + 1) * sizeof(float));
  const Rows x(memory, scan.layout().tokens(rank), stack.ssm_heads, stack.ssm_dim);
  const Rows y(memory, scan.layout().tokens(rank), stack.ssm_heads, stack.ssm_dim);
  const Rows dt = of_scan(SyntheticTensor::kSsmDt, stack.ssm_heads, 1);
  const Rows b = of_scan(SyntheticTensor::kSsmB, 1, stack.state_dim);
  const Rows c = of_scan(SyntheticTensor::kSsmC, 1, stack.state_dim);
  // Heads that remember super-segments, and heads that don't.
  std::vector<float> decays;
  for (int head = 0; head < stack.ssm_heads; ++head) decays.push_back(head % 2 == 0 ? -1e-5F : -0.5F);
  DeviceArray a(memory, decays.size() * sizeof(float));
  const auto* const decay_bytes = reinterpret_cast<const std::byte*>(decays.data());
  a.write({decay_bytes, decay_bytes + decays.size() * sizeof(float)});
  const Buffer workspace = memory.allocate(attention.workspace_bytes());
  const std::span<std::byte> space(workspace.data(), workspace.bytes());
  const Stream stream = memory.stream();

  const Outputs outputs{out.view(), {lse.floats(), stack.heads, 1}, {}};
  attention.enqueue({q.view(), k.view(), v.view()}, outputs, space, stream);
  there.enqueue(out.data(), x.data(), stream);
  scan.enqueue({.x = x.view(), .dt = dt.view(), .b = b.view(), .c = c.view(), .a = a.floats()}, {.y = y.view()},
               stream);
  back.enqueue(y.data(), q.data(), stream);
  attention.enqueue({q.view(), k.view(), v.view()}, outputs, space, stream);
  there.wait();
  scan.wait();
  back.wait();
  attention.wait();
  striped.unshard(rank, out.read().data(), packed.data(), stack.row_bytes());  // each rank writes its own rows
  transport.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
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
