// SPDX-License-Identifier: Apache-2.0
// The row of the batched GEMM in the table of ops.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <memory>

#include "base/error.hpp"
#include "ops/batched_gemm/batched_gemm.hpp"
#include "ops/common/staging.hpp"
#include "ops/common/values.hpp"
#include "ops/jobs/row_op.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"rows", "[tokens, heads, head_dim]"}, {"weights", "[heads, out_dim, head_dim]"}};
constexpr std::string_view kSettings[] = {"head-dim"};
constexpr std::int64_t kMostDim = 1 << 16;
constexpr SettingRow kOwn[] = {{.name = "out-dim",
                                .value = "N",
                                .fallback = "512",
                                .help = "dimension of a row of the result",
                                .check = [](std::string_view text) { parse_integer(text, 1, kMostDim); }}};

class Multiplied final : public RowKernel {
 public:
  Multiplied(const BatchedGemmJob& job, const KernelRequest& kernel, const Options& options, int device,
             std::int64_t tokens)
      : gemm_(job, {kernel, options.threads, device}),
        timeouts_(options.timeout_seconds),
        tokens_(tokens),
        rows_(gemm_.backend().allocate(bytes(tokens * job.heads * job.spec.dim_k))),
        weights_(gemm_.backend().allocate(bytes(job.heads * job.spec.dim_n * job.spec.dim_k))),
        out_(gemm_.backend().allocate(bytes(tokens * job.heads * job.spec.dim_n))) {}

  Backend& backend() override { return gemm_.backend(); }
  void load(const RowInput& input, const Layout& layout, int rank, int threads) override {
    const BatchedGemmJob& job = gemm_.job();
    load(input, 0, packed_runs(layout.runs(rank), layout.cu()), job.heads, job.spec.dim_k, threads, rows_);
    const PackedRun all{0, job.heads};
    load(input, 1, {all}, job.spec.dim_n, job.spec.dim_k, threads, weights_);
  }
  double run() override {
    const BatchedGemmJob& job = gemm_.job();
    const std::int64_t k = job.spec.dim_k;
    const std::int64_t n = job.spec.dim_n;
    const auto begin = std::chrono::steady_clock::now();
    gemm_.run({dense_view(static_cast<const void*>(rows_.data()), job.spec.dtype, tokens_, job.heads, k),
               {weights_.data(), job.spec.dtype, job.heads, n, k, n * k, k, 1},
               dense_view(static_cast<void*>(out_.data()), job.spec.dtype, tokens_, job.heads, n)},
              backend().stream());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  void fetch(std::span<std::byte> out) override {
    Staging(backend(), timeouts_).store(out_.data(), out.data(), out.size());
  }

 private:
  std::size_t bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * size_of(gemm_.job().spec.dtype);
  }
  void load(const RowInput& input, std::size_t tensor, const std::vector<PackedRun>& runs, std::int64_t heads,
            std::int64_t dim, int threads, const Buffer& target) {
    Staging(backend(), timeouts_)
        .load(
            runs, dense_view(static_cast<void*>(target.data()), input.dtype(), total_tokens(runs), heads, dim),
            [&](std::span<const PackedRun> piece, const MutableTensorView& into) {
              input.read(tensor, piece, into, threads);
            },
            [](std::int64_t) {});
  }

  BatchedGemm gemm_;
  Timeouts timeouts_;
  std::int64_t tokens_;
  Buffer rows_, weights_, out_;
};

class BatchedGemmOp final : public RowOp {
 public:
  explicit BatchedGemmOp(const OpRequest& request)
      : input_(request, {{.name = "rows", .heads = request.settings.heads, .dim = request.settings.head_dim},
                         {.name = "weights",
                          .heads = parse_integer(request.settings.own.at("out-dim"), 1, kMostDim),
                          .dim = request.settings.head_dim,
                          .whole = true,
                          .tokens = request.settings.heads}}) {
    const RowTensor& rows = input_.tensors()[0];
    const RowTensor& weights = input_.tensors()[1];
    if (weights.tokens != rows.heads || weights.dim != rows.dim) {
      fail(ErrorCode::kFile, fmt::format("weights are [{}, {}, {}]", weights.tokens, weights.heads, weights.dim),
           fmt::format("rows have {} heads of {}", rows.heads, rows.dim),
           "Give a matrix [out_dim, head_dim] for each head of the rows.");
    }
  }

  std::string_view name() const override { return "batched_gemm"; }
  std::string describe() const override {
    return fmt::format("{}, heads {}, rows of {} to {}", dtype_name(input_.dtype()), heads(), input_.tensors()[0].dim,
                       dim());
  }
  const RowInput& input() const override { return input_; }
  std::int64_t heads() const override { return input_.tensors()[0].heads; }
  std::int64_t dim() const override { return input_.tensors()[1].heads; }
  Dtype out_dtype() const override { return input_.dtype(); }
  double flops() const override {
    return 2.0 * static_cast<double>(input_.tokens() * heads() * dim()) * static_cast<double>(input_.tensors()[0].dim);
  }
  std::vector<std::pair<std::string, BenchValue>> members() const override {
    return {{"heads", heads()}, {"head_dim", input_.tensors()[0].dim}, {"out_dim", dim()}};
  }

  Kernel choose(const KernelRequest& request, KernelScope scope) const override {
    const BatchedGemmChoice choice = choose_kernel(spec(), request, scope);
    return {choice.row, choice.reason};
  }
  std::unique_ptr<RowKernel> make_kernel(const Kernel& kernel, Transport& world, const Options& options,
                                         const Layout& layout) const override {
    const KernelRequest same{std::string(kernel.entry->backend), std::string(kernel.entry->name)};
    return std::make_unique<Multiplied>(BatchedGemmJob{spec(), heads()}, same, options, world.device(),
                                        layout.tokens(world.rank()));
  }
  // fp32 sums of K products, in any order, rounded once.
  void compute_exactly(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<double> out,
                       std::span<double> allowed) const override {
    const std::span<const float> row = rows.row(0, token, head);
    const double rounding = input_.dtype() == Dtype::kBf16 ? 0x1p-8 : input_.dtype() == Dtype::kF16 ? 0x1p-11 : 0.0;
    for (std::size_t n = 0; n < out.size(); ++n) {
      const std::span<const float> weights = rows.row(1, head, static_cast<std::int64_t>(n));
      double sum = 0.0;
      double size = 0.0;
      for (std::size_t k = 0; k < row.size(); ++k) {
        const double product = double{row[k]} * weights[k];
        sum += product;
        size += std::abs(product);
      }
      out[n] = sum;
      allowed[n] = rounding * std::abs(sum) + static_cast<double>(row.size()) * 0x1p-24 * size + 0x1p-24;
    }
  }

 private:
  BatchedGemmSpec spec() const {
    return {input_.dtype(), static_cast<int>(input_.tensors()[0].dim), static_cast<int>(dim())};
  }

  RowInput input_;
};

}  // namespace

extern const OpEntry kBatchedGemmOp;
const OpEntry kBatchedGemmOp{
    .name = "batched_gemm",
    .help = "rows of each head times that head's matrix, as MLA absorbs and expands",
    .file = "a file with rows and weights",
    .tensors = kTensors,
    .settings = kSettings,
    .own_settings = kOwn,
    .recognizes = [](const TensorFile& file) { return has_tensors(file, kTensors); },
    .make = [](const OpRequest& request) { return make_row_job(std::make_unique<BatchedGemmOp>(request)); }};

}  // namespace ringattn
