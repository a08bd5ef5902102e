// SPDX-License-Identifier: Apache-2.0
#include "launch/job_text.hpp"

#include <fmt/format.h>

#include <set>
#include <string>

#include "base/gpu.hpp"
#include "kernels/common/registry.hpp"
#include "launch/help.hpp"

namespace ringattn {

void note_model_sinks(const Screen& screen, const Config& config) {
  const JobOptions& options = config.options;
  if (!options.model_sinks || options.sinks || config.given("input")) return;
  screen.context("sinks: the model's layer has a learned logit for each query head (--sinks generates one)");
}

void print_unread(const Screen& screen, const UnreadTensors& unread) {
  if (unread.count > 0) screen.context(fmt::format("not read: {}", unread.text()));
}

void print_job(const Screen& screen, const Report& report) {
  OpJob& job = *report.job;
  const KernelEntry& kernel = job.kernel();
  const std::string tool = version_line();
  const std::size_t hosts = std::set<std::string>(report.hosts.begin(), report.hosts.end()).size();
  screen.context(tool.substr(0, tool.size() - 1));
  // Reasons are shown with --verbose, and if there is a GPU that is not used.
  const bool reasons = screen.verbose() || (kernel.backend == "cpu" && !visible_gpus().empty());
  const std::string& reason = report.invocation->transport_reason;
  screen.context(
      fmt::format("world: {} rank{} on {} host{}, transport {}{}", report.ranks, report.ranks == 1 ? "" : "s", hosts,
                  hosts == 1 ? "" : "s", report.transport,
                  !reasons || reason.empty() || reason == "forced" ? "" : fmt::format(" (passed over: {})", reason)));
  screen.context(fmt::format("input: {}", job.source()));
  print_unread(screen, job.unread());
  screen.context(fmt::format("job: {}", job.describe()));
  note_model_sinks(screen, report.invocation->config);
  const std::string per_rank =
      kernel.backend == "cpu" ? fmt::format(", {} thread{} a rank", job.threads(), job.threads() == 1 ? "" : "s") : "";
  screen.context(
      fmt::format("kernel: {}{}{}", kernel.name, per_rank, reasons ? "; " + job.kernel_reason() : std::string()));
  for (const std::string& line : job.plan_lines(*report.plan)) screen.context(line);
  for (std::size_t rank = 0; rank < report.devices.size(); ++rank) {
    const std::string processors =
        report.processors.empty() ? "" : fmt::format(", processors {}", report.processors[rank]);
    screen.detail(fmt::format("rank {} on {}: {}{}", rank, report.hosts[rank], report.devices[rank], processors));
  }
  for (const std::string& line : job.plan_details()) screen.detail(line);
}

}  // namespace ringattn
