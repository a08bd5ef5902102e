// SPDX-License-Identifier: Apache-2.0
// Ops whose result has one row for each token and head, which depends on rows of the input alone. Such an op says what
// one row is, in fp32 and in fp64; the rest is here: files and seeds, ranks, plans, digests, outputs, checks, goldens,
// benchmarks. It runs on the host: a first version of an op, or one that is never worth a kernel.
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

#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "ops/common/bench_job.hpp"
#include "ops/common/op_entry.hpp"
#include "ops/common/op_job.hpp"

namespace ringattn {

// The name of the kernel of all ops of rows.
inline constexpr std::string_view kRowKernel = "cpu_rows";

// A tensor of the input: [tokens, heads, dim], in the order of axes that the file has.
struct RowTensor {
  std::string_view name;
  std::int64_t heads = 1;  // of a synthetic input; a file's tensor has its own
  std::int64_t dim = 1;
  bool whole = false;  // every rank reads the rows of all tokens, not only of its own
};

// The tensors of a job, from a file or a seed. Sequences are equally long, or as cu_seqlens says, where a file has it.
class RowInput {
 public:
  // `tensors`: those of the op, at most 14. Throws kFile where the file lacks one, or they disagree in tokens or dtype.
  RowInput(const OpRequest& request, std::vector<RowTensor> tensors);

  const std::vector<RowTensor>& tensors() const { return tensors_; }  // as the file has them
  Dtype dtype() const { return dtype_; }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  std::int64_t tokens() const;
  bool is_synthetic() const { return file_ == nullptr; }
  // Fills rows, [total_tokens(runs), heads, dim] of dtype(), in host memory. Throws kFile, and kUsage where the input
  // is only a shape.
  void read(std::size_t tensor, std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;

  std::vector<FileFingerprint> fingerprints() const;
  UnreadTensors unread() const;
  std::string source() const;

 private:
  void find(const OpRequest& request);

  std::vector<RowTensor> tensors_;
  Dtype dtype_ = Dtype::kBf16;
  std::vector<std::int64_t> lengths_;
  std::optional<std::uint64_t> seed_;
  std::shared_ptr<const TensorFile> file_;  // null: synthetic
  std::vector<TensorSource> sources_;       // of the tensors, then cu_seqlens
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

class RowOp {
 public:
  virtual ~RowOp() = default;

  virtual std::string_view name() const = 0;  // of op_table()
  virtual std::string describe() const = 0;   // "bf16, heads 8, head_dim 64": all that decides the bits, no tokens
  virtual const RowInput& input() const = 0;
  // The shape of a result: [tokens, heads, dim], in fp32.
  virtual std::int64_t heads() const = 0;
  virtual std::int64_t dim() const = 0;
  virtual double flops() const = 0;  // of the whole job
  // Settings of the shape that the input says, by name, and what makes a benchmark's points comparable.
  virtual std::vector<std::pair<std::string, BenchValue>> members() const = 0;

  // The result of a packed token and head. Called by several threads at once.
  virtual void compute(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<float> out) const = 0;
  // The same in fp64, and how far each value may lie from it.
  virtual void compute_exactly(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<double> out,
                               std::span<double> allowed) const = 0;
};

std::unique_ptr<OpJob> make_row_job(std::unique_ptr<const RowOp> op);

// Whether the file has all tensors that are not optional, by their own names or by those that are given.
bool has_tensors(const TensorFile& file, std::span<const OpTensor> tensors);

}  // namespace ringattn
