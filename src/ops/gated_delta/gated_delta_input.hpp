// SPDX-License-Identifier: Apache-2.0
// The input of a gated delta rule: tensors in a file, or functions of a seed. Its shape is known at once, and rows are
// read on request. In a file:
//
//   q, k           [tokens, key_heads, key_dim]; [batch, tokens, …] gives all rows below that axis too
//   v              [tokens, value_heads, value_dim]
//   log_decay      [tokens, value_heads] (Gated DeltaNet), or [tokens, value_heads, key_dim] (Kimi Delta Attention)
//   beta           [tokens, value_heads]
//   initial_state  [sequences, value_heads, key_dim, value_dim], optional
//   cu_seqlens     I32 or I64 [sequences + 1], optional
//
// With `state` instead of initial_state it is a decode step with one token per sequence. q, k and v have one dtype.
// log_decay, beta and states may have another; they are converted to fp32.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/tokens/gated_delta_job.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "io/fingerprint.hpp"
#include "kernels/common/synthetic.hpp"
#include "ops/common/tensor_file.hpp"
#include "ops/jobs/op_entry.hpp"

namespace ringattn {

// The rows of a gated delta rule, one of each kind per token.
enum class DeltaTensor { kQ, kK, kV, kLogDecay, kBeta };
inline constexpr DeltaTensor kDeltaTensors[] = {DeltaTensor::kQ, DeltaTensor::kK, DeltaTensor::kV,
                                                DeltaTensor::kLogDecay, DeltaTensor::kBeta};

// Whether a file has the tensors of a gated delta rule.
bool holds_gated_delta(const SafetensorsFile& file, const InputNames& names);

class GatedDeltaInput {
 public:
  // `spec`: the settings that no tensor determines (qk_l2norm, scale) and, for synthetic input, its shape. Throws kFile
  // for a file without these tensors, and kUsage for one that contradicts itself.
  GatedDeltaInput(const OpRequest& request, const GatedDeltaSpec& spec);

  const GatedDeltaJob& job() const { return job_; }
  // [sequences + 1] packed tokens of the whole input: where each sequence begins, and the end of the last one.
  const std::vector<std::int64_t>& origins() const { return origins_; }
  const std::optional<std::uint64_t>& seed() const { return seed_; }

  struct RowShape {
    Dtype dtype = Dtype::kF32;
    std::int64_t heads = 0;
    std::int64_t dim = 0;
  };
  RowShape row_shape(DeltaTensor tensor) const;
  // Whether a backend can generate these synthetic rows directly.
  bool made_by_backend(DeltaTensor tensor) const;
  static SyntheticTensor synthetic(DeltaTensor tensor);
  // Fills `rows`, in host memory and of row_shape(), with the packed tokens of `runs`. Throws kFile, and kUsage if the
  // input is only a shape.
  void read(DeltaTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;
  // Fills `states` with the initial states of these sequences, [sequences, value_heads, key_dim, value_dim].
  void read_initial(std::span<const std::int32_t> sequences, std::span<float> states) const;

  // The same input with only tokens [begins[s], ends[s]) of each sequence s, which may be none. Rows keep their packed
  // tokens.
  GatedDeltaInput part(std::span<const std::int64_t> begins, std::span<const std::int64_t> ends) const;
  // Makes the job have initial states, which set_initial() sets before they are read.
  void need_initial_states() { job_.initial_states = true; }
  // `states`: [sequences, value_heads, key_dim, value_dim] of these sequences, ascending, in host memory.
  void set_initial(std::vector<std::int32_t> sequences, Buffer states);

  // The layout of out in a file, and the shape of the final states there.
  const RowGrid& out_grid() const { return out_grid_; }
  std::vector<std::int64_t> states_shape() const;

  std::vector<FileFingerprint> fingerprints() const;
  UnreadTensors unread() const;
  std::string source() const;

 private:
  struct FileRows {
    TensorSource source;
    RowGrid grid;
  };

  void take_file(const OpRequest& request);
  void take_synthetic(const OpRequest& request);
  FileRows find_rows(std::string_view name, std::size_t outer_axes, std::int64_t tokens) const;
  void take_lengths();
  void read_synthetic(DeltaTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows,
                      int threads) const;

  std::shared_ptr<const TensorFile> file_;  // null: synthetic
  std::optional<std::uint64_t> seed_;
  GatedDeltaJob job_;
  std::vector<std::int64_t> origins_;
  std::vector<std::int32_t> given_sequences_;  // of set_initial()
  std::shared_ptr<const Buffer> given_states_;
  std::vector<FileRows> rows_;  // [DeltaTensor], for a file
  std::optional<TensorSource> initial_;
  std::vector<TensorSource> used_;
  RowGrid out_grid_;
};

}  // namespace ringattn
