// SPDX-License-Identifier: Apache-2.0
// Properties of the machine that this process runs on.
#pragma once

#include <cstddef>
#include <string>

namespace ringattn {

std::string host_name();

// The processors that this process may run on: their count, and a string that is equal for equal sets.
struct Processors {
  int count = 1;
  std::string set;
};
Processors usable_processors();

// Model name of the first processor, e.g. "AMD EPYC 9654", or "unknown".
std::string cpu_model();

// Bytes that this process may use on its host: memory plus swap, or its cgroup's limit if that is less. If the system
// reports nothing, the largest std::size_t.
std::size_t usable_bytes();

// Peak anonymous memory of this process in bytes: its peak resident size minus the file pages resident now.
std::size_t peak_resident_bytes();

}  // namespace ringattn
