// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/ring/random_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/attention/block_mask_patterns.hpp"
#include "ops/attention/attention_work.hpp"

namespace ringattn::testing {

namespace {

Mask random_mask(Draw& draw, std::int64_t max_tokens) {
  switch (draw.between(0, 4)) {
    case 0:
      return {-1, -1};
    case 1:
    case 2:
      return {-1, 0};
    case 3:
      return {draw.between(0, draw.size(max_tokens)), 0};
    default:
      return {draw.chance(20) ? -1 : draw.between(0, draw.size(max_tokens)),
              draw.chance(20) ? -1 : draw.between(0, draw.size(max_tokens))};
  }
}

Sequence random_sequence(Draw& draw, std::int64_t max_tokens) {
  Sequence s;
  s.k_len = draw.chance(10) ? 0 : draw.size(max_tokens);
  s.q_len = draw.chance(60) ? s.k_len : draw.chance(10) ? 0 : draw.size(max_tokens);
  s.q_offset = s.k_len - s.q_len;
  if (draw.chance(15)) s.q_offset = draw.between(-max_tokens, 2 * max_tokens);
  return s;
}

// Lists of some of the blocks, few enough of them to be looked at one by one.
void add_random_lists(Draw& draw, const KernelShape& kernel, Job& job) {
  constexpr std::int64_t kMostBlocks = 40;
  std::int64_t longest = 1;
  for (const Sequence& s : job.batch.sequences) longest = std::max({longest, s.q_len, s.k_len});
  const auto block = [&](int tile) {
    const std::int64_t least = longest / kMostBlocks / tile + 1;
    return static_cast<int>(tile * draw.between(least, 3 * least));
  };
  const int heads[] = {1, job.spec.kv_heads, job.spec.heads};
  const BlockMaskShape shape{block(kernel.query_tile), block(kernel.key_tile), heads[draw.between(0, 2)]};
  const BlockMaskPattern random =
      random_blocks(shape, draw.chance(50) ? job.spec.mask : Mask{-1, -1}, static_cast<int>(draw.between(0, 8)),
                    static_cast<std::uint64_t>(draw.between(0, 1 << 20)));
  const BlockMaskPattern make = draw.chance(20) ? all_blocks()
                                : draw.chance(50)
                                    ? union_of_patterns({random, window_blocks(shape, draw.between(0, longest / 4))})
                                    : random;
  set_block_mask(job, std::make_shared<const BlockMask>(make_block_mask(shape, masked_sequences(job.batch), make)));
}

}  // namespace

std::int64_t Draw::size(std::int64_t high) {
  int orders = 0;
  while (high >> orders > 1) ++orders;
  const std::int64_t bound = std::int64_t{2} << between(0, orders);
  return between(1, std::min(bound, high));
}

RandomJob random_job(std::uint64_t seed, std::int64_t max_tokens, int max_ranks) {
  Draw draw(seed);
  RandomJob random;
  AttentionSpec& spec = random.job.spec;
  spec.kv_heads = static_cast<int>(draw.between(1, 3));
  spec.heads = spec.kv_heads * static_cast<int>(draw.between(1, 4));
  spec.head_dim = static_cast<int>(draw.between(1, 8)) * 8;
  spec.head_dim_v = draw.chance(70) ? spec.head_dim : 8;
  spec.dtype = draw.chance(50) ? Dtype::kBf16 : Dtype::kF32;
  spec.mask = random_mask(draw, max_tokens);
  const std::int64_t sequences = draw.chance(50) ? 1 : draw.size(30);
  for (std::int64_t i = 0; i < sequences; ++i) {
    const bool large = i == 0 || draw.chance(20);
    random.job.batch.sequences.push_back(
        random_sequence(draw, large ? max_tokens : std::max<std::int64_t>(1, max_tokens / 30)));
  }

  random.world = static_cast<int>(draw.size(max_ranks));
  const int key_tiles[] = {1, 8, 16, 64, 128};
  const int query_tiles[] = {1, 1, 64, 128, 24};
  random.kernel = {key_tiles[draw.between(0, 4)], query_tiles[draw.between(0, 4)]};
  random.request.kind = static_cast<LayoutKind>(draw.between(0, 2));
  if (draw.chance(50)) random.request.stripe = draw.size(max_tokens);
  random.options.route = draw.chance(50) ? Route::kChain : Route::kDirect;
  random.options.checksum = draw.chance(30);
  if (draw.chance(60)) random.options.block_tokens = draw.chance(20) ? 2 * max_tokens : draw.size(max_tokens);
  // From links slower than any kernel to links without cost, so that every way of cutting and routing comes up.
  random.machine.flops_per_second = static_cast<double>(draw.size(1LL << 40));
  random.machine.link_bytes_per_second = static_cast<double>(draw.size(1LL << 40));
  random.machine.latency_seconds = draw.chance(30) ? 0.0 : 1e-9 * static_cast<double>(draw.size(1LL << 30));
  random.options.state_bytes = static_cast<std::size_t>(draw.size(1 << 20));
  random.options.state_out = draw.chance(20);
  if (draw.chance(30)) add_random_lists(draw, random.kernel, random.job);
  return random;
}

RandomJob random_job_of_both_directions(std::uint64_t seed, std::int64_t max_tokens, int max_ranks) {
  RandomJob random = random_job(seed, max_tokens, max_ranks);
  Draw draw(~seed);
  Job& job = random.job;
  set_block_mask(job, nullptr);
  std::vector<Sequence> sequences(job.batch.sequences.begin(), job.batch.sequences.end());
  for (Sequence& s : sequences) {
    if (draw.chance(30)) s.q_offset = draw.between(-200, 200);
    if (draw.chance(30)) s.q_offset = draw.between(-max_tokens, 2 * max_tokens);
  }
  job.batch.sequences = std::move(sequences);
  random.kernel = {draw.chance(50) ? 64 : 128, 64};
  random.query_streams = {
      {"q", draw.between(1, 64), true}, {"dout", draw.between(1, 64), true}, {"row_stats", draw.between(1, 64), true}};
  random.query_pair_flops = static_cast<double>(draw.size(1000));
  random.query_flops = draw.chance(50) ? static_cast<double>(draw.size(100000)) : 0.0;
  return random;
}

RingWork RandomJob::work() const {
  RingWork work = attention_work(job);
  work.streams.insert(work.streams.end(), query_streams.begin(), query_streams.end());
  work.query_pair_flops = query_pair_flops;
  work.query_flops = query_flops;
  return work;
}

std::string RandomJob::description() const {
  std::string text = fmt::format(
      "{} ranks, mask {},{}, {} stripe {}, tiles {}/{}, {}, block {}, state {}{}, rates {}/{}/{}, sequences (q, k, "
      "offset):",
      world, job.spec.mask.left, job.spec.mask.right, layout_name(request.kind), request.stripe, kernel.query_tile,
      kernel.key_tile, options.route == Route::kChain ? "chain" : "direct", options.block_tokens, options.state_bytes,
      options.state_out ? " out" : "", machine.flops_per_second, machine.link_bytes_per_second,
      machine.latency_seconds);
  for (const Sequence& s : job.batch.sequences) text += fmt::format(" ({}, {}, {})", s.q_len, s.k_len, s.q_offset);
  if (job.block_mask != nullptr) text += fmt::format("; {}", describe(job.spec.block_mask, job.spec.heads));
  return text;
}

JobLayout stated_layout(const Job& job, int world, std::uint64_t seed) {
  Draw draw(seed);
  const auto deal = [&](auto length_of) {
    std::vector<std::int64_t> lengths;
    std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(world));
    for (std::size_t i = 0; i < job.batch.sequences.size(); ++i) {
      lengths.push_back(length_of(job.batch.sequences[i]));
      for (std::int64_t begin = 0; begin < lengths.back();) {
        const std::int64_t end = std::min(lengths.back(), begin + draw.size(lengths.back()));
        runs[static_cast<std::size_t>(draw.between(0, world - 1))].push_back(
            {static_cast<std::int32_t>(i), begin, end});
        begin = end;
      }
    }
    return Layout(lengths, std::move(runs));
  };
  Layout queries = deal([](const Sequence& s) { return s.q_len; });
  Layout keys = deal([](const Sequence& s) { return s.k_len; });
  return {{}, std::move(queries), std::move(keys)};
}

}  // namespace ringattn::testing
