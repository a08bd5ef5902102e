// SPDX-License-Identifier: Apache-2.0
// The input of a job: tensors in a file, or functions of a seed. Its shape is known at once, its rows are read when
// they are asked for.
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

#include "attention/files/fingerprint.hpp"
#include "attention/files/input_file.hpp"
#include "attention/files/input_names.hpp"
#include "attention/files/safetensors_rows.hpp"
#include "attention/files/top_k_blocks.hpp"
#include "attention/tokens/decode_rows.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/mla_job.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "kernels/row_format.hpp"
#include "kernels/synthetic.hpp"

namespace ringattn {

// What computes a job. The first two give a row the same bits.
enum class Op {
  kAttention,  // Attention: rows in any number, keys dealt to ranks as the rows are
  kDecode,     // Decode: a few rows at the end of each sequence, whose keys lie in a cache
  kMla,        // Mla: rows in any number, keys and values expanded from latents
  // Of a SsmInput (ssm_input.hpp).
  kSsd,            // Ssm: Mamba-2's, a decay a head
  kSelectiveScan,  // Ssm: Mamba-1's, a decay for each state of a channel
  kConv1d,         // Ssm: the convolution in front of one, alone
};
std::string_view op_name(Op op);  // "attention", "decode", "mla", "ssd", "selective_scan", "conv1d"

// q, k and v, or latents and matrices, as functions of a seed, for sequences of equal length.
struct SyntheticInput {
  Op op = Op::kAttention;
  std::optional<std::uint64_t> seed;  // absent: a shape alone, of which no rows can be read
  std::int64_t tokens = 0;            // keys of each sequence
  // Queries of each, at the end of its keys; absent: all of them, or one where a cache is decoded.
  std::optional<std::int64_t> q_len = {};
  // Tokens, of kDecode and kLatent: pages dealt at random by the seed. 0: a dense cache, or rows of latents.
  std::int64_t page_size = 0;
  // Of kDecode in pages: keys that all sequences begin with, those of the first, in the same pages as far as they fill
  // them.
  std::int64_t prefix = 0;
  std::int64_t batch = 1;  // sequences
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 64;
  std::optional<int> head_dim_v;  // absent: head_dim
  // Of kLatent, where head_dim is without the rotary part, and kv_heads says nothing.
  int rope_dim = 64;
  int latent_dim = 512;
  Dtype dtype = Dtype::kBf16;
  std::optional<AxisOrder> order;  // of out in a file; absent: thd, or bthd for several sequences
  // A method of compression_methods() in whose usual format k and v are stored, or a format by its words, or their
  // dtype, or nothing: as they are. Of kLatent also "fp8": rows of 8 bits.
  std::string cache_format = {};
};

using InputRequest = std::variant<FileInput, SyntheticInput>;

// What is computed from q, k and v, whatever their shape.
struct Numerics {
  Mask mask{-1, 0};                     // causal
  std::optional<double> softmax_scale;  // absent: 1 / sqrt(head_dim), of heads' keys with their rotary part
  double softcap = 0.0;                 // 0: off
  // Position of each sequence's first query among its keys; absent: as the file says, or aligned to the keys' end. Keys
  // that have positions of their own are counted with those that were taken out.
  std::optional<std::int64_t> query_offset;
  // Which key blocks each query block sees beside that: a pattern, or a file (block_mask_request.hpp); empty: all of
  // them.
  std::string block_mask;
  std::optional<MlaForm> form;  // of latents; absent: by the shape
  // Bytes that a rank may use, which no lists exceed (BlockMaskRequest); 0: no limit. Decides nothing else.
  std::size_t memory_budget = 0;
};

class JobInput {
 public:
  // Of a file, reads the header and the short block_mask; all of q and k where lists of key blocks follow from them,
  // which are then chosen at `target`. Throws kFile for a file that holds no job, kUsage for a job that contradicts
  // itself.
  JobInput(const InputRequest& request, const Numerics& numerics, const TopKDevice& target = {});

  // Synthetic input for a job that the caller made.
  static JobInput synthetic(Job job, std::uint64_t seed);

  // The same job as a decoding step over another cache, without pages (0) or with pages of so many tokens, whose
  // contents are read token by token. Its rows must be a step's: op() says so, or the caller sees to it.
  JobInput decoded(std::int64_t page_size) const;
  // The same job for Attention, or for Mla. `why`: of one that would have been decoded, why it isn't.
  JobInput attended(std::string why = {}) const;
  // Some of its sequences, ascending, each with its last `rows` queries and the keys up to the last of these: no query
  // stands before the first key or behind the last.
  JobInput last_rows(std::span<const std::int64_t> sequences, std::int64_t rows) const;

  // Of latents, as if keys and values lay there expanded: as many K/V heads as query heads.
  const Job& job() const { return job_; }
  // Of a file, kLatent where it holds latents; kDecode where it holds a cache and every sequence has as many rows, no
  // more than decode kernels take.
  Op op() const { return op_; }
  // Whether a op class of decoding computes it: Decode for kDecode, and MlaDecode for latents, absorbed, where
  // every sequence has as many rows at its end, no more than decode kernels take.
  bool decodes() const { return op_ == Op::kDecode || decodes_mla_; }
  // Whether what it decodes are latents in rows, of which a cache is made: without pages or, of sequences whose lengths
  // differ, in pages of 64. Other steps have a cache.
  bool makes_cache() const { return decodes_mla_ && in_rows_; }
  // Why a job is computed as rows that would have been decoded; else empty.
  const std::string& not_decoded_reason() const { return not_decoded_reason_; }
  // Whether tokens were taken out of the file's cache: queries stand where they did among all of them.
  bool has_evicted_tokens() const { return file_ && file_->tensors.positions != nullptr; }
  // Then: the first query whose own token is not among those that are left, of some head of keys.
  const std::optional<QueryWithoutKey>& query_without_key() const { return query_without_key_; }
  // Of kLatent: the job as its op class has it, with the form that computes, and why it is that one. Where a file's
  // queries are in the latent, or it has no w_uv, the spec says so.
  const MlaJob& latent() const { return *latent_; }
  const MlaFormChoice& form() const { return form_; }
  // Of kLatent: of heads' keys without the rotary part, which queries in the latent don't tell; absent: nothing says
  // it.
  std::optional<int> nope_dim() const;
  // Of latents in rows of 8 bits, as latent().format says: fills `rows` with those of these packed keys, wherever pages
  // hold them. Throws kFile.
  void read_fp8_latents(std::span<const PackedRun> runs, std::span<std::byte> rows, int threads) const;
  // Of a cache in pages: where each sequence's keys lie; else null.
  const PageTable* pages() const { return has_file_pages() ? file_->tensors.pages.get() : dealt_.get(); }
  // Of a synthetic cache: keys that all sequences begin with.
  std::int64_t prefix() const { return prefix_; }
  // Whether these are pages that lie in a file.
  bool has_file_pages() const { return file_ && file_->tensors.pages && !repaged_; }
  // Of input with compressed keys or values, that tensor as it is stored: kK or kV; null: plain. job().format says
  // how they travel, or lie in a cache, and read() gives their elements.
  const CompressedSource* compressed(SyntheticTensor tensor) const;
  // Whether a page's axes are [kv_heads, page_size, dim] instead of [page_size, kv_heads, dim].
  bool head_major_pages() const { return has_file_pages() && file_->tensors.k_grid.head_major(); }
  // Fills `target` with these pages of a file's pool of k or v that is not compressed, one behind the other, as they
  // lie there. `tensor` is kK or kV. Throws kFile.
  void read_pages(SyntheticTensor tensor, std::span<const std::int32_t> pages, std::span<std::byte> target) const;
  std::span<const float> sinks() const;  // [heads], or empty
  // How out lies in a file.
  const RowGrid& out_grid() const { return out_grid_; }
  // Of synthetic input.
  const std::optional<std::uint64_t>& seed() const { return seed_; }
  // The tokens of a seed that packed tokens of q, or of k and v, are made of: queries are those of the last keys.
  std::vector<PackedRun> made_tokens(SyntheticTensor tensor, std::span<const PackedRun> runs) const;
  // Whether a tensor's rows are those that fill_synthetic() makes of made_tokens(), and not what compressing them
  // gives.
  bool is_made(SyntheticTensor tensor) const {
    return seed_ && stored(tensor) == nullptr && !(fp8_latents_ && tensor == SyntheticTensor::kLatent);
  }
  // Fills `rows`, in host memory, with the tokens of `runs` (packed tokens of q, or of k and v), wherever pages hold
  // them. `tensor` is kQ, kK or kV or, of latents, kQ, kLatent, kKeyRope or the matrices of the heads of `runs`
  // (SyntheticTensor). Synthetic input is made by `threads` threads. Throws kFile, and kUsage for a shape alone.
  void read(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows, int threads) const;
  // Of the files that it is read from; none for synthetic input. Reads samples. Throws kFile.
  std::vector<FileFingerprint> fingerprints() const;
  // Tensors of its file that the job does not read.
  UnreadTensors unread() const;
  // One line for people: the file, or the seed.
  std::string source() const;

 private:
  JobInput() = default;
  void take_latents(const MlaSpec& spec);
  void take_form(std::optional<MlaForm> form);
  // Of latents, where none is stated. Throws kUsage where nothing says of how many dims heads' keys are.
  float mla_softmax_scale() const;
  void take_shape(const FileInput& input);
  void take_shape(const SyntheticInput& input);
  void take_numerics(const Numerics& numerics, const TopKDevice& target);
  const CompressedSource* stored(SyntheticTensor tensor) const;
  const Batch& whole() const { return part_ ? part_->whole : job_.batch; }
  std::vector<PackedRun> file_keys(std::span<const PackedRun> runs) const;
  std::vector<PackedRun> runs_of_whole(SyntheticTensor tensor, std::span<const PackedRun> runs) const;

  std::shared_ptr<const InputFile> file_;  // null: synthetic
  std::optional<std::uint64_t> seed_;
  std::shared_ptr<const SafetensorsFile> block_mask_file_;  // that the lists were read from
  std::vector<TensorSource> block_mask_tensors_;            // of it
  bool queries_end_keys_ = false;                           // synthetic queries are those of a prefill's last tokens
  std::int64_t prefix_ = 0;  // synthetic keys of each sequence that are those of the first
  Op op_ = Op::kAttention;
  std::string not_decoded_reason_;
  std::optional<QueryWithoutKey> query_without_key_;
  std::optional<MlaJob> latent_;
  MlaFormChoice form_;
  bool decodes_mla_ = false;
  bool in_rows_ = false;                             // latents that decodes_mla_ without pages of their own
  bool fp8_latents_ = false;                         // of a seed: latents lie in rows of 8 bits
  std::shared_ptr<const SyntheticCompressed> made_;  // of a seed with a format
  bool repaged_ = false;                             // by decoded() or last_rows(): the file's pages are not the job's
  std::shared_ptr<const PageTable> dealt_;           // of a cache in pages that lies in no file
  Job job_;
  // Where the sequences of a part begin on the packed axes of the whole; null: the job is the whole.
  struct Part {
    Batch whole;
    std::vector<std::int64_t> q;
    std::vector<std::int64_t> k;
  };
  std::shared_ptr<const Part> part_;
  RowGrid out_grid_;
};

// One line for people and golden files: what is computed, of how many tokens.
std::string describe(const JobInput& input);

}  // namespace ringattn
