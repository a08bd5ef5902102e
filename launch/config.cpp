// SPDX-License-Identifier: Apache-2.0
#include "launch/config.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "base/size.hpp"
#include "base/text_file.hpp"
#include "io/flat_table.hpp"
#include "launch/commands.hpp"
#include "launch/op_flags.hpp"
#include "ops/common/values.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kPrefix[] = {"RINGATTN_"};

// The row of `key` that serves `command`, or else any row of that key, or null.
const FlagRow* find_flag(std::string_view key, unsigned command) {
  const FlagRow* elsewhere = nullptr;
  for (const FlagRow& row : flag_table()) {
    if (row.key() != key) continue;
    if ((row.commands & command) != 0) return &row;
    elsewhere = &row;
  }
  return elsewhere;
}

// "Try --seq 16k, the default.", in the syntax of the layer that `origin` names.
std::string suggested_value(const FlagRow& row, Source source, std::string_view origin) {
  const bool is_switch = row.kind == FlagKind::kSwitch;
  const bool example = is_switch || !row.example.empty();
  const std::string_view value = is_switch ? "on" : example ? row.example : row.fallback;
  const std::string_view what = example ? "for example" : "the default";
  if (source == Source::kEnvironment) return fmt::format("Try {}={}, {}.", origin, value, what);
  if (source == Source::kFile) return fmt::format("Try {} = {}, {}.", row.key(), toml_quoted(value), what);
  if (is_switch) return fmt::format("Give --{} alone, or leave it out.", row.name);
  return fmt::format("Try --{} {}, {}.", row.name, value, what);
}

// Stores `text` in `options` and `value`. `origin` names it in messages: "--mask", "RINGATTN_MASK", "mask in job.toml".
void apply(Config& config, const FlagRow& row, const std::string& text, Source source, std::string_view origin) {
  try {
    row.apply(config.options, text);
  } catch (const BadValue& bad) {
    fail(ErrorCode::kUsage, fmt::format("{} is \"{}\"", origin, text), fmt::format("it takes {}", bad.accepted),
         bad.suggestion.empty() ? suggested_value(row, source, origin) : bad.suggestion);
  }
  for (ConfigValue& value : config.values) {
    if (value.row != &row) continue;
    value.source = source;
    const auto size = row.kind == FlagKind::kSize ? parse_size(text) : std::nullopt;
    value.text = size ? fmt::format("{}", *size) : text;
    if (row.kind == FlagKind::kSwitch) value.text = parse_switch(text) ? "true" : "false";
  }
}

// In the environment and the config file, a flag of another command with the same name may have a key of its own.
// Throws kUsage if `text`, the value of `key` there, is one of the words of that other flag: with `output = "csv"` a
// user asks `bench` for CSV, and `run` would write a file named csv.
void check_meaning(unsigned command, std::string_view key, std::string_view text, Source source,
                   std::string_view origin) {
  const auto named = [key](const FlagRow& row) { return row.name == key; };
  if (std::ranges::none_of(flags_of(command), [&](const FlagRow* row) { return named(*row); })) return;
  for (const FlagRow& row : flag_table()) {
    if (!named(row) || row.key() == key || !row.lists(text)) continue;
    const std::string own =
        source == Source::kEnvironment ? environment_variable(row.key()) : fmt::format("the key {}", row.key());
    fail(ErrorCode::kUsage, fmt::format("{} is \"{}\"", origin, text),
         fmt::format("{} is a value of --{} of {}, which {} sets", text, row.name, command_names(row.commands), own),
         fmt::format("Set {}; a file of this name is ./{}.", own, text));
  }
}

void check_environment_names(std::span<const EnvironmentEntry> entries) {
  // The common prefix is removed, because it would make all names look alike.
  const auto stem = [](const std::string& name) { return name.substr(kPrefix[0].size()); };
  std::vector<std::string> known;
  for (const FlagRow& row : flag_table()) known.push_back(stem(environment_variable(row.key())));
  for (const EnvironmentVariable& variable : environment_table()) known.push_back(stem(std::string(variable.name)));
  const std::vector<std::string_view> names(known.begin(), known.end());
  for (const EnvironmentEntry& entry : entries) {
    const std::string name = stem(entry.name);
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    const std::string nearest = nearest_name(name, names.data(), names.size());
    fail(ErrorCode::kUsage, fmt::format("unknown environment variable {}", entry.name),
         "every RINGATTN_ variable must mean something",
         nearest.empty() ? fmt::format("Unset it; `env -u {} ringattn info` lists those that do.", entry.name)
                         : fmt::format("Did you mean {}{}?", kPrefix[0], nearest));
  }
}

// Whether the value is a default that --print-config wrote into the config file, perhaps for another op than this one.
bool is_printed_default(const ConfigValue& value) {
  if (value.source != Source::kFile) return false;
  if (value.row->kind == FlagKind::kSize) return parse_size(value.text) == parse_size(value.row->fallback);
  if (value.row->kind == FlagKind::kSwitch) return (value.text == "true") == (value.row->fallback == "on");
  return value.text == value.row->fallback;
}

bool is_toml_number(std::string_view text) {
  try {
    parse_integer(text, std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
    return true;
  } catch (const BadValue&) {
    return false;
  }
}

}  // namespace

std::string_view source_name(Source source) {
  switch (source) {
    case Source::kDefault:
      return "default";
    case Source::kModel:
      return "model config";
    case Source::kFile:
      return "config file";
    case Source::kEnvironment:
      return "environment";
    case Source::kFlag:
      return "flag";
  }
  return "default";
}

const ConfigValue& Config::value(std::string_view flag) const {
  for (const ConfigValue& candidate : values) {
    if (candidate.row->name == flag) return candidate;
  }
  static const ConfigValue absent;  // a flag that this subcommand doesn't have is never given
  return absent;
}

bool Config::chosen(std::string_view flag) const { return given(flag) && !is_printed_default(value(flag)); }

std::string Config::origin(std::string_view flag) const {
  const Source source = value(flag).source;
  return source == Source::kFlag ? fmt::format("--{}", flag) : fmt::format("--{} ({})", flag, source_name(source));
}

std::vector<GivenFlag> read_config_text(unsigned command, std::string_view text, std::string_view name) {
  std::vector<std::string_view> keys;
  for (const FlagRow& row : flag_table()) {
    if (row.name != "config") keys.push_back(row.key());
  }
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string_view::npos && text[first] == '{' && text.find("\"model_type\"") != std::string_view::npos) {
    fail(ErrorCode::kUsage, fmt::format("{} is a model's config.json", name),
         "a config file is TOML, with flags as keys", {"Use ", setting("model_config", std::string(name)), "."});
  }
  std::vector<GivenFlag> given;
  for (FlatEntry& entry : parse_toml_table(text, name, ErrorCode::kUsage)) {
    if (entry.key == "config") {
      fail(ErrorCode::kUsage, fmt::format("{}, line {}: {} is set", name, entry.line, entry.key),
           "a config file can't name another", "Put all keys into one file.");
    }
    const FlagRow* row = find_flag(entry.key, command);
    if (row == nullptr) {
      const std::string nearest = nearest_name(entry.key, keys.data(), keys.size());
      fail(ErrorCode::kUsage, fmt::format("{}, line {}: there is no key {}", name, entry.line, entry.key),
           "keys are the long flags, without the dashes in front; --help names those that differ",
           nearest.empty() ? "The subcommands' --help lists them." : fmt::format("Did you mean {}?", nearest));
    }
    given.push_back({row, std::move(entry.text)});
  }
  return given;
}

Config load_config(unsigned command, const std::vector<GivenFlag>& flags) {
  const auto here = [&](const FlagRow* row) { return (row->commands & command) != 0; };
  Config config;
  for (const FlagRow* row : flags_of(command)) config.values.push_back({row, "", Source::kDefault});
  for (const FlagRow* row : flags_of(command)) {
    if (!row->fallback.empty()) apply(config, *row, std::string(row->fallback), Source::kDefault, row->name);
  }

  const std::vector<EnvironmentEntry> variables = environment_entries(kPrefix);
  check_environment_names(variables);
  environment();

  std::string file;
  if (const auto variable_name = environment_value(environment_variable("config"))) file = *variable_name;
  for (const GivenFlag& flag : flags) {
    if (flag.row->name == "config") file = flag.text;
  }
  if (!file.empty()) {
    for (const GivenFlag& entry : read_config_text(command, read_text_file(file), file)) {
      const std::string origin = fmt::format("{} in {}", entry.row->key(), file);
      check_meaning(command, entry.row->key(), entry.text, Source::kFile, origin);
      if (here(entry.row)) apply(config, *entry.row, entry.text, Source::kFile, origin);
    }
  }
  for (const FlagRow* row : flags_of(command)) {
    const std::string shared_name = environment_variable(row->name);
    if (const auto text = environment_value(shared_name))
      check_meaning(command, row->name, *text, Source::kEnvironment, shared_name);
    const std::string variable_name = environment_variable(row->key());
    if (const auto text = environment_value(variable_name))
      apply(config, *row, *text, Source::kEnvironment, variable_name);
  }
  for (const GivenFlag& flag : flags) {
    apply(config, *flag.row, flag.text, Source::kFlag, fmt::format("--{}", flag.row->name));
  }
  return config;
}

void fill_value(Config& config, std::string_view flag, const std::string& text, Source source,
                std::string_view origin) {
  if (const FlagRow* const row = config.value(flag).row) apply(config, *row, text, source, origin);
}

bool comes_from_input(const Config& config, const ConfigValue& value) {
  const FlagRow& row = *value.row;
  const bool of_model = row.name == "model-config" || row.name == "layer";
  return config.given("input") && row.group == FlagGroup::kShape && !of_model && !config.given(row.name);
}

std::string print_config(const Config& config, const InputShape* shape) {
  std::string text;
  const OpEntry& op = op_entry(shape != nullptr ? shape->at("op") : config.options.op);
  for (const ConfigValue& value : config.values) {
    const std::string_view name = value.row->name, key = value.row->key();
    if (name == "config" || name == "print-config") continue;  // they would act again when the file is read
    if (comes_from_input(config, value)) {
      const auto said = shape == nullptr ? InputShape::const_iterator() : shape->find(name);
      text += shape == nullptr       ? fmt::format("# {} comes from the input\n", name)
              : said == shape->end() ? fmt::format("# {} is not given by the input\n", name)
                                     : fmt::format("# {} = {} comes from the input\n", name, said->second);
      continue;
    }
    if (value.text.empty()) {
      text += fmt::format("# {} is not set\n", key);
      continue;
    }
    if (!config.given(name) && !belongs_to(*value.row, op)) {
      text += fmt::format("# {} does not belong to --op {}\n", name, op.name);
      continue;
    }
    const bool bare =
        value.row->kind == FlagKind::kSwitch || (value.row->kind != FlagKind::kText && is_toml_number(value.text));
    text += fmt::format("{} = {}  # {}\n", key, bare ? value.text : toml_quoted(value.text), source_name(value.source));
  }
  if (config.options.model_sinks && !config.options.sinks) {
    text += config.given("input") ? "# sinks are those of the input\n"
                                  : "# sinks of the model's layer are not generated: a logit for each query head\n";
  }
  return text;
}

std::string config_difference(const std::string& mine, const std::string& other) {
  std::size_t at = 0;
  while (at < mine.size() && at < other.size() && mine[at] == other[at]) ++at;
  const auto value = [at](const std::string& text) {
    const std::size_t begin = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;
    const std::string line = text.substr(begin, text.find('\n', begin) - begin);
    if (line.starts_with("# ")) return fmt::format("--{}", line.substr(2));  // a flag without a value
    const std::size_t equals = line.find(" = ");
    const std::size_t source = line.rfind("  # ");
    if (equals == std::string::npos || source == std::string::npos) return line;
    return fmt::format("--{} {} ({})", line.substr(0, equals), line.substr(equals + 3, source - equals - 3),
                       line.substr(source + 4));
  };
  return fmt::format("{} against {}", value(mine), value(other));
}

}  // namespace ringattn
