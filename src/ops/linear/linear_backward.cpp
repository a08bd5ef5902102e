// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/linear_backward.hpp"

#include <fmt/format.h>

#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "attention/ring/enqueued_runs.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "kernels/gemm/weight_gradient.hpp"
#include "ops/common/shard_checks.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kBiasDim = 8;  // ones in a row: dims of a weight gradient are multiples of 8
// The number of weight rows that the weight gradient treats as one head. Bits do not depend on it.
constexpr std::int64_t kHeadRows = 128;

[[noreturn]] void refuse_gradient(const std::string& problem, const std::string& why, const std::string& suggestion) {
  fail(ErrorCode::kUnsupported, problem, why, suggestion);
}

bool has_activation(const LinearSpec& spec) { return spec.gated || spec.activation != LinearActivation::kNone; }
bool is_column_job(const LinearJob& job) { return job.spec.parallel == LinearParallel::kColumn; }

// The layer that recomputes z, for one matrix.
LinearJob z_job(const LinearJob& job, int ranks) {
  LinearJob z = job;
  z.spec.activation = LinearActivation::kNone;
  z.spec.gated = false;
  z.output = job.spec.parallel == LinearParallel::kRow && ranks > 1 ? LinearOutput::kReplicated : LinearOutput::kShard;
  return z;
}

// The layer over Wᵀ.
LinearJob dx_job(const LinearJob& job, int ranks) {
  LinearJob dx;
  dx.spec.dtype = job.spec.dtype;
  dx.spec.in_features = job.spec.sum_columns();
  dx.spec.out_features = job.spec.in_features;
  dx.max_tokens = job.max_tokens;
  if (is_column_job(job)) {
    dx.spec.parallel = LinearParallel::kRow;
    if (ranks > 1) dx.output = LinearOutput::kReplicated;
  }
  if (job.spec.parallel == LinearParallel::kRow) dx.spec.parallel = LinearParallel::kColumn;
  return dx;
}

void check_backward_job(const LinearJob& job, int ranks) {
  check_linear_job(job, ranks);
  const LinearSpec& spec = job.spec;
  if (spec.weights != WeightFormat::kFloat) {
    refuse_gradient(fmt::format("gradients of a linear layer with {} weights", format_name(spec.weights)),
                    "only floating-point layers have gradients", "Train the layer before it is quantized.");
  }
  for (const std::int64_t features : {spec.in_features, spec.sum_columns()}) {
    if (features % kBiasDim == 0) continue;
    refuse_gradient(
        fmt::format("gradients of a linear layer of {} to {} features", spec.in_features, spec.out_features),
        fmt::format("weight gradients have multiples of {}", kBiasDim), "Pad the weight and x with zeros.");
  }
  if (ranks == 1 || spec.parallel == LinearParallel::kNone) return;
  const bool is_whole = job.output == LinearOutput::kReplicated;
  if (!is_whole && !(is_column_job(job) && job.output == LinearOutput::kShard)) {
    refuse_gradient(
        fmt::format("gradients of a {}-parallel layer whose output is divided by tokens", parallel_name(spec.parallel)),
        "each rank needs dy of all tokens", "Use LinearOutput::kReplicated.");
  }
  if (!is_column_job(job)) return;
  const LinearJob dx = dx_job(job, ranks);
  const std::int64_t matrices = spec.gated ? 2 : 1;
  for (int rank = 0; rank < ranks; ++rank) {
    const FeatureRange columns = linear_columns(job, ranks, rank), summed = linear_features(dx, ranks, rank);
    if (summed == FeatureRange{matrices * columns.begin, matrices * columns.end}) continue;
    refuse_gradient(fmt::format("gradients of {} columns in {} parts", spec.out_features, ranks),
                    fmt::format("rank {} has columns {} to {}, which are not whole leaves of the {} that dx sums", rank,
                                columns.begin, columns.end, dx.spec.in_features),
                    "Use a number of columns that 128 divides.");
  }
}

}  // namespace

std::vector<FeatureRange> linear_gradient_order(const LinearJob& job, int ranks, int rank) {
  const FeatureRange columns = linear_columns(job, ranks, rank);
  if (!job.spec.gated) return {{0, columns.size()}};
  if (!is_column_job(job)) return {{0, 2 * columns.size()}};
  std::vector<FeatureRange> order;
  const LeafRange leaves = linear_leaves(ranks, rank);
  for (int leaf = leaves.begin; leaf < leaves.end; ++leaf) {
    const std::int64_t unit = leaf_unit(job.spec.weights);
    const std::int64_t begin = leaf_begin(job.spec.out_features, unit, leaf) - columns.begin;
    const std::int64_t end = leaf_begin(job.spec.out_features, unit, leaf + 1) - columns.begin;
    if (begin == end) continue;
    order.push_back({begin, end});
    order.push_back({columns.size() + begin, columns.size() + end});
  }
  return order;
}

struct LinearBackward::Impl {
  Impl(LinearJob the_job, Transport& the_transport, LinearOptions the_options)
      : job(std::move(the_job)),
        transport(the_transport),
        ranks(transport.size()),
        self(transport.rank()),
        collective(transport, Timeouts(the_options.timeout_seconds)) {
    collective.run_collectively([&] { check_backward_job(job, ranks); });
    dx.emplace(dx_job(job, ranks), transport, the_options);
    if (has_activation(job.spec)) z.emplace(z_job(job, ranks), transport, the_options);
    collective.run_collectively([&] { allocate(); });
  }

  void allocate();
  void check(const LinearBackwardInputs& inputs, const LinearBackwardOutputs& outputs) const;
  // Computes z, dz, dweight and dbias, and enqueues dx. `runs`: called by run(), which checks and waits.
  void compute(const LinearBackwardInputs& inputs, const LinearBackwardOutputs& outputs, Stream stream, bool runs);

  std::int64_t element() const { return static_cast<std::int64_t>(size_of(job.spec.dtype)); }
  FeatureRange features() const { return linear_features(job, ranks, self); }
  FeatureRange columns() const { return linear_columns(job, ranks, self); }
  std::int64_t matrices() const { return job.spec.gated ? 2 : 1; }
  std::int64_t rows() const { return matrices() * columns().size(); }  // of this rank's weight
  bool shares() const { return ranks > 1 && job.spec.parallel != LinearParallel::kNone; }
  MutableTensorView rows_in(Buffer& buffer, std::int64_t tokens) const {
    return dense_view(static_cast<void*>(buffer.data()), job.spec.dtype, tokens, 1, rows());
  }
  TensorView dz_of(const LinearBackwardInputs& inputs, Stream stream, bool runs);
  TensorView in_order(const TensorView& dz, Stream stream);

  LinearJob job;
  Transport& transport;
  int ranks;
  int self;
  Collective collective;
  std::optional<Linear> dx, z;
  std::unique_ptr<LinearKernel> activation;  // of the forward's spec, for this rank's columns
  std::unique_ptr<WeightGradientKernel> weight_gradient, bias_gradient;
  std::int64_t head_rows = 0;  // rows of the weight in a head of these kernels
  Buffer gradients, ordered;   // [max_tokens, rows]: z and then dz; dz in the order of dx
  Buffer ones, bias_sums;      // [max_tokens, kBiasDim]; [rows, kBiasDim] fp32
  std::optional<EnqueuedRuns> enqueued;
};

void LinearBackward::Impl::allocate() {
  Backend& backend = dx->backend();
  const std::string backend_name(dx->kernel().row->backend);
  enqueued.emplace(backend, transport, collective.timeouts());
  if (rows() == 0) return;
  head_rows = std::gcd(rows(), kHeadRows);
  const auto kernel_of = [&](std::int64_t dim_k) {
    const WeightGradientSpec spec{job.spec.dtype, static_cast<int>(head_rows), static_cast<int>(dim_k)};
    return choose_kernel(spec, {backend_name, "auto"}).row->make_kernel(spec, backend);
  };
  if (features().size() > 0) weight_gradient = kernel_of(features().size());
  const auto row_bytes = static_cast<std::size_t>(job.max_tokens * rows() * element());
  if (has_activation(job.spec)) {
    LinearSpec spec = job.spec;
    spec.out_features = columns().size();
    const LinearChoice choice = choose_kernel(job.spec, {backend_name, "auto"});
    activation = choice.row->make_kernel(spec, backend);
    gradients = backend.allocate(row_bytes);
  }
  if (linear_gradient_order(job, ranks, self).size() > 1) ordered = backend.allocate(row_bytes);
  if (job.spec.bias) {
    bias_gradient = kernel_of(kBiasDim);
    std::vector<std::byte> row(static_cast<std::size_t>(job.max_tokens * kBiasDim * element()));
    for (std::size_t at = 0; at < row.size(); at += size_of(job.spec.dtype)) {
      store_element(row.data() + at, job.spec.dtype, 1.0F);
    }
    const auto bytes = static_cast<std::int64_t>(row.size());
    ones = backend.allocate(row.size());
    bias_sums = backend.allocate(static_cast<std::size_t>(rows() * kBiasDim) * sizeof(float));
    backend.copy_rows(ones.data(), bytes, row.data(), bytes, bytes, 1, backend.stream());
    backend.synchronize(backend.stream(), collective.timeouts().for_peer(), {});
  }
}

void LinearBackward::Impl::check(const LinearBackwardInputs& inputs, const LinearBackwardOutputs& outputs) const {
  const std::int64_t tokens = inputs.x.tokens;
  if (tokens > job.max_tokens) {
    fail(ErrorCode::kUsage, fmt::format("x has {} tokens", tokens),
         fmt::format("the gradients were made for up to {}", job.max_tokens), "Make them for more.");
  }
  const bool shard = is_column_job(job) && job.output == LinearOutput::kShard;
  check_shard("Linear", "x", inputs.x, {job.spec.dtype, tokens, 1, features().size()});
  check_shard("Linear", "dy", inputs.dy, {job.spec.dtype, tokens, 1, shard ? columns().size() : job.spec.out_features});
  if (outputs.dbias != nullptr && !job.spec.bias) {
    fail(ErrorCode::kUsage, "dbias is given", "the layer has no bias", "Leave it out.");
  }
  if (z) z->check_weights({inputs.weights.matrix, {}});
  if (z && job.spec.gated) z->check_weights({inputs.weights.up, {}});
  if (outputs.dx.data == nullptr) return;
  dx->check_weights({inputs.transposed, {}});
  check_shard("Linear", "dx", outputs.dx, {job.spec.dtype, tokens, 1, features().size()});
  if (tokens == 0) return;
  check_apart("dx", outputs.dx, "x", inputs.x);
  check_apart("dx", outputs.dx, "dy", inputs.dy);
}

TensorView LinearBackward::Impl::dz_of(const LinearBackwardInputs& inputs, Stream stream, bool runs) {
  TensorView dy = inputs.dy;
  if (is_column_job(job) && dy.dim != columns().size()) {
    dy.data = static_cast<const std::byte*>(dy.data) + columns().begin * element();
    dy.dim = columns().size();
  }
  if (!z) return dy;
  const std::int64_t tokens = dy.tokens, n = columns().size();
  const MutableTensorView dz = rows_in(gradients, tokens);
  for (const bool is_up : {false, true}) {
    if (is_up && !job.spec.gated) continue;
    MutableTensorView part = dz;
    part.data = static_cast<std::byte*>(dz.data) + (is_up ? n * element() : 0);
    part.dim = n;
    z->load({is_up ? inputs.weights.up : inputs.weights.matrix, {}}, stream);
    if (runs) {
      z->run(inputs.x, part, stream);
    } else {
      z->enqueue(inputs.x, part, stream);
    }
  }
  if (n > 0) activation->activation_gradient({dy, dz, dz}, stream, [this] { transport.progress(); });
  return dz;
}

TensorView LinearBackward::Impl::in_order(const TensorView& dz, Stream stream) {
  const std::vector<FeatureRange> order = linear_gradient_order(job, ranks, self);
  if (order.size() <= 1) return dz;
  const MutableTensorView to = rows_in(ordered, dz.tokens);
  std::int64_t at = 0;
  for (const FeatureRange& run : order) {
    dx->backend().copy_rows(static_cast<std::byte*>(to.data) + at * element(), to.token_stride * element(),
                            static_cast<const std::byte*>(dz.data) + run.begin * element(), dz.token_stride * element(),
                            run.size() * element(), dz.tokens, stream);
    at += run.size();
  }
  return to;
}

void LinearBackward::Impl::compute(const LinearBackwardInputs& inputs, const LinearBackwardOutputs& outputs,
                                   Stream stream, bool runs) {
  const Progress progress = [this] { transport.progress(); };
  const std::int64_t tokens = inputs.x.tokens;
  const TensorView dz = dz_of(inputs, stream, runs);
  // The rows of the weight, as heads of the weight gradient.
  TensorView heads = dz;
  if (head_rows > 0) {
    heads.heads = rows() / head_rows;
    heads.dim = heads.head_stride = head_rows;
  }
  if (outputs.dweight != nullptr && weight_gradient) {
    weight_gradient->compute({heads, inputs.x, std::span(&tokens, 1), outputs.dweight}, stream, progress);
  }
  if (outputs.dbias != nullptr && bias_gradient) {
    const TensorView one = dense_view(static_cast<const void*>(ones.data()), job.spec.dtype, tokens, 1, kBiasDim);
    auto* const sums = reinterpret_cast<float*>(bias_sums.data());
    bias_gradient->compute({heads, one, std::span(&tokens, 1), sums}, stream, progress);
    dx->backend().copy_rows(outputs.dbias, sizeof(float), sums, kBiasDim * sizeof(float), sizeof(float), rows(),
                            stream);
  }
  if (outputs.dx.data == nullptr) return;
  dx->load({inputs.transposed, {}}, stream);
  // A rank without features can't distinguish an empty dx from one that is not requested. Ranks that exchange nothing
  // therefore do not compare it.
  if (runs && is_column_job(job)) {
    dx->run(in_order(dz, stream), outputs.dx, stream);
  } else {
    dx->enqueue(in_order(dz, stream), outputs.dx, stream);
  }
}

LinearBackward::LinearBackward(LinearJob job, Transport& transport, LinearOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {}

LinearBackward::~LinearBackward() = default;
LinearBackward::LinearBackward(LinearBackward&&) noexcept = default;

const LinearJob& LinearBackward::job() const { return impl_->job; }
const LinearChoice& LinearBackward::kernel() const { return impl_->dx->kernel(); }
std::size_t LinearBackward::memory_bytes() const {
  return impl_->dx->memory_bytes() + (impl_->z ? impl_->z->memory_bytes() : 0) + impl_->gradients.bytes() +
         impl_->ordered.bytes() + impl_->ones.bytes() + impl_->bias_sums.bytes();
}
FeatureRange LinearBackward::features() const { return impl_->features(); }
FeatureRange LinearBackward::columns() const { return impl_->columns(); }

void LinearBackward::run(const LinearBackwardInputs& inputs, const LinearBackwardOutputs& outputs, Stream stream) {
  Impl& impl = *impl_;
  const auto check = [&] {
    check_not_captured(impl.dx->backend(), stream);
    impl.check(inputs, outputs);
  };
  if (impl.shares()) {
    impl.collective.run_collectively(check);
  } else {
    check();
  }
  impl.enqueued->enqueue(stream, 0.0, [&] { impl.compute(inputs, outputs, stream, true); });
  wait();
}

void LinearBackward::enqueue(const LinearBackwardInputs& inputs, const LinearBackwardOutputs& outputs, Stream stream) {
  impl_->check(inputs, outputs);
  impl_->enqueued->enqueue(stream, 0.0, [&] { impl_->compute(inputs, outputs, stream, false); });
}

void LinearBackward::wait() {
  if (impl_->z) impl_->z->wait();
  impl_->dx->wait();
  if (impl_->enqueued->any()) impl_->enqueued->wait_all();
}

}  // namespace ringattn
