// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/shapes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "attention/ring/reshard.hpp"
#include "attention/tokens/cost.hpp"
#include "attention/tokens/decode_deal.hpp"
#include "ops/attention_jobs/planned_job.hpp"
#include "ops/attention_jobs/prepared_job.hpp"
#include "ops/common/compatibility.hpp"

namespace ringattn {

namespace {

// A size that cuts the longest sequence into a handful of blocks, at other tokens than the plan's own blocks.
std::int64_t second_block_size(const Job& job, int key_tile) {
  std::int64_t longest = 1;
  for (const Sequence& sequence : job.batch.sequences) longest = std::max(longest, sequence.k_len);
  const std::int64_t tiles = (longest + key_tile - 1) / key_tile;
  return (tiles / 5 + 1) * key_tile;
}

// The results of a shape, moved to the even layout of the whole world.
struct EvenResult {
  Buffer out;
  Buffer lse;
};

// A shape's own world: ranks 0 … size − 1, and null on other ranks. A failure inside of it is raised in the whole
// world.
class Runner {
 public:
  Runner(const JobInput& input, const Options& options, Transport& world)
      : input_(input),
        options_(options),
        world_(world),
        collective_(world, Timeouts(options.timeout_seconds)),
        even_(even_layout(input.job().batch.q_lengths(), world.size())) {}

  std::int64_t rows() const { return even_.tokens(world_.rank()); }

  EvenResult run(const Shape& shape) {
    const AttentionSpec& spec = input_.job().spec;
    const std::unique_ptr<Transport> part = world_.split_world(shape.ranks, collective_.timeouts().for_peer());
    Options options = options_;
    options.layout = shape.layout;
    options.block_tokens = shape.block;
    RankResult result;
    std::optional<Layout> layout;
    std::optional<Error> agreed;  // agreed by the shape's ranks; the others don't know it yet
    if (part) {
      try {
        PreparedJob prepared(input_of(shape), *part, options, shape.heads_at_a_time);
        blocks_ =
            shape.decoded ? prepared.step().kv_splits : static_cast<std::int64_t>(prepared.ring().plan.blocks.size());
        if (!shape.decoded) layout = prepared.ring().layout.queries;
        result = prepared.compute();
      } catch (const AgreedError& error) {
        agreed = error;
      }
    }
    // The other ranks only wait for the shape's ranks.
    const double estimated = job_flops(input_.job()) / (shape.ranks * options_.machine.flops_per_second);
    agree(world_, agreed ? &*agreed : nullptr, collective_.timeouts().for_work(estimated));
    EvenResult even;
    collective_.run_collectively([&] {
      even.out = allocate_host(bytes(rows(), out_token_bytes(spec)));
      even.lse = allocate_host(bytes(rows(), lse_token_bytes(spec)));
    });
    if (!layout) layout = shape.decoded ? row_layout(shape.ranks) : dealt_layout(shape, options);
    const Layout from = widened(*layout, input_.job().batch, world_.size());
    reshard(world_.host(), from, even_, result.out.data(), even.out.data(), out_token_bytes(spec),
            collective_.timeouts().for_peer());
    reshard(world_.host(), from, even_, result.lse.data(), even.lse.data(), lse_token_bytes(spec),
            collective_.timeouts().for_peer());
    return even;
  }

  std::optional<Difference> compare(const EvenResult& left, const EvenResult& right) {
    const AttentionSpec& spec = input_.job().spec;
    const std::vector<PackedRun> runs = packed_runs(even_.runs(world_.rank()), input_.job().batch.cu_q());
    const auto out = [&](const EvenResult& result) {
      return dense_view(static_cast<const void*>(result.out.data()), spec.dtype, rows(), spec.heads, spec.head_dim_v);
    };
    const auto lse = [&](const EvenResult& result) {
      return dense_view(static_cast<const void*>(result.lse.data()), Dtype::kF32, rows(), spec.heads, 1);
    };
    std::optional<Difference> mine = first_difference(false, out(left), out(right), runs);
    if (!mine) mine = first_difference(true, lse(left), lse(right), runs);
    return earliest(collective_, mine);
  }

  // KV blocks of the last shape that this rank took part in.
  std::int64_t blocks() const { return blocks_; }

 private:
  static std::size_t bytes(std::int64_t count, std::int64_t each) { return static_cast<std::size_t>(count * each); }

  JobInput input_of(const Shape& shape) const {
    if (!shape.decoded) return input_.attended();
    return shape.page_size ? input_.decoded(*shape.page_size) : input_;
  }

  // The layout of a decode step's result rows.
  Layout row_layout(int ranks) const {
    const Batch& batch = input_.job().batch;
    std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      const SequenceRange owned = owned_sequences(static_cast<std::int64_t>(batch.sequences.size()), rank, ranks);
      for (std::int64_t s = owned.first; s < owned.end(); ++s) {
        runs[static_cast<std::size_t>(rank)].push_back({static_cast<std::int32_t>(s), 0, batch.sequences[0].q_len});
      }
    }
    return {batch.q_lengths(), std::move(runs)};
  }

  // The layout of the shape's ranks, computed on a rank that isn't among them.
  Layout dealt_layout(const Shape& shape, const Options& options) const {
    Options fitting = options;
    fitting.kernel = compatible_request(options.kernel, world_);
    fitting.threads = std::max(1, options.threads);
    PlannedJob planned(input_, fitting, KernelScope::kThisMachine, shape.heads_at_a_time);
    const KernelShape tiles = planned.ring(shape.ranks).kernel;
    return make_layout(input_.job(), shape.ranks, shape.layout, tiles.query_tile, tiles.key_tile).queries;
  }

  const JobInput& input_;
  const Options& options_;
  Transport& world_;
  Collective collective_;
  Layout even_;
  std::int64_t blocks_ = 0;
};

}  // namespace

std::vector<Shape> shapes_of(const ShapeRequest& request, const JobInput& input, int key_tile) {
  const Job& job = input.job();
  std::vector<LayoutRequest> layouts{{LayoutKind::kStriped, 0}, {LayoutKind::kZigzag, 0}, {LayoutKind::kContiguous, 0}};
  if (request.layout) layouts = {*request.layout};
  std::vector<std::int64_t> blocks{0, second_block_size(job, key_tile)};
  if (request.block) blocks = {*request.block};
  std::vector<Shape> shapes;
  for (const int ranks : request.ranks) {
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      if (ranks == 1 && i > 0) break;  // one rank owns everything, whatever the layout
      for (const std::int64_t block : blocks) shapes.push_back({.ranks = ranks, .layout = layouts[i], .block = block});
    }
  }
  if (input.mla() != nullptr && input.form().form == MlaForm::kExpanded && job.spec.heads > 1) {
    shapes.push_back(
        {.ranks = request.ranks.back(), .layout = layouts.front(), .block = blocks.front(), .heads_at_a_time = 1});
  }
  return shapes;
}

std::vector<std::string> shape_cells(const Shape& shape, std::int64_t blocks) {
  return {fmt::format("{}", shape.ranks), std::string(layout_name(shape.layout.kind)),
          shape.layout.stripe > 0 ? fmt::format("{}", shape.layout.stripe) : "auto",
          shape.block > 0 ? fmt::format("{}", shape.block) : "auto", fmt::format("{}", blocks)};
}

std::vector<Shape> decode_shapes_of(const ShapeRequest& request, const JobInput& input) {
  const std::int64_t own = input.pages() == nullptr ? 0 : input.pages()->page_size;
  std::vector<Shape> shapes;
  for (const int ranks : request.ranks) {
    shapes.push_back({.ranks = ranks, .decoded = true});
    const bool varied = ranks == request.ranks.front() || ranks == request.ranks.back();
    if (!varied) continue;
    for (const std::int64_t page_size : {0, 16, 64, 256}) {
      if (page_size == own || request.page_size) continue;
      shapes.push_back({.ranks = ranks, .decoded = true, .page_size = page_size});
    }
    if (request.as_rows) shapes.push_back({.ranks = ranks});
  }
  return shapes;
}

void run_shapes(const JobInput& input, const Options& options, std::span<const Shape> shapes, Transport& world,
                const std::function<void(const Shape&, const ShapeResult&)>& done) {
  Runner runner(input, options, world);
  std::optional<EvenResult> first;
  for (const Shape& shape : shapes) {
    EvenResult even = runner.run(shape);
    ShapeResult result{runner.blocks(), std::nullopt};
    if (first) {
      result.difference = runner.compare(*first, even);
    } else {
      first = std::move(even);
    }
    done(shape, result);
  }
}

}  // namespace ringattn
