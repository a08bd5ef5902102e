// SPDX-License-Identifier: Apache-2.0
// The layout of a job: which rank holds which tokens. Runs of `stripe` tokens are dealt to the ranks in snake order, 0
// 1 … P−1 P−1 … 1 0 0 1 …. The order continues from sequence to sequence (contiguous: restarts). With a causal mask
// every rank gets the same work in every block. Pure: no ranks run here.
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

// A run on the packed token axis, with its owner.
struct OwnedRun {
  std::int64_t token = 0;  // packed tokens [token, token + tokens), of one sequence
  std::int64_t tokens = 0;
  int owner = 0;
  std::int64_t row = 0;  // first row of the run in the owner's shard

  std::int64_t end() const { return token + tokens; }
};

enum class LayoutKind { kStriped, kZigzag, kContiguous };
std::string_view layout_name(LayoutKind kind);

// The layout that a user requests.
struct LayoutRequest {
  LayoutKind kind = LayoutKind::kStriped;
  std::int64_t stripe = 0;  // tokens; 0: from the tiles (striped), ⌈n / 2P⌉ (zigzag) or ⌈n / P⌉ (contiguous) of each
                            // sequence, rounded up to tiles

  bool operator==(const LayoutRequest&) const = default;
};

// The distribution of the query tokens or of the key tokens over all ranks.
class Layout {
 public:
  // The tokens of each rank, as a caller states them: ascending by (sequence, begin), disjoint, together exactly the
  // tokens of `lengths`. A rank without tokens has no runs. Throws kUsage otherwise.
  Layout(std::span<const std::int64_t> lengths, std::vector<std::vector<TokenRun>> runs);

  int world() const { return static_cast<int>(runs_.size()); }
  // The rank's shard: its rows are these tokens in this order. Adjacent runs of a sequence are merged.
  std::span<const TokenRun> runs(int rank) const { return runs_[static_cast<std::size_t>(rank)]; }
  // Row of the shard at which each run begins, then the number of rows: [runs + 1].
  std::span<const std::int64_t> run_rows(int rank) const { return rows_[static_cast<std::size_t>(rank)]; }
  std::int64_t tokens(int rank) const { return run_rows(rank).back(); }
  // Token index in its sequence for each row of the shard: [tokens(rank)]. This is the RoPE position of a key; for a
  // query add q_offset.
  std::vector<std::int64_t> positions(int rank) const;
  // Packed token index of each row of the shard: [tokens(rank)].
  std::vector<std::int64_t> packed_tokens(int rank) const;
  // Packed token at which each sequence begins, then the number of tokens: [sequences + 1].
  std::span<const std::int64_t> cu() const { return packed_begin_; }
  // Runs of all ranks, ascending by token. They cover the packed axis.
  std::span<const OwnedRun> owners() const { return owners_; }
  // Number of the rank's rows before `packed_token`.
  std::int64_t rows_before(int rank, std::int64_t packed_token) const;

  // Copies a rank's rows from the packed tensor, or back into it. `token_bytes`: bytes of one token.
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
  LayoutRequest request;  // with the used stripe, if it is the same for all sequences
  Layout queries;
  Layout keys;
};

// Work of a run of queries against all keys of their sequence, in visible (query, key) pairs.
using QueryWork = std::function<double(const TokenRun& queries)>;

// Distributes a batch's tokens. Queries and keys of a sequence get the same runs if both have the same length;
// otherwise each side is distributed on its own. A sequence of fewer than 2P stripes whose work is at most a quarter of
// a rank's share stays whole on one rank: the largest such sequence first, each on the rank with the least work. Every
// rank computes the same result. Throws kUsage for a negative stripe or an empty world.
JobLayout make_layout(const Batch& batch, const QueryWork& work, int world, const LayoutRequest& request,
                      int query_tile, int key_tile);

}  // namespace ringattn
