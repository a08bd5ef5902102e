// SPDX-License-Identifier: Apache-2.0
// Distributes a batch's tokens over ranks: stripes in snake order, short sequences whole.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "attention/tokens/layout.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

using RankRuns = std::vector<std::vector<TokenRun>>;

// A sequence that is not split has at most this share of a rank's work, so that ranks are balanced.
constexpr double kWholeShare = 0.25;

// The ranks in snake order: 0 1 … P−1 P−1 … 1 0 0 1 …
class Snake {
 public:
  explicit Snake(int world) : world_(world) {}

  int next() {
    const int rank = step_ < world_ ? step_ : 2 * world_ - 1 - step_;
    step_ = (step_ + 1) % (2 * world_);
    return rank;
  }

 private:
  int world_;
  int step_ = 0;
};

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Stripe in tokens of the query or key side of a sequence. `tile`: tile size of that side.
std::int64_t stripe_of(const LayoutRequest& request, std::int64_t length, int world, int query_tile, int key_tile,
                       int tile) {
  if (request.stripe > 0) return request.stripe;
  if (request.kind == LayoutKind::kStriped) return std::lcm(query_tile, key_tile);
  const std::int64_t pieces = request.kind == LayoutKind::kZigzag ? 2 * std::int64_t{world} : world;
  return std::max<std::int64_t>(tile, round_up((length + pieces - 1) / pieces, tile));
}

void deal_sequence(std::int32_t sequence, std::int64_t length, std::int64_t stripe, Snake& snake, RankRuns& runs) {
  for (std::int64_t begin = 0; begin < length; begin += std::min(stripe, length - begin)) {
    auto& of_rank = runs[static_cast<std::size_t>(snake.next())];
    of_rank.push_back({sequence, begin, begin + std::min(stripe, length - begin)});
  }
}

class Dealer {
 public:
  Dealer(const Batch& batch, const QueryWork& work, int world, const LayoutRequest& request, int query_tile,
         int key_tile)
      : batch_(batch),
        query_work_(work),
        world_(world),
        request_(request),
        query_tile_(query_tile),
        key_tile_(key_tile),
        query_runs_(static_cast<std::size_t>(world)),
        key_runs_(static_cast<std::size_t>(world)) {
    for (std::size_t i = 0; i < batch.sequences.size(); ++i) total_work_ += work_of(i);
  }

  JobLayout deal() {
    std::vector<std::size_t> whole;
    for (std::size_t i = 0; i < batch_.sequences.size(); ++i) {
      if (is_whole(i)) {
        whole.push_back(i);
      } else {
        split(static_cast<std::int32_t>(i));
      }
    }
    pack(std::move(whole));
    LayoutRequest used = request_;
    if (used.stripe == 0 && one_stripe_) used.stripe = stripe_;
    return {used, Layout(batch_.q_lengths(), std::move(query_runs_)), Layout(batch_.k_lengths(), std::move(key_runs_))};
  }

 private:
  // A token counts as one more pair, so that ranks are also balanced without pairs.
  double work_of(std::size_t sequence) const {
    const Sequence& s = batch_.sequences[sequence];
    return query_work_({static_cast<std::int32_t>(sequence), 0, s.q_len}) + static_cast<double>(s.q_len) +
           static_cast<double>(s.k_len);
  }

  bool is_whole(std::size_t sequence) const {
    const Sequence& s = batch_.sequences[sequence];
    const auto is_short = [&](std::int64_t length, int tile) {
      const std::int64_t stripe = stripe_of(request_, length, world_, query_tile_, key_tile_, tile);
      return (length - 1) / stripe + 1 < 2 * std::int64_t{world_};
    };
    return is_short(s.k_len, key_tile_) && is_short(s.q_len, query_tile_) &&
           work_of(sequence) * world_ <= kWholeShare * total_work_;
  }

  void split(std::int32_t sequence) {
    const Sequence& s = batch_.sequences[static_cast<std::size_t>(sequence)];
    if (request_.kind == LayoutKind::kContiguous) {  // runs are in order of rank
      query_snake_ = Snake(world_);
      key_snake_ = Snake(world_);
    }
    const std::int64_t stripe = stripe_of(request_, s.k_len, world_, query_tile_, key_tile_, key_tile_);
    if (s.q_len == s.k_len) query_snake_ = key_snake_;
    deal_sequence(sequence, s.k_len, stripe, key_snake_, key_runs_);
    deal_sequence(
        sequence, s.q_len,
        s.q_len == s.k_len ? stripe : stripe_of(request_, s.q_len, world_, query_tile_, key_tile_, query_tile_),
        query_snake_, query_runs_);
    if (s.k_len > 0) {
      one_stripe_ = stripe_ == 0 || (one_stripe_ && stripe_ == stripe);
      stripe_ = stripe;
    }
  }

  // Assigns each of these sequences to the rank with the least work so far, the largest first.
  void pack(std::vector<std::size_t> whole) {
    if (whole.empty()) return;
    using Bin = std::pair<double, std::size_t>;  // (work, rank)
    std::priority_queue<Bin, std::vector<Bin>, std::greater<>> bins;
    for (std::size_t rank = 0; rank < query_runs_.size(); ++rank) {
      double work = 0.0;
      for (const TokenRun& run : query_runs_[rank]) {
        work += query_work_(run) + static_cast<double>(run.tokens());
      }
      for (const TokenRun& run : key_runs_[rank]) work += static_cast<double>(run.tokens());
      bins.emplace(work, rank);
    }
    std::vector<double> work(batch_.sequences.size());
    for (const std::size_t i : whole) work[i] = work_of(i);
    std::stable_sort(whole.begin(), whole.end(), [&](std::size_t a, std::size_t b) { return work[a] > work[b]; });
    for (const std::size_t i : whole) {
      const auto [load, rank] = bins.top();
      bins.pop();
      bins.emplace(load + work[i], rank);
      const Sequence& s = batch_.sequences[i];
      const auto sequence = static_cast<std::int32_t>(i);
      if (s.q_len > 0) query_runs_[rank].push_back({sequence, 0, s.q_len});
      if (s.k_len > 0) key_runs_[rank].push_back({sequence, 0, s.k_len});
    }
    for (RankRuns* runs : {&query_runs_, &key_runs_}) {
      for (std::vector<TokenRun>& of_rank : *runs) {
        std::sort(of_rank.begin(), of_rank.end(), [](const TokenRun& a, const TokenRun& b) {
          return a.sequence != b.sequence ? a.sequence < b.sequence : a.begin < b.begin;
        });
      }
    }
  }

  const Batch& batch_;
  const QueryWork& query_work_;
  int world_;
  LayoutRequest request_;
  int query_tile_;
  int key_tile_;
  double total_work_ = 0.0;
  Snake query_snake_{world_};
  Snake key_snake_{world_};
  RankRuns query_runs_;
  RankRuns key_runs_;
  std::int64_t stripe_ = 0;  // of the keys of the last sequence that was split
  bool one_stripe_ = true;
};

}  // namespace

JobLayout make_layout(const Batch& batch, const QueryWork& work, int world, const LayoutRequest& request,
                      int query_tile, int key_tile) {
  if (world < 1) {
    fail(ErrorCode::kUsage, fmt::format("a world of {} ranks", world), "a world has at least one",
         "Give the number of ranks.");
  }
  if (request.stripe < 0) {
    fail(ErrorCode::kUsage, fmt::format("a stripe of {} tokens", request.stripe), "a stripe holds at least one token",
         "0 lets the layout choose.");
  }
  return Dealer(batch, work, world, request, query_tile, key_tile).deal();
}

}  // namespace ringattn
