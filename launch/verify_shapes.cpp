// SPDX-License-Identifier: Apache-2.0
#include "launch/verify_shapes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "launch/job_text.hpp"
#include "launch/progress.hpp"
#include "launch/table.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/file_job.hpp"
#include "ops/common/shapes.hpp"

namespace ringattn {

std::vector<int> world_sizes(const Config& config, const Transport& world) {
  const bool chosen = config.given("ranks") || !world.name().ends_with("threads");
  if (!chosen) return {1, 2, 3, 4, kLargestLocalWorld};
  std::vector<int> sizes(static_cast<std::size_t>(world.size()));
  std::iota(sizes.begin(), sizes.end(), 1);
  return sizes;
}

namespace {

// What the user holds fixed is in every shape.
ShapeRequest request_of(const Config& config, const Options& library, const Transport& world) {
  ShapeRequest request;
  request.ranks = world_sizes(config, world);
  if (config.given("layout") || config.given("stripe")) request.layout = library.layout;
  if (config.given("block")) request.block = library.block_tokens;
  request.page_size = config.given("page-size");
  return request;
}

// Cells of a shape: ranks, layout and blocks for attention, ranks and pages for decode.
std::vector<std::string> row_of(const Shape& shape, const ShapeResult& result, const JobInput& input) {
  if (!input.decodes()) {
    std::vector<std::string> row{fmt::format("{}", shape.ranks), std::string(layout_name(shape.layout.kind)),
                                 shape.layout.stripe > 0 ? fmt::format("{}", shape.layout.stripe) : "auto",
                                 shape.block > 0 ? fmt::format("{}", shape.block) : "auto",
                                 fmt::format("{}", result.blocks)};
    if (input.op() == Op::kMla) {
      row.push_back(shape.heads_at_a_time > 0 ? fmt::format("{}", shape.heads_at_a_time) : "auto");
    }
    return row;
  }
  const std::int64_t own = input.pages() == nullptr ? 0 : input.pages()->page_size;
  const std::int64_t page_size = shape.page_size.value_or(own);
  const std::string page = shape.op == Op::kAttention ? std::string("-")
                           : page_size > 0            ? fmt::format("{}", page_size)
                                                      : std::string("dense");
  return {fmt::format("{}", shape.ranks),
          shape.op == Op::kAttention && input.op() == Op::kMla ? "mla, over rows" : std::string(op_name(shape.op)),
          page, fmt::format("{}", result.blocks)};
}

// What waits for the ranks of a shape rest on.
MachineModel machine_of(const Options& library, PreparedFileJob& prepared) {
  return library.machine == MachineModel{} ? default_machine(prepared.kernel(), prepared.backend()) : library.machine;
}

}  // namespace

bool verify_shapes(const Invocation& invocation, const JobInput& input, Options library, const Screen& screen,
                   Transport& world, Report& report) {
  const Config& config = invocation.config;
  const Collective collective(world, Timeouts(config.options.timeout));
  const bool steps = input.decodes();
  std::vector<Shape> shapes;
  {
    // Throws on every rank what the shapes would throw: no kernel, unlike ranks, too little memory.
    PreparedFileJob prepared(input, world, library);
    gather_world(report, prepared, world, collective);
    print_job(screen, prepared, report);
    ShapeRequest request = request_of(config, library, world);
    // A kernel that only decodes gives other bits than the attention kernels.
    const auto same = [&](const AttentionRow& row) { return row.name == prepared.kernel().name; };
    request.as_rows = std::ranges::any_of(kernel_table<AttentionSpec>(), same);
    shapes = steps ? decode_shapes_of(request, input) : shapes_of(request, input, prepared.tiles().key_tile);
    library.machine = steps ? machine_of(library, prepared) : prepared.ring().options.machine;
  }
  screen.context(fmt::format("{} shapes, bit for bit", shapes.size()));
  if (config.options.dry_run) {
    screen.context("dry run: nothing is computed");
    return true;
  }

  ProgressDisplay progress(config.options, world.rank() == 0);
  std::optional<Difference> first;
  std::int64_t done = 0;
  std::vector<Table::Column> columns{{"ranks"}, {"layout"}, {"stripe", "(tokens)"}, {"block", "(tokens)"}, {"blocks"}};
  if (steps) columns = {{"ranks"}, {"op"}, {"page", "(tokens)"}, {"KV splits"}};
  if (input.op() == Op::kMla && !steps) columns.push_back({"heads", "at a time"});
  columns.push_back({"verdict"});
  Table table(columns);
  run_shapes(input, library, shapes, world, [&](const Shape& shape, const ShapeResult& result) {
    std::vector<std::string> row = row_of(shape, result, input);
    row.emplace_back(done == 0 ? "baseline" : (result.difference ? "FAIL" : "PASS"));
    table.add(std::move(row));
    if (!first) first = result.difference;
    progress.update("shape", {++done, static_cast<std::int64_t>(shapes.size())});
  });
  progress.clear();
  screen.print(table.text());
  if (first) screen.print(fmt::format("  first difference: {}\n", describe(*first, input.job())));
  return !first;
}

}  // namespace ringattn
