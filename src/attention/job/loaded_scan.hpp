// SPDX-License-Identifier: Apache-2.0
// A scan on this rank: its rows of the input, the computation, its rows of the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention/check/scan_accuracy.hpp"
#include "attention/files/scan_input.hpp"
#include "attention/job/loaded_job.hpp"
#include "attention/scan.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/memory.hpp"
#include "comm/meeting.hpp"

namespace ringattn {

// This rank's part of a finished scan.
struct ScanRankResult {
  std::vector<PackedRun> runs;  // packed tokens of the rows
  Buffer y;                     // [rows, heads, head_dim], the job's dtype
  std::int64_t rows = 0;
  std::vector<PackedRun> sequences;  // whose final states and halos these are; empty: they were not wanted
  Buffer states;                     // [sequences, heads, head_dim, state_dim] fp32
  Buffer halos;                      // with a convolution: [sequences, channels, width − 1], as in files
  ScanStats stats;
  std::int64_t non_finite = 0;  // values of the input's rows that are NaN or infinite

  TensorView y_view(const ScanSpec& spec) const;
  // What sequences hand on: their states, [sequences, heads, head_dim · state_dim], or of a convolution alone their
  // halos, [sequences, channels, width − 1].
  TensorView carried_view(const ScanJob& job) const;
  CheckedScan checked_view(const ScanJob& job) const;
  Buffer& carried(const ScanJob& job) { return job.alone ? halos : states; }
};

// This rank's rows of a scan in the memory of its kernel, ready to be scanned any number of times. All calls are
// collective over `meeting`, in whose world the front door was made; that and the input outlive the object.
class LoadedScan {
 public:
  // Allocates everything and reads the rows.
  LoadedScan(const ScanInput& input, Scan& scan, const Meeting& meeting, const StepDone& step_done = {});

  // Begins on all ranks at once and returns when all are done.
  ScanStats run();
  // The rows of the last run, in host memory. Ends the object's use.
  ScanRankResult fetch(const ScanStats& stats);

 private:
  TensorView load_rows(ScanRows which, std::int64_t before, std::int64_t all, const StepDone& step_done);
  TensorView side_by_side(std::span<const ScanRows> all, const std::function<TensorView(ScanRows)>& load);
  const std::byte* load_bytes(std::span<const std::byte> bytes);
  const float* load_array(std::span<const float> values);
  void load_states();
  void make_room();
  void load(const StepDone& step_done);

  const ScanInput& input_;
  Scan& scan_;
  Meeting meeting_;
  ScanRankResult result_;
  std::vector<Buffer> buffers_;
  ScanInputs inputs_;
  ScanOutputs outputs_;
  const float* states_before_ = nullptr;  // of an update, which is done in place
};

}  // namespace ringattn
