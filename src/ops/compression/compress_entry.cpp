// SPDX-License-Identifier: Apache-2.0
// The row of compression in the table of ops that make files: smaller keys and values, and what that costs in accuracy.
#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/host.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "kernels/quant/compression_methods.hpp"
#include "ops/attention_jobs/output_change.hpp"
#include "ops/compression/compress_job.hpp"
#include "ops/jobs/file_op.hpp"

namespace ringattn {

namespace {

void check(const FileOpRequest& request) {
  if (request.settings.method.empty()) {
    fail(ErrorCode::kUsage, {setting("method"), " is missing"}, "it says how keys and values are compressed",
         {"Try ", setting("method", "int4"), "; the help of ", command("compress"), " lists the methods."});
  }
  if (request.sources.chosen("rows") && !request.compare) {
    fail(ErrorCode::kUsage, {setting("rows"), " needs ", setting("report")}, "it says how many rows are compared",
         {"Add ", setting("report"), ", or leave it out."});
  }
  parse_cache_method(request.settings.method);
}

InputRequest input_of(const Settings& settings) {
  if (!settings.input.empty()) return file_input(settings);
  return synthetic_input(settings, Op::kAttention, settings.seq.front());
}

// The jobs over the cache before and after. A file without queries has no jobs.
std::optional<std::pair<JobInput, JobInput>> jobs_of(const FileOpRequest& request) {
  const Settings& settings = request.settings;
  FileInput after{request.output};
  if (!settings.input.empty()) {
    if (!SafetensorsFile(request.output).contains("q")) return std::nullopt;
    after.order = settings.order;
  }
  const Numerics numerics = numerics_of(settings);
  return std::pair(JobInput(input_of(settings), numerics), JobInput(after, numerics));
}

std::string share(std::int64_t part, std::int64_t whole) {
  return fmt::format("{:.4f}", whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0);
}

// The compressed tensors, by name.
std::vector<std::pair<std::string_view, const CompressedFigures*>> tensors_of(const CompressResult& result) {
  if (result.latent) return {{"latent", &*result.latent}};
  return {{"k", &result.k}, {"v", &result.v}};
}

// The device on which values were quantized and times were measured.
std::string coder(const CompressResult& result) {
  return result.quantized_on.empty() ? cpu_model() : result.quantized_on;
}

FileOpTable figures_table(const CompressResult& result, int threads) {
  FileOpTable table;
  table.columns = {{"tensor", "", ""},          {"before", "(bytes)", ""}, {"after", "(bytes)", ""},
                   {"removed", "(share)", ""},  {"tables", "(bytes)", ""}, {"energy", "of factors", ""},
                   {"change", "(rms/rms)", ""}, {"compress", "(ms)", ""},  {"decompress", "(ms)", ""}};
  for (const auto& [name, figures] : tensors_of(result)) {
    const bool coded = !figures->format.is_plain();  // otherwise the kept tokens are unchanged
    table.rows.push_back(
        {std::string(name), fmt::format("{}", figures->bytes_before), fmt::format("{}", figures->bytes_after),
         share(figures->bytes_before - figures->bytes_after, figures->bytes_before),
         fmt::format("{}", figures->table_bytes),
         figures->format.rank > 0 ? fmt::format("{:.6f}", figures->energy_kept) : "-",
         coded ? fmt::format("{:.3e}", figures->error) : "-", fmt::format("{:.3f}", 1e3 * figures->compress_seconds),
         fmt::format("{:.3f}", 1e3 * figures->decompress_seconds)});
  }
  if (result.position_bytes > 0)
    table.notes.push_back(fmt::format("plus {} bytes of positions", result.position_bytes));
  std::string times =
      fmt::format("times: {}, {}", coder(result), counted(static_cast<std::uint64_t>(threads), "thread"));
  if (result.evict_seconds > 0.0)
    times += fmt::format("; tokens were evicted in {:.3f} ms", 1e3 * result.evict_seconds);
  table.notes.push_back(std::move(times));
  return table;
}

FileOpTable change_table(const OutputChange& change) {
  FileOpTable table;
  table.columns = {
      {"rows", "", ""}, {"change of O", "(rms/rms)", ""}, {"greatest", "of an O", ""}, {"greatest", "of an LSE", ""}};
  table.rows = {{fmt::format("{}", change.rows), fmt::format("{:.3e}", change.relative_error),
                 fmt::format("{:.3e}", change.greatest), fmt::format("{:.3e}", change.greatest_lse)}};
  if (change.emptied > 0) table.notes.push_back(fmt::format("rows that no longer see a token: {}", change.emptied));
  return table;
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

void write_result(JsonWriter& json, const std::string& method, const CompressResult& result,
                  const std::optional<OutputChange>& change, int threads) {
  json.member("method", method).member("tokens", result.tokens);
  json.member("kept_tokens", result.kept).member("position_bytes", result.position_bytes);
  json.member("bytes_before", result.bytes_before()).member("bytes_after", result.bytes_after());
  json.member("evict_seconds", result.evict_seconds);
  json.member("quantized_on", coder(result)).member("threads", threads);
  for (const auto& [name, figures] : tensors_of(result)) {
    json.key(name);
    write_figures(json, *figures);
  }
  json.key("out");
  if (!change) {
    json.null();
    return;
  }
  json.begin_object().member("rows", change->rows).member("relative_error", change->relative_error);
  json.member("greatest", change->greatest).member("greatest_lse", change->greatest_lse);
  json.member("emptied", change->emptied).end_object();
}

FileOpResult run(const FileOpRequest& request) {
  check(request);
  const Settings& settings = request.settings;
  CompressJob job;
  job.input = input_of(settings);
  job.output = request.output;
  job.replace = request.replace;
  job.method = parse_cache_method(settings.method);
  job.ratio = settings.ratio;
  job.compared = request.compare;
  job.numerics = numerics_of(settings);
  job.threads = request.threads;
  const CompressResult result = compress_file(job);
  FileOpResult done;
  done.unread = result.unread;
  if (const auto& eviction = job.method.eviction) {
    done.lines.push_back(fmt::format("{} of {} tokens kept; {}", result.kept, result.tokens, describe(*eviction)));
  }
  std::string formats;
  for (const auto& [name, figures] : tensors_of(result)) {
    formats += fmt::format("{}{}: {}", formats.empty() ? "" : ", ", name, describe(figures->format));
  }
  done.lines.push_back(fmt::format("{}; {} tokens{}", formats, result.kept,
                                   result.quantized_on.empty() ? "" : "; coded on " + result.quantized_on));
  done.lines.push_back(fmt::format("{} become {}: {} of the bytes are removed",
                                   format_bytes(static_cast<double>(result.bytes_before())),
                                   format_bytes(static_cast<double>(result.bytes_after())),
                                   share(result.bytes_before() - result.bytes_after(), result.bytes_before())));
  std::optional<OutputChange> change;
  if (request.compare) {
    if (const auto jobs = jobs_of(request)) {
      change = output_change(jobs->first, jobs->second, request.rows, request.threads);
    } else {
      done.lines.emplace_back("the file has no q: no rows of O to compare");
    }
  }
  done.tables.push_back(figures_table(result, request.threads));
  if (change) done.tables.push_back(change_table(*change));
  done.write = [=, method = settings.method, threads = request.threads](JsonWriter& json) {
    write_result(json, method, result, change, threads);
  };
  return done;
}

}  // namespace

extern const FileOpEntry kCompressOp;
const FileOpEntry kCompressOp{.name = "compress", .check = check, .run = run};

}  // namespace ringattn
