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

// Memory of this process that no file backs (RssAnon + RssShmem), in bytes.
std::size_t resident_bytes();

// The most of it that there has been so far: the peak resident size less the file pages of now.
std::size_t peak_resident_bytes();

}  // namespace ringattn
