// SPDX-License-Identifier: Apache-2.0
// The resources of this machine and of a hostfile, as the system's tools report them. A tool that is missing or hangs
// counts as no answer.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/launcher/options.hpp"

namespace ringattn::launcher {

// The path of a program on PATH, or an empty string.
std::string find_on_path(const std::string& name);

// What a command prints on stdout, at most 1 MB. Nothing if it takes longer than 10 s; the command is then not waited
// for, because a program that hangs in a driver can't even be killed.
std::optional<std::string> output_of(const Words& command);

// The number of GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES makes visible.
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
