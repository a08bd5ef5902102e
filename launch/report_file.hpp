// SPDX-License-Identifier: Apache-2.0
// The destination of --json. The file exists from the start of the job, and says that the job has not reported its end,
// because a killed process can't write any more. The last report of the job replaces it.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>
#include <string_view>

#include "launch/options.hpp"

namespace ringattn {

class ReportFile {
 public:
  explicit ReportFile(const JobOptions& options) : path_(options.json), force_(options.force) {}

  bool wanted() const { return !path_.empty(); }
  // Writes the first text if a file is requested and may be written. check() throws if it may not.
  void begin(std::string_view text) noexcept;
  // Throws kFile if write() would, except for a file that begin() has made.
  void check() const;
  // Writes to the file or, for "-", to stdout. Throws kFile.
  void write(std::string_view text) const;

 private:
  // Whether the existing file is still the one that begin() made.
  bool is_ours() const;

  std::string path_;  // "-": stdout; empty: no report
  bool force_;
  std::optional<struct stat> begun_;
};

}  // namespace ringattn
