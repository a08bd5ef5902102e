// SPDX-License-Identifier: Apache-2.0
// What the operating system knows about this process and its machine.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ringattn {

std::string host_name();
std::string cpu_model();
// Processors that this process may run on, ascending.
std::vector<int> allowed_processors();
// Bytes of memory of the machine.
std::size_t physical_memory();

// The largest amount of memory that this process has held so far without the pages of mapped files (programs,
// libraries), which the system drops when it needs room: the peak resident size less the file pages of now.
std::size_t peak_memory();

}  // namespace ringattn
