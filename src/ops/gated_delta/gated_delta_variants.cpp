// SPDX-License-Identifier: Apache-2.0
// Runs a gated delta rule in several variants, whose results must have the same bits: numbers of ranks, segments that
// are adjacent or dealt in turn, sequences that are cut and resumed.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "attention/ring/reshard.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "ops/gated_delta/gated_delta_op_job.hpp"
#include "ops/ssm/ssm_op_job.hpp"
#include "ops/ssm/ssm_shapes.hpp"

namespace ringattn {

namespace {

// The cuts: after half of a sequence's segments, or at the end of a sequence with a single segment.
std::vector<std::int64_t> segment_cuts(std::span<const std::int64_t> lengths) {
  std::vector<std::int64_t> cuts;
  for (const std::int64_t length : lengths) {
    const std::int64_t half = std::max(length / 2 / kSegmentTokens, std::int64_t{1}) * kSegmentTokens;
    cuts.push_back(std::min(half, length));
  }
  return cuts;
}

// The final states of `before` on the ranks where sequences of `after` begin: [after.beginning() sequences], each of
// state_bytes().
Buffer states_between(const GatedDeltaResult& result, const GatedDelta& before, const GatedDelta& after,
                      const Collective& ranks, Transport& world) {
  const std::int64_t bytes = state_bytes(after.job().spec);
  const Layout to = state_layout(state_owners(after.layout()).initial, world.size());
  Buffer states;
  ranks.run_collectively([&] { states = allocate_host(static_cast<std::size_t>(to.tokens(world.rank()) * bytes)); });
  reshard(world.host(), final_state_layout(before.layout()), to, result.states.data(), states.data(), bytes,
          ranks.timeouts().for_peer());
  return states;
}

}  // namespace

VariantTable GatedDeltaOpJob::list_variants(const VariantRequest& request, const Options& options) {
  variants_ = ssm_shapes(request.ranks, input_.job().lengths, kSegmentTokens);
  VariantTable table;
  if (!variants_.back().resumed) {
    table.notes.push_back(
        fmt::format("no sequence is longer than a segment of {} tokens, so none is cut and resumed", kSegmentTokens));
  }
  variant_options_ = ssm_options(options);
  variant_seconds_ = rule_->estimated_seconds() * rule_->layout().world();
  rule_.reset();
  table.count = std::ssize(variants_);
  table.columns = {
      {"ranks", "", ""}, {"runs", "", ""}, {"sequences", "", ""}, {"states", "moved", ""}, {"digest of out", "", ""}};
  return table;
}

// `moved`: states that this rank received from others, in the op.
GatedDeltaResult GatedDeltaOpJob::run_variant(const SsmShape& variant, Transport& world, std::int64_t& moved) const {
  SsmOptions options = variant_options_;
  if (variant.in_turn) options.runs = runs_in_turn(input_.job().lengths, variant.ranks, kSegmentTokens);
  const Collective ranks(world, Timeouts(options.timeout_seconds));
  const auto computed = [&](const GatedDeltaInput& input, GatedDelta& rule) {
    LoadedGatedDelta loaded(input, rule, ranks);
    moved += rule.bytes_received() / state_bytes(input.job().spec);
    return loaded.fetch(loaded.run());
  };
  if (!variant.resumed) {
    GatedDelta rule(input_.job(), world, options);
    return computed(input_, rule);
  }
  // Both parts have all sequences. A sequence that is not cut is empty in the second part, which passes its state
  // through.
  const std::vector<std::int64_t>& lengths = input_.job().lengths;
  const std::vector<std::int64_t> cuts = segment_cuts(lengths);
  const GatedDeltaInput front = input_.part(std::vector<std::int64_t>(lengths.size()), cuts);
  GatedDeltaInput rear = input_.part(cuts, lengths);
  rear.need_initial_states();
  GatedDelta front_rule(front.job(), world, options);
  GatedDelta rear_rule(rear.job(), world, options);
  const GatedDeltaResult first = computed(front, front_rule);
  rear.set_initial(rear_rule.beginning(), states_between(first, front_rule, rear_rule, ranks, world));
  GatedDeltaResult all = computed(rear, rear_rule);
  const std::int64_t row_bytes = std::int64_t{input_.job().spec.value_heads} * input_.job().spec.value_dim *
                                 static_cast<std::int64_t>(size_of(input_.job().spec.dtype));
  ranks.run_collectively([&] { all.o = interleaved_rows(first.o, first.runs, all.o, all.runs, row_bytes); });
  all.rows += first.rows;
  all.runs.insert(all.runs.end(), first.runs.begin(), first.runs.end());
  std::ranges::sort(all.runs, {}, &PackedRun::begin);
  return all;
}

// Digests are those of all rows, whichever ranks have them.
void GatedDeltaOpJob::run_variants(Transport& world, const VariantDone& done) {
  struct DeltaDigests {
    char out[40] = {};
    char states[40] = {};
    std::int64_t moved = 0;
  };
  const Collective everybody(world, Timeouts(variant_options_.timeout_seconds));
  std::optional<DeltaDigests> first;
  for (const SsmShape& variant : variants_) {
    const std::unique_ptr<Transport> part = world.split_world(variant.ranks, everybody.timeouts().for_peer());
    DeltaDigests mine;
    everybody.run_collectively(
        [&] {
          if (part == nullptr) return;
          std::int64_t moved = 0;
          const GatedDeltaResult result = run_variant(variant, *part, moved);
          const Collective ranks(*part, Timeouts(variant_options_.timeout_seconds));
          const std::vector<ResultDigest> digests = digests_of(result, ranks);
          std::strncpy(mine.out, digests.front().hex.c_str(), sizeof mine.out - 1);
          std::strncpy(mine.states, digests.back().hex.c_str(), sizeof mine.states - 1);
          for (const std::int64_t states : ranks.gather_values(moved)) mine.moved += states;
        },
        variant_seconds_);
    const DeltaDigests theirs = everybody.gather_values(mine).front();  // rank 0 is in every part
    if (!first) first = theirs;
    std::string difference;
    if (std::strcmp(theirs.out, first->out) != 0) {
      difference = fmt::format("the digest of out is {}, not {}", theirs.out, first->out);
    } else if (std::strcmp(theirs.states, first->states) != 0) {
      difference = fmt::format("the digest of final_states is {}, not {}", theirs.states, first->states);
    }
    done({fmt::format("{}", variant.ranks), variant.in_turn ? "in-turn" : "neighbours",
          variant.resumed ? "resumed" : "whole", fmt::format("{}", theirs.moved), theirs.out},
         difference);
  }
}

}  // namespace ringattn
