// SPDX-License-Identifier: Apache-2.0
#include "attention/head_product.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "attention/memory_shape.hpp"
#include "attention/ring/enqueued_runs.hpp"
#include "attention/shard_checks.hpp"
#include "base/device_patience.hpp"
#include "base/error.hpp"
#include "base/host.hpp"

namespace ringattn {

namespace {

// Kernels count tiles of so many in 32 bits.
constexpr std::int64_t kMostHeads = std::int64_t{1} << 16;
constexpr int kMostDim = 1 << 20;

[[noreturn]] void refuse(const std::string& what, const std::string& why, const std::string& remedy) {
  fail(ErrorCode::kUsage, what, why, remedy);
}

std::string text_of(Dtype dtype, std::int64_t a, std::int64_t b, std::int64_t c) {
  return fmt::format("{} [{}, {}, {}]", dtype_name(dtype), a, b, c);
}
std::string text_of(const TensorView& view) { return text_of(view.dtype, view.tokens, view.heads, view.dim); }

void check_job(const HeadProductJob& job) {
  const HeadProductSpec& spec = job.spec;
  const auto fits = [](std::int64_t number, std::int64_t most) { return number >= 1 && number <= most; };
  if (!fits(job.heads, kMostHeads)) {
    refuse(fmt::format("a product of {} heads", job.heads), fmt::format("there are 1 to {}", kMostHeads),
           job.heads > kMostHeads ? "Multiply some of the heads at a time." : "Say how many heads the weights have.");
  }
  if (fits(spec.inner, kMostDim) && fits(spec.outer, kMostDim)) return;
  refuse(fmt::format("a product with inner {} and outer {}", spec.inner, spec.outer),
         fmt::format("each is 1 to {}", kMostDim), "Check the spec: a head's matrix is [outer, inner].");
}

// `shape`: that of what is checked.
void check_dtype(std::string_view name, Dtype dtype, const std::string& shape, const HeadProductSpec& spec) {
  if (dtype == spec.dtype) return;
  refuse(fmt::format("{} {} {}", name, name == "out" ? "is" : "are", shape),
         fmt::format("the product was made for {}: rows, weights and out have one dtype", dtype_name(spec.dtype)),
         name == "out" ? fmt::format("Give an out of {}.", dtype_name(spec.dtype))
                       : fmt::format("Convert the {} to {}, or what they are multiplied by to {}.", name,
                                     dtype_name(spec.dtype), dtype_name(dtype)));
}

// Whether a step along an axis of so many, in elements, stays within the bytes that can be counted.
bool reaches_too_far(std::int64_t stride, std::int64_t length, Dtype dtype) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 61;  // of an axis; a tensor has two, and its rows
  if (length <= 1) return false;
  const auto bits = static_cast<std::uint64_t>(stride);
  const std::uint64_t magnitude = stride < 0 ? 0 - bits : bits;
  return magnitude > kMostBytes / size_of(dtype) / static_cast<std::uint64_t>(length - 1);
}

void check_reach(std::string_view name, const TensorView& view) {
  if (!reaches_too_far(view.token_stride, view.tokens, view.dtype) &&
      !reaches_too_far(view.head_stride, view.heads, view.dtype)) {
    return;
  }
  refuse(fmt::format("{} {} strides of {} and {}", name, name == "out" ? "has" : "have", view.token_stride,
                     view.head_stride),
         "its rows would lie 2^61 bytes apart, or farther", "Check them: strides count elements.");
}

void check_weights(const HeadProductJob& job, const HeadMatrices& weights) {
  const HeadProductSpec& spec = job.spec;
  check_dtype("weights", weights.dtype, text_of(weights.dtype, weights.heads, weights.outer, weights.inner), spec);
  if (weights.outer != spec.outer || weights.inner != spec.inner || weights.heads < 1 || weights.heads > job.heads) {
    refuse(
        fmt::format("weights are {}", text_of(weights.dtype, weights.heads, weights.outer, weights.inner)),
        fmt::format("the product was made for {}, of fewer heads too",
                    text_of(spec.dtype, job.heads, spec.outer, spec.inner)),
        "They are [heads, outer, inner] for rows of inner numbers: transpose them where they lie the other way round.");
  }
  if (weights.data == nullptr) refuse("weights are missing", "rows are multiplied by them", "Pass them.");
  if (weights.outer_stride == 1 || weights.inner_stride == 1) return;
  refuse(fmt::format("weights have strides {}, {} and {}", weights.head_stride, weights.outer_stride,
                     weights.inner_stride),
         "one of the last two is 1", "Give matrices whose rows or columns lie without gaps.");
}

// The numbers of all matrices, as a tensor that has the same ones.
TensorView numbers_of(const HeadMatrices& weights) {
  if (weights.inner_stride == 1) {
    return {weights.data,  weights.dtype,        weights.outer,      weights.heads,
            weights.inner, weights.outer_stride, weights.head_stride};
  }
  return {weights.data,  weights.dtype,        weights.inner,      weights.heads,
          weights.outer, weights.inner_stride, weights.head_stride};
}

void check_task(const HeadProductJob& job, const HeadProductTask& task) {
  const HeadProductSpec& spec = job.spec;
  check_weights(job, task.weights);
  const std::int64_t heads = task.weights.heads;
  const TensorView& rows = task.rows;
  check_dtype("rows", rows.dtype, text_of(rows), spec);
  if (rows.tokens < 0 || rows.dim != spec.inner || (rows.heads != heads && rows.heads != 1)) {
    refuse(fmt::format("rows are {}", text_of(rows)),
           fmt::format("they should be {} [rows, {}, {}]", dtype_name(spec.dtype),
                       heads == 1 ? "1" : fmt::format("{} or 1", heads), spec.inner),
           "They have the weights' heads, or one that all share, and their inner numbers: transpose weights that lie "
           "the other way round.");
  }
  const TensorView out = task.out;
  check_dtype("out", out.dtype, text_of(out), spec);
  if (out.tokens != rows.tokens || out.heads != heads || out.dim != spec.outer) {
    refuse(fmt::format("out is {}", text_of(out)),
           fmt::format("it should be {}", text_of(spec.dtype, rows.tokens, heads, spec.outer)),
           "It has a row for each of the rows, in every head of the weights.");
  }
  if (rows.tokens == 0) return;
  if (rows.data == nullptr) refuse("rows are missing", fmt::format("there are {}", rows.tokens), "Pass them.");
  if (out.data == nullptr) refuse("out is missing", "the product is written there", "Pass it.");
  check_reach("rows", rows);
  check_reach("weights", numbers_of(task.weights));
  check_reach("out", out);
  check_apart("out", out, "rows", rows);
  check_apart("out", out, "weights", numbers_of(task.weights));
  if (!MemoryShape(out).overlaps_itself()) return;
  refuse(fmt::format("out has strides {} and {}", out.token_stride, out.head_stride),
         fmt::format("rows of {} numbers would lie over each other", out.dim), "Give each row memory of its own.");
}

}  // namespace

struct HeadProduct::Impl {
  Impl(HeadProductJob the_job, const HeadProductOptions& options) : job(std::move(the_job)) {
    check_job(job);
    choice = choose_kernel(job.spec, options.kernel);
    const int threads = options.threads == 0 ? usable_processors().count : options.threads;
    backend = choice.row->make_backend({threads, options.device});
    kernel = choice.row->make_kernel(job.spec, *backend);
    kernel->reserve(job.heads);
    ended = backend->make_marks(1, false);
  }

  HeadProductJob job;
  HeadProductChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<HeadProductKernel> kernel;
  std::unique_ptr<Marks> ended;  // where the last product that was enqueued ends
};

HeadProduct::HeadProduct(HeadProductJob job, HeadProductOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), options)) {}

HeadProduct::~HeadProduct() = default;
HeadProduct::HeadProduct(HeadProduct&&) noexcept = default;

const HeadProductJob& HeadProduct::job() const { return impl_->job; }
const HeadProductChoice& HeadProduct::kernel() const { return impl_->choice; }
Backend& HeadProduct::backend() { return *impl_->backend; }
std::size_t HeadProduct::memory_bytes() const { return impl_->kernel->scratch_bytes(impl_->job.heads); }

void HeadProduct::enqueue(const HeadProductTask& task, Stream stream) {
  Impl& impl = *impl_;
  check_task(impl.job, task);
  if (task.rows.tokens == 0) return;
  impl.kernel->multiply(task, stream, {});
  if (!impl.backend->is_capturing(stream)) impl.ended->record(0, stream);
}

void HeadProduct::wait() { impl_->ended->synchronize(0, DevicePatience::for_queue(), {}); }

void HeadProduct::run(const HeadProductTask& task, Stream stream) {
  check_not_captured(*impl_->backend, stream);
  enqueue(task, stream);
  wait();
}

}  // namespace ringattn
