// SPDX-License-Identifier: Apache-2.0
// What the plan knows of a machine: three numbers. `info --measure` writes them, `--machine` reads them.
#pragma once

#include <string>

namespace ringattn {

struct MachineModel {
  std::string name = "default";
  double flops_per_second = 5e10;      // of one rank's fold, by the convention of job_flops()
  double link_bytes_per_second = 5e9;  // that one rank receives
  double latency_seconds = 20e-6;      // of one message
};

}  // namespace ringattn
