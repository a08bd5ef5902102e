// SPDX-License-Identifier: Apache-2.0
// The input of a job: tensors in a file, or functions of a seed. Its shape is known at once, its rows are read when
// they are asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "attention/files/fingerprint.hpp"
#include "attention/files/input_file.hpp"
#include "attention/files/safetensors_rows.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "kernels/synthetic.hpp"

namespace ringattn {

// q, k and v as functions of a seed, for sequences of equal length.
struct SyntheticInput {
  std::optional<std::uint64_t> seed;  // absent: a shape alone, of which no rows can be read
  std::int64_t tokens = 0;            // of each sequence
  std::int64_t batch = 1;             // sequences
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 64;
  std::optional<int> head_dim_v;  // absent: head_dim
  Dtype dtype = Dtype::kBf16;
  std::optional<AxisOrder> order;  // of out in a file; absent: thd, or bthd for several sequences
};

using InputRequest = std::variant<FileInput, SyntheticInput>;

// What is computed from q, k and v, whatever their shape.
struct Numerics {
  Mask mask{-1, 0};                     // causal
  std::optional<double> softmax_scale;  // absent: 1 / sqrt(head_dim)
  double softcap = 0.0;                 // 0: off
  // Position of each sequence's first query among its keys; absent: as the file says, or aligned to the keys' end.
  std::optional<std::int64_t> query_offset;
  // Which key blocks each query block sees beside that: a pattern, or a file (list_request.hpp); empty: all of them.
  std::string lists;
};

class JobInput {
 public:
  // Of a file, reads the header and the short lists; all of q and k where lists of key blocks follow from them. Throws
  // kFile for a file that holds no job, kUsage for a job that contradicts itself.
  JobInput(const InputRequest& request, const Numerics& numerics);

  // Synthetic input for a job that the caller made.
  static JobInput synthetic(Job job, std::uint64_t seed);

  const Job& job() const { return job_; }
  std::span<const float> sinks() const;  // [heads], or empty
  // How out lies in a file.
  const RowGrid& out_grid() const { return out_grid_; }
  // Of synthetic input.
  const std::optional<std::uint64_t>& seed() const { return seed_; }
  // Fills `rows`, in host memory, with the tokens of `runs` (packed tokens of q, or of k and v). `tensor` is kQ, kK or
  // kV. Synthetic input is made by `threads` threads. Throws kFile, and kUsage for a
  // shape alone.
  void read(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;
  // Of the files that it is read from; none for synthetic input. Reads samples. Throws kFile.
  std::vector<FileFingerprint> fingerprints() const;
  // One line for people: the file, or the seed.
  std::string source() const;

 private:
  JobInput() = default;
  void take_shape(const FileInput& input);
  void take_shape(const SyntheticInput& input);
  void take_numerics(const Numerics& numerics);

  std::shared_ptr<const InputFile> file_;  // null: synthetic
  std::optional<std::uint64_t> seed_;
  Job job_;
  RowGrid out_grid_;
};

}  // namespace ringattn
