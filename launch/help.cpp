// SPDX-License-Identifier: Apache-2.0
#include "launch/help.hpp"

#include <fmt/format.h>

#include <iterator>

#include "base/build.hpp"
#include "launch/collect_env.hpp"
#include "launch/launcher/launcher.hpp"
#include "launch/op_flags.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kHelpColumn = 34;
constexpr std::size_t kWidth = 110;

constexpr std::string_view kExitCodes =
    "Exit codes, the same on every rank:\n"
    "  0  done\n"
    "  1  wrong result, or a difference\n"
    "  2  usage: flags, environment, config file, or ranks that were given different ones\n"
    "  3  a file is missing, malformed, unwritable, or exists\n"
    "  4  can't be done here: forced kernel, missing device or library, ranks with different programs or machines\n"
    "  5  memory: budget or device too small\n"
    "  6  a peer failed, or a wait was too long\n"
    "  7  a bug\n";

// Appends `text`, wrapped at spaces, and a line break. The text begins at column `indent`, and continuation lines are
// indented to it.
void append_wrapped(std::string& target, std::string_view text, std::size_t indent) {
  std::size_t column = indent;
  bool first = true;
  while (!text.empty()) {
    const std::size_t space = text.find(' ');
    const std::string_view word = text.substr(0, space);
    if (!first && column + 1 + word.size() > kWidth) {
      target += '\n';
      target.append(indent, ' ');
      column = indent;
      first = true;
    }
    if (!first) {
      target += ' ';
      ++column;
    }
    target += word;
    column += word.size();
    first = false;
    text.remove_prefix(space == std::string_view::npos ? text.size() : space + 1);
  }
  target += '\n';
}

void append_flag(std::string& target, const FlagRow& row) {
  std::string left =
      row.letter != 0 ? fmt::format("  -{}, --{}", row.letter, row.name) : fmt::format("      --{}", row.name);
  if (!row.value.empty()) left += fmt::format(" {}", row.value);
  target += left;
  if (left.size() + 2 > kHelpColumn) {
    target += '\n';
    target.append(kHelpColumn, ' ');
  } else {
    target.append(kHelpColumn - left.size(), ' ');
  }
  const bool show_default = !row.fallback.empty() && row.kind != FlagKind::kSwitch;
  std::string help(row.help);
  if (show_default) help += fmt::format(" [{}]", row.fallback);
  if (!row.own_key.empty()) {
    help += fmt::format("; in a config file {}, in the environment {}", row.own_key, environment_variable(row.own_key));
  }
  append_wrapped(target, help, kHelpColumn);
}

}  // namespace

std::string command_help(const CommandRow& command, const OpEntry* op) {
  const bool jobs = (command.bit & kJobs) != 0;
  std::string text;
  if (op != nullptr) {
    text = fmt::format("ringattn {} --op {}: {}.\n\nTensors of --input:\n", command.name, op->name, op->help);
    for (const OpTensor& tensor : op->tensors) {
      text += fmt::format("  {:<16}{}{}\n", tensor.name, tensor.axes, tensor.optional ? ", optional" : "");
    }
    for (const std::string_view line : op->tensor_notes) text += fmt::format("  {}\n", line);
  } else {
    text = "Examples:\n";
    for (const std::string_view example : command.examples) text += fmt::format("  {}\n", example);
    text += fmt::format("\nringattn {}: {}.\n", command.name, command.summary);
    append_wrapped(text, command.description, 0);
  }
  if (jobs && op == nullptr) {
    text +=
        fmt::format("\nOps, each with flags and tensors of its own (`ringattn {} --op NAME --help`):\n", command.name);
    std::size_t width = 0;
    for (const OpEntry* row : op_table()) width = std::max(width, row->name.size());
    for (const OpEntry* row : op_table()) text += fmt::format("  {:<{}}  {}\n", row->name, width, row->help);
  }
  for (std::size_t group = 0; group < std::size(kGroupTitles); ++group) {
    bool titled = false;
    for (const FlagRow* row : flags_of(command.bit)) {
      if (static_cast<std::size_t>(row->group) != group) continue;
      const bool shared = row->of_all_ops;
      if (op != nullptr ? shared || !belongs_to(*row, *op) : jobs && !shared) continue;
      if (!titled) text += fmt::format("\n{}:\n", kGroupTitles[group]);
      titled = true;
      append_flag(text, *row);
    }
  }
  if (op != nullptr) {
    return text + fmt::format("\n`ringattn {} --help` shows the flags that all ops share.\n", command.name);
  }
  text +=
      "\nSizes take the suffixes k, m, g = 1024, 1024^2, 1024^3, in tokens and bytes. Defaults are in brackets.\n"
      "Each long flag is also an environment variable, RINGATTN_ and its name in capitals with _ for -, and a key of\n"
      "the config file. Flags beat the environment, the environment beats the config file.\n\n";
  text += kExitCodes;
  return text;
}

std::string program_help() {
  std::string text = "Examples:\n";
  for (const std::string_view example : command_table()[0].examples) text += fmt::format("  {}\n", example);
  text +=
      "\nringattn: exact attention over long contexts, with the same bits on one rank and on many.\n\nSubcommands:\n";
  for (const CommandRow& command : command_table()) text += fmt::format("  {:<13}{}\n", command.name, command.summary);
  text += fmt::format("  {:<13}{}\n", kLaunchCommand, kLaunchSummary);
  text += fmt::format("  {:<13}{}\n", kCollectEnvCommand, kCollectEnvSummary);
  text += "\n`ringattn SUBCOMMAND --help` shows its flags, `ringattn --version` the version.\n\n";
  text += kExitCodes;
  return text;
}

std::string version_line() {
  return fmt::format("ringattn {} (git {}{}, {}, {})\n", version(), git_revision(), git_dirty() ? "-dirty" : "",
                     compiler(), build_type().empty() ? "custom build" : build_type());
}

}  // namespace ringattn
