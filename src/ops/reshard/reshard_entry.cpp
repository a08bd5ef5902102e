// SPDX-License-Identifier: Apache-2.0
// The row of reshard in the table of ops: rows move unchanged from the layout of attention to equal shares of adjacent
// tokens.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "ops/common/staging.hpp"
#include "ops/jobs/row_op.hpp"
#include "ops/reshard/reshard.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"rows", "[tokens, heads, head_dim]"}};
constexpr std::string_view kSettings[] = {"head-dim", "layout", "stripe"};

class Moved final : public RowKernel {
 public:
  Moved(const KernelEntry& entry, std::size_t row_bytes, Layout from, const Layout& to, Transport& world,
        const Options& options)
      : row_bytes_(row_bytes),
        world_(world),
        timeouts_(options.timeout_seconds),
        backend_(entry.make_backend({1, world.device()})),
        from_(std::move(from)),
        rows_(backend_->allocate(bytes_of(from_))),
        target_(backend_->allocate(bytes_of(to))),
        reshard_(from_, to, static_cast<std::int64_t>(row_bytes), world, *backend_, options.timeout_seconds) {}

  Backend& backend() override { return *backend_; }
  void load(const RowInput& input, const Layout&, int, int threads) override {
    const RowTensor& tensor = input.tensors().front();
    const std::vector<PackedRun> runs = packed_runs(from_.runs(world_.rank()), from_.cu());
    const MutableTensorView rows = dense_view(static_cast<void*>(rows_.data()), input.dtype(),
                                              from_.tokens(world_.rank()), tensor.heads, tensor.dim);
    Staging(*backend_, timeouts_)
        .load(
            runs, rows,
            [&](std::span<const PackedRun> piece, const MutableTensorView& into) {
              input.read(0, piece, into, threads);
            },
            [](std::int64_t) {});
  }
  double run() override {
    const auto begin = std::chrono::steady_clock::now();
    reshard_.enqueue(rows_.data(), target_.data(), backend_->stream());
    reshard_.wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  void fetch(std::span<std::byte> out) override {
    Staging(*backend_, timeouts_).store(target_.data(), out.data(), out.size());
  }

 private:
  std::size_t bytes_of(const Layout& layout) const {
    return static_cast<std::size_t>(layout.tokens(world_.rank())) * row_bytes_;
  }

  std::size_t row_bytes_;
  Transport& world_;
  Timeouts timeouts_;
  std::unique_ptr<Backend> backend_;
  Layout from_;
  Buffer rows_, target_;
  Reshard reshard_;
};

class ReshardOp final : public RowOp {
 public:
  explicit ReshardOp(const OpRequest& request)
      : input_(request, {{"rows", request.settings.heads, request.settings.head_dim}}) {}

  std::string_view name() const override { return "reshard"; }
  std::string describe() const override {
    return fmt::format("{}, heads {}, head_dim {}", dtype_name(input_.dtype()), heads(), dim());
  }
  const RowInput& input() const override { return input_; }
  std::int64_t heads() const override { return input_.tensors().front().heads; }
  std::int64_t dim() const override { return input_.tensors().front().dim; }
  Dtype out_dtype() const override { return input_.dtype(); }
  double flops() const override { return 0.0; }
  std::vector<std::pair<std::string, BenchValue>> members() const override {
    return {{"heads", heads()}, {"head_dim", dim()}};
  }

  Kernel choose(const KernelRequest& request, KernelScope scope) const override {
    const auto nothing_missing = [](std::size_t) { return std::vector<std::string>(); };
    std::vector<const KernelEntry*> rows;
    for (const KernelEntry& entry : copy_kernels()) rows.push_back(&entry);
    const EntryChoice choice = choose_entry(rows, nothing_missing, describe(), request, scope);
    return {rows[choice.row], choice.reason};
  }
  std::unique_ptr<RowKernel> make_kernel(const Kernel& kernel, Transport& world, const Options& options,
                                         const Layout& layout) const override {
    const auto row_bytes = static_cast<std::size_t>(heads() * dim()) * size_of(input_.dtype());
    return std::make_unique<Moved>(*kernel.entry, row_bytes,
                                   attention_layout(input_.lengths(), world.size(), options.layout), layout, world,
                                   options);
  }
  void compute_exactly(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<double> out,
                       std::span<double> allowed) const override {
    std::ranges::copy(rows.row(0, token, head), out.begin());
    std::ranges::fill(allowed, 0.0);
  }

 private:
  RowInput input_;
};

}  // namespace

extern const OpEntry kReshardOp;
const OpEntry kReshardOp{
    .name = "reshard",
    .help = "move rows from a layout of attention to equal shares of adjacent tokens",
    .file = "a file with rows",
    .tensors = kTensors,
    .settings = kSettings,
    .recognizes = [](const TensorFile& file) { return has_tensors(file, kTensors) && !file.file.contains("weights"); },
    .make = [](const OpRequest& request) { return make_row_job(std::make_unique<ReshardOp>(request)); }};

}  // namespace ringattn
