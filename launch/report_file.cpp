// SPDX-License-Identifier: Apache-2.0
#include "launch/report_file.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include "base/error.hpp"
#include "base/temporary_file.hpp"
#include "base/text_file.hpp"

namespace ringattn {

void ReportFile::begin(std::string_view text) noexcept {
  if (path_.empty() || path_ == "-") return;
  try {
    check_new_file(path_, force_, "json");
    TemporaryFile file(path_, setting("json", path_));
    file.write(text);
    struct stat status {};
    const bool known = ::fstat(file.file().get(), &status) == 0;
    file.publish(force_);  // not synced: it must outlive this process, but not a crash of the machine
    if (known) begun_ = status;
  } catch (const std::exception&) {
    // The job checks its outputs before it computes, and reports this error then.
  }
}

bool ReportFile::is_ours() const {
  struct stat now {};
  return begun_ && ::lstat(path_.c_str(), &now) == 0 && now.st_dev == begun_->st_dev && now.st_ino == begun_->st_ino;
}

void ReportFile::check() const {
  if (!path_.empty() && path_ != "-") check_new_file(path_, force_ || is_ours(), "json");
}

void ReportFile::write(std::string_view text) const {
  if (path_.empty()) return;
  if (path_ != "-") {
    write_text_file(path_, text, force_ || is_ours(), "json");
    return;
  }
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    fail(ErrorCode::kFile, "the report can't be written to stdout", std::strerror(errno),
         {"Redirect stdout, or name a file with ", setting("json"), "."});
  }
}

}  // namespace ringattn
