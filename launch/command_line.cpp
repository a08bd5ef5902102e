// SPDX-License-Identifier: Apache-2.0
// The only file that includes CLI11, which is used only to split the arguments into flags and their texts. Its config
// files and its number conversion are not used: the former override environment variables, and the latter wraps around
// (`--memory -1`).
#include "launch/command_line.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iterator>

#include "base/error.hpp"
#include "launch/commands.hpp"
#include "launch/other_spellings.hpp"

namespace ringattn {

namespace {

std::string flag_name(const FlagRow& row) {
  return row.letter != 0 ? fmt::format("-{},--{}", row.letter, row.name) : fmt::format("--{}", row.name);
}

// The command's flag with this name, or null. `plan` has --world where other commands have --ranks: both names find
// either flag.
const FlagRow* flag_or_counterpart(unsigned command, std::string_view name) {
  const std::string_view counterpart = name == "ranks" ? "world" : name == "world" ? "ranks" : name;
  for (const FlagRow* row : flags_of(command)) {
    if (row->name == name || row->name == counterpart) return row;
  }
  return nullptr;
}

// The suggestion for a flag that only other programs have. Empty if kOtherSpellings does not list the name.
std::string suggestion_for(unsigned command, std::string_view other) {
  const auto* const found = std::ranges::find(kOtherSpellings, other, &OtherSpelling::other);
  if (found == std::end(kOtherSpellings)) return {};
  const FlagRow* const row = flag_or_counterpart(command, found->flag);
  if (row == nullptr) {  // only other commands have the flag
    unsigned elsewhere = 0;
    for (const FlagRow& other_row : flag_table()) {
      if (other_row.name == found->flag) elsewhere |= other_row.commands;
    }
    return elsewhere == 0 ? "" : fmt::format("--{} belongs to {}.", found->flag, command_names(elsewhere));
  }
  const std::string_view note = row->name == found->flag ? found->note : std::string_view();
  return fmt::format("Use --{} {}.{}{}", row->name, row->value, note.empty() ? "" : " ", note);
}

[[noreturn]] void refuse_unknown(unsigned command, std::string_view command_name, std::string_view argument) {
  const std::string help = fmt::format("See `ringattn {} --help`.", command_name);
  if (!argument.starts_with("-") || argument == "-") {
    fail(ErrorCode::kUsage, fmt::format("\"{}\" belongs to no flag", argument), "all values follow a flag", help);
  }
  const std::string_view name = argument.substr(argument.starts_with("--") ? 2 : 1);
  const std::string_view stem = name.substr(0, name.find('='));
  std::vector<std::string_view> here;
  unsigned elsewhere = 0;
  for (const FlagRow& row : flag_table()) {
    if ((row.commands & command) != 0) {
      here.push_back(row.name);
    } else if (row.name == stem) {
      elsewhere |= row.commands;
    }
  }
  if (elsewhere != 0) {
    const FlagRow* const same = flag_or_counterpart(command, stem);
    fail(ErrorCode::kUsage, fmt::format("--{} is not a flag of {}", stem, command_name),
         fmt::format("it belongs to {}", command_names(elsewhere)),
         same != nullptr ? fmt::format("Did you mean --{}?", same->name) : help);
  }
  const std::string nearest = nearest_name(stem, here.data(), here.size());
  const std::string suggestion = suggestion_for(command, stem);
  fail(ErrorCode::kUsage, fmt::format("unknown flag {}", argument.substr(0, argument.find('='))),
       fmt::format("{} has no flag of that name", command_name),
       !suggestion.empty() ? suggestion
       : nearest.empty()   ? help
                           : fmt::format("Did you mean --{}?", nearest));
}

// Refuses flags without a value. CLI11 would take the next argument as the value, even if it is a flag, and would
// accept "--flag=".
void check_values(unsigned command, std::string_view command_name, const std::vector<std::string>& arguments) {
  const std::vector<const FlagRow*> rows = flags_of(command);
  const auto flag_of = [&](std::string_view text) -> const FlagRow* {
    const auto matches = [&](const FlagRow* row) {
      return (row->letter != 0 && text == std::string{'-', row->letter}) ||
             (text.starts_with("--") && text.substr(2, text.find('=') - 2) == row->name);
    };
    const auto found = std::find_if(rows.begin(), rows.end(), matches);
    return found == rows.end() ? nullptr : *found;
  };
  const auto is_flag = [&](std::string_view text) {
    return text == "-h" || text == "--help" || flag_of(text) != nullptr;
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    const std::size_t equals = argument.find('=');
    const FlagRow* row = flag_of(argument);
    if (row == nullptr || row->kind == FlagKind::kSwitch) continue;
    const bool has_equals = equals != std::string_view::npos;
    const bool empty =
        has_equals ? equals + 1 == argument.size() : i + 1 == arguments.size() || is_flag(arguments[i + 1]);
    if (empty) {
      fail(ErrorCode::kUsage, fmt::format("--{} has no value", row->name), "it takes one",
           fmt::format("See `ringattn {} --help`.", command_name));
    }
    if (!has_equals) ++i;
  }
}

}  // namespace

CommandLine split_command_line(unsigned command, std::string_view command_name,
                               const std::vector<std::string>& arguments) {
  check_values(command, command_name, arguments);
  CommandLine line;
  const std::vector<const FlagRow*> rows = flags_of(command);
  std::vector<std::vector<std::string>> texts(rows.size());

  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  app.add_flag("-h,--help", line.help);
  std::vector<CLI::Option*> options;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string name = flag_name(*rows[i]);
    if (rows[i]->kind == FlagKind::kSwitch) {
      options.push_back(app.add_flag(name, texts[i]));
    } else {
      options.push_back(app.add_option(name, texts[i])->expected(1)->allow_extra_args(false));
    }
    options.back()->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  }

  try {
    std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // parse() takes them in reverse order
    app.parse(reversed);
  } catch (const CLI::ParseError& error) {
    fail(ErrorCode::kUsage, "the arguments can't be read", error.what(),
         fmt::format("See `ringattn {} --help`.", command_name));
  }
  if (line.help) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const bool chooses_op = rows[i]->name == "op" || rows[i]->name == "backward";
      if (chooses_op && options[i]->count() == 1) line.flags.push_back({rows[i], texts[i].front()});
    }
    return line;
  }
  for (const std::string& extra : app.remaining()) refuse_unknown(command, command_name, extra);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t count = options[i]->count();
    if (count == 0) continue;
    if (count > 1 || texts[i].size() != 1) {
      fail(ErrorCode::kUsage, fmt::format("--{} is given {} times", rows[i]->name, std::max(count, texts[i].size())),
           "one value would be ignored", "Give it once.");
    }
    line.flags.push_back({rows[i], texts[i].front()});
  }
  return line;
}

}  // namespace ringattn
