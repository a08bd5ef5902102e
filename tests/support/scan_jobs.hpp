// SPDX-License-Identifier: Apache-2.0
// Small scans through the library's jobs, on one rank, and what fp64 says of them.
#pragma once

#include "attention/check/scan_accuracy.hpp"
#include "attention/job/scan_file_job.hpp"
#include "comm/threads.hpp"

namespace ringattn::testing {

inline ScanOptions one_thread() {
  ScanOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

inline SyntheticScan small_scan(std::int64_t tokens, bool selective = false) {
  SyntheticScan scan;
  scan.selective = selective;
  scan.seed = 7;
  scan.tokens = tokens;
  scan.heads = selective ? 8 : 2;
  scan.head_dim = 8;
  scan.state_dim = 8;
  return scan;
}

// y of a synthetic scan on one rank.
struct FinishedScan {
  ScanInput input;
  ScanRankResult result;
};

// `rounded`: as if its kernel rounded factors of rows.
inline ScanAccuracy checked(const FinishedScan& scan, bool rounded = false) {
  ScanAccuracy accuracy;
  run_threads_world(1, {}, [&](Transport& transport) {
    const Meeting meeting(transport, Patience(60.0));
    accuracy = check_scan_result(meeting, scan.input, 64, scan.result.checked_view(scan.input.job()), rounded, 1);
  });
  return accuracy;
}

inline FinishedScan finished(const ScanInput& input) {
  FinishedScan scan{input, {}};
  run_threads_world(
      1, {}, [&](Transport& transport) { scan.result = PreparedScan(input, transport, one_thread()).compute(); });
  return scan;
}

}  // namespace ringattn::testing
