// SPDX-License-Identifier: Apache-2.0
#include "launch/verify_shapes.hpp"

#include <fmt/format.h>

#include <numeric>
#include <optional>

#include "attention/check/difference.hpp"
#include "attention/job/shapes.hpp"
#include "launch/job_text.hpp"
#include "launch/progress.hpp"
#include "launch/table.hpp"

namespace ringattn {

namespace {

// The world's own sizes, or (alone) an assortment that divides nothing.
std::vector<int> world_sizes(const Config& config, const Transport& world) {
  const bool chosen = config.given("ranks") || !world.name().ends_with("threads");
  if (!chosen) return {1, 2, 3, 4, kLargestLocalWorld};
  std::vector<int> sizes(static_cast<std::size_t>(world.size()));
  std::iota(sizes.begin(), sizes.end(), 1);
  return sizes;
}

// What the user holds fixed is in every shape.
ShapeRequest request_of(const Config& config, const Options& library, const Transport& world) {
  ShapeRequest request;
  request.ranks = world_sizes(config, world);
  if (config.given("layout") || config.given("stripe")) request.layout = library.layout;
  if (config.given("block")) request.block = library.block_tokens;
  return request;
}

}  // namespace

bool verify_shapes(const Invocation& invocation, const JobInput& input, Options library, const Screen& screen,
                   Transport& world, Report& report) {
  const Config& config = invocation.config;
  const Meeting meeting(world, Patience(config.options.timeout));
  int key_tile = 1;
  {
    // Throws on every rank what the shapes would throw: no kernel, unlike ranks, too little memory.
    Attention attention(input.job(), world, library);
    gather_world(report, attention, world, meeting);
    print_job(screen, input, attention, report);
    key_tile = attention.plan().kernel.key_tile;
    library.machine = attention.options().machine;
  }
  const std::vector<Shape> shapes = shapes_of(request_of(config, library, world), input.job(), key_tile);
  screen.context(fmt::format("{} shapes, bit for bit", shapes.size()));
  if (config.options.dry_run) {
    screen.context("dry run: nothing is computed");
    return true;
  }

  ProgressDisplay progress(config.options, world.rank() == 0);
  std::optional<Difference> first;
  std::int64_t done = 0;
  Table table({{"ranks"}, {"layout"}, {"stripe", "(tokens)"}, {"block", "(tokens)"}, {"blocks"}, {"verdict"}});
  run_shapes(input, library, shapes, world, [&](const Shape& shape, const ShapeResult& result) {
    table.add({fmt::format("{}", shape.ranks), std::string(layout_name(shape.layout.kind)),
               shape.layout.stripe > 0 ? fmt::format("{}", shape.layout.stripe) : "auto",
               shape.block > 0 ? fmt::format("{}", shape.block) : "auto", fmt::format("{}", result.blocks),
               done == 0 ? "baseline" : (result.difference ? "FAIL" : "PASS")});
    if (!first) first = result.difference;
    progress.update("shape", ++done, static_cast<std::int64_t>(shapes.size()));
  });
  progress.clear();
  screen.print(table.text());
  if (first) screen.print(fmt::format("  first difference: {}\n", describe(*first, input.job())));
  return !first;
}

}  // namespace ringattn
