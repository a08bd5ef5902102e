// SPDX-License-Identifier: Apache-2.0
#include "launch/verify_golden.hpp"

#include <fmt/format.h>

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
  for (const auto& [name, digest] : {std::pair{"out", &Golden::digest_out},
                                     {"lse", &Golden::digest_lse},
                                     {"final_states", &Golden::digest_final_states}}) {
    if (recorded.*digest == now.*digest) continue;
    same = false;
    screen.print(fmt::format("  {}: recorded {}, now {}\n", name, recorded.*digest, now.*digest));
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
