// SPDX-License-Identifier: Apache-2.0
// Ops whose result has one row per token and head, which depends only on rows of the input. Such an op defines one row,
// in fp32 and in fp64. Everything else is here: files and seeds, ranks, plans, digests, outputs, checks, goldens,
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
// Every rank computes the rows of its own tokens, an equal share of the packed axis. One thread computes a row in the
// order that the op defines, so its bits depend on neither ranks nor threads.
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

// A tensor of the input: [tokens, heads, dim], in the file's order of axes.
struct RowTensor {
  std::string_view name;
  std::int64_t heads = 1;  // for synthetic input; a file's tensor has its own
  std::int64_t dim = 1;
  bool whole = false;       // every rank reads the rows of all tokens, not only of its own
  std::int64_t tokens = 0;  // of a whole tensor without an axis of tokens, such as matrices; otherwise 0
  bool flat = false;        // has no axis of heads in a file: [tokens, dim], or [tokens] with dim 1
  bool optional = false;    // not in tensors() if a file lacks it; optional tensors come last
};

// The tensors of a job, from a file or a seed. All sequences have the same length, unless a file has cu_seqlens. The op
// itself refuses heads and dims that don't match: kFile for a file's, kUsage for settings.
class RowInput {
 public:
  // `tensors`: those of the op, at most 14. `others`: names of tensors that the op finds and reads by itself. Throws
  // kFile if the file lacks a tensor, or if they differ in tokens or dtype.
  RowInput(const OpRequest& request, std::vector<RowTensor> tensors, std::span<const std::string_view> others = {});
  // Adds tensors that the op reads by itself.
  void add_sources(std::span<const TensorSource> sources) {
    sources_.insert(sources_.end(), sources.begin(), sources.end());
  }
  const std::shared_ptr<const TensorFile>& file() const { return file_; }  // null: synthetic

  const std::vector<RowTensor>& tensors() const { return tensors_; }  // as in the file
  Dtype dtype() const { return dtype_; }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  std::int64_t tokens() const;
  // The tokens of a tensor that a rank with these own tokens reads.
  PackedRun tokens_read(const RowTensor& tensor, const PackedRun& own) const;
  // The layout in a file of a result with these heads and dims: that of the first tensor.
  RowGrid out_grid(std::int64_t heads, std::int64_t dim) const;
  // The result's shape in a file. It has no axis of heads if the first tensor is flat.
  std::vector<std::int64_t> out_shape(std::int64_t heads, std::int64_t dim) const;
  bool is_synthetic() const { return file_ == nullptr; }
  // Fills rows, [total_tokens(runs), heads, dim] of dtype(), in host memory. Throws kFile, and kUsage if the input is
  // only a shape.
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

// Rows of the input in host memory, converted to fp32, which is exact.
class RowReader {
 public:
  virtual ~RowReader() = default;
  // The row of a packed token: one of this rank's own tokens or, if the tensor is `whole`, any token.
  virtual std::span<const float> row(std::size_t tensor, std::int64_t token, std::int64_t head) const = 0;
  // The packed tokens of the sequence that `token` belongs to.
  virtual PackedRun sequence(std::int64_t token) const = 0;
};

// A kernel of an op, prepared on a rank.
class RowKernel {
 public:
  virtual ~RowKernel() = default;
  virtual Backend& backend() = 0;
  // Reads the parts of the input that a rank needs. `layout`: of the result. Throws kFile.
  virtual void load(const RowInput& input, const Layout& layout, int rank, int threads) = 0;
  // Computes the loaded rows, any number of times. Collective. Returns the time in seconds.
  virtual double run() = 0;
  // Copies the result to host memory: [tokens of this rank, heads, dim].
  virtual void fetch(std::span<std::byte> out) = 0;
  // Number of NaN and infinite values that were loaded in addition to the input's rows. Values that several ranks have
  // count once.
  virtual std::int64_t non_finite() const { return 0; }
};

// A tensor of the result: a range of its heads.
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

  virtual std::string_view name() const = 0;  // name in op_table()
  virtual std::string describe()
      const = 0;  // "bf16, heads 8, head_dim 64": everything that determines the bits, without tokens
  virtual const RowInput& input() const = 0;
  // The shape of a result: [tokens, heads, dim].
  virtual std::int64_t heads() const = 0;
  virtual std::int64_t dim() const = 0;
  virtual Dtype out_dtype() const { return Dtype::kF32; }
  virtual std::string_view out_name() const { return "out"; }  // name in files and reports
  // The tensors of the result in files and reports, which together have all heads. One tensor, unless an op overrides
  // this.
  virtual std::vector<RowResult> results() const { return {{std::string(out_name()), 0, heads()}}; }
  // Bytes that a kernel needs on the rank that needs most, besides the input's rows and its results. `backend`: of the
  // kernel, perhaps without a device.
  virtual std::size_t kernel_bytes(const Kernel&, Backend&, int) const { return 0; }
  // Bytes of the input besides its rows that a run reads.
  virtual std::int64_t other_bytes() const { return 0; }
  // Throws kUsage if the input does not match the model's layer. Most ops compute no layer of a model.
  virtual void check_model(const ModelComparison& compare) const;
  // Throws kUsage if this number of ranks can't share the job.
  virtual void check_world(int) const {}
  virtual double flops() const = 0;  // of the whole job
  // Estimated compute time of a run on `world` ranks, for plans. `backend`: the kernel's. Nothing if it is not
  // estimated.
  virtual std::optional<double> seconds(const PlanRequest&, const Kernel&, const Backend&, int /*world*/) const {
    return std::nullopt;
  }

  // An op with kernels chooses one in choose(), and prepares it in the next function for the tokens that a rank has in
  // `layout`. The latter is collective and may return null. Without a kernel, compute() is called for each row.
  virtual Kernel choose(const KernelRequest& request, KernelScope scope) const;
  virtual std::unique_ptr<RowKernel> make_kernel(const Kernel&, Transport&, const Options&, const Layout&) const {
    return nullptr;
  }
  // The values that determine the job, by name: heads, dims, settings. For reports, tables and a benchmark's points.
  virtual std::vector<std::pair<std::string, BenchValue>> members() const = 0;

  // Computes the result of a packed token and head in fp32. Called by several threads at once. Does not throw.
  virtual void compute(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<float> out) const;
  // The same in fp64, with the allowed error of each value. Values that fp32 can't represent count as infinite.
  virtual void compute_exactly(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<double> out,
                               std::span<double> allowed) const = 0;
};

std::unique_ptr<OpJob> make_row_job(std::unique_ptr<const RowOp> op);

// Whether the file has all tensors that are not optional, under their own names or the given ones.
bool has_tensors(const TensorFile& file, std::span<const OpTensor> tensors);

}  // namespace ringattn
