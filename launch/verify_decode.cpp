// SPDX-License-Identifier: Apache-2.0
#include "launch/verify_decode.hpp"

#include <fmt/format.h>

#include <optional>

#include "base/size.hpp"
#include "launch/job_text.hpp"
#include "launch/progress.hpp"
#include "launch/table.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/output.hpp"
#include "ops/decode/rank_cache.hpp"
#include "ops/decode/replay.hpp"

namespace ringattn {

namespace {

// Without pages, and with pages whose ends cut tiles.
constexpr std::int64_t kCaches[] = {0, 16};

}  // namespace

bool verify_decode(const Invocation& invocation, const JobInput& input, const Options& library, const Screen& screen,
                   Transport& world, Report& report) {
  const JobOptions& options = invocation.config.options;
  const Collective collective(world, Timeouts(options.timeout));
  collective.run_collectively([&] { check_replayable(input); });
  {
    PreparedFileJob prepared(
        input.attended(input.decodes() ? "steps are compared with a prefill of its rows" : std::string()), world,
        library);
    gather_world(report, prepared, world, collective);
    print_job(screen, prepared, report);
    collective.run_collectively(
        [&] { check_replay_kernel(prepared.kernel(), decode_spec(input), compatible_request(library.kernel, world)); });
  }
  if (options.dry_run) {
    screen.context("dry run: nothing is computed");
    return true;
  }
  ProgressDisplay progress(options, world.rank() == 0);
  std::optional<Difference> first;
  Table table({{"cache"}, {"page", "(tokens)"}, {"rows"}, {"verdict"}});
  replay_rows(
      input, library, options.rows, kCaches, world,
      [&](std::string_view what, const StepCount& steps) { progress.update(what, steps); },
      [&](PreparedFileJob& prepared, const RankResult& result) {
        report.digests = digest_result(prepared.input(), result, collective);
        gather_figures(report, prepared, result, world, collective);
      },
      [&](const ReplayResult& result) {
        const bool paged = result.page_size > 0;
        table.add({paged ? "paged" : "dense", paged ? fmt::format("{}", result.page_size) : "-",
                   fmt::format("{}", result.rows), result.difference ? "FAIL" : "PASS"});
        if (!first) first = result.difference;
      });
  progress.clear();
  screen.context(fmt::format("digests of the prefill: out {}, lse {}", report.digests->out, report.digests->lse));
  screen.context(fmt::format("the last {} of each sequence, decoded one by one, against the prefill, bit for bit",
                             counted(static_cast<std::uint64_t>(options.rows), "row")));
  screen.print(table.text());
  if (first) screen.print(fmt::format("  first difference: {}\n", describe(*first, input.job())));
  return !first;
}

}  // namespace ringattn
