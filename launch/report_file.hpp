// SPDX-License-Identifier: Apache-2.0
// Where --json leads. A file is there from the start of the job, and says that the job has not told its end: a process
// that is killed can't write any more. Whatever the job reports last replaces it.
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
  // Writes the first text, where a file is wanted and may be written; check() says what stands in its way.
  void begin(std::string_view text) noexcept;
  // Throws kFile where write() would, but for a file that begin() made.
  void check() const;
  // To the file or, for "-", to stdout. Throws kFile.
  void write(std::string_view text) const;

 private:
  // Whether the file that is there is still the one that begin() made.
  bool is_ours() const;

  std::string path_;  // "-": stdout; empty: no report
  bool force_;
  std::optional<struct stat> begun_;
};

}  // namespace ringattn
