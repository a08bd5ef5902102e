// SPDX-License-Identifier: Apache-2.0
// A job's lists of key tiles that follow from the data: for each query block the key blocks of the highest scores. A
// block's score is that of its mean query and its mean key. Sums have a fixed order, and of equal scores the block of
// the lower number is taken, so everyone who has the rows makes the same block_mask, by whatever backend
// (block_mask_choice.hpp). Nothing is learned; how much of a row's weight its list keeps is measured
// (attention/check/kept_mass.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/attention.hpp"
#include "kernels/backend.hpp"
#include "kernels/block_mask_choice.hpp"
#include "kernels/block_mask_patterns.hpp"
#include "kernels/synthetic.hpp"

namespace ringattn {

// Gives rows of q (kQ) or k (kK) of a sequence, from row `first` on: 1 to `most` of them, [rows, heads, head_dim] in
// the backend's memory, once the stream of top_k_selection() has passed what is enqueued. They stay until the next
// call.
using RowSource =
    std::function<TensorView(SyntheticTensor tensor, std::size_t sequence, std::int64_t first, std::int64_t most)>;

// Rows that lie in the backend's memory: q [queries of all sequences, heads, head_dim] and k [their keys, kv_heads,
// head_dim], the sequences one after the other, of any strides.
RowSource packed_rows(std::span<const MaskedSequence> sequences, const TensorView& q, const TensorView& k);

// Lists of spec.lists' shape: for each query block `count` of the key blocks that the mask lets it see: the first of
// them, the one that its last query's position lies in, and of the others those of the highest scores; fewer where it
// sees fewer. NaN scores lowest. Rows are read once, of each sequence those of k before those of q, and lists are
// copied to the host once, and waited for. Beside them the backend's memory holds the mean keys of all blocks, and up
// to kTopKScratchBytes. Throws kUsage for a count below 1, for a spec whose heads or lists contradict each other and
// for rows of another shape or dtype; what the source throws; and kMemory. check_top_k() says before rows are read
// whether the lists have room.
BlockMask top_k_selection(const AttentionSpec& spec, std::vector<MaskedSequence> sequences, int count,
                          const RowSource& rows, Backend& backend, Stream stream);

inline constexpr std::int64_t kTopKScratchBytes = std::int64_t{1} << 26;  // scores, and mean queries, of a few blocks

// Throws kMemory where such lists don't fit, and kUsage for a count below 1.
void check_top_k(const AttentionSpec& spec, std::span<const MaskedSequence> sequences, int count,
                 const BlockMaskBudget& room);

// The same in parts, for callers of whom each has some of the rows, in whole blocks.
class TopKSelection {
 public:
  // Says how lists lie, which follows from lengths and the mask, and allocates. The backend outlives the object.
  TopKSelection(const AttentionSpec& spec, std::vector<MaskedSequence> sequences, int count, Backend& backend,
                Stream stream);

  std::span<const MaskedSequence> sequences() const { return sequences_; }
  TileRange query_blocks(std::size_t sequence) const { return places_[sequence].query_blocks; }
  TileRange key_blocks(std::size_t sequence) const;
  // Whether a query of the sequence sees a key of it.
  bool selects_any(std::size_t sequence) const { return places_[sequence].entries > 0; }

  // Makes the means of these blocks of a sequence's keys.
  void pool_keys(std::size_t sequence, const TileRange& key_blocks, const RowSource& rows);
  // Where they lie, [blocks, kv_heads, head_dim] in the backend's memory: for means that others have made.
  std::span<float> mean_keys(std::size_t sequence, const TileRange& key_blocks) const;
  std::span<float> all_mean_keys() const { return {mean_keys_, mean_numbers_}; }  // of all sequences, one after another
  // Makes the lists of these query blocks, by the means of all of the sequence's keys.
  void choose(std::size_t sequence, const TileRange& query_blocks, const RowSource& rows);

  // Returns when the stream has passed what is enqueued.
  void finish() const;
  // The entries of all block_mask, as BlockMask has them; of lists that nobody made here they say nothing. Waits.
  std::vector<std::int32_t> fetch() const;
  // Which of them are those of a head's lists of these query blocks: [begin, end).
  TileRange entries(std::size_t sequence, int head, const TileRange& query_blocks) const;
  BlockMask block_mask(std::vector<std::int32_t> entries) const;

 private:
  // A sequence among the others.
  struct Place {
    TileRange query_blocks;
    std::int64_t first = 0;      // of its candidates
    std::int64_t key_block = 0;  // the first of its own
    std::int64_t begin = 0;      // of its lists' entries
    std::int64_t entries = 0;    // of one head
  };

  void pool(SyntheticTensor tensor, std::size_t sequence, const KeyRange& all, const KeyRange& positions, int block,
            float* means, const RowSource& rows);

  AttentionSpec spec_;
  std::vector<MaskedSequence> sequences_;
  Backend& backend_;
  Stream stream_;
  std::vector<Place> places_;                // [sequences]
  std::vector<BlockCandidates> candidates_;  // of all query blocks
  std::vector<std::int64_t> begins_{0};      // of BlockMask
  std::int64_t at_a_time_ = 1;               // query blocks that are chosen for
  std::vector<Buffer> memory_;               // of all below
  float* mean_keys_ = nullptr;
  std::size_t mean_numbers_ = 0;
  float* mean_queries_ = nullptr;
  float* scores_ = nullptr;
  std::int32_t* listed_ = nullptr;
  const BlockCandidates* candidates_there_ = nullptr;
};

}  // namespace ringattn
