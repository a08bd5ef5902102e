// SPDX-License-Identifier: Apache-2.0
#include "launch/verify_golden.hpp"

#include <fmt/format.h>

#include <set>
#include <string>
#include <string_view>

#include "base/text_file.hpp"

namespace ringattn {

Golden read_golden(const Collective& collective, const std::string& path, const Golden& now) {
  std::string text;
  collective.run_collectively([&] {
    if (collective.rank() == 0) text = read_text_file(path);
  });
  text = collective.gather(text).front();
  Golden recorded;
  collective.run_collectively([&] {
    recorded = parse_golden(text, path);
    check_comparable(recorded, now, path);
  });
  return recorded;
}

bool check_golden(const Screen& screen, const std::string& path, const Golden& recorded, const Golden& now) {
  screen.context(fmt::format("against {}, recorded by version {} (git {})", path, recorded.version, recorded.git));
  bool same = true;
  std::set<std::string_view> names;
  for (const Golden* const golden : {&recorded, &now}) {
    for (const auto& [name, digest] : golden->digests) names.insert(name);
  }
  const auto digest_in = [](const Golden& golden, std::string_view name) {
    const auto found = golden.digests.find(name);
    return found == golden.digests.end() ? std::string(kNoDigest) : found->second;
  };
  for (const std::string_view name : names) {
    const std::string before = digest_in(recorded, name);
    const std::string after = digest_in(now, name);
    if (before == after) continue;
    same = false;
    screen.print(fmt::format("  {}: recorded {}, now {}\n", name, before, after));
  }
  return same;
}

void write_golden(const Screen& screen, const Collective& collective, const JobOptions& options, const Golden& golden) {
  collective.run_collectively([&] {
    if (collective.rank() == 0) write_text_file(options.record, golden_text(golden), options.force, "record");
  });
  screen.context(fmt::format("golden file: {}", options.record));
}

}  // namespace ringattn
