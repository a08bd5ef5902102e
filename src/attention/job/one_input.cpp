// SPDX-License-Identifier: Apache-2.0
#include "attention/job/one_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/host.hpp"

namespace ringattn {

namespace {

// What is compared of a file, in the order in which a difference is named, and what it is called.
struct Member {
  std::string_view what;
  std::string FileFingerprint::*value;
};
constexpr Member kMembers[] = {{"XXH3-128 of its header", &FileFingerprint::header},
                               {"XXH3-128 of samples of its data", &FileFingerprint::data}};

// A rank's files as text, one member a line: host, then path, bytes, header, data, place and state of each file.
constexpr std::size_t kLines = 6;

std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, '?');
  return text;
}

std::string text_of(const std::vector<FileFingerprint>& prints) {
  std::string text = one_line(host_name());
  for (const FileFingerprint& print : prints) {
    text += fmt::format("\n{}\n{}\n{}\n{}\n{}\n{}", one_line(print.path), print.bytes, print.header, print.data,
                        one_line(print.place), print.state);
  }
  return text;
}

struct RankFiles {
  std::string host;
  std::vector<FileFingerprint> prints;
};

RankFiles files_of(std::string_view text) {
  std::vector<std::string> lines;
  for (;;) {
    const std::size_t end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  RankFiles files{lines.front(), {}};
  for (std::size_t i = 1; i + kLines <= lines.size(); i += kLines) {
    files.prints.push_back(
        {lines[i], std::stoll(lines[i + 1]), lines[i + 2], lines[i + 3], lines[i + 4], lines[i + 5]});
  }
  return files;
}

std::optional<std::string> difference(const FileFingerprint& theirs, const FileFingerprint& zeros) {
  const std::string names =
      theirs.path == zeros.path ? theirs.path : fmt::format("{} against {}", theirs.path, zeros.path);
  if (theirs.bytes != zeros.bytes) {
    return fmt::format("{}: it has {} bytes against {}", names, theirs.bytes, zeros.bytes);
  }
  for (const Member& member : kMembers) {
    if (theirs.*member.value == zeros.*member.value) continue;
    return fmt::format("{}: the {} is {} against {}", names, member.what, theirs.*member.value, zeros.*member.value);
  }
  if (theirs.place == zeros.place && theirs.state != zeros.state) {
    return fmt::format("{}: it was replaced or written to between their openings, {} against {}", names, theirs.state,
                       zeros.state);
  }
  return std::nullopt;
}

std::optional<std::string> difference(const RankFiles& theirs, const RankFiles& zeros) {
  if (theirs.prints.size() != zeros.prints.size()) {
    return fmt::format("its tensors lie in {} files against {}", theirs.prints.size(), zeros.prints.size());
  }
  for (std::size_t i = 0; i < theirs.prints.size(); ++i) {
    if (auto found = difference(theirs.prints[i], zeros.prints[i])) return found;
  }
  return std::nullopt;
}

}  // namespace

void agree_on_files(const Meeting& meeting, const std::function<std::vector<FileFingerprint>()>& fingerprints) {
  if (meeting.size() == 1) return;
  std::string mine;
  meeting.together([&] { mine = text_of(fingerprints()); });
  const std::vector<std::string> all = meeting.gather(mine);
  const RankFiles zeros = files_of(all.front());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    const RankFiles theirs = files_of(all[rank]);
    const auto found = difference(theirs, zeros);
    if (!found) continue;
    // Everyone sees the same table, so everyone throws the same.
    throw AgreedError(
        Error(ErrorCode::kFile,
              fmt::format("rank {} on {} and rank 0 on {} read different files", rank, theirs.host, zeros.host), *found,
              "Give all ranks the same file, or copies of it, and leave it alone while the job runs."));
  }
}

void agree_on_input(const Meeting& meeting, const JobInput& input) {
  agree_on_files(meeting, [&] { return input.fingerprints(); });
}

}  // namespace ringattn
