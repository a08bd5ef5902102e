// SPDX-License-Identifier: Apache-2.0
// The facts about this build and this machine that a bug report needs: `ringattn collect-env`, also from Python.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace ringattn {

// Lines "name  value" in sections, ending with a line break. If a fact is missing, its line says why, and other lines
// are not affected. Contains no host name, address or user name, except in values of environment variables: those of
// ringattn, CUDA, NCCL, OpenMP, MPI and PyTorch, without secrets. Initializes the CUDA driver.
std::string environment_facts();

// Replaces bytes that are not printable UTF-8 by \xNN.
std::string printable_utf8(std::string_view text);

// A section of the facts.
class FactSection {
 public:
  explicit FactSection(std::string_view title);
  // Adds a printable_utf8() line. If `value` throws, the line has the reason.
  void add(std::string_view name, const std::function<std::string()>& value);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace ringattn
