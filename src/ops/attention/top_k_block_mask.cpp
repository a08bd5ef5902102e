// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/top_k_block_mask.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "comm/collective.hpp"
#include "comm/exchange.hpp"
#include "kernels/attention/top_k_selection.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

// Blocks of a sequence on one rank, contiguous in its shard.
struct BlockRun {
  std::size_t sequence = 0;
  TileRange blocks;
  int owner = 0;
  std::int64_t row = 0;     // row of the first token in the owner's shard
  std::int64_t before = 0;  // index of the first token in the sequence
};

void check_tokens(std::string_view what, const Layout& layout, const std::vector<std::int64_t>& cu, int ranks) {
  if (layout.world() == ranks && std::ranges::equal(layout.cu(), cu)) return;
  fail(ErrorCode::kUsage,
       fmt::format("a layout of {} tokens of {} over {} ranks", layout.cu().back(), what, layout.world()),
       fmt::format("the job has {} in {} sequences, and the world {} ranks", cu.back(), cu.size() - 1, ranks),
       "Give the layout of the job's tokens over this world's ranks.");
}

// The block runs of all ranks, ascending. `positions`: position of the first token of each sequence.
std::vector<BlockRun> block_runs(std::string_view what, const Layout& layout,
                                 const std::vector<std::int64_t>& positions, int block) {
  std::vector<BlockRun> runs;
  for (const OwnedRun& run : layout.owners()) {
    const std::span<const std::int64_t> cu = layout.cu();
    const auto s = static_cast<std::size_t>(std::upper_bound(cu.begin(), cu.end(), run.token) - cu.begin() - 1);
    const std::int64_t before = run.token - cu[s];
    const std::int64_t first = positions[s] + before;
    const TileRange blocks{query_block_of(first, block), query_block_of(first + run.tokens - 1, block) + 1};
    if (!runs.empty() && runs.back().sequence == s && runs.back().blocks.end > blocks.begin) {
      fail(ErrorCode::kUsage,
           fmt::format("block {} of the {} of sequence {} lies on ranks {} and {}", blocks.begin, what, s,
                       runs.back().owner, run.owner),
           fmt::format("its mean is one sum, over {} tokens", block),
           "Use a layout whose runs begin and end where blocks do, or smaller blocks.");
    }
    runs.push_back({s, blocks, run.owner, run.row, before});
  }
  return runs;
}

// The elements [begin, end) of an array that the owner of a run computes.
using OwnedElements = std::function<std::vector<TileRange>(const BlockRun& run)>;

// All-gathers the elements of an array. Each rank's elements are packed into one message.
template <class Element>
void share(const std::string& label, std::vector<Element>& elements, const std::vector<BlockRun>& runs,
           const OwnedElements& owned_elements, const Collective& collective, Transport& transport) {
  std::vector<std::vector<TileRange>> of_ranks(static_cast<std::size_t>(transport.size()));
  for (const BlockRun& run : runs) {
    std::vector<TileRange>& own = of_ranks[static_cast<std::size_t>(run.owner)];
    for (const TileRange& piece : owned_elements(run)) own.push_back(piece);
  }
  std::vector<std::vector<Element>> parts;
  for (const std::vector<TileRange>& own : of_ranks) {
    std::int64_t count = 0;
    for (const TileRange& piece : own) count += piece.end - piece.begin;
    parts.emplace_back(static_cast<std::size_t>(count));
  }
  const auto self = static_cast<std::size_t>(transport.rank());
  const auto move = [&](std::size_t rank, bool pack) {
    auto part = parts[rank].begin();
    for (const TileRange& piece : of_ranks[rank]) {
      const auto begin = elements.begin() + piece.begin;
      const auto count = static_cast<std::ptrdiff_t>(piece.end - piece.begin);
      if (pack) {
        std::copy_n(begin, count, part);
      } else {
        std::copy_n(part, count, begin);
      }
      part += count;
    }
  };
  move(self, true);
  OneRound round;
  for (int peer = 0; peer < transport.size(); ++peer) {
    std::vector<Element>& theirs = parts[static_cast<std::size_t>(peer)];
    if (peer == transport.rank()) continue;
    if (!parts[self].empty())
      round.send(peer, {reinterpret_cast<const std::byte*>(parts[self].data()), parts[self].size() * sizeof(Element)});
    if (!theirs.empty())
      round.receive(peer, {reinterpret_cast<std::byte*>(theirs.data()), theirs.size() * sizeof(Element)});
  }
  transport.wait(transport.post(std::move(round).exchange(label), {}), {}, collective.timeouts().for_peer());
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (rank != self) move(rank, false);
  }
}

// Rows of a rank's shard, by token index in the run's sequence. The requested rows must lie in the run.
RowSource rows_of(const BlockRun& run, const TensorView& shard) {
  return [&run, &shard](SyntheticTensor, std::size_t, std::int64_t first, std::int64_t most) {
    TensorView rows = shard;
    rows.data = shard.at(run.row + first - run.before, 0);
    rows.tokens = most;
    return rows;
  };
}

// Digest of a layout, to compare it between ranks.
std::string layout_text(const Layout& layout) {
  std::string text;
  for (const OwnedRun& run : layout.owners()) text += fmt::format("{}@{} ", run.token, run.owner);
  return fmt::format("{:016x}", std::hash<std::string>()(text));
}

void check_top_k_inputs(const Job& job, const TopKInputs& rows, const Transport& transport) {
  const AttentionSpec& spec = job.spec;
  const int self = transport.rank();
  check_job(job);
  if (job.block_mask != nullptr || job.positions != nullptr || job.page_size > 0 || !job.format.is_plain()) {
    fail(ErrorCode::kUsage, "the top-k blocks of a job with a block mask, pages, quantized keys or positions",
         "blocks are selected from plain rows of keys",
         "Give a job with plain rows of q and k, and without a block mask.");
  }
  check_tokens("q", rows.queries, job.batch.cu_q(), transport.size());
  check_tokens("k", rows.keys, job.batch.cu_k(), transport.size());
  check_shard("TopKInputs", "q", rows.q, {spec.dtype, rows.queries.tokens(self), spec.heads, spec.head_dim});
  check_shard("TopKInputs", "k", rows.k, {spec.dtype, rows.keys.tokens(self), spec.kv_heads, spec.head_dim});
}

}  // namespace

std::shared_ptr<const BlockMask> top_k_block_mask(const Job& job, const BlockMaskShape& shape, int count,
                                                  const TopKInputs& rows, Transport& transport, const Options& options,
                                                  Stream stream) {
  const Collective collective(transport, Timeouts(options.timeout_seconds));
  const int self = transport.rank();
  Job listed = job;
  listed.spec.block_mask = shape;
  const AttentionSpec& spec = listed.spec;
  AttentionChoice choice;
  std::unique_ptr<Backend> backend;
  std::optional<TopKSelection> top;
  std::vector<BlockRun> queries, keys;
  collective.run_collectively([&] {
    check_top_k_inputs(job, rows, transport);
    std::vector<std::int64_t> offsets;
    for (const Sequence& sequence : job.batch.sequences) offsets.push_back(sequence.q_offset);
    choice = choose_kernel(spec, compatible_request(options.kernel, transport));
    backend = choice.row->make_backend({options.threads, transport.device()});
    check_compatible(*choice.row, *backend, transport);
    top.emplace(spec, masked_sequences(job.batch), count, *backend, stream);
    queries = block_runs("queries", rows.queries, offsets, shape.query_block);
    keys = block_runs("keys", rows.keys, std::vector<std::int64_t>(offsets.size(), 0), shape.key_block);
  });
  std::vector<RankConfigEntry> mine = rank_config(listed, options, choice, *backend);
  mine.push_back({"blocks of a query block", std::to_string(count)});
  mine.push_back({"layouts of rows", layout_text(rows.queries) + layout_text(rows.keys)});
  handshake(collective, mine);

  const std::span<float> means = top->all_mean_keys();
  std::vector<float> on_host(transport.size() > 1 ? means.size() : 0);
  const auto copy = [&](float* to, const float* from) {
    const auto bytes = static_cast<std::int64_t>(means.size_bytes());
    if (bytes > 0) backend->copy_rows(to, bytes, from, bytes, bytes, 1, stream);
    top->finish();
  };
  collective.run_collectively([&] {
    for (const BlockRun& run : keys) {
      if (run.owner == self) top->pool_keys(run.sequence, run.blocks, rows_of(run, rows.k));
    }
    if (transport.size() > 1) copy(on_host.data(), means.data());
  });
  if (transport.size() > 1) {
    share(
        "mean keys", on_host, keys,
        [&](const BlockRun& run) -> std::vector<TileRange> {
          const std::span<float> own = top->mean_keys(run.sequence, run.blocks);
          const std::int64_t begin = own.data() - means.data();
          return {{begin, begin + static_cast<std::int64_t>(own.size())}};
        },
        collective, transport.host());
  }
  std::vector<std::int32_t> entries;
  collective.run_collectively([&] {
    if (transport.size() > 1) copy(means.data(), on_host.data());
    for (const BlockRun& run : queries) {
      if (run.owner == self) top->choose(run.sequence, run.blocks, rows_of(run, rows.q));
    }
    entries = top->fetch();
  });
  if (transport.size() > 1) {
    share(
        "block mask", entries, queries,
        [&](const BlockRun& run) {
          std::vector<TileRange> owned_elements;
          for (int head = 0; head < shape.heads; ++head) {
            owned_elements.push_back(top->entries(run.sequence, head, run.blocks));
          }
          return owned_elements;
        },
        collective, transport.host());
  }
  auto block_mask = std::make_shared<const BlockMask>(top->block_mask(std::move(entries)));
  handshake(collective, {block_mask_config_entry(block_mask.get())});
  return block_mask;
}

}  // namespace ringattn
