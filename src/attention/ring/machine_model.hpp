// SPDX-License-Identifier: Apache-2.0
// What the plan knows of a machine: three numbers. `info --measure` writes them, `--machine` reads them.
#pragma once

#include <string>
#include <string_view>

namespace ringattn {

class Backend;
struct KernelEntry;

struct MachineModel {
  std::string name = "default";
  double flops_per_second = 5e10;      // of one rank's fold, by the convention of job_flops()
  double link_bytes_per_second = 5e9;  // that one rank receives
  double latency_seconds = 20e-6;      // of one message

  bool operator==(const MachineModel&) const = default;
};

// What is assumed of a machine that nobody has measured, for a kernel on its backend. The same in every run: what a run
// does never rests on a reading that the next one would not repeat.
MachineModel default_machine(const KernelEntry& kernel, const Backend& backend);

// A file's text with the four members of MachineModel by these names: TOML if `path` ends in ".toml", else JSON. Throws
// kFile for anything else: other names, missing names, numbers that aren't positive (latency: negative).
MachineModel parse_machine_model(std::string_view text, const std::string& path);
MachineModel read_machine_model(const std::string& path);

// The text of such a file, in the format that `path` asks for.
std::string machine_model_text(const MachineModel& machine, std::string_view path);

}  // namespace ringattn
