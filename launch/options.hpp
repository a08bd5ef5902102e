// SPDX-License-Identifier: Apache-2.0
// The user's settings as plain values. flags.cpp fills them in. Their sources are not recorded here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "ops/jobs/settings.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

enum class When { kAuto, kOn, kOff };

// How `bench` writes its points to stdout.
enum class BenchOutput { kTable, kMarkdown, kCsv, kJsonl };
inline constexpr std::string_view kBenchOutputs[] = {"table", "md", "csv", "jsonl"};

// The settings of a job and of the program around it.
struct JobOptions : Settings {
  std::string op{op_table().front()->name};  // of synthetic input
  bool backward = false;                     // compute its gradients
  std::vector<std::int64_t> batches;         // batch sizes of `bench`
  std::string model_config;                  // file that gives the shape; empty: none
  std::optional<std::int64_t> layer;         // of the model, if its layers differ
  std::string model_assumed;  // how a model's config without model_type is interpreted; empty: it has one
  std::string model_note;     // values that the op reads and a model's config lacks; empty: none
  bool model_sinks = false;   // the model's layer has attention sinks, which no flag says

  // Compression
  bool compression_report = false;

  // Parallelism
  std::string transport = "auto";
  std::optional<LayoutKind> layout;  // absent: striped, or contiguous for a sliding window
  std::int64_t stripe = 0;           // 0: from the tiles
  std::int64_t block = 0;            // 0: from the machine and the memory budget
  bool overlap = true;
  std::string simd_target = "auto";
  bool bind_to_numa_node = true;
  int threads = 0;                  // 0: all
  std::vector<std::int64_t> world;  // of `plan`
  std::string machine;              // file of a machine model; empty: the default model

  // Output
  std::string output;  // empty: nothing is written
  bool force = false;
  std::string json;  // "-": stdout; empty: no report
  std::string trace;
  When progress = When::kAuto;
  When color = When::kAuto;
  bool quiet = false;
  bool verbose = false;
  std::string config;
  bool print_config = false;
  bool dry_run = false;

  // Failure
  double timeout = 60.0;  // seconds
  bool checksum = false;

  // Verification
  std::string against;  // "oracle" (`bench`: "compute", "sgemm"), a file, or empty
  bool decode = false;  // check the last rows again, by decode steps
  std::int64_t rows = 64;
  std::string record;
  std::string golden;
  std::string peer;  // a file of another system's result

  // Measurement
  bool measure = false;
  std::int64_t total_tokens = 0;     // total of short sequences in a batch; 0: --batch sets it
  std::vector<std::int64_t> blocks;  // of `bench`; empty: as `block`
  std::int64_t samples = 0;          // 0: enough for a figure
  bool compute_only = false;
  std::string jsonl;  // "-": stdout; empty: no lines
  BenchOutput bench_output = BenchOutput::kTable;
  bool quick = false;  // the jobs of `bench --quick`
  std::string baseline;
  double fail_above = 0.05;  // as a fraction of the baseline's time
};

}  // namespace ringattn
