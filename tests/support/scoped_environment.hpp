// SPDX-License-Identifier: Apache-2.0
// An environment variable for the time of a test.
#pragma once

#include <cstdlib>
#include <string>
#include <utility>

namespace ringattn::testing {

class ScopedEnvironment {
 public:
  ScopedEnvironment(std::string name, const std::string& value) : name_(std::move(name)) {
    ::setenv(name_.c_str(), value.c_str(), 1);
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;
  ~ScopedEnvironment() { ::unsetenv(name_.c_str()); }

 private:
  std::string name_;
};

}  // namespace ringattn::testing
