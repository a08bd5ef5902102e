// SPDX-License-Identifier: Apache-2.0
// The machine this process runs on.
#pragma once

#include <cstddef>
#include <string>

namespace ringattn {

std::string host_name();

// The processors that this process may run on: how many, and which as a string that is equal for equal sets.
struct Processors {
  int count = 1;
  std::string set;
};
Processors usable_processors();

// Model name of the first processor, e.g. "AMD EPYC 9654", or "unknown".
std::string cpu_model();

// Bytes that this process may use of its host: memory and swap, or the limit of its control group where that is less.
// Without a word from the system, the most that a number holds.
std::size_t usable_bytes();

// The most memory that no file backs and that this process has had so far, in bytes: its peak resident size less the
// file pages of now.
std::size_t peak_resident_bytes();

}  // namespace ringattn
