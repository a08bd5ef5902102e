// SPDX-License-Identifier: Apache-2.0
// A job in several shapes (numbers of ranks, layouts, block sizes; for a cache, page sizes), whose results must have
// the same bits.
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
  bool decoded = false;                        // computed as a decode step, not around the ring
  LayoutRequest layout = {};                   // around the ring only
  std::int64_t block = 0;                      // around the ring only: tokens; 0: chosen by the plan
  std::optional<std::int64_t> page_size = {};  // decode steps only; 0: no pages; absent: as in the input
  int heads_at_a_time = 0;                     // expanded MLA only; 0: the default of the op class
};

// The numbers of ranks, and the settings that are the same in every shape. Other settings are varied.
struct ShapeRequest {
  std::vector<int> ranks;
  std::optional<LayoutRequest> layout;
  std::optional<std::int64_t> block;
  bool page_size = false;  // keep the page size of the input
  bool as_rows = true;     // decode steps: also compute them as rows of a prefill by the kernel of the same name, which
                           // has their bits
};

// One shape for each choice that gives a different shape. The others are compared with the first. `key_tile`: of the
// kernel. The expanded form of MLA is also computed one head at a time, unless the request sets it.
std::vector<Shape> shapes_of(const ShapeRequest& request, const JobInput& input, int key_tile);

// The same for an input that is decoded: on each number of ranks over its own cache; on the first and the last number
// also over caches with other pages and without pages, and by Attention.
std::vector<Shape> decode_shapes_of(const ShapeRequest& request, const JobInput& input);

// Ranks, layout, stripe, block and the number of blocks of a shape around the ring, for a row of a table.
std::vector<std::string> shape_cells(const Shape& shape, std::int64_t blocks);

struct ShapeResult {
  std::int64_t blocks = 0;  // of the plan, or the longest sequence's KV splits; on a rank outside of the shape: of an
                            // earlier shape
  std::optional<Difference> difference;  // the first difference from the first shape's results
};

// Runs the job in every shape, in worlds split from `world`, and compares out and lse with those of the first shape.
// Passes the result of each shape to `done` as soon as it is known. `options`, including a machine model, apply to what
// a Shape doesn't set. Collective. Throws the errors of a job.
void run_shapes(const JobInput& input, const Options& options, std::span<const Shape> shapes, Transport& world,
                const std::function<void(const Shape&, const ShapeResult&)>& done);

}  // namespace ringattn
