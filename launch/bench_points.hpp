// SPDX-License-Identifier: Apache-2.0
// A point of a benchmark: a job on a world, with its figures. One line of JSON each (schema "ringattn.bench/2"), which
// bench/peers writes too and bench/tables.py reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/jobs/bench_job.hpp"
#include "ops/jobs/samples.hpp"

namespace ringattn {

class JsonWriter;

inline constexpr std::string_view kBenchSchema = "ringattn.bench/2";
inline constexpr std::string_view kFirstBenchSchema = "ringattn.bench/1";  // read, too, with its older names

// Whole runs, or the same kernels without transfers.
inline constexpr std::string_view kWholeMode = "whole";
inline constexpr std::string_view kComputeMode = "compute";

struct BenchPoint {
  std::string tool = "ringattn";  // or a peer's name
  std::string tool_version;       // of a peer; ours is this build's
  std::string git;
  std::string host;
  std::vector<std::string> devices;  // of each rank
  int world = 0;
  std::string transport;
  std::string kernel;
  std::string mode = std::string(kWholeMode);
  BenchJob job;
  std::string layout;
  std::int64_t stripe = 0;
  std::int64_t block = 0;   // requested tokens per block; 0: the plan's choice
  std::int64_t blocks = 0;  // number of blocks of the plan
  bool overlap = true;
  std::int64_t samples = 0;
  SampleTimes ms;
  double tflops_per_rank = 0.0;
  double exposed_comm_ms = 0.0;  // median over the samples of the rank that waited longest
  double estimated_ms = 0.0;     // by the machine model, for the slowest rank
  std::size_t memory_peak = 0;
  std::size_t memory_planned = 0;
  double gb_per_s = 0.0;  // of a decode step: K and V read; of an SSM op: rows read and written; all ranks together
  std::string digest;     // of a decode step's out, or an SSM op's y
  std::string error;      // why there are no figures

  bool measured() const { return samples > 0 && error.empty(); }
};

// One JSON object: a single line unless `json` is pretty. `arguments`: the command line.
void write_point(JsonWriter& json, const BenchPoint& point, std::span<const std::string> arguments);

// The members of the object "job" of a line.
void write_bench_job(JsonWriter& json, const BenchJob& job);

// The points of a file of lines, at most 16 MiB. Other objects, such as those of older schemas, are skipped. Throws
// kFile for a file that can't be read, a line that is not a JSON object or is longer than 64 KiB, a point with missing
// members, and a file without points. `flag` names the file in messages.
std::vector<BenchPoint> read_points(const std::string& path, std::string_view flag);

// The program that measured the point: "ringattn sm80_attention, p2p", "pytorch sdpa cudnn".
std::string who(const BenchPoint& point);

}  // namespace ringattn
