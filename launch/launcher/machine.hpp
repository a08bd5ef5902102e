// SPDX-License-Identifier: Apache-2.0
// What this machine and a hostfile have, as the system's tools say. A tool that is missing or hangs says nothing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/launcher/options.hpp"

namespace ringattn::launcher {

// The path of a program on PATH, or an empty string.
std::string find_on_path(const std::string& name);

// What a command prints on stdout, at most 1 MB; nothing if it takes longer than 10 s. Its end is not waited for then:
// a program that hangs in a driver can't even be killed.
std::optional<std::string> output_of(const Words& command);

// GPUs that CUDA_VISIBLE_DEVICES leaves of those that nvidia-smi lists.
int count_gpus();
// The processors, and the cores, that this process may use.
int count_processors();
int count_cores();
bool is_root();
bool in_container();

// The ranks of each NUMA node, if binding rank r to NUMA node r / (ranks / nodes) puts it beside GPU r.
std::optional<int> ranks_of_numa_node(int ranks, int gpus);

// Slots and hosts of a hostfile. Throws Error.
struct HostSlots {
  int slots = 0;
  Words hosts;
};
HostSlots read_hostfile(const std::string& path);

}  // namespace ringattn::launcher
