// SPDX-License-Identifier: Apache-2.0
// Data-dependent block masks for prefill: each query block attends to the key blocks with the highest scores, the dot
// product of its mean query and the block's mean key. Sums have a fixed order, and ties go to the lower index, so every
// process with the same rows computes the same block mask on any backend (attention/block_mask_choice.hpp). Nothing is
// learned. ops/attention_jobs/kept_mass.hpp measures how much softmax mass the mask keeps.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/block_mask_choice.hpp"
#include "kernels/attention/block_mask_patterns.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/common/synthetic.hpp"

namespace ringattn {

// Returns rows of q (kQ) or k (kK) of a sequence, from row `first` on: 1 to `max_rows` rows, [rows, heads, head_dim],
// in the backend's memory, ready once the stream of top_k_selection() has passed what is enqueued. They must stay valid
// until the next call.
using RowSource =
    std::function<TensorView(SyntheticTensor tensor, std::size_t sequence, std::int64_t first, std::int64_t max_rows)>;

// A RowSource for rows in the backend's memory: q [queries of all sequences, heads, head_dim] and k [their keys,
// kv_heads, head_dim], with the sequences concatenated, of any strides.
RowSource packed_rows(std::span<const MaskedSequence> sequences, const TensorView& q, const TensorView& k);

// Computes a block mask of the shape spec.block_mask. Each query block has `count` of the key blocks that the Mask
// allows: the first one, the one with its last query's position, and the others with the highest scores; fewer if fewer
// are allowed. NaN is the lowest score. Rows are read once, for each sequence k before q, and the result is copied to
// the host once, with a wait. The backend's memory also holds the mean keys of all blocks, and up to kTopKScratchBytes.
// Throws kUsage for a count below 1, for a spec whose heads or blocks contradict each other, and for rows of another
// shape or dtype; whatever the source throws; and kMemory. check_top_k() says before rows are read whether the mask
// fits in memory.
BlockMask top_k_selection(const AttentionSpec& spec, std::vector<MaskedSequence> sequences, int count,
                          const RowSource& rows, Backend& backend, Stream stream);

// For scores and mean queries of some query blocks.
inline constexpr std::int64_t kTopKScratchBytes = std::int64_t{1} << 26;

// Throws kMemory if such a mask does not fit, and kUsage for a count below 1.
void check_top_k(const AttentionSpec& spec, std::span<const MaskedSequence> sequences, int count,
                 const BlockMaskBudget& budget);

// top_k_selection() in steps, for callers that each have some of the rows, in whole blocks.
class TopKSelection {
 public:
  // Computes the mask's structure from lengths and the Mask, and allocates. The backend must outlive the object.
  TopKSelection(const AttentionSpec& spec, std::vector<MaskedSequence> sequences, int count, Backend& backend,
                Stream stream);

  std::span<const MaskedSequence> sequences() const { return sequences_; }
  TileRange query_blocks(std::size_t sequence) const { return offsets_[sequence].query_blocks; }
  TileRange key_blocks(std::size_t sequence) const;
  // Whether some query of the sequence sees a key.
  bool selects_any(std::size_t sequence) const { return offsets_[sequence].entries > 0; }

  // Computes the mean keys of these key blocks of a sequence.
  void pool_keys(std::size_t sequence, const TileRange& key_blocks, const RowSource& rows);
  // Their memory, [blocks, kv_heads, head_dim] on the backend, for means that other processes have computed.
  std::span<float> mean_keys(std::size_t sequence, const TileRange& key_blocks) const;
  std::span<float> all_mean_keys() const { return {mean_keys_, mean_numbers_}; }  // all sequences, concatenated
  // Chooses the mask rows of these query blocks, from the mean keys of all of the sequence.
  void choose(std::size_t sequence, const TileRange& query_blocks, const RowSource& rows);

  // Returns when the stream has passed what is enqueued.
  void finish() const;
  // The indices of all mask rows, as in BlockMask. Rows that this object has not chosen are unspecified. Waits.
  std::vector<std::int32_t> fetch() const;
  // Range [begin, end) of these indices for a head's mask rows of these query blocks.
  TileRange entries(std::size_t sequence, int head, const TileRange& query_blocks) const;
  BlockMask block_mask(std::vector<std::int32_t> entries) const;

 private:
  // A sequence's offsets in the arrays of all sequences.
  struct SequenceOffsets {
    TileRange query_blocks;
    std::int64_t first = 0;      // offset of its candidates
    std::int64_t key_block = 0;  // offset of its key blocks
    std::int64_t begin = 0;      // offset of its mask rows' entries
    std::int64_t entries = 0;    // entries per mask head
  };

  void pool(SyntheticTensor tensor, std::size_t sequence, const KeyRange& all, const KeyRange& positions, int block,
            float* means, const RowSource& rows);

  AttentionSpec spec_;
  std::vector<MaskedSequence> sequences_;
  Backend& backend_;
  Stream stream_;
  std::vector<SequenceOffsets> offsets_;     // [sequences]
  std::vector<BlockCandidates> candidates_;  // [query blocks of all sequences]
  std::vector<std::int64_t> indptr_{0};      // BlockMask's indptr
  std::int64_t blocks_per_call_ = 1;         // query blocks chosen per call
  std::vector<Buffer> memory_;               // owns all arrays below
  float* mean_keys_ = nullptr;
  std::size_t mean_numbers_ = 0;
  float* mean_queries_ = nullptr;
  float* scores_ = nullptr;
  std::int32_t* listed_ = nullptr;
  const BlockCandidates* device_candidates_ = nullptr;
};

}  // namespace ringattn
