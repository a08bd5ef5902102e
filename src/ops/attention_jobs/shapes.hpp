// SPDX-License-Identifier: Apache-2.0
// A job in several shapes (numbers of ranks, layouts, block sizes; of a cache, pages), whose results must have the same
// bits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/transport.hpp"
#include "ops/attention/attention.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/common/difference.hpp"

namespace ringattn {

struct Shape {
  int ranks = 1;
  bool decoded = false;                        // as a decode step, not around the ring
  LayoutRequest layout = {};                   // around the ring
  std::int64_t block = 0;                      // around the ring: tokens; 0: the plan's own
  std::optional<std::int64_t> page_size = {};  // of a decode step; 0: no pages; absent: as the input has them
  int heads_at_a_time = 0;                     // of expanded MLA; 0: the op class's own
};

// Sizes of worlds, and what is held fixed in every shape; the rest is varied.
struct ShapeRequest {
  std::vector<int> ranks;
  std::optional<LayoutRequest> layout;
  std::optional<std::int64_t> block;
  bool page_size = false;  // as the input has it
  bool as_rows = true;     // of steps: also computed as rows of a prefill, whose kernel of the same name has their bits
};

// One shape for each choice that makes another one; the first is what the others are compared with. `key_tile`: of the
// kernel that computes them. Expanded latents are also taken a head at a time, where the request says nothing.
std::vector<Shape> shapes_of(const ShapeRequest& request, const JobInput& input, int key_tile);

// The same of an input that is decoded: on each number of ranks over its own cache, and on the first and the last over
// caches with other pages and without, and by Attention.
std::vector<Shape> decode_shapes_of(const ShapeRequest& request, const JobInput& input);

// Ranks, layout, stripe, block and the number of blocks of a shape around the ring, for a row of a table.
std::vector<std::string> shape_cells(const Shape& shape, std::int64_t blocks);

struct ShapeResult {
  std::int64_t blocks = 0;  // of the plan, or the longest sequence's KV splits; on a rank that the shape leaves out, of
                            // an earlier shape
  std::optional<Difference> difference;  // the first, from the first shape's results
};

// Runs the job in every shape, in worlds split from `world`, and compares out and lse with those of the first. The
// result of each shape is given to `done` as soon as it is known. Options stand for what a Shape doesn't say, with a
// machine model. Collective. Throws what a job throws.
void run_shapes(const JobInput& input, const Options& options, std::span<const Shape> shapes, Transport& world,
                const std::function<void(const Shape&, const ShapeResult&)>& done);

}  // namespace ringattn
