// SPDX-License-Identifier: Apache-2.0
// The machine model of a plan: three rates. `ringattn info --measure` writes a file of them, `--machine` reads it.
#pragma once

#include <string>
#include <string_view>

namespace ringattn {

class Backend;
struct KernelEntry;

struct MachineModel {
  std::string name = "default";
  double flops_per_second = 5e10;      // attention FLOPs of one rank, counted as in job_flops()
  double link_bytes_per_second = 5e9;  // received by one rank
  double latency_seconds = 20e-6;      // per message

  bool operator==(const MachineModel&) const = default;
};

// The assumed machine model of a kernel on its backend, if none was measured. Constant, so that plans are reproducible.
MachineModel default_machine(const KernelEntry& kernel, const Backend& backend);

// Parses a file with the four members of MachineModel: TOML if `path` ends in ".toml", else JSON. Throws kFile for
// other or missing members, and for numbers that aren't positive (latency: negative).
MachineModel parse_machine_model(std::string_view text, const std::string& path);
MachineModel read_machine_model(const std::string& path);

// The text of such a file, in the format given by the extension of `path`.
std::string machine_model_text(const MachineModel& machine, std::string_view path);

}  // namespace ringattn
