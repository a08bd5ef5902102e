// SPDX-License-Identifier: Apache-2.0
// What a bug report needs to know of this build and this machine: `ringattn collect-env`, and the same in Python.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace ringattn {

// Lines "name  value" in sections, ending with a line break. An item that is missing says why, and none makes the
// others fail. It has no host name, address or user name of its own; of the environment it has the variables of
// ringattn, CUDA, NCCL, OpenMP, MPI and PyTorch without secrets. Initializes the CUDA driver.
std::string environment_facts();

// Bytes that are no printable UTF-8 become \\xNN.
std::string printable_utf8(std::string_view text);

// A section of such lines.
class FactSection {
 public:
  explicit FactSection(std::string_view title);
  // Adds a printable_utf8() line. `value` may throw: the line then says what.
  void add(std::string_view name, const std::function<std::string()>& value);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace ringattn
