// SPDX-License-Identifier: Apache-2.0
// The python3 on PATH as a child process. It runs a script that is compiled into the program, and the two exchange
// lines.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.hpp"
#include "base/file_descriptor.hpp"

namespace ringattn {

class PythonProcess {
 public:
  // Starts `python3 -c script arguments…`. Its stderr is discarded. If there is no python3, the process counts as
  // ended.
  PythonProcess(std::string_view script, const std::vector<std::string>& arguments);
  ~PythonProcess();  // kills it
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;

  // Returns false if the process has ended.
  bool write_line(std::string_view line);
  // The next line that it prints. Nothing if it has ended, or if the deadline passes, after which it is killed; why()
  // has the reason.
  std::optional<std::string> read_line(const Deadline& deadline);
  // Why read_line() returned nothing.
  const std::string& why() const { return why_; }

 private:
  // Always returns nothing.
  std::optional<std::string> end(std::string why);

  pid_t child_ = -1;  // -1: it has ended
  FileDescriptor socket_;
  std::string read_;  // received after the last line
  std::string why_;
};

}  // namespace ringattn
