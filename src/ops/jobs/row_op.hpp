// SPDX-License-Identifier: Apache-2.0
// Ops whose result has one row for each token and head, which depends on rows of the input alone. Such an op says what
// one row is, in fp32 and in fp64; the rest is here: files and seeds, ranks, plans, digests, outputs, checks, goldens,
// benchmarks. It runs on the host, row by row, unless it has kernels.
//
//   class DotProduct final : public RowOp {            // out = scale · ⟨left, right⟩, one number a token and head
//    public:
//     explicit DotProduct(const OpRequest& request)
//         : input_(request, {{"left", request.settings.heads, request.settings.head_dim},
//                            {"right", request.settings.heads, request.settings.head_dim}}) {…}
//     …
//   };
//   std::unique_ptr<OpJob> make(const OpRequest& request) {
//     return make_row_job(std::make_unique<DotProduct>(request));
//   }
//
// Every rank computes the rows of its own tokens, an equal share of the packed axis. A row is computed by one thread in
// the order that the op writes down, so its bits depend on neither ranks nor threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/options.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "ops/jobs/bench_job.hpp"
#include "ops/jobs/op_entry.hpp"
#include "ops/jobs/op_job.hpp"

namespace ringattn {

struct PlanRequest;

// A tensor of the input: [tokens, heads, dim], in the order of axes that the file has.
struct RowTensor {
  std::string_view name;
  std::int64_t heads = 1;  // of a synthetic input; a file's tensor has its own
  std::int64_t dim = 1;
  bool whole = false;       // every rank reads the rows of all tokens, not only of its own
  std::int64_t tokens = 0;  // of a tensor that is not on the axis of tokens, such as matrices, and whole; else 0
  bool flat = false;        // without an axis of heads in a file: [tokens, dim], or [tokens] with dim 1
  bool optional = false;    // left out of tensors() where a file lacks it; such tensors come last
};

// The tensors of a job, from a file or a seed. Sequences are equally long, or as cu_seqlens says, where a file has it.
// Heads and dims that don't fit each other are for the op to refuse: kFile for a file's, kUsage for settings.
class RowInput {
 public:
  // `tensors`: those of the op, at most 14. `others`: names of tensors that the op finds and reads by itself. Throws
  // kFile where the file lacks one, or they disagree in tokens or dtype.
  RowInput(const OpRequest& request, std::vector<RowTensor> tensors, std::span<const std::string_view> others = {});
  // Tensors that the op reads by itself.
  void add_sources(std::span<const TensorSource> sources) {
    sources_.insert(sources_.end(), sources.begin(), sources.end());
  }
  const std::shared_ptr<const TensorFile>& file() const { return file_; }  // null: synthetic

  const std::vector<RowTensor>& tensors() const { return tensors_; }  // as the file has them
  Dtype dtype() const { return dtype_; }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  std::int64_t tokens() const;
  // Tokens of a tensor that a rank reads whose own tokens are these.
  PackedRun tokens_read(const RowTensor& tensor, const PackedRun& own) const;
  // How a result of these heads and dims lies in a file: as the first tensor does.
  RowGrid out_grid(std::int64_t heads, std::int64_t dim) const;
  // The result's shape in a file. It has no axis of heads where the first tensor is flat.
  std::vector<std::int64_t> out_shape(std::int64_t heads, std::int64_t dim) const;
  bool is_synthetic() const { return file_ == nullptr; }
  // Fills rows, [total_tokens(runs), heads, dim] of dtype(), in host memory. Throws kFile, and kUsage where the input
  // is only a shape.
  void read(std::size_t tensor, std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;

  std::vector<FileFingerprint> fingerprints() const;
  UnreadTensors unread() const;
  std::string source() const;

 private:
  void find(const OpRequest& request, std::span<const std::string_view> others);

  std::vector<RowTensor> tensors_;
  Dtype dtype_ = Dtype::kBf16;
  AxisOrder order_ = AxisOrder::kThd;
  std::vector<std::int64_t> lengths_;
  std::optional<std::uint64_t> seed_;
  std::shared_ptr<const TensorFile> file_;  // null: synthetic
  std::vector<TensorSource> sources_;       // of the tensors, then cu_seqlens, then those added
  std::vector<RowGrid> grids_;
};

// Rows of the input in fp32, which is exact, in host memory.
class RowReader {
 public:
  virtual ~RowReader() = default;
  // Row of a packed token: of this rank's own tokens or, of a tensor that is `whole`, any.
  virtual std::span<const float> row(std::size_t tensor, std::int64_t token, std::int64_t head) const = 0;
  // The packed tokens of the sequence that `token` belongs to.
  virtual PackedRun sequence(std::int64_t token) const = 0;
};

// A kernel of an op, prepared on a rank.
class RowKernel {
 public:
  virtual ~RowKernel() = default;
  virtual Backend& backend() = 0;
  // Reads what a rank needs of the input. `layout`: of the result. Throws kFile.
  virtual void load(const RowInput& input, const Layout& layout, int rank, int threads) = 0;
  // Computes the loaded rows, any number of times. Collective. Returns the seconds.
  virtual double run() = 0;
  // Copies the result to host memory: [tokens of this rank, heads, dim].
  virtual void fetch(std::span<std::byte> out) = 0;
  // NaN and infinite values that were loaded beside the input's rows. Those that several ranks have count once.
  virtual std::int64_t non_finite() const { return 0; }
};

// A tensor of the result: some heads of it.
struct RowResult {
  std::string name;
  std::int64_t first_head = 0;
  std::int64_t heads = 0;
};

class RowOp {
 public:
  struct Kernel {
    const KernelEntry* entry = nullptr;
    std::string reason;
  };

  virtual ~RowOp() = default;

  virtual std::string_view name() const = 0;  // of op_table()
  virtual std::string describe() const = 0;   // "bf16, heads 8, head_dim 64": all that decides the bits, no tokens
  virtual const RowInput& input() const = 0;
  // The shape of a result: [tokens, heads, dim].
  virtual std::int64_t heads() const = 0;
  virtual std::int64_t dim() const = 0;
  virtual Dtype out_dtype() const { return Dtype::kF32; }
  virtual std::string_view out_name() const { return "out"; }  // in files and reports
  // The tensors that files and reports have of the result, which are all its heads. One unless an op has more.
  virtual std::vector<RowResult> results() const { return {{std::string(out_name()), 0, heads()}}; }
  // Bytes that a kernel needs on the rank which needs most, beside the input's rows and its results. `backend`: of the
  // kernel, perhaps without a device.
  virtual std::size_t kernel_bytes(const Kernel&, Backend&, int) const { return 0; }
  // Bytes of the input beside its rows, which a run reads.
  virtual std::int64_t other_bytes() const { return 0; }
  // Throws kUsage where the input is not of the model's layer. No layer of a model is one of most ops.
  virtual void check_model(const ModelComparison& compare) const;
  // Throws kUsage if so many ranks can't share the job.
  virtual void check_world(int) const {}
  virtual double flops() const = 0;  // of the whole job
  // Estimated compute time of a run on `world` ranks, for plans. `backend` is the kernel's. Nothing: it is not
  // estimated.
  virtual std::optional<double> seconds(const PlanRequest&, const Kernel&, const Backend&, int /*world*/) const {
    return std::nullopt;
  }

  // An op with kernels chooses one, and prepares it for the tokens that a rank has in `layout`. The latter is
  // collective; it may return null. Otherwise compute() is called for each row.
  virtual Kernel choose(const KernelRequest& request, KernelScope scope) const;
  virtual std::unique_ptr<RowKernel> make_kernel(const Kernel&, Transport&, const Options&, const Layout&) const {
    return nullptr;
  }
  // What decides the job, by name, as it is used: heads, dims, settings. For reports, tables and a benchmark's points.
  virtual std::vector<std::pair<std::string, BenchValue>> members() const = 0;

  // The result of a packed token and head, in fp32. Called by several threads at once; it doesn't throw.
  virtual void compute(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<float> out) const;
  // The same in fp64, and how far each value may lie from it. What fp32 can't hold counts as infinite.
  virtual void compute_exactly(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<double> out,
                               std::span<double> allowed) const = 0;
};

std::unique_ptr<OpJob> make_row_job(std::unique_ptr<const RowOp> op);

// Whether the file has all tensors that are not optional, by their own names or by those that are given.
bool has_tensors(const TensorFile& file, std::span<const OpTensor> tensors);

}  // namespace ringattn
