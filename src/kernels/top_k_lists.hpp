// SPDX-License-Identifier: Apache-2.0
// A job's lists of key tiles that follow from the data: for each query block the key blocks of the highest scores. A
// block's score is that of its mean query and its mean key. Sums have a fixed order, and of equal scores the block of
// the lower number is taken, so everyone who has the rows makes the same lists, by whatever backend (list_choice.hpp).
// Nothing is learned; how much of a row's weight its list keeps is measured (attention/check/kept_share.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/backend.hpp"
#include "kernels/fold.hpp"
#include "kernels/list_makers.hpp"
#include "kernels/synthetic.hpp"

namespace ringattn {

// Gives rows of q (kQ) or k (kK) of a sequence, from row `first` on: 1 to `most` of them, [rows, heads, head_dim] in
// the backend's memory, once the stream of top_k_lists() has passed what is enqueued. They stay until the next call.
using RowSource =
    std::function<TensorView(SyntheticTensor tensor, std::size_t sequence, std::int64_t first, std::int64_t most)>;

// Rows that lie in the backend's memory: q [queries of all sequences, heads, head_dim] and k [their keys, kv_heads,
// head_dim], the sequences one after the other, of any strides.
RowSource packed_rows(std::span<const ListedSequence> sequences, const TensorView& q, const TensorView& k);

// Lists of spec.lists' shape: for each query block `count` of the key blocks that the mask lets it see: the first of
// them, the one that its last query's position lies in, and of the others those of the highest scores; fewer where it
// sees fewer. NaN scores lowest. Rows are read once, of each sequence those of k before those of q, and lists are
// copied to the host once, and waited for. Beside them the backend's memory holds mean keys of the longest sequence and
// up to kTopKScratchBytes. Throws kUsage for a count below 1, and for a spec whose heads or lists contradict each
// other; what the source throws; and kMemory. check_top_k() says before rows are read whether the lists have room.
TileLists top_k_lists(const FoldSpec& spec, std::vector<ListedSequence> sequences, int count, const RowSource& rows,
                      Backend& backend, Stream stream);

inline constexpr std::int64_t kTopKScratchBytes = std::int64_t{1} << 26;  // scores, and mean queries, of a few blocks

// Throws kMemory where such lists don't fit, and kUsage for a count below 1.
void check_top_k(const FoldSpec& spec, std::span<const ListedSequence> sequences, int count, const ListRoom& room);

}  // namespace ringattn
