// SPDX-License-Identifier: Apache-2.0
// Subcommands of ops that convert one file to another: `ringattn compress`, `ringattn quantize`.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/host.hpp"
#include "base/json_writer.hpp"
#include "launch/commands.hpp"
#include "launch/job_request.hpp"
#include "launch/job_text.hpp"
#include "launch/outputs.hpp"
#include "launch/report.hpp"
#include "launch/screen.hpp"
#include "launch/table.hpp"

namespace ringattn {

namespace {

void print_tables(const Screen& screen, const std::vector<FileOpTable>& tables, bool quiet) {
  for (const FileOpTable& table : tables) {
    std::vector<Table::Column> columns;
    for (const Cell& column : table.columns) columns.push_back({column.title, column.unit});
    Table shown(std::move(columns));
    for (const std::vector<std::string>& cells : table.rows) shown.add(cells);
    screen.print(shown.text(!quiet));
    for (const std::string& note : table.notes) screen.context(note);
  }
}

}  // namespace

int file_op_main(const Invocation& invocation, Transport*) {
  const Config& config = invocation.config;
  const JobOptions& options = config.options;
  const FileOpEntry& op = **std::ranges::find(file_op_table(), invocation.arguments.at(1), &FileOpEntry::name);
  if (!op.synthetic && !config.given("input")) {
    fail(ErrorCode::kUsage, "--input is missing", "it names the model that is read", "Try --input model.safetensors.");
  }
  check_source(config, true);
  FileOpRequest request{options, config, options.output, options.force, options.compression_report, options.rows};
  request.threads = options.threads > 0 ? options.threads : usable_processors().count;
  op.check(request);
  if (!config.given("output")) {
    fail(ErrorCode::kUsage, "--output is missing", "it names the file that is written",
         fmt::format("Try --output {}.", op.output_example));
  }
  check_outputs(invocation, op.check_output);
  const Screen screen(options, true);
  const FileOpResult result = op.run(request);
  print_unread(screen, result.unread);
  for (const std::string& line : result.lines) screen.context(line);
  if (options.compression_report || !options.quiet) print_tables(screen, result.tables, options.quiet);
  screen.context(fmt::format("output: {}", options.output));
  JsonWriter json;
  json.begin_object();
  write_document_head(json, op.name, invocation);
  result.write(json);
  invocation.report_file->write(std::string(json.key("error").null().end_object().text()));
  return 0;
}

}  // namespace ringattn
