// SPDX-License-Identifier: Apache-2.0
// The input of a job: tensors in a file, or functions of a seed. Its shape is known at once, and its rows are read on
// request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "attention/tokens/decode_rows.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/mla_job.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "io/fingerprint.hpp"
#include "io/input_names.hpp"
#include "io/safetensors_rows.hpp"
#include "kernels/common/synthetic.hpp"
#include "kernels/quant/row_format.hpp"
#include "ops/attention_jobs/input_file.hpp"
#include "ops/attention_jobs/top_k_blocks.hpp"
#include "ops/common/op.hpp"

namespace ringattn {

// q, k and v, or latents and matrices, as functions of a seed, for sequences of equal length.
struct SyntheticInput {
  Op op = Op::kAttention;
  std::optional<std::uint64_t> seed;  // absent: only a shape, whose rows can't be read
  std::int64_t tokens = 0;            // keys of each sequence
  // Queries per sequence, at the end of its keys; absent: all of them, or one if a cache is decoded.
  std::optional<std::int64_t> q_len = {};
  // kDecode and kMla only: tokens of a page. Pages are assigned at random by the seed. 0: a dense cache, or latents in
  // rows.
  std::int64_t page_size = 0;
  // kDecode with pages only: length of a prefix that all sequences share. Its keys are those of the first sequence, and
  // full pages of the prefix are shared.
  std::int64_t prefix = 0;
  std::int64_t batch = 1;  // sequences
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 64;
  std::optional<int> head_dim_v;  // absent: head_dim
  // kMla only. head_dim is then without the rotary part, and kv_heads is ignored.
  int rope_dim = 64;
  int latent_dim = 512;
  Dtype dtype = Dtype::kBf16;
  std::optional<AxisOrder> order;  // axis order of out in a file; absent: thd, or bthd for several sequences
  // How k and v are stored: a method of compression_methods() in its usual format, a format string, or their dtype.
  // Empty: uncompressed. For kMla also "fp8": FP8 rows.
  std::string cache_format = {};
  bool sinks = false;  // a logit for each query head; not for kMla
};

using InputRequest = std::variant<FileInput, SyntheticInput>;

// Settings of the computation, independent of the shape.
struct Numerics {
  Mask mask{-1, 0};                     // causal
  std::optional<double> softmax_scale;  // absent: 1 / sqrt(head_dim), including the rotary part
  double softcap = 0.0;                 // 0: off
  // Position of each sequence's first query among its keys; absent: given by the file, or aligned to the end of the
  // keys. If tokens were evicted, positions count them, too.
  std::optional<std::int64_t> query_offset;
  // The block mask: a pattern, or a file (block_mask_request.hpp); empty: all blocks.
  std::string block_mask;
  std::optional<MlaForm> form;  // MLA only; absent: chosen by the shape
  // Bytes that a rank may use, which limit the size of the block mask (BlockMaskRequest); 0: no limit. Has no other
  // effect.
  std::size_t memory_budget = 0;
};

class JobInput {
 public:
  // For a file, reads the header and the short tensors of the block mask. If the block mask is selected from q and k,
  // reads all of them and selects on `target`. Throws kFile for a file that holds no job, and kUsage for a job that
  // contradicts itself. `share`: what the ranks of this process share of the input; null: nothing.
  JobInput(const InputRequest& request, const Numerics& numerics, const TopKDevice& target = {},
           std::shared_ptr<JobShare> share = nullptr);

  // Synthetic input for a job that the caller made.
  static JobInput synthetic(Job job, std::uint64_t seed);

  // The same job as a decode step over another cache, without pages (0) or with pages of `page_size` tokens, whose
  // contents are read token by token. Its rows must be those of a decode step: op() says so, or the caller ensures it.
  JobInput decoded(std::int64_t page_size) const;
  // The same job for Attention or Mla. `why`: why a job that could be decoded is not.
  JobInput attended(std::string why = {}) const;
  // A part of the job: some sequences, ascending, each with its last `rows` queries and the keys up to the last of
  // these. No query may be before the first key or after the last.
  JobInput last_rows(std::span<const std::int64_t> sequences, std::int64_t rows) const;

  // The job. For MLA it is that of the expanded keys and values: kv_heads equals the number of query heads.
  const Job& job() const { return job_; }
  // kMla for latents; otherwise kDecode if decodes(), else kAttention.
  Op op() const { return latent_ ? Op::kMla : decodes_ ? Op::kDecode : Op::kAttention; }
  // Whether a decode op class computes the job: Decode for a cache, and MlaDecode for absorbed latents, if every
  // sequence has the same number of rows at its end, which decode kernels support.
  bool decodes() const { return decodes_; }
  // Whether latents in rows are decoded, for which a cache is made: without pages or, if the lengths of sequences
  // differ, in pages of 64. Other decode steps have a cache.
  bool makes_cache() const { return decodes_ && in_rows_; }
  // Why a job that could be decoded is computed as rows; otherwise empty.
  const std::string& not_decoded_reason() const { return not_decoded_reason_; }
  // True if tokens were evicted from the file's cache. Queries keep their original positions.
  bool has_evicted_tokens() const { return file_ && file_->tensors.positions != nullptr; }
  // In that case: the first query whose own token was evicted from some K/V head.
  const std::optional<QueryWithoutKey>& query_without_key() const { return query_without_key_; }
  // The job as class Mla takes it; null if the input is keys and values. The spec says if a file's queries are in the
  // latent space, or if it has no w_uv.
  const MlaJob* mla() const { return latent_ ? &*latent_ : nullptr; }
  // MLA only: the form that computes the job, and why that form was chosen.
  const MlaFormChoice& form() const { return form_; }
  // MLA only: head_dim of the keys without the rotary part. Absent if unknown: queries in the latent space don't
  // determine it.
  std::optional<int> nope_dim() const;
  // FP8 latents only (mla()->format): fills `rows` with the 8-bit rows of these packed keys, also if they are in pages.
  // Throws kFile.
  void read_fp8_latents(std::span<const PackedRun> runs, std::span<std::byte> rows, int threads) const;
  // The block table of a paged cache; otherwise null.
  const PageTable* pages() const { return has_file_pages() ? file_->tensors.pages.get() : dealt_.get(); }
  // Synthetic cache: the length in keys of the prefix that all sequences share.
  std::int64_t prefix() const { return prefix_; }
  // True if the pages are those of a file.
  bool has_file_pages() const { return file_ && file_->tensors.pages && !repaged_; }
  // The compressed tensor kK or kV as it is stored, or null if it is plain. job().format is the format in which its
  // rows are sent or stored in a cache. read() returns decompressed elements.
  const CompressedSource* compressed(SyntheticTensor tensor) const;
  // True if a page's axes are [kv_heads, page_size, dim] instead of [page_size, kv_heads, dim].
  bool head_major_pages() const { return has_file_pages() && file_->tensors.k_grid.head_major(); }
  // Fills `target` with these pages of a file's uncompressed pool of k or v, consecutively and as stored. `tensor` is
  // kK or kV. Throws kFile.
  void read_pages(SyntheticTensor tensor, std::span<const std::int32_t> pages, std::span<std::byte> target) const;
  std::span<const float> sinks() const;  // [heads], or empty
  // The layout of out in a file.
  const RowGrid& out_grid() const { return out_grid_; }
  // The seed of synthetic input; absent for a file.
  const std::optional<std::uint64_t>& seed() const { return seed_; }
  // The tokens of the seed from which packed tokens of q, or of k and v, are generated: queries have those of the last
  // keys.
  std::vector<PackedRun> made_tokens(SyntheticTensor tensor, std::span<const PackedRun> runs) const;
  // True if a tensor's rows are those of fill_synthetic() for made_tokens(), not decompressed ones.
  bool is_made(SyntheticTensor tensor) const {
    return seed_ && stored(tensor) == nullptr && !(fp8_latents_ && tensor == SyntheticTensor::kLatent);
  }
  // Fills `rows`, in host memory, with the tokens of `runs` (packed tokens of q, or of k and v), also if they are in
  // pages. `tensor` is kQ, kK or kV or, for MLA, kQ, kLatent, kKeyRope or the matrices of the heads of `runs`
  // (SyntheticTensor). Synthetic input is generated by `threads` threads. Throws kFile, and kUsage if the input is only
  // a shape.
  void read(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;
  // Fingerprints of the files that the input is read from; none for synthetic input. Reads samples of the data. Throws
  // kFile.
  std::vector<FileFingerprint> fingerprints() const;
  // Tensors of the file that the job does not read.
  UnreadTensors unread() const;
  // A one-line description: the file, or the seed.
  std::string source() const;

 private:
  JobInput() = default;
  void take_latents(const MlaSpec& spec);
  void take_form(std::optional<MlaForm> form);
  // The default softmax scale of MLA. Throws kUsage if the head_dim of the keys is unknown.
  float mla_softmax_scale() const;
  void take_shape(const FileInput& input);
  void take_shape(const SyntheticInput& input);
  void take_numerics(const Numerics& numerics, const TopKDevice& target);
  const CompressedSource* stored(SyntheticTensor tensor) const;
  const Batch& whole() const { return part_ ? part_->whole : job_.batch; }
  std::vector<PackedRun> file_keys(std::span<const PackedRun> runs) const;
  std::vector<PackedRun> runs_of_whole(SyntheticTensor tensor, std::span<const PackedRun> runs) const;

  std::shared_ptr<JobShare> share_;
  std::shared_ptr<const InputFile> file_;  // null: synthetic
  std::optional<std::uint64_t> seed_;
  std::shared_ptr<const SafetensorsFile> block_mask_file_;  // the file of the block mask
  std::vector<TensorSource> block_mask_tensors_;            // the tensors read from it
  bool queries_end_keys_ = false;                           // synthetic queries are those of a prefill's last tokens
  std::int64_t prefix_ = 0;                                 // synthetic keys that each sequence shares with the first
  std::string not_decoded_reason_;
  std::optional<QueryWithoutKey> query_without_key_;
  std::optional<MlaJob> latent_;
  MlaFormChoice form_;
  bool decodes_ = false;
  bool in_rows_ = false;                             // the latents are in rows, without pages
  bool fp8_latents_ = false;                         // synthetic latents are stored as FP8 rows
  std::vector<float> made_sinks_;                    // generated from the seed
  std::shared_ptr<const SyntheticCompressed> made_;  // for a seed with a format
  bool repaged_ = false;                    // set by decoded() and last_rows(): the job doesn't use the file's pages
  std::shared_ptr<const PageTable> dealt_;  // block table of a paged cache that is not in a file
  Job job_;
  // Where the sequences of a part begin on the packed axes of the whole job; null: the job is the whole.
  struct Part {
    Batch whole;
    std::vector<std::int64_t> q;
    std::vector<std::int64_t> k;
  };
  std::shared_ptr<const Part> part_;
  RowGrid out_grid_;
};

// A one-line description for users and golden files: the computation, and numbers of tokens.
std::string describe(const JobInput& input);

}  // namespace ringattn
