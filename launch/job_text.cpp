// SPDX-License-Identifier: Apache-2.0
#include "launch/job_text.hpp"

#include <fmt/format.h>

#include <set>

#include "base/size.hpp"
#include "launch/help.hpp"

namespace ringattn {

std::string layout_text(const LayoutRequest& request) {
  std::string text(layout_name(request.kind));
  if (request.stripe > 0) text += fmt::format(", stripe {} tokens", request.stripe);
  return text;
}

void print_job(const Screen& screen, const JobInput& input, const Attention& attention, const Report& report) {
  const std::string tool = version_line();
  const std::size_t hosts = std::set<std::string>(report.hosts.begin(), report.hosts.end()).size();
  screen.context(tool.substr(0, tool.size() - 1));
  const std::string& reason = report.invocation->transport_reason;
  screen.context(fmt::format("world: {} rank{} on {} host{}, transport {}{}", report.ranks,
                             report.ranks == 1 ? "" : "s", hosts, hosts == 1 ? "" : "s", report.transport,
                             reason.empty() || reason == "forced" ? "" : fmt::format(" (passed over: {})", reason)));
  screen.context(fmt::format("input: {}", input.source()));
  screen.context(fmt::format("job: {}", describe(input.job())));
  const int threads = attention.options().threads;
  const std::string per_rank = attention.kernel().row->backend == "cpu"
                                   ? fmt::format(", {} thread{} a rank", threads, threads == 1 ? "" : "s")
                                   : "";
  screen.context(fmt::format("kernel: {}{}; {}", report.kernel, per_rank, report.kernel_reason));
  screen.context(fmt::format("layout: {}; {} block{}, {} moved, {} planned for a rank",
                             layout_text(attention.layout().request), report.plan->blocks,
                             report.plan->blocks == 1 ? "" : "s",
                             format_bytes(static_cast<double>(report.plan->bytes_moved)),
                             format_bytes(static_cast<double>(report.plan->memory_per_rank))));
  for (std::size_t rank = 0; rank < report.devices.size(); ++rank) {
    screen.detail(fmt::format("rank {} on {}: {}", rank, report.hosts[rank], report.devices[rank]));
  }
  for (std::size_t block = 0; block < attention.plan().blocks.size(); ++block) {
    const BlockPlan& plan = attention.plan().blocks[block];
    screen.detail(fmt::format("block {}: keys {} to {}; rank 0 receives {}, folds {:.3f} GFLOP", block,
                              plan.first_token, plan.last_token, format_bytes(static_cast<double>(plan.bytes_received)),
                              plan.flops / 1e9));
  }
}

}  // namespace ringattn
