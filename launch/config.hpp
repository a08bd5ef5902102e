// SPDX-License-Identifier: Apache-2.0
// The layers of a configuration, each of which overrides the next ones: flags, the environment, the config file, values
// from a model's config (model_layer.hpp), defaults. The values of every layer are read and checked, even those that a
// higher layer replaces.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/command_line.hpp"
#include "launch/flags.hpp"
#include "launch/options.hpp"
#include "ops/common/job_share.hpp"
#include "ops/jobs/op_entry.hpp"
#include "ops/jobs/op_job.hpp"

namespace ringattn {

enum class Source { kDefault, kModel, kFile, kEnvironment, kFlag };
std::string_view source_name(Source source);  // "default", "model config", "config file", "environment", "flag"

struct ConfigValue {
  const FlagRow* row = nullptr;
  std::string text;  // sizes in full digits; empty: unset
  Source source = Source::kDefault;
};

struct Config : SettingSources {
  JobOptions options;
  std::vector<ConfigValue> values;  // one per flag of the subcommand, in the table's order
  // What the ranks of this process share of the job's input.
  std::shared_ptr<JobShare> share = std::make_shared<JobShare>();

  const ConfigValue& value(std::string_view flag) const;
  // Whether the user gave the flag a value, in any layer.
  bool given(std::string_view flag) const override { return value(flag).source > Source::kModel; }
  // Whether the user chose it. A default that --print-config wrote into the config file is not a choice.
  bool chosen(std::string_view flag) const override;
  // "--seq (environment)", for messages.
  std::string origin(std::string_view flag) const;
};

// Merges the layers. Throws kUsage for a value that its flag doesn't accept, an unknown RINGATTN_ variable or key, and
// kFile if the config file can't be read.
Config load_config(unsigned command, const std::vector<GivenFlag>& flags);

// Gives a flag of the subcommand a value that no user gave. Does nothing if the subcommand has no such flag. `origin`
// names the value in messages. Throws kUsage for a value that the flag doesn't accept.
void fill_value(Config& config, std::string_view flag, const std::string& text, Source source, std::string_view origin);

// Reads only the config file's layer, from its text: (flag, value) pairs. Throws kUsage.
std::vector<GivenFlag> read_config_text(unsigned command, std::string_view text, std::string_view name);

// Valid TOML that --config reads back, each value with its source in a comment. `shape`: the shape of the input, if it
// has been opened; it is written as comments.
std::string print_config(const Config& config, const InputShape* shape = nullptr);
// Whether the input, not a default, determines the value of a flag.
bool comes_from_input(const Config& config, const ConfigValue& value);

// The first values in which two texts of print_config differ, as in "--seq 16384 (default) against --seq 4096 (flag)".
std::string config_difference(const std::string& mine, const std::string& other);

}  // namespace ringattn
