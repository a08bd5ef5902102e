// SPDX-License-Identifier: Apache-2.0
#include "launch/run_end.hpp"

#include <fmt/format.h>

#include "base/text_file.hpp"

namespace ringattn {

int end_dry_run(const Screen& screen, Report& report, const Collective& collective) {
  screen.context("dry run: nothing is computed");
  report.verdict = "ok";
  collective.run_collectively([&] {
    if (collective.rank() == 0) write_report(report);
  });
  return 0;
}

int end_run(const Screen& screen, Report& report, const Collective& collective,
            const std::function<void()>& print_result, const std::function<std::string()>& trace) {
  const JobOptions& options = report.invocation->config.options;
  report.verdict = "ok";
  collective.run_collectively([&] {
    if (collective.rank() != 0) return;
    print_result();
    if (!options.output.empty()) screen.context(fmt::format("output: {}", options.output));
    if (!options.trace.empty()) {
      write_text_file(options.trace, trace(), options.force, "trace");
      screen.context(fmt::format("trace: {}", options.trace));
    }
    write_report(report);
  });
  return 0;
}

}  // namespace ringattn
