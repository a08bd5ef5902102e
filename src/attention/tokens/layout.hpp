// SPDX-License-Identifier: Apache-2.0
// Who owns which tokens. One parameter, the stripe: runs of `stripe` tokens are dealt to the ranks like a snake,
// 0 1 … P−1 P−1 … 1 0 0 1 …, and the deal goes on from sequence to sequence (contiguous: starts afresh with each).
// Under a causal mask that gives every rank the same work, in every block. Pure: no ranks run here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "attention/tokens/batch.hpp"

namespace ringattn {

// Tokens [begin, end) of one sequence.
struct TokenRun {
  std::int32_t sequence = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t tokens() const { return end - begin; }
  bool operator==(const TokenRun&) const = default;
};

// A run on the packed token axis, with its place.
struct OwnedRun {
  std::int64_t token = 0;  // packed tokens [token, token + tokens), of one sequence
  std::int64_t tokens = 0;
  int owner = 0;
  std::int64_t row = 0;  // of the owner's shard at which the run begins

  std::int64_t end() const { return token + tokens; }
};

enum class LayoutKind { kStriped, kZigzag, kContiguous };
std::string_view layout_name(LayoutKind kind);

// What a user asks for.
struct LayoutRequest {
  LayoutKind kind = LayoutKind::kStriped;
  std::int64_t stripe = 0;  // tokens; 0: from the tiles (striped), ⌈n / 2P⌉ (zigzag) or ⌈n / P⌉ (contiguous) of each
                            // sequence, rounded up to tiles

  bool operator==(const LayoutRequest&) const = default;
};

// One side's tokens (queries, or keys and values) over all ranks.
class Layout {
 public:
  // The tokens of each rank, as a caller states them: ascending by (sequence, begin), disjoint, and together exactly
  // the tokens of `lengths`; a rank without tokens states no run. Throws kUsage when they are not.
  Layout(std::span<const std::int64_t> lengths, std::vector<std::vector<TokenRun>> runs);

  int world() const { return static_cast<int>(runs_.size()); }
  // The rank's shard: its rows are these tokens in this order. Neighbouring runs of a sequence are joined.
  std::span<const TokenRun> runs(int rank) const { return runs_[static_cast<std::size_t>(rank)]; }
  // Row of the shard at which each run begins, with the total behind: [runs + 1].
  std::span<const std::int64_t> run_rows(int rank) const { return rows_[static_cast<std::size_t>(rank)]; }
  std::int64_t tokens(int rank) const { return run_rows(rank).back(); }
  // Index in its own sequence of each row of the shard: [tokens(rank)]. For keys, and for queries once the sequence's
  // q_offset is added, that is the position which RoPE needs.
  std::vector<std::int64_t> positions(int rank) const;
  // Index on the packed token axis of each row of the shard: [tokens(rank)].
  std::vector<std::int64_t> packed_tokens(int rank) const;
  // Packed token where each sequence begins, with the total behind: [sequences + 1].
  std::span<const std::int64_t> cu() const { return packed_begin_; }
  // All runs of all ranks, ascending by token; they cover the packed axis.
  std::span<const OwnedRun> owners() const { return owners_; }
  // How many of the rank's rows lie before `packed_token`.
  std::int64_t rows_before(int rank, std::int64_t packed_token) const;

  // Copies a rank's rows out of the whole packed array, or back into it. `token_bytes` is the size of one token's row.
  void shard(int rank, const std::byte* packed, std::byte* rows, std::int64_t token_bytes) const;
  void unshard(int rank, const std::byte* rows, std::byte* packed, std::int64_t token_bytes) const;

 private:
  std::vector<std::int64_t> packed_begin_;  // [sequences + 1]
  std::vector<std::vector<TokenRun>> runs_;
  std::vector<std::vector<std::int64_t>> rows_;
  std::vector<OwnedRun> owners_;
};

// The layouts of a batch's queries and of its keys.
struct JobLayout {
  LayoutRequest request;  // with the stripe that was used, where it is one number for all sequences
  Layout queries;
  Layout keys;
};

// How much work it is to compute a run of queries against all keys of their sequence, in units of a visible
// (query, key) pair.
using QueryWork = std::function<double(const TokenRun& queries)>;

// Deals a batch's tokens. Queries and keys of a sequence get the same runs where they are equally many, otherwise each
// side is dealt on its own. A sequence of fewer than 2P stripes whose work is at most a quarter of a rank's share lives
// whole on one rank, keys and queries: the least loaded one, the largest such sequences first. Every rank gets the same
// answer. Throws kUsage for a negative stripe or an empty world.
JobLayout make_layout(const Batch& batch, const QueryWork& work, int world, const LayoutRequest& request,
                      int query_tile, int key_tile);

}  // namespace ringattn
