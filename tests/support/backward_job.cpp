// SPDX-License-Identifier: Apache-2.0
#include "tests/support/backward_job.hpp"

#include <cstring>
#include <limits>
#include <random>

#include "comm/self.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

std::size_t tensor_bytes(std::int64_t tokens, int heads, int dim, Dtype dtype) {
  return static_cast<std::size_t>(tokens * heads * dim) * size_of(dtype);
}

// A rank's tensors in the kernel's kind of memory.
class RankTensors {
 public:
  RankTensors(Backend& backend, int rank) : backend_(backend), rank_(rank), stream_(backend.stream()) {}

  // The rank's rows of a packed tensor.
  MutableTensorView place(const Layout& layout, const void* packed, Dtype dtype, int heads, int dim) {
    const auto token_bytes = static_cast<std::int64_t>(tensor_bytes(1, heads, dim, dtype));
    std::vector<std::byte> rows(static_cast<std::size_t>(layout.tokens(rank_) * token_bytes));
    layout.shard(rank_, static_cast<const std::byte*>(packed), rows.data(), token_bytes);
    return dense_view(upload(rows), dtype, layout.tokens(rank_), heads, dim);
  }
  // Rows that a run must write, filled with NaN.
  MutableTensorView poison(std::int64_t tokens, Dtype dtype, int heads, int dim) {
    return dense_view(upload(std::vector<std::byte>(tensor_bytes(tokens, heads, dim, dtype), std::byte{0xff})), dtype,
                      tokens, heads, dim);
  }
  void* upload(const std::vector<std::byte>& bytes) {
    buffers_.push_back(backend_.allocate(bytes.size()));
    copy(buffers_.back().data(), bytes.data(), bytes.size());
    return buffers_.back().data();
  }
  std::vector<float> read_floats(const MutableTensorView& rows) {
    std::vector<float> floats(static_cast<std::size_t>(rows.tokens * rows.heads * rows.dim));
    copy(floats.data(), rows.data, floats.size() * sizeof(float));
    return floats;
  }
  // Puts the rank's rows of a dense tensor into the packed one.
  void collect(const Layout& layout, const MutableTensorView& rows, std::vector<std::byte>& packed) {
    const auto heads = static_cast<int>(rows.heads);
    const auto dim = static_cast<int>(rows.dim);
    std::vector<std::byte> bytes(tensor_bytes(rows.tokens, heads, dim, rows.dtype));
    copy(bytes.data(), rows.data, bytes.size());
    layout.unshard(rank_, bytes.data(), packed.data(),
                   static_cast<std::int64_t>(tensor_bytes(1, heads, dim, rows.dtype)));
  }

 private:
  void copy(void* target, const void* source, std::size_t bytes) {
    const auto size = static_cast<std::int64_t>(bytes);
    backend_.copy_rows(target, size, source, size, size, 1, stream_);
    backend_.synchronize(stream_, Deadline::after(60.0), {});
  }

  Backend& backend_;
  int rank_;
  Stream stream_;
  std::vector<Buffer> buffers_;
};

RowView row_view(const MutableTensorView& rows) {
  return {static_cast<float*>(rows.data), rows.token_stride, rows.head_stride};
}

}  // namespace

BackwardTensors random_backward_tensors(const Job& job, std::uint64_t seed) {
  const AttentionSpec& spec = job.spec;
  BackwardTensors tensors;
  tensors.forward = random_tensors(job, seed);
  Options options;
  options.kernel.backend = "cpu";
  JobResult forward = run_job(job, options, tensors.forward, 1);
  tensors.out = std::move(forward.out);
  tensors.lse = std::move(forward.lse);
  std::mt19937_64 generator(seed + 1);
  tensors.dout = random_elements(job.batch.q_tokens() * spec.heads * spec.head_dim_v, spec.dtype, generator);
  const Normal normal;
  for (std::size_t i = 0; i < tensors.lse.size(); ++i) tensors.dlse.push_back(normal(generator));
  return tensors;
}

std::string BackwardResult::difference(const BackwardResult& other) const {
  if (dq != other.dq) return "dq";
  if (dk != other.dk) return "dk";
  if (dv != other.dv) return "dv";
  for (const std::vector<float>& sinks : dsinks) {
    const std::vector<float>& expected = other.dsinks.front();
    if (sinks.size() != expected.size()) return "dsinks";
    if (!sinks.empty() && std::memcmp(sinks.data(), expected.data(), sinks.size() * sizeof(float)) != 0)
      return "dsinks";
  }
  return {};
}

BackwardResult poisoned_backward_result(const BackwardJob& job, int world) {
  const AttentionSpec& spec = job.forward.spec;
  const Batch& batch = job.forward.batch;
  const auto poisoned = [&](std::int64_t tokens, int heads, int dim) {
    return std::vector<std::byte>(tensor_bytes(tokens, heads, dim, job.gradients), std::byte{0xff});
  };
  BackwardResult result;
  result.dq = poisoned(batch.q_tokens(), spec.heads, spec.head_dim);
  result.dk = poisoned(batch.k_tokens(), spec.kv_heads, spec.head_dim);
  result.dv = poisoned(batch.k_tokens(), spec.kv_heads, spec.head_dim_v);
  result.dsinks.resize(static_cast<std::size_t>(world));
  result.stats.resize(static_cast<std::size_t>(world));
  return result;
}

void run_backward_rank(const BackwardJob& job, const Options& options, const BackwardTensors& tensors,
                       Transport& transport, BackwardResult& result, bool enqueues) {
  const AttentionSpec& spec = job.forward.spec;
  AttentionBackward backward(job, transport, options);
  const Layout& queries = backward.layout().queries;
  const Layout& keys = backward.layout().keys;
  RankTensors there(backward.backend(), transport.rank());
  const MutableTensorView lse = there.place(queries, tensors.lse.data(), Dtype::kF32, spec.heads, 1);
  BackwardInputs inputs{there.place(queries, tensors.forward.q.data(), spec.dtype, spec.heads, spec.head_dim),
                        there.place(keys, tensors.forward.k.data(), spec.dtype, spec.kv_heads, spec.head_dim),
                        there.place(keys, tensors.forward.v.data(), spec.dtype, spec.kv_heads, spec.head_dim_v),
                        there.place(queries, tensors.out.data(), spec.dtype, spec.heads, spec.head_dim_v),
                        row_view(lse),
                        there.place(queries, tensors.dout.data(), spec.dtype, spec.heads, spec.head_dim_v)};
  if (!tensors.dlse.empty()) {
    inputs.dlse = row_view(there.place(queries, tensors.dlse.data(), Dtype::kF32, spec.heads, 1));
  }
  const auto rank = static_cast<std::size_t>(transport.rank());
  BackwardOutputs outputs{there.poison(backward.q_rows(), job.gradients, spec.heads, spec.head_dim),
                          there.poison(backward.k_rows(), job.gradients, spec.kv_heads, spec.head_dim),
                          there.poison(backward.k_rows(), job.gradients, spec.kv_heads, spec.head_dim_v)};
  MutableTensorView dsinks;
  if (spec.sinks) {
    std::vector<std::byte> sinks(tensors.forward.sinks.size() * sizeof(float));
    std::memcpy(sinks.data(), tensors.forward.sinks.data(), sinks.size());
    inputs.sinks = static_cast<const float*>(there.upload(sinks));
    dsinks = there.poison(1, Dtype::kF32, spec.heads, 1);
    outputs.dsinks = static_cast<float*>(dsinks.data);
  }
  const std::vector<std::byte> poison(backward.workspace_bytes(), std::byte{0xff});
  const std::span<std::byte> workspace(static_cast<std::byte*>(there.upload(poison)), poison.size());
  if (enqueues) {
    // Two runs in the same memory: the second one has the sums of the first.
    for (int run = 0; run < 2; ++run) backward.enqueue(inputs, outputs, workspace, backward.backend().stream());
    backward.wait();
  } else {
    result.stats[rank] = backward.run(inputs, outputs, workspace, backward.backend().stream());
  }
  if (spec.sinks) result.dsinks[rank] = there.read_floats(dsinks);
  there.collect(queries, outputs.dq, result.dq);
  there.collect(keys, outputs.dk, result.dk);
  there.collect(keys, outputs.dv, result.dv);
  transport.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

BackwardResult run_backward(const BackwardJob& job, const Options& options, const BackwardTensors& tensors, int world,
                            const ThreadsDelivery& delivery, bool enqueues) {
  BackwardResult result = poisoned_backward_result(job, world);
  if (world == 1) {
    const auto transport = make_self_transport();
    run_backward_rank(job, options, tensors, *transport, result, enqueues);
    return result;
  }
  run_threads_world(world, delivery, [&](Transport& transport) {
    run_backward_rank(job, options, tensors, transport, result, enqueues);
  });
  return result;
}

BackwardResult run_gpu_backward(const BackwardJob& job, const Options& options, const BackwardTensors& tensors,
                                int world, bool enqueues) {
  BackwardResult result = poisoned_backward_result(job, world);
  run_gpu_world(world, [&](Transport& rank) { run_backward_rank(job, options, tensors, rank, result, enqueues); });
  return result;
}

}  // namespace ringattn::testing
