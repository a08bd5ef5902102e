// SPDX-License-Identifier: Apache-2.0
#include "ops/batched_gemm/batched_gemm.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "attention/ring/enqueued_runs.hpp"
#include "base/device_timeouts.hpp"
#include "base/error.hpp"
#include "base/host.hpp"
#include "ops/common/memory_shape.hpp"
#include "ops/common/shard_checks.hpp"

namespace ringattn {

namespace {

// Kernels count the tiles of up to this number of heads in 32 bits.
constexpr std::int64_t kMaxHeads = std::int64_t{1} << 16;
constexpr int kMaxDim = 1 << 20;

[[noreturn]] void refuse(const std::string& what, const std::string& why, const std::string& suggestion) {
  fail(ErrorCode::kUsage, what, why, suggestion);
}

std::string text_of(Dtype dtype, std::int64_t a, std::int64_t b, std::int64_t c) {
  return fmt::format("{} [{}, {}, {}]", dtype_name(dtype), a, b, c);
}
std::string text_of(const TensorView& view) { return text_of(view.dtype, view.tokens, view.heads, view.dim); }

void check_job(const BatchedGemmJob& job) {
  const BatchedGemmSpec& spec = job.spec;
  const auto fits = [](std::int64_t number, std::int64_t max) { return number >= 1 && number <= max; };
  if (!fits(job.heads, kMaxHeads)) {
    refuse(fmt::format("a batched GEMM of {} heads", job.heads), fmt::format("there are 1 to {}", kMaxHeads),
           job.heads > kMaxHeads ? "Multiply some of the heads at a time." : "Say how many heads the weights have.");
  }
  if (fits(spec.dim_k, kMaxDim) && fits(spec.dim_n, kMaxDim)) return;
  refuse(fmt::format("a batched GEMM with k {} and n {}", spec.dim_k, spec.dim_n),
         fmt::format("each is 1 to {}", kMaxDim), "Check the spec: a head's matrix is [n, k].");
}

// `shape`: text of the checked tensor's shape.
void check_dtype(std::string_view name, Dtype dtype, const std::string& shape, const BatchedGemmSpec& spec) {
  if (dtype == spec.dtype) return;
  refuse(fmt::format("{} {} {}", name, name == "out" ? "is" : "are", shape),
         fmt::format("the batched GEMM was made for {}: rows, weights and out have one dtype", dtype_name(spec.dtype)),
         name == "out" ? fmt::format("Give an out of {}.", dtype_name(spec.dtype))
                       : fmt::format("Convert the {} to {}, or what they are multiplied by to {}.", name,
                                     dtype_name(spec.dtype), dtype_name(dtype)));
}

// True if the byte offset of the last element of an axis is too large. `stride` is in elements.
bool is_out_of_range(std::int64_t stride, std::int64_t length, Dtype dtype) {
  constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 61;  // per axis; a tensor has two axes, and its rows
  if (length <= 1) return false;
  const auto bits = static_cast<std::uint64_t>(stride);
  const std::uint64_t magnitude = stride < 0 ? 0 - bits : bits;
  return magnitude > kMaxBytes / size_of(dtype) / static_cast<std::uint64_t>(length - 1);
}

void check_range(std::string_view name, const TensorView& view) {
  if (!is_out_of_range(view.token_stride, view.tokens, view.dtype) &&
      !is_out_of_range(view.head_stride, view.heads, view.dtype)) {
    return;
  }
  refuse(fmt::format("{} {} strides of {} and {}", name, name == "out" ? "has" : "have", view.token_stride,
                     view.head_stride),
         "its rows would lie 2^61 bytes apart, or farther", "Check them: strides count elements.");
}

void check_weights(const BatchedGemmJob& job, const GemmWeights& weights) {
  const BatchedGemmSpec& spec = job.spec;
  check_dtype("weights", weights.dtype, text_of(weights.dtype, weights.heads, weights.dim_n, weights.dim_k), spec);
  if (weights.dim_n != spec.dim_n || weights.dim_k != spec.dim_k || weights.heads < 1 || weights.heads > job.heads) {
    refuse(fmt::format("weights are {}", text_of(weights.dtype, weights.heads, weights.dim_n, weights.dim_k)),
           fmt::format("the batched GEMM was made for {}, of fewer heads too",
                       text_of(spec.dtype, job.heads, spec.dim_n, spec.dim_k)),
           "They are [heads, n, k] for rows of k elements: transpose them if they are stored as [heads, k, n].");
  }
  if (weights.data == nullptr) refuse("weights are missing", "rows are multiplied by them", "Pass them.");
  if (weights.n_stride == 1 || weights.k_stride == 1) return;
  refuse(fmt::format("weights have strides {}, {} and {}", weights.head_stride, weights.n_stride, weights.k_stride),
         "one of the last two is 1", "Give matrices with contiguous rows or columns.");
}

// All elements of the weights as a tensor view, for overlap checks.
TensorView numbers_of(const GemmWeights& weights) {
  if (weights.k_stride == 1) {
    return {weights.data,  weights.dtype,    weights.dim_n,      weights.heads,
            weights.dim_k, weights.n_stride, weights.head_stride};
  }
  return {weights.data,  weights.dtype,    weights.dim_k,      weights.heads,
          weights.dim_n, weights.k_stride, weights.head_stride};
}

void check_task(const BatchedGemmJob& job, const BatchedGemmTask& task) {
  const BatchedGemmSpec& spec = job.spec;
  check_weights(job, task.weights);
  const std::int64_t heads = task.weights.heads;
  const TensorView& rows = task.rows;
  check_dtype("rows", rows.dtype, text_of(rows), spec);
  if (rows.tokens < 0 || rows.dim != spec.dim_k || (rows.heads != heads && rows.heads != 1)) {
    refuse(fmt::format("rows are {}", text_of(rows)),
           fmt::format("they should be {} [rows, {}, {}]", dtype_name(spec.dtype),
                       heads == 1 ? "1" : fmt::format("{} or 1", heads), spec.dim_k),
           "They have the weights' heads, or one head that all share, and the weights' k: transpose the weights if "
           "k is not their last axis.");
  }
  const TensorView out = task.out;
  check_dtype("out", out.dtype, text_of(out), spec);
  if (out.tokens != rows.tokens || out.heads != heads || out.dim != spec.dim_n) {
    refuse(fmt::format("out is {}", text_of(out)),
           fmt::format("it should be {}", text_of(spec.dtype, rows.tokens, heads, spec.dim_n)),
           "It has a row for each of the rows, in every head of the weights.");
  }
  if (rows.tokens == 0) return;
  if (rows.data == nullptr) refuse("rows are missing", fmt::format("there are {}", rows.tokens), "Pass them.");
  if (out.data == nullptr) refuse("out is missing", "the result is written there", "Pass it.");
  check_range("rows", rows);
  check_range("weights", numbers_of(task.weights));
  check_range("out", out);
  check_apart("out", out, "rows", rows);
  check_apart("out", out, "weights", numbers_of(task.weights));
  if (!MemoryShape(out).overlaps_itself()) return;
  refuse(fmt::format("out has strides {} and {}", out.token_stride, out.head_stride),
         fmt::format("rows of {} elements would overlap", out.dim), "Give each row memory of its own.");
}

}  // namespace

struct BatchedGemm::Impl {
  Impl(BatchedGemmJob the_job, const BatchedGemmOptions& options) : job(std::move(the_job)) {
    check_job(job);
    choice = choose_kernel(job.spec, options.kernel);
    const int threads = options.threads == 0 ? usable_processors().count : options.threads;
    backend = choice.row->make_backend({threads, options.device});
    kernel = choice.row->make_kernel(job.spec, *backend);
    kernel->reserve(job.heads);
    ended = backend->make_events(1, false);
  }

  BatchedGemmJob job;
  BatchedGemmChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<BatchedGemmKernel> kernel;
  std::unique_ptr<Events> ended;  // end of the last enqueued GEMM
};

BatchedGemm::BatchedGemm(BatchedGemmJob job, BatchedGemmOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), options)) {}

BatchedGemm::~BatchedGemm() = default;
BatchedGemm::BatchedGemm(BatchedGemm&&) noexcept = default;

const BatchedGemmJob& BatchedGemm::job() const { return impl_->job; }
const BatchedGemmChoice& BatchedGemm::kernel() const { return impl_->choice; }
Backend& BatchedGemm::backend() { return *impl_->backend; }
std::size_t BatchedGemm::memory_bytes() const { return impl_->kernel->scratch_bytes(impl_->job.heads); }

void BatchedGemm::enqueue(const BatchedGemmTask& task, Stream stream) {
  Impl& impl = *impl_;
  check_task(impl.job, task);
  if (task.rows.tokens == 0) return;
  impl.kernel->multiply(task, stream, {});
  if (!impl.backend->is_capturing(stream)) impl.ended->record(0, stream);
}

void BatchedGemm::wait() { impl_->ended->synchronize(0, DeviceTimeouts::for_queue(), {}); }

void BatchedGemm::run(const BatchedGemmTask& task, Stream stream) {
  check_not_captured(*impl_->backend, stream);
  enqueue(task, stream);
  wait();
}

}  // namespace ringattn
