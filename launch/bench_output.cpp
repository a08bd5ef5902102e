// SPDX-License-Identifier: Apache-2.0
#include "launch/bench_output.hpp"

#include <fmt/format.h>

#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "launch/report.hpp"

namespace ringattn {

void check_one_stdout(const Config& config) {
  const JobOptions& options = config.options;
  std::vector<std::string> flags;
  if (options.json == "-") flags.push_back(config.origin("json"));
  if (options.jsonl == "-") flags.push_back(config.origin("jsonl"));
  if (options.bench_output != BenchOutput::kTable) flags.push_back(config.origin("output"));
  if (flags.size() < 2) return;
  fail(ErrorCode::kUsage, fmt::format("{} and {} both go to stdout", flags[0], flags[1]),
       "a reader couldn't tell them apart",
       flags[1].starts_with("--output") ? fmt::format("Give {} a file, or leave --output out.", flags[0])
                                        : "Give one of them a file.");
}

void write_table(const Screen& screen, const JobOptions& options, const Table& table) {
  switch (options.bench_output) {
    case BenchOutput::kTable:
    case BenchOutput::kJsonl:  // to stderr
      return screen.print(table.text(!options.quiet));
    case BenchOutput::kMarkdown:
      return screen.print_result(table.markdown());
    case BenchOutput::kCsv:
      return screen.print_result(table.csv());
  }
}

void write_bench_report(const Invocation& invocation, std::span<const BenchPoint> points,
                        std::span<const PointPair> pairs, std::optional<double> sgemm, int code) {
  JsonWriter json;
  json.begin_object();
  write_document_head(json, "bench", invocation);
  json.key("points").begin_array();
  for (const BenchPoint& point : points) write_point(json, point, invocation.arguments);
  json.end_array().key("against").begin_array();
  for (const PointPair& pair : pairs) {
    json.begin_object().member("tokens", pair.ours.job.tokens).member("they", who(pair.theirs));
    json.member("ours_tflops", pair.ours.tflops_per_rank).member("theirs_tflops", pair.theirs.tflops_per_rank);
    json.member("ratio", pair.speed()).end_object();
  }
  json.end_array().key("sgemm_flops_per_second");
  if (sgemm) {
    json.value(*sgemm);
  } else {
    json.null();
  }
  json.member("verdict", code == 0 ? "ok" : "fail").key("error").null().end_object();
  invocation.report_file->write(json.text());
}

}  // namespace ringattn
