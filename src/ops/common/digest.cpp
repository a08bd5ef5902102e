// SPDX-License-Identifier: Apache-2.0
#include "ops/common/digest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstring>
#include <deque>
#include <map>
#include <type_traits>
#include <vector>

// Compiled in, so that the layout of a hash's state, which ranks pass to each other, is the same on every host.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

using Hash = std::array<char, 16>;  // canonical: big endian
static_assert(sizeof(XXH128_canonical_t) == sizeof(Hash));

// An incremental XXH3-128.
class RunHash {
 public:
  RunHash() {
    std::memset(&state_, 0, sizeof state_);
    XXH3_128bits_reset(&state_);
  }

  void add(const void* data, std::size_t bytes) { XXH3_128bits_update(&state_, data, bytes); }

  // [rows, heads, dim] of a view.
  void add_rows(const TensorView& view, std::int64_t first, std::int64_t rows) {
    const auto head_bytes = static_cast<std::size_t>(view.dim) * size_of(view.dtype);
    if (rows == 0) return;
    if (view.is_dense()) {
      add(view.at(first, 0), static_cast<std::size_t>(rows * view.heads) * head_bytes);
      return;
    }
    for (std::int64_t row = first; row < first + rows; ++row) {
      for (std::int64_t head = 0; head < view.heads; ++head) add(view.at(row, head), head_bytes);
    }
  }

  Hash finish() const {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_));
    Hash hash;
    std::memcpy(hash.data(), canonical.digest, hash.size());
    return hash;
  }

  // The state as bytes for another process. Its pointer to the library's constant secret differs between processes.
  void append_to(std::string& bytes) const {
    static_assert(std::is_trivially_copyable_v<XXH3_state_t>);
    XXH3_state_t copy = state_;
    copy.extSecret = nullptr;
    bytes.append(reinterpret_cast<const char*>(&copy), sizeof copy);
  }
  static RunHash from(const char* bytes) {
    RunHash hash;
    const unsigned char* const secret = hash.state_.extSecret;
    std::memcpy(&hash.state_, bytes, kBytes);
    hash.state_.extSecret = secret;
    return hash;
  }
  static constexpr std::size_t kBytes = sizeof(XXH3_state_t);

 private:
  XXH3_state_t state_;
};

// Rows of one rank in a 128-token run that it shares with other ranks.
struct Piece {
  std::int64_t end = 0;  // packed token
  std::int64_t row = 0;
};

// The unfinished hash of a run of 128 tokens, up to `next`.
struct OpenRun {
  std::int64_t next = 0;  // packed token whose owner continues
  RunHash hash;
};

// Contribution of one rank to a digest.
class RankDigest {
 public:
  RankDigest(const Collective& collective, const TensorView& rows, std::int64_t tokens)
      : collective_(collective), rows_(rows), tokens_(tokens) {}

  // Hashes the 128-token runs that only this rank holds and remembers the other runs' pieces.
  void add(std::span<const PackedRun> runs) {
    std::int64_t row = 0;
    for (const PackedRun& run : runs) {
      if (run.begin < 0 || run.begin > run.end || run.end > tokens_) {
        fail(ErrorCode::kInternal, fmt::format("digest of tokens {} to {} of {}", run.begin, run.end, tokens_));
      }
      for (std::int64_t begin = run.begin; begin < run.end;) {
        heartbeat();
        const std::int64_t end = std::min(run.end, end_of(begin));
        if (begin % kDigestTokens == 0 && end == end_of(begin)) {
          RunHash hash;
          hash.add_rows(rows_, row, end - begin);
          finished_[begin / kDigestTokens] = hash.finish();
        } else {
          pieces_[begin] = {end, row};
        }
        row += end - begin;
        begin = end;
      }
    }
    for (const auto& [begin, piece] : pieces_) {
      if (begin % kDigestTokens == 0) go_on({begin, RunHash()});
    }
  }

  // Passes unfinished runs on until there are none. Every rank sees all of them, and the owner of the next token
  // continues.
  void finish_shared_runs() {
    constexpr std::size_t kPerRound = 6;  // keeps a message below 4 KiB
    constexpr std::size_t kBytes = sizeof(std::int64_t) + RunHash::kBytes;
    for (bool any = true; any;) {
      std::string message;
      for (std::size_t i = 0; i < kPerRound && !open_.empty(); ++i, open_.pop_front()) {
        message.append(reinterpret_cast<const char*>(&open_.front().next), sizeof(std::int64_t));
        open_.front().hash.append_to(message);
      }
      any = false;
      for (const std::string& theirs : collective_.world().all_gather(message, collective_.timeouts().for_peer())) {
        any = any || !theirs.empty();
        for (std::size_t at = 0; at + kBytes <= theirs.size(); at += kBytes) {
          std::int64_t next = 0;
          std::memcpy(&next, theirs.data() + at, sizeof next);
          if (pieces_.contains(next)) go_on({next, RunHash::from(theirs.data() + at + sizeof next)});
        }
      }
    }
  }

  // The hash of the hashes of all runs, which ranks gather some at a time.
  std::string combine() {
    constexpr std::int64_t kPerRound = 256;  // runs of all ranks together
    RunHash whole;
    const std::int64_t runs = (tokens_ + kDigestTokens - 1) / kDigestTokens;
    for (std::int64_t first = 0; first < runs; first += kPerRound) {
      const std::int64_t last = std::min(runs, first + kPerRound);
      std::string message;  // pairs of index in the round and hash
      for (auto at = finished_.lower_bound(first); at != finished_.end() && at->first < last; ++at) {
        message += static_cast<char>(at->first - first);
        message.append(at->second.data(), at->second.size());
      }
      std::array<Hash, kPerRound> hashes;
      std::bitset<kPerRound> present;
      for (const std::string& theirs : collective_.world().all_gather(message, collective_.timeouts().for_peer())) {
        for (std::size_t at = 0; at + 1 + sizeof(Hash) <= theirs.size(); at += 1 + sizeof(Hash)) {
          const auto index = static_cast<unsigned char>(theirs[at]);
          if (index >= kPerRound) {
            fail(ErrorCode::kPeer, "a rank told of a run that is not in this round", "its text is another one's",
                 "See whether all ranks run the same build.");
          }
          std::memcpy(hashes[index].data(), theirs.data() + at + 1, sizeof(Hash));
          present.set(index);
        }
      }
      for (std::int64_t run = first; run < last; ++run) {
        const auto index = static_cast<std::size_t>(run - first);
        if (!present.test(index)) {
          fail(ErrorCode::kInternal, "can't digest the output",
               fmt::format("no rank holds all that belongs to packed tokens {} to {}", run * kDigestTokens,
                           end_of(run * kDigestTokens)));
        }
        whole.add(hashes[index].data(), sizeof(Hash));
      }
    }
    std::string hex;
    for (const char byte : whole.finish()) hex += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    return hex;
  }

 private:
  // End of the run of 128 tokens that holds `token`.
  std::int64_t end_of(std::int64_t token) const {
    return std::min(tokens_, (token / kDigestTokens + 1) * kDigestTokens);
  }

  // Hashes this rank's pieces into the run as far as they reach. Then stores its hash if it is complete, or passes it
  // on.
  void go_on(OpenRun&& run) {
    const std::int64_t begin = run.next / kDigestTokens * kDigestTokens;
    const std::int64_t end = end_of(begin);
    while (run.next < end) {
      const auto piece = pieces_.find(run.next);
      if (piece == pieces_.end()) {
        open_.push_back(std::move(run));
        return;
      }
      run.hash.add_rows(rows_, piece->second.row, piece->second.end - run.next);
      run.next = piece->second.end;
    }
    finished_[begin / kDigestTokens] = run.hash.finish();
  }

  Collective collective_;
  const TensorView& rows_;
  std::int64_t tokens_;
  std::map<std::int64_t, Piece> pieces_;   // by first packed token
  std::map<std::int64_t, Hash> finished_;  // by run of 128 tokens
  std::deque<OpenRun> open_;               // waiting for their next owner
};

}  // namespace

std::string digest(const Collective& collective, const TensorView& rows, std::span<const PackedRun> runs,
                   std::int64_t tokens) {
  if (rows.tokens != total_tokens(runs)) {
    fail(ErrorCode::kInternal, fmt::format("digest of {} rows for {} tokens", rows.tokens, total_tokens(runs)));
  }
  RankDigest rank(collective, rows, tokens);
  rank.add(runs);
  rank.finish_shared_runs();
  return rank.combine();
}

std::string digest(const Collective& collective, const RowView& lse, std::int64_t heads,
                   std::span<const PackedRun> runs, std::int64_t tokens) {
  return digest(collective,
                TensorView{lse.data, Dtype::kF32, total_tokens(runs), heads, 1, lse.token_stride, lse.head_stride},
                runs, tokens);
}

}  // namespace ringattn
