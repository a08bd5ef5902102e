// SPDX-License-Identifier: Apache-2.0
// The input of an SSM op: tensors in a file, or functions of a seed. Its shape and the tensors with an entry per head
// are known at once, and rows are read on request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "attention/tokens/ssm_job.hpp"
#include "io/fingerprint.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/common/tensor_file.hpp"
#include "ops/ssm/ssm_tensors.hpp"

namespace ringattn {

// An SSM layer as a function of a seed, over sequences of equal length, with D, z and a bias of dt. Some heads have
// decays that forget within a chunk, and others remember for super-segments.
struct SyntheticSsmInput {
  bool update = false;                // one token of each sequence, from states that also follow from the seed
  bool selective = false;             // Mamba-1: heads are channels, and head_dim is 1
  std::optional<SsmDecay> linear;     // linear attention with such a decay: groups are ignored
  bool convolution = false;           // only a convolution: heads are its channels; dims, groups and states are ignored
  std::optional<std::uint64_t> seed;  // absent: only a shape, whose rows can't be read
  std::int64_t tokens = 0;            // of each sequence
  std::int64_t batch = 1;             // sequences
  int heads = 1;
  int head_dim = 64;
  int groups = 1;
  int state_dim = 128;
  int conv_width = 0;  // of the convolution in front, with a bias; 0: none
  Dtype dtype = Dtype::kBf16;
  std::optional<AxisOrder> order;  // of y in a file: kThd, kBthd; absent: kThd, or kBthd for several sequences
};

using SsmRequest = std::variant<FileInput, SyntheticSsmInput>;

// Settings of the computation, independent of the shape.
struct SsmNumerics {
  std::optional<bool> softplus;  // of dt; absent: if dt has a bias
  float dt_min = -std::numeric_limits<float>::infinity();
  float dt_max = std::numeric_limits<float>::infinity();
  bool final_states = false;  // and the last tokens of the convolution's input
  // Ranks of this process that open the input. With more ranks, fewer sequences and tokens are allowed
  // (check_ssm_size()). It has no other effect.
  int ranks = 1;
  Op op = Op::kSsd;  // of a file: kLinearAttention, or any other op, which its tensors then determine
};

Op ssm_op(const SsmJob& job);

// The tensors of an SSM layer in an open file. The ranks of a process share them.
struct SsmFile {
  // Throws kFile.
  SsmFile(std::shared_ptr<const TensorFile> opened_file, Op op);

  std::shared_ptr<const TensorFile> opened;
  SsmTensors tensors;
};

// The rows of an SSM layer, each with one row per token. A convolution without an SSM layer has only x.
enum class SsmTensorKind { kX, kDt, kB, kC, kZ };

class SsmInput {
 public:
  // Throws kFile for a file that holds no SSM layer, kUsage for one that contradicts itself, kMemory for one that is
  // too large.
  // `share`: data that the ranks of this process share of the input. Null: nothing is shared.
  SsmInput(const SsmRequest& request, const SsmNumerics& numerics, std::shared_ptr<JobShare> share = nullptr);
  // Linear attention only: the scale of out, and RoPE. Throws kUsage.
  void set_scale(float scale);
  void set_log_decays(std::vector<float> decays) { a_ = std::move(decays); }  // of synthetic input
  void set_rope(std::optional<RopeSpec> rope);

  Op op() const { return ssm_op(job_); }
  const SsmJob& job() const { return job_; }
  // The same input, with final states requested.
  SsmInput with_final_states() const;
  // Tokens [begins, ends) of each sequence, as sequences of their own, without those that have no tokens. If they don't
  // begin at 0, `carried` holds the data that they continue from, [remaining sequences, …] in the layout of
  // carried_view(): states, or tokens if there is only a convolution. Rows are still identified by the tokens of the
  // whole input.
  SsmInput part(std::span<const std::int64_t> begins, std::span<const std::int64_t> ends,
                std::vector<std::byte> carried) const;
  // For each sequence: its number in the whole input, and the packed token of the whole input at which it begins.
  const std::vector<std::int32_t>& numbers() const { return numbers_; }
  const std::vector<std::int64_t>& origins() const { return origins_; }

  // Tensors with an entry per head, as in SsmTask; empty if the spec has none.
  const std::vector<float>& a() const { return a_; }
  const std::vector<float>& d() const { return d_; }
  const std::vector<float>& dt_bias() const { return dt_bias_; }
  // Tensors with an entry per channel, as in CausalConv1dTask; empty without a convolution or its bias.
  const std::vector<float>& conv_weight() const { return conv_weight_; }
  const std::vector<float>& conv_bias() const { return conv_bias_; }
  // The rows that a convolution reads, concatenated in this order. None without a convolution.
  std::vector<SsmTensorKind> convolved() const;
  // Heads and dims of a token's rows. z exists only if the spec has a gate.
  struct RowShape {
    std::int64_t heads = 0;
    std::int64_t dim = 0;
  };
  RowShape row_shape(SsmTensorKind rows) const;
  Dtype row_dtype(SsmTensorKind rows) const;
  // Whether a backend can generate the synthetic rows directly.
  bool made_by_backend(SsmTensorKind rows) const { return seed_ && !is_log_decay(rows); }
  // The position of a sequence's first token here, for RoPE.
  std::int64_t position_of(std::size_t sequence) const {
    return begin_of(sequence) + (offsets_.empty() ? 0 : offsets_[static_cast<std::size_t>(numbers_[sequence])]);
  }

  const std::optional<std::uint64_t>& seed() const { return seed_; }
  static SyntheticTensor synthetic(SsmTensorKind rows);
  // Fills `rows`, in host memory, with the packed tokens of `runs`. Synthetic input is made by `threads` threads.
  // Throws kFile, and kUsage if the input is only a shape.
  void read(SsmTensorKind which, std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;
  // Fills `states` with the initial states of these sequences, [sequences, heads, head_dim, state_dim].
  void read_initial(std::span<const std::int32_t> sequences, std::span<float> states) const;
  // Fills `halos` with the tokens before these sequences, [sequences, width − 1, channels], oldest first.
  void read_halos(std::span<const std::int32_t> sequences, std::span<std::byte> halos) const;

  // The layout of y in a file, and the shape of the final states in the file.
  const RowGrid& y_grid() const { return y_grid_; }
  std::vector<std::int64_t> y_shape() const;
  std::vector<std::int64_t> states_shape() const;
  // Shape of the last tokens before a convolution: [sequences, channels, width − 1].
  std::vector<std::int64_t> halos_shape() const;

  // See JobInput.
  std::vector<FileFingerprint> fingerprints() const;
  UnreadTensors unread() const;
  // The tensors of the file that the job reads.
  std::vector<TensorSource> used() const {
    return file_ == nullptr ? std::vector<TensorSource>() : file_->tensors.used;
  }
  std::string source() const;

 private:
  void take_shape(const FileInput& input, const SsmNumerics& numerics, JobShare& share);
  void take_shape(const SyntheticSsmInput& input, const SsmNumerics& numerics, JobShare& share);
  bool is_log_decay(SsmTensorKind rows) const { return rows == SsmTensorKind::kDt && job_.spec.decay != SsmDecay::kDt; }
  void take_whole();
  std::int64_t begin_of(std::size_t sequence) const { return begins_.empty() ? 0 : begins_[sequence]; }
  void set_conv1d(int width, bool bias);
  void read_before(std::int64_t token, const MutableTensorView& rows) const;

  std::shared_ptr<const SsmFile> file_;  // null: synthetic
  std::optional<std::uint64_t> seed_;
  SsmJob job_;
  std::vector<std::int32_t> numbers_;
  std::vector<std::int64_t> origins_;
  std::vector<std::int64_t> begins_;   // a part: tokens of the sequence before it; the whole: empty
  std::vector<std::int64_t> offsets_;  // of the whole's sequences, or empty
  std::vector<float> a_, d_, dt_bias_, conv_weight_, conv_bias_;
  std::optional<std::vector<std::byte>> carried_;  // from the tokens before a part
  RowGrid y_grid_;
};

}  // namespace ringattn
