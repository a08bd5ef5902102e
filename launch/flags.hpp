// SPDX-License-Identifier: Apache-2.0
// The table of flags. A flag is one row, and the row defines all its layers: the long flag on the command line, its
// environment variable RINGATTN_KEY, its key in a config file, and its line in --help. A config file and the
// environment serve all commands, so a key has one meaning. A flag that means something else in another command has its
// own key there. Settings that only one op has are rows of that op's entry (ops/jobs/op_entry.hpp). Tests iterate over
// the table.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/options.hpp"
#include "ops/jobs/op_entry.hpp"

namespace ringattn {

// Bits of FlagRow::commands.
inline constexpr unsigned kRun = 1;
inline constexpr unsigned kVerify = 2;
inline constexpr unsigned kPlan = 4;
inline constexpr unsigned kInfo = 8;
inline constexpr unsigned kBench = 16;
inline constexpr unsigned kCompress = 32;
inline constexpr unsigned kJobs = kRun | kVerify | kPlan | kBench;
inline constexpr unsigned kQuantize = 128;
inline constexpr unsigned kAllCommands = kJobs | kInfo | kCompress | kQuantize;
inline constexpr unsigned kLaunch = 64;       // has options of its own (launch/launcher), and no flags
inline constexpr unsigned kCollectEnv = 256;  // has no flags

enum class FlagGroup {
  kInput,
  kShape,
  kNumerics,
  kCompression,
  kQuantization,
  kParallelism,
  kOutput,
  kFailure,
  kVerification,
  kMeasurement
};
inline constexpr std::string_view kGroupTitles[] = {"Input",        "Shape of synthetic input",
                                                    "Numerics",     "Compression",
                                                    "Quantization", "Parallelism",
                                                    "Output",       "Failure",
                                                    "Verification", "Measurement"};

using FlagKind = SettingKind;

struct FlagRow {
  std::string_view name;  // without the dashes
  char letter;            // short flag, or 0
  unsigned commands;
  bool of_all_ops;  // true: all ops have it; false: ops whose entry lists it. Commands without an op always accept it
  FlagGroup group;
  FlagKind kind;
  std::string_view value;     // what --help shows after the flag; empty for a switch
  std::string_view fallback;  // the default, as text that `set` takes; empty: unset
  std::string_view help;
  void (*set)(JobOptions& options, std::string_view text);
  std::string_view example = {};    // shown in messages if there is no default, or if the default is no helpful example
  bool beside_input = false;        // a flag of the shape that may be given together with an input file
  std::string_view off = {};        // the value that leaves the setting out
  const SettingRow* own = nullptr;  // a setting of one op, for which `set` is not used
  std::string_view own_key = {};    // the key if it differs from the name

  std::string_view key() const { return own_key.empty() ? name : own_key; }
  // Returns true if `text` is one of the words that `value` lists, as csv is of "table|md|csv|jsonl".
  bool lists(std::string_view text) const;
  // Stores a value; throws BadValue.
  void apply(JobOptions& options, std::string_view text) const;
};

std::span<const FlagRow> flag_table();

// The rows of one subcommand.
std::vector<const FlagRow*> flags_of(unsigned command);

// "RINGATTN_SOFTMAX_SCALE" for "softmax-scale".
std::string environment_variable(std::string_view key);

}  // namespace ringattn
