// SPDX-License-Identifier: Apache-2.0
// `ringattn compress`: a file with smaller keys and values, and what that costs in accuracy.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/host.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "io/safetensors_file.hpp"
#include "kernels/quant/compression_methods.hpp"
#include "launch/commands.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/op_flags.hpp"
#include "launch/outputs.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "launch/table.hpp"
#include "ops/common/output_change.hpp"
#include "ops/compression/compress_job.hpp"

namespace ringattn {

namespace {

void check_flags(const Config& config) {
  check_source(config, true);
  for (const std::string_view flag : {"method", "output"}) {
    if (config.given(flag)) continue;
    fail(ErrorCode::kUsage, fmt::format("--{} is missing", flag),
         flag == "method" ? "it says how keys and values are compressed" : "it names the file that is written",
         flag == "method" ? "Try --method int4; `ringattn compress --help` lists the methods."
                          : "Try --output small.safetensors.");
  }
  if (config.chosen("rows") && !config.options.compression_report) {
    fail(ErrorCode::kUsage, fmt::format("{} needs --report", config.origin("rows")),
         "it says how many rows are compared", "Add --report, or leave it out.");
  }
  parse_cache_method(config.options.method);
}

// The jobs over the cache before and after. A file without queries has none.
std::optional<std::pair<JobInput, JobInput>> jobs_of(const Config& config) {
  const JobOptions& options = config.options;
  const Numerics numerics = numerics_of(options);
  const FileInput after{options.output};
  if (config.given("input")) {
    const FileInput before = file_input(options);
    if (!SafetensorsFile(options.output).contains("q")) return std::nullopt;
    FileInput renamed = after;
    renamed.order = options.order;
    return std::pair(JobInput(before, numerics), JobInput(renamed, numerics));
  }
  return std::pair(JobInput(synthetic_input(options, Op::kAttention, options.seq.front()), numerics),
                   JobInput(after, numerics));
}

std::string share(std::int64_t part, std::int64_t whole) {
  return fmt::format("{:.4f}", whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0);
}

// The tensors that were made smaller, by name.
std::vector<std::pair<std::string_view, const CompressedFigures*>> tensors_of(const CompressResult& result) {
  if (result.latent) return {{"latent", &*result.latent}};
  return {{"k", &result.k}, {"v", &result.v}};
}

// Where values were quantized, and so where times were measured.
std::string coder(const CompressResult& result) {
  return result.quantized_on.empty() ? cpu_model() : result.quantized_on;
}

void print_figures(const CompressResult& result, const std::optional<OutputChange>& change, int threads,
                   const Screen& screen, bool quiet) {
  Table table({{"tensor"},
               {"before", "(bytes)"},
               {"after", "(bytes)"},
               {"removed", "(share)"},
               {"tables", "(bytes)"},
               {"energy", "of factors"},
               {"change", "(rms/rms)"},
               {"compress", "(ms)"},
               {"decompress", "(ms)"}});
  for (const auto& [name, figures] : tensors_of(result)) {
    const bool coded = !figures->format.is_plain();  // else tokens that are left are what they were
    table.add({std::string(name), fmt::format("{}", figures->bytes_before), fmt::format("{}", figures->bytes_after),
               share(figures->bytes_before - figures->bytes_after, figures->bytes_before),
               fmt::format("{}", figures->table_bytes),
               figures->format.rank > 0 ? fmt::format("{:.6f}", figures->energy_kept) : "-",
               coded ? fmt::format("{:.3e}", figures->error) : "-",
               fmt::format("{:.3f}", 1e3 * figures->compress_seconds),
               fmt::format("{:.3f}", 1e3 * figures->decompress_seconds)});
  }
  screen.print(table.text(!quiet));
  if (result.position_bytes > 0 && !quiet) {
    screen.context(fmt::format("plus {} bytes of positions", result.position_bytes));
  }
  if (!quiet) {
    std::string times =
        fmt::format("times: {}, {}", coder(result), counted(static_cast<std::uint64_t>(threads), "thread"));
    if (result.evict_seconds > 0.0)
      times += fmt::format("; tokens were evicted in {:.3f} ms", 1e3 * result.evict_seconds);
    screen.context(times);
  }
  if (!change) return;
  Table of_o({{"rows"}, {"change of O", "(rms/rms)"}, {"greatest", "of an O"}, {"greatest", "of an LSE"}});
  of_o.add({fmt::format("{}", change->rows), fmt::format("{:.3e}", change->relative_error),
            fmt::format("{:.3e}", change->greatest), fmt::format("{:.3e}", change->greatest_lse)});
  screen.print(of_o.text(!quiet));
  if (change->emptied > 0) {
    screen.context(fmt::format("rows that no longer see a token: {}", change->emptied));
  }
}

void write_figures(JsonWriter& json, const CompressedFigures& figures) {
  json.begin_object()
      .member("format", describe(figures.format))
      .member("bytes_before", figures.bytes_before)
      .member("bytes_after", figures.bytes_after)
      .member("table_bytes", figures.table_bytes)
      .member("energy_kept", figures.energy_kept)
      .member("change", figures.error)
      .member("compress_seconds", figures.compress_seconds)
      .member("decompress_seconds", figures.decompress_seconds)
      .end_object();
}

std::string document(const Invocation& invocation, const CompressResult& result,
                     const std::optional<OutputChange>& change, int threads) {
  JsonWriter json;
  json.begin_object();
  write_document_head(json, "compress", invocation);
  json.member("method", invocation.config.options.method).member("tokens", result.tokens);
  json.member("kept_tokens", result.kept).member("position_bytes", result.position_bytes);
  json.member("bytes_before", result.bytes_before()).member("bytes_after", result.bytes_after());
  json.member("evict_seconds", result.evict_seconds);
  json.member("quantized_on", coder(result)).member("threads", threads);
  for (const auto& [name, figures] : tensors_of(result)) {
    json.key(name);
    write_figures(json, *figures);
  }
  json.key("out");
  if (change) {
    json.begin_object()
        .member("rows", change->rows)
        .member("relative_error", change->relative_error)
        .member("greatest", change->greatest)
        .member("greatest_lse", change->greatest_lse)
        .member("emptied", change->emptied)
        .end_object();
  } else {
    json.null();
  }
  return std::string(json.key("error").null().end_object().text());
}

}  // namespace

int compress_main(const Invocation& invocation, Transport*) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  check_flags(config);
  check_outputs(invocation);
  const Screen screen(options, true);
  CompressJob job;
  job.input = synthetic_input(options, Op::kAttention, options.seq.front());
  if (config.given("input")) job.input = file_input(options);
  job.output = options.output;
  job.replace = options.force;
  job.method = parse_cache_method(options.method);
  job.ratio = options.ratio;
  job.compared = options.compression_report;
  job.numerics = numerics_of(options);
  job.threads = options.threads > 0 ? options.threads : usable_processors().count;
  const CompressResult result = compress_file(job);
  print_unread(screen, result.unread);
  const auto& eviction = job.method.eviction;
  if (eviction)
    screen.context(fmt::format("{} of {} tokens kept; {}", result.kept, result.tokens, describe(*eviction)));
  std::string formats;
  for (const auto& [name, figures] : tensors_of(result)) {
    formats += fmt::format("{}{}: {}", formats.empty() ? "" : ", ", name, describe(figures->format));
  }
  screen.context(fmt::format("{}; {} tokens{}", formats, result.kept,
                             result.quantized_on.empty() ? "" : "; coded on " + result.quantized_on));
  screen.context(fmt::format("{} become {}: {} of the bytes are removed",
                             format_bytes(static_cast<double>(result.bytes_before())),
                             format_bytes(static_cast<double>(result.bytes_after())),
                             share(result.bytes_before() - result.bytes_after(), result.bytes_before())));
  std::optional<OutputChange> change;
  if (options.compression_report) {
    const auto jobs = jobs_of(config);
    if (jobs) {
      change = output_change(jobs->first, jobs->second, options.rows, job.threads);
    } else {
      screen.context("the file has no q: no rows of O to compare");
    }
  }
  if (options.compression_report || !options.quiet) print_figures(result, change, job.threads, screen, options.quiet);
  screen.context(fmt::format("output: {}", options.output));
  invocation.report_file->write(document(invocation, result, change, job.threads));
  return 0;
}

}  // namespace ringattn
