// SPDX-License-Identifier: Apache-2.0
// The plan of a job of any op for worlds of several sizes, computed only from its shape, without ranks and devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/options.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

class JsonWriter;

// A table value with its column.
struct Cell {
  std::string title;
  std::string unit;
  std::string text;
};

struct PlanRequest {
  Options options;  // if no machine model is set, that of the kernel is used
  KernelScope scope = KernelScope::kThisMachine;
  bool verbose = false;  // lines for every rank and each of its runs
};

// A world of the plan.
struct PlanRow {
  std::vector<std::string> cells;   // as in OpPlan::columns()
  std::vector<std::string> lines;   // which rank owns what; only if details are requested
  int ranks_left_out = 0;           // number of ranks without lines
  std::vector<std::string> notes;   // printed after the lines
  std::vector<Cell> block_columns;  // without text
  std::vector<std::vector<std::string>> blocks;
};

class OpPlan {
 public:
  virtual ~OpPlan() = default;

  virtual const KernelEntry& kernel() const = 0;
  virtual const Backend& backend() const = 0;
  // "kernel: …", and the rates that times are estimated from.
  virtual std::vector<std::string> lines() const = 0;
  virtual bool estimates_time() const = 0;
  // Text about this length, if there are several; empty: none.
  virtual std::string length_text() const { return {}; }
  virtual std::vector<Cell> columns() const = 0;  // without text
  virtual std::string_view unit() const = 0;      // unit of units(): "tokens"
  virtual std::int64_t units() const = 0;
  // Also writes a JSON object. `route`: how blocks are sent. Throws kMemory for a plan that exceeds the budget.
  virtual PlanRow row(int world, Route route, bool details, JsonWriter& json) = 0;
};

// The number of threads that host kernels of a rank would have in a run on this machine.
int planned_threads(const Options& options);

// Number of ranks that are shown without `verbose`.
inline constexpr int kShownRanks = 8;

// "1.50": bytes in MiB.
std::string mebibytes_text(double bytes);
// The runs that a rank owns, as sequence:begin-end: the first four, or `all`.
std::string runs_text(std::span<const TokenRun> runs, bool all);

}  // namespace ringattn
