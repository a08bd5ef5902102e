// SPDX-License-Identifier: Apache-2.0
#include "ops/common/input_agreement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/host.hpp"

namespace ringattn {

namespace {

// A compared property of a file and its name, in the order in which differences are reported.
struct Member {
  std::string_view what;
  std::string FileFingerprint::*value;
};
constexpr Member kMembers[] = {{"XXH3-128 of its header", &FileFingerprint::header},
                               {"XXH3-128 of samples of its data", &FileFingerprint::data}};

// A rank's files as text, one value per line: the host, then path, size and the text members of each file.
constexpr std::string FileFingerprint::*kTexts[] = {
    &FileFingerprint::header, &FileFingerprint::data,   &FileFingerprint::location, &FileFingerprint::state,
    &FileFingerprint::kernel, &FileFingerprint::device, &FileFingerprint::stamp};
constexpr std::size_t kLines = 2 + std::size(kTexts);

std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, '?');
  return text;
}

std::string text_of(const std::vector<FileFingerprint>& prints) {
  std::string text = one_line(host_name());
  for (const FileFingerprint& print : prints) {
    text += fmt::format("\n{}\n{}", one_line(print.path), print.bytes);
    for (const auto member : kTexts) text += '\n' + one_line(print.*member);
  }
  return text;
}

struct RankFiles {
  std::string host;
  std::vector<FileFingerprint> prints;
};

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  for (;;) {
    const std::size_t end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return lines;
    text.remove_prefix(end + 1);
  }
}

RankFiles files_of(std::string_view text) {
  const std::vector<std::string> lines = lines_of(text);
  RankFiles files{lines.front(), {}};
  for (std::size_t i = 1; i + kLines <= lines.size(); i += kLines) {
    FileFingerprint& print = files.prints.emplace_back();
    print.path = lines[i];
    print.bytes = std::stoll(lines[i + 1]);
    for (std::size_t t = 0; t < std::size(kTexts); ++t) print.*kTexts[t] = lines[i + 2 + t];
  }
  return files;
}

std::string names_of(const FileFingerprint& theirs, const FileFingerprint& zeros) {
  return theirs.path == zeros.path ? theirs.path : fmt::format("{} against {}", theirs.path, zeros.path);
}

std::optional<std::string> difference(const FileFingerprint& theirs, const FileFingerprint& zeros) {
  const std::string names = names_of(theirs, zeros);
  if (theirs.bytes != zeros.bytes) {
    return fmt::format("{}: it has {} bytes against {}", names, theirs.bytes, zeros.bytes);
  }
  for (const Member& member : kMembers) {
    if (theirs.*member.value == zeros.*member.value) continue;
    return fmt::format("{}: the {} is {} against {}", names, member.what, theirs.*member.value, zeros.*member.value);
  }
  if (theirs.location == zeros.location && theirs.state != zeros.state) {
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

// All ranks check the same table, so all throw the same error.
[[noreturn]] void refuse(std::size_t rank, const RankFiles& theirs, const RankFiles& zeros, const std::string& found) {
  throw AgreedError(
      Error(ErrorCode::kFile,
            fmt::format("rank {} on {} and rank 0 on {} read different files", rank, theirs.host, zeros.host), found,
            "Give all ranks the same file, or copies of it, and leave it alone while the job runs."));
}

bool are_one(const RankFiles& theirs, const RankFiles& zeros) {
  return std::equal(theirs.prints.begin(), theirs.prints.end(), zeros.prints.begin(), zeros.prints.end(), is_one_file);
}

// Called if ranks have opened several files that look alike, because samples may miss the difference.
void agree_on_data(const Collective& collective, const std::vector<FileFingerprint>& own,
                   const std::vector<RankFiles>& files) {
  std::string mine;
  collective.run_collectively([&] {
    for (const FileFingerprint& print : own) mine += print.more_data() + '\n';
  });
  const std::vector<std::string> all = collective.gather(mine);
  const std::vector<std::string> zeros = lines_of(all.front());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    const std::vector<std::string> theirs = lines_of(all[rank]);
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (theirs[i] == zeros[i]) continue;
      refuse(rank, files[rank], files.front(),
             fmt::format("{}: the XXH3-128 of its data, of 64 MB at the most, is {} against {}",
                         names_of(files[rank].prints[i], files.front().prints[i]), theirs[i], zeros[i]));
    }
  }
}

}  // namespace

void agree_on_files(const Collective& collective, const std::function<std::vector<FileFingerprint>()>& fingerprints) {
  if (collective.size() == 1) return;
  std::vector<FileFingerprint> own;
  collective.run_collectively([&] { own = fingerprints(); });
  const std::vector<std::string> all = collective.gather(text_of(own));
  std::vector<RankFiles> files;
  for (const std::string& text : all) files.push_back(files_of(text));
  bool one = true;
  for (std::size_t rank = 1; rank < files.size(); ++rank) {
    if (const auto found = difference(files[rank], files.front())) refuse(rank, files[rank], files.front(), *found);
    one = one && are_one(files[rank], files.front());
  }
  if (!one) agree_on_data(collective, own, files);
}

}  // namespace ringattn
