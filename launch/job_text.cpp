// SPDX-License-Identifier: Apache-2.0
#include "launch/job_text.hpp"

#include <fmt/format.h>

#include <set>

#include "base/gpu.hpp"
#include "base/size.hpp"
#include "launch/help.hpp"

namespace ringattn {

std::string shape_text(const JobInput& input) {
  if (input.op() == Op::kMla) return describe(input.latent().spec);
  const AttentionSpec& spec = input.job().spec;
  return fmt::format("{}, scale {}", describe(spec), spec.softmax_scale);
}

void note_model_sinks(const Screen& screen, const Config& config) {
  if (!config.options.model_sinks || config.given("input")) return;
  screen.context("sinks: the model's layer has a learned logit for each query head (not generated)");
}

std::string layout_text(const LayoutRequest& request) {
  std::string text(layout_name(request.kind));
  if (request.stripe > 0) text += fmt::format(", stripe {} tokens", request.stripe);
  return text;
}

void print_unread(const Screen& screen, const UnreadTensors& unread) {
  if (unread.count > 0) screen.context(fmt::format("not read: {}", unread.text()));
}

void print_head(const Screen& screen, const std::string& source, const UnreadTensors& unread, const std::string& job,
                const KernelEntry& kernel, int threads, const Report& report) {
  const std::string tool = version_line();
  const std::size_t hosts = std::set<std::string>(report.hosts.begin(), report.hosts.end()).size();
  screen.context(tool.substr(0, tool.size() - 1));
  // Reasons are for those who look for them, and for a GPU that is not used.
  const bool reasons = screen.verbose() || (kernel.backend == "cpu" && !visible_gpus().empty());
  const std::string& reason = report.invocation->transport_reason;
  screen.context(
      fmt::format("world: {} rank{} on {} host{}, transport {}{}", report.ranks, report.ranks == 1 ? "" : "s", hosts,
                  hosts == 1 ? "" : "s", report.transport,
                  !reasons || reason.empty() || reason == "forced" ? "" : fmt::format(" (passed over: {})", reason)));
  screen.context(fmt::format("input: {}", source));
  print_unread(screen, unread);
  screen.context(fmt::format("job: {}", job));
  note_model_sinks(screen, report.invocation->config);
  const std::string per_rank =
      kernel.backend == "cpu" ? fmt::format(", {} thread{} a rank", threads, threads == 1 ? "" : "s") : "";
  screen.context(fmt::format("kernel: {}{}{}", report.kernel, per_rank, reasons ? "; " + report.kernel_reason : ""));
}

void print_devices(const Screen& screen, const Report& report) {
  for (std::size_t rank = 0; rank < report.devices.size(); ++rank) {
    screen.detail(fmt::format("rank {} on {}: {}", rank, report.hosts[rank], report.devices[rank]));
  }
}

void print_read_rows(const Screen& screen, const JobInput& input) {
  if (!input.not_decoded_reason().empty()) {
    const bool cached = input.op() != Op::kMla || input.pages() != nullptr;
    screen.context((cached ? "cache: read into rows; " : "op: mla, rows around the ring; ") +
                   input.not_decoded_reason());
  } else if (input.pages() != nullptr && input.op() == Op::kMla) {
    screen.context("cache: read into rows");
  } else if (input.pages() != nullptr) {
    screen.context("cache: read into rows; sequences of many queries, or of unequally many, are not decoded");
  }
}

// ", 1.5 MiB sent"; empty where ranks send each other nothing.
std::string sent_text(const PlanFigures& plan) {
  return plan.bytes_moved == 0 ? "" : fmt::format(", {} sent", format_bytes(static_cast<double>(plan.bytes_moved)));
}

std::string form_text(const JobInput& input) {
  return fmt::format("form: {} ({})", form_name(input.form().form), input.form().reason);
}

namespace {

void print_ring(const Screen& screen, const JobInput& input, const RingOp& ring_op, const Report& report) {
  print_head(screen, input.source(), input.unread(), describe(input), *ring_op.kernel.row, ring_op.options.threads,
             report);
  if (report.plan->latents) {
    const PlanFigures::MlaFigures& latents = *report.plan->latents;
    screen.context(fmt::format("{}; {} at a time", form_text(input),
                               counted(static_cast<std::uint64_t>(latents.heads_at_a_time), "head")));
    const MlaSpec& spec = input.latent().spec;
    if (report.plan->bytes_moved > 0) {
      const std::string of_heads = spec.q_in_latent || spec.out_in_latent
                                       ? ""
                                       : fmt::format(" instead of {} of keys and values",
                                                     format_bytes(static_cast<double>(latents.bytes_moved_expanded)));
      screen.context(
          fmt::format("latents: {} sent{}", format_bytes(static_cast<double>(report.plan->bytes_moved)), of_heads));
    }
  }
  print_read_rows(screen, input);
  screen.context(fmt::format("layout: {}; {} block{}{}, {} planned for a rank", layout_text(ring_op.layout.request),
                             report.plan->blocks, report.plan->blocks == 1 ? "" : "s", sent_text(*report.plan),
                             format_bytes(static_cast<double>(report.plan->memory_per_rank))));
  print_devices(screen, report);
  for (std::size_t block = 0; block < ring_op.plan.blocks.size(); ++block) {
    const BlockPlan& plan = ring_op.plan.blocks[block];
    screen.detail(fmt::format("block {}: keys {} to {}; rank 0 receives {}, computes {:.3f} GFLOP", block,
                              plan.first_token, plan.last_token, format_bytes(static_cast<double>(plan.bytes_received)),
                              plan.flops / 1e9));
  }
}

}  // namespace

std::string cache_text(const JobInput& input, const DecodeJob& job) {
  const CacheFormat& given = input.job().format;
  std::string stored;
  if (job.values_in_keys) {
    if (!job.format.is_plain()) stored = ", stored as " + describe(job.format.k);
  } else if (!given.is_plain()) {
    stored = fmt::format(", {} {}", job.format.is_plain() ? "decompressed from" : "stored as", describe(given));
  }
  if (input.pages() == nullptr) return "dense" + stored;
  return fmt::format("{} of {} tokens{}{}", counted(static_cast<std::uint64_t>(input.pages()->pages), "page"),
                     input.pages()->page_size, input.head_major_pages() ? ", head-major" : "", stored);
}

std::string deal_text(const DecodePlanSummary& step) {
  if (!step.job.spec.block_mask.any()) return fmt::format("dealt by KV splits of {} keys", step.kv_split_keys);
  const DecodeDeal& deal = step.deal;
  if (deal.ranks() == 1) return "whole on one rank";
  std::string text = fmt::format("dealt by {}", deal_name(deal));
  if (step.idle() > 0) text += fmt::format("; {} of {} ranks without any", step.idle(), deal.ranks());
  return text;
}

std::string held_text(const DecodePlanSummary& step, std::size_t rank) {
  const std::string heads =
      step.deal.heads == 1 ? "" : " of " + counted(static_cast<std::uint64_t>(step.kv_heads[rank]), "K/V head");
  return fmt::format("rank {} holds {} keys{}, owns {} rows", rank, step.keys[rank], heads, step.rows[rank]);
}

void print_decode(const Screen& screen, const JobInput& input, const Decode& decode, const DecodePlanSummary& step,
                  const Report& report) {
  print_head(screen, input.source(), input.unread(), "decode, " + describe(input), *decode.kernel().row,
             decode.options().threads, report);
  if (input.op() == Op::kMla) screen.context(form_text(input));
  screen.context(fmt::format("cache: {}; {}{}, {} planned for a rank", cache_text(input, step.job), deal_text(step),
                             sent_text(*report.plan), format_bytes(static_cast<double>(step.memory.total()))));
  print_devices(screen, report);
  for (std::size_t rank = 0; rank < step.keys.size(); ++rank) {
    screen.detail(
        fmt::format("{}, receives {}", held_text(step, rank), format_bytes(static_cast<double>(step.received[rank]))));
  }
}

void print_job(const Screen& screen, PreparedFileJob& prepared, const Report& report) {
  if (prepared.input().decodes()) {
    print_decode(screen, prepared.input(), prepared.decode(), prepared.step(), report);
  } else {
    print_ring(screen, prepared.input(), prepared.ring(), report);
  }
}

}  // namespace ringattn
