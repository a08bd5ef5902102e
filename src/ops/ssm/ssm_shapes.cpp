// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_shapes.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "attention/ring/reshard.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "ops/ssm/loaded_ssm.hpp"

namespace ringattn {

namespace {

using RankRuns = std::vector<std::vector<TokenRun>>;

// The tokens at which sequences are cut: after half of their super-segments, or at their end if they have only one.
std::vector<std::int64_t> cuts_of(std::span<const std::int64_t> lengths) {
  std::vector<std::int64_t> cuts;
  for (const std::int64_t length : lengths) {
    const std::int64_t whole = length / 2 / kSuperSegmentTokens * kSuperSegmentTokens;
    cuts.push_back(length <= kSuperSegmentTokens ? length : std::max(whole, kSuperSegmentTokens));
  }
  return cuts;
}

// The results of a shape on a rank: rows, and the data that a continuation would need, in the order of the rank's runs.
struct Outcome {
  Buffer y;
  Buffer carried;
};

class Runner {
 public:
  Runner(const SsmInput& input, const SsmOptions& options, Transport& world, double seconds)
      : input_(input),
        spec_(input.job().spec),
        options_(options),
        world_(world),
        collective_(world, Timeouts(options.timeout_seconds)),
        even_y_(even_layout(input.job().lengths, world.size())),
        even_states_(even_layout(sequence_count(), world.size())),
        cuts_(cuts_of(input.job().lengths)),
        seconds_(seconds) {}

  Outcome run(const SsmShape& shape) {
    const std::unique_ptr<Transport> part = world_.split_world(shape.ranks, collective_.timeouts().for_peer());
    Outcome outcome;
    std::optional<Error> agreed;  // an error of all ranks of the shape; the others don't know it yet
    if (part) {
      try {
        outcome = shape.resumed ? run_resumed(shape, *part) : run_whole(shape, *part);
      } catch (const AgreedError& error) {
        agreed = error;
      }
    }
    // The others have nothing to do but wait for the shape's ranks.
    agree(world_, agreed ? &*agreed : nullptr, collective_.timeouts().for_work(seconds_));
    const Layout from = layout_of(shape);
    return {moved(from, even_y_, outcome.y, y_bytes()),
            moved(states_of_ranks(shape), even_states_, outcome.carried, carried_bytes(input_.job()))};
  }

  std::optional<Difference> compare(const Outcome& left, const Outcome& right) const {
    const auto y = [&](const Outcome& outcome) {
      return dense_view(static_cast<const void*>(outcome.y.data()), spec_.dtype, even_y_.tokens(world_.rank()),
                        spec_.heads, spec_.head_dim);
    };
    const auto states = [&](const Outcome& outcome) {
      return carried_view(input_.job(), outcome.carried.data(), even_states_.tokens(world_.rank()));
    };
    const auto runs = [&](const Layout& layout) { return packed_runs(layout.runs(world_.rank()), layout.cu()); };
    std::optional<Difference> mine = first_difference(false, y(left), y(right), runs(even_y_));
    if (!mine) mine = first_difference(true, states(left), states(right), runs(even_states_));
    return earliest(collective_, mine);
  }

  // Number of states that are sent in a shape. In a resumed shape the caller passes on one more for each sequence that
  // is cut.
  std::int64_t states_of(const SsmShape& shape) const {
    std::int64_t states = 0;
    for (const std::vector<StateHop>& step : state_hops(layout_of(shape)).hops) {
      states += static_cast<std::int64_t>(step.size());
    }
    return states;
  }

 private:
  std::vector<std::int64_t> sequence_count() const { return {static_cast<std::int64_t>(input_.job().lengths.size())}; }
  std::int64_t y_bytes() const {
    return std::int64_t{spec_.heads} * spec_.head_dim * static_cast<std::int64_t>(size_of(spec_.dtype));
  }

  std::vector<std::int64_t> ends() const { return input_.job().lengths; }
  // True if the second part of a resumed shape has the sequence. Both parts have empty sequences.
  bool goes_on(std::size_t sequence) const { return cuts_[sequence] < ends()[sequence] || ends()[sequence] == 0; }
  SsmInput front() const { return input_.part(std::vector<std::int64_t>(cuts_.size()), cuts_, {}); }
  SsmInput rear(std::vector<std::byte> carried) const { return input_.part(cuts_, ends(), std::move(carried)); }

  SsmOptions options_of(const SsmShape& shape, const SsmInput& input) const {
    SsmOptions options = options_;
    if (shape.in_turn) options.runs = runs_in_turn(input.job().lengths, shape.ranks);
    return options;
  }

  Outcome run_whole(const SsmShape& shape, Transport& part) {
    PreparedSsm prepared(input_, part, options_of(shape, input_));
    SsmRankResult result = prepared.compute();
    return {std::move(result.y), std::move(result.carried(input_.job()))};
  }

  Outcome run_resumed(const SsmShape& shape, Transport& part) {
    SsmRankResult first = PreparedSsm(front(), part, options_of(shape, front())).compute();
    const SsmInput second_input = rear(carried_at_cuts(part, first));
    SsmRankResult second = PreparedSsm(second_input, part, options_of(shape, second_input)).compute();
    // If a sequence was cut, its states are those of its second part.
    std::vector<PackedRun> kept;
    const Buffer& carried = first.carried(input_.job());
    Buffer kept_states = allocate_host(carried.bytes());
    const auto bytes = static_cast<std::size_t>(carried_bytes(input_.job()));
    std::byte* to = kept_states.data();
    for (std::size_t i = 0; i < first.sequences.size(); ++i) {
      const auto s = static_cast<std::size_t>(first.sequences[i].begin);
      if (goes_on(s)) continue;
      kept.push_back(first.sequences[i]);
      std::memcpy(to, carried.data() + i * bytes, bytes);
      to += bytes;
    }
    return {interleaved_rows(first.y, first.runs, second.y, second.runs, y_bytes()),
            interleaved_rows(kept_states, kept, second.carried(input_.job()), second.sequences,
                             static_cast<std::int64_t>(bytes))};
  }

  // The final states of the sequences that continue, ascending. A rank gets those of the sequences whose second part it
  // begins.
  std::vector<std::byte> carried_at_cuts(Transport& part, SsmRankResult& first) const {
    const Layout from = final_state_layout(ssm_layout(front().job().lengths, {}, part.size()));
    const SsmInput rest = rear({});
    // The rank that continues from each state. The state of a sequence that ends stays where it is.
    std::vector<int> owners = state_owners(ssm_layout(front().job().lengths, {}, part.size())).final;
    replace(owners, rest, state_owners(ssm_layout(rest.job().lengths, {}, part.size())).initial);
    const Layout to = state_layout(owners, part.size());
    const std::int64_t bytes = carried_bytes(input_.job());
    const Buffer arrived = allocate_host(static_cast<std::size_t>(to.tokens(part.rank()) * bytes));
    reshard(part.host(), from, to, first.carried(input_.job()).data(), arrived.data(), bytes,
            collective_.timeouts().for_peer());
    std::vector<std::byte> carried(rest.job().lengths.size() * static_cast<std::size_t>(bytes));
    for (std::size_t i = 0; i < rest.numbers().size(); ++i) {
      const std::int32_t sequence = rest.numbers()[i];
      if (owners[static_cast<std::size_t>(sequence)] != part.rank()) continue;
      std::memcpy(carried.data() + i * static_cast<std::size_t>(bytes),
                  arrived.data() + to.rows_before(part.rank(), sequence) * bytes, static_cast<std::size_t>(bytes));
    }
    return carried;
  }

  // Replaces owners of sequences by those in a part of the input.
  static void replace(std::vector<int>& owners, const SsmInput& part, const std::vector<int>& of_part) {
    for (std::size_t i = 0; i < of_part.size(); ++i) {
      owners[static_cast<std::size_t>(part.numbers()[i])] = of_part[i];
    }
  }

  // The ranks that hold the sequences' final states in a shape, as a layout of this world.
  Layout states_of_ranks(const SsmShape& shape) const {
    std::vector<int> owners(cuts_.size());
    const auto add = [&](const SsmInput& input) {
      const Layout layout = ssm_layout(input.job().lengths, options_of(shape, input).runs, shape.ranks);
      replace(owners, input, state_owners(layout).final);
    };
    if (shape.resumed) {
      add(front());
      add(rear({}));
    } else {
      add(input_);
    }
    return state_layout(owners, world_.size());
  }

  // The ranks that hold the tokens in a shape, as a layout of this world. Ranks that are not part of the shape know it,
  // too.
  Layout layout_of(const SsmShape& shape) const {
    RankRuns all(static_cast<std::size_t>(world_.size()));
    const auto add = [&](const SsmInput& input, std::span<const std::int64_t> begins) {
      const Layout layout = ssm_layout(input.job().lengths, options_of(shape, input).runs, shape.ranks);
      for (int rank = 0; rank < shape.ranks; ++rank) {
        for (const TokenRun& run : layout.runs(rank)) {
          const std::int32_t sequence = input.numbers()[static_cast<std::size_t>(run.sequence)];
          const std::int64_t begin = begins[static_cast<std::size_t>(sequence)];
          all[static_cast<std::size_t>(rank)].push_back({sequence, begin + run.begin, begin + run.end});
        }
      }
    };
    const std::vector<std::int64_t> zeros(cuts_.size());
    if (shape.resumed) {
      add(front(), zeros);
      add(rear({}), cuts_);
    } else {
      add(input_, zeros);
    }
    for (std::vector<TokenRun>& runs : all) {
      std::ranges::sort(runs, {}, [](const TokenRun& run) { return std::pair(run.sequence, run.begin); });
    }
    return {input_.job().lengths, std::move(all)};
  }

  Buffer moved(const Layout& from, const Layout& to, const Buffer& rows, std::int64_t row_bytes) {
    Buffer target;
    collective_.run_collectively(
        [&] { target = allocate_host(static_cast<std::size_t>(to.tokens(world_.rank()) * row_bytes)); });
    reshard(world_.host(), from, to, rows.data(), target.data(), row_bytes, collective_.timeouts().for_peer());
    return target;
  }

  const SsmInput& input_;
  const SsmSpec& spec_;
  const SsmOptions& options_;
  Transport& world_;
  Collective collective_;
  Layout even_y_;
  Layout even_states_;
  std::vector<std::int64_t> cuts_;
  double seconds_;
};

}  // namespace

Buffer interleaved_rows(const Buffer& a, std::span<const PackedRun> a_runs, const Buffer& b,
                        std::span<const PackedRun> b_runs, std::int64_t row_bytes) {
  struct Piece {
    PackedRun run;
    const std::byte* from;
  };
  std::vector<Piece> pieces;
  for (const auto& [buffer, runs] : {std::pair{&a, a_runs}, {&b, b_runs}}) {
    const std::byte* from = buffer->data();
    for (const PackedRun& run : runs) {
      pieces.push_back({run, from});
      from += run.tokens() * row_bytes;
    }
  }
  std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.run.begin; });
  Buffer all = allocate_host(static_cast<std::size_t>((total_tokens(a_runs) + total_tokens(b_runs)) * row_bytes));
  std::byte* to = all.data();
  for (const Piece& piece : pieces) {
    std::memcpy(to, piece.from, static_cast<std::size_t>(piece.run.tokens() * row_bytes));
    to += piece.run.tokens() * row_bytes;
  }
  return all;
}

RankRuns runs_in_turn(std::span<const std::int64_t> lengths, int ranks, std::int64_t unit) {
  RankRuns runs(static_cast<std::size_t>(ranks));
  std::size_t next = 0;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    for (std::int64_t begin = 0; begin < lengths[s]; begin += unit) {
      const std::int64_t end = std::min(lengths[s], begin + unit);
      runs[next++ % runs.size()].push_back({static_cast<std::int32_t>(s), begin, end});
    }
  }
  return runs;
}

std::vector<SsmShape> ssm_shapes(const std::vector<int>& ranks, std::span<const std::int64_t> lengths,
                                 std::int64_t unit) {
  std::int64_t units = 0;
  for (const std::int64_t length : lengths) units += (length + unit - 1) / unit;
  std::vector<SsmShape> shapes;
  for (const int count : ranks) {
    shapes.push_back({.ranks = count});
    if (count > 1 && units > count) shapes.push_back({.ranks = count, .in_turn = true});
  }
  if (std::ranges::max(lengths) > unit) {
    shapes.push_back({.ranks = ranks.front(), .resumed = true});
    if (ranks.back() != ranks.front()) shapes.push_back({.ranks = ranks.back(), .resumed = true});
  }
  return shapes;
}

void run_ssm_shapes(const SsmInput& input, const SsmOptions& options, std::span<const SsmShape> shapes,
                    Transport& world, double seconds,
                    const std::function<void(const SsmShape&, const SsmShapeResult&)>& done) {
  Runner runner(input, options, world, seconds);
  std::optional<Outcome> first;
  for (const SsmShape& shape : shapes) {
    Outcome outcome = runner.run(shape);
    SsmShapeResult result{runner.states_of(shape), std::nullopt};
    if (first) {
      result.difference = runner.compare(*first, outcome);
    } else {
      first = std::move(outcome);
    }
    done(shape, result);
  }
}

}  // namespace ringattn
