// SPDX-License-Identifier: Apache-2.0
// Environment variables for the time of a test.
#pragma once

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/environment.hpp"

namespace ringattn::testing {

class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(std::vector<std::pair<std::string, std::string>> variables)
      : variables_(std::move(variables)) {
    for (const auto& [name, value] : variables_) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;
  ~ScopedEnvironment() {
    for (const auto& [name, value] : variables_) ::unsetenv(name.c_str());
  }

 private:
  std::vector<std::pair<std::string, std::string>> variables_;
};

}  // namespace ringattn::testing
