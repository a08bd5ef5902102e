// SPDX-License-Identifier: Apache-2.0
// The layers of a configuration, for every flag of every subcommand.
#include "launch/config.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "launch/commands.hpp"
#include "tests/cli/flag_samples.hpp"
#include "tests/support/scoped_environment.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::FlagSamples;
using testing::samples_of;
using testing::ScopedEnvironment;
using testing::TemporaryFolder;

GivenFlag given(unsigned command, std::string_view name, std::string_view text) {
  for (const FlagRow* row : flags_of(command)) {
    if (row->name == name) return {row, std::string(text)};
  }
  throw std::runtime_error("no such flag");
}

// As it stands in a config file: sizes in full digits.
std::string canonical(const FlagRow& row, std::string_view text) {
  return load_config(row.commands & -row.commands, {{&row, std::string(text)}}).value(row.name).text;
}

TEST(Layers, EveryFlagHasSamples) {
  for (const FlagRow& row : flag_table()) {
    if (row.name == "config" || row.own != nullptr) continue;  // settings of one op are tested with it
    EXPECT_NE(samples_of(row.name), nullptr) << row.name;
  }
}

TEST(Layers, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const TemporaryFolder folder;
  for (const CommandRow& command : command_table()) {
    for (const FlagRow* row : flags_of(command.bit)) {
      if (row->name == "config" || row->own != nullptr) continue;
      SCOPED_TRACE(fmt::format("{} --{}", command.name, row->name));
      const FlagSamples& samples = *samples_of(row->name, row->commands == kBench);
      const std::string line = fmt::format("{} = \"{}\"\n", row->key(), samples.values[0]);
      const std::string file = folder.write("job.toml", line);
      std::vector<GivenFlag> flags;

      const Config defaults = load_config(command.bit, {});
      EXPECT_EQ(defaults.value(row->name).source, Source::kDefault);
      EXPECT_EQ(defaults.given(row->name), false);

      flags.push_back(given(command.bit, "config", file));
      const Config from_file = load_config(command.bit, flags);
      EXPECT_EQ(from_file.value(row->name).source, Source::kFile);
      EXPECT_EQ(from_file.value(row->name).text, canonical(*row, samples.values[0]));

      const ScopedEnvironment environment(environment_variable(row->key()), std::string(samples.values[1]));
      const Config from_environment = load_config(command.bit, flags);
      EXPECT_EQ(from_environment.value(row->name).source, Source::kEnvironment);
      EXPECT_EQ(from_environment.value(row->name).text, canonical(*row, samples.values[1]));

      flags.push_back(given(command.bit, row->name, samples.values[2]));
      const Config from_flag = load_config(command.bit, flags);
      EXPECT_EQ(from_flag.value(row->name).source, Source::kFlag);
      EXPECT_EQ(from_flag.value(row->name).text, canonical(*row, samples.values[2]));
    }
  }
}

TEST(Layers, TheFileIsNamedByTheEnvironmentToo) {
  const TemporaryFolder folder;
  const ScopedEnvironment environment("RINGATTN_CONFIG", folder.write("a.toml", "heads = 32\n"));
  EXPECT_EQ(load_config(kRun, {}).options.heads, 32);
  const std::string other = folder.write("b.toml", "heads = 16\n");
  EXPECT_EQ(load_config(kRun, {given(kRun, "config", other)}).options.heads, 16);
}

TEST(Layers, AFileSharedByCommandsMayNameFlagsOfOthers) {
  const TemporaryFolder folder;
  const std::string file = folder.write("job.toml", "rows = 7\nheads = 32\n");
  EXPECT_EQ(load_config(kRun, {given(kRun, "config", file)}).options.heads, 32);
  EXPECT_EQ(load_config(kVerify, {given(kVerify, "config", file)}).options.rows, 7);
}

// A file and an environment that serve several commands: a key means one thing in all of them.
TEST(Layers, AKeyHasOneMeaning) {
  const TemporaryFolder folder;
  const std::string file = folder.write(
      "job.toml", "output = 'a.safetensors'\nbench-output = 'csv'\nagainst = 'oracle'\nbench-against = 'compute'\n");
  const Config bench = load_config(kBench, {given(kBench, "config", file)});
  EXPECT_EQ(bench.options.bench_output, BenchOutput::kCsv);
  EXPECT_EQ(bench.options.against, "compute");
  EXPECT_EQ(bench.options.output, "");
  EXPECT_EQ(load_config(kRun, {given(kRun, "config", file)}).options.output, "a.safetensors");
  EXPECT_EQ(load_config(kVerify, {given(kVerify, "config", file)}).options.against, "oracle");

  const ScopedEnvironment path("RINGATTN_OUTPUT", "b.safetensors"), format("RINGATTN_BENCH_OUTPUT", "md");
  EXPECT_EQ(load_config(kBench, {}).options.bench_output, BenchOutput::kMarkdown);
  EXPECT_EQ(load_config(kRun, {}).options.output, "b.safetensors");
  EXPECT_NE(print_config(load_config(kBench, {})).find("bench-output = \"md\"  # environment\n"), std::string::npos);
}

TEST(Layers, NumbersAndTruthAreReadFromToml) {
  const TemporaryFolder folder;
  const std::string file = folder.write(
      "job.toml",
      "seq = 4096\nsoftmax-scale = 0.125\nchecksum = true\nquery-offset = -3\nmemory = \"1g\"\ntimeout = 5\n");
  const JobOptions options = load_config(kRun, {given(kRun, "config", file)}).options;
  EXPECT_EQ(options.seq, std::vector<std::int64_t>{4096});
  EXPECT_EQ(options.softmax_scale, 0.125);
  EXPECT_TRUE(options.checksum);
  EXPECT_EQ(options.query_offset, -3);
  EXPECT_EQ(options.memory, std::int64_t{1} << 30);
  EXPECT_EQ(options.timeout, 5.0);
}

TEST(PrintedConfig, IsReadBackAsTheSame) {
  const TemporaryFolder folder;
  for (const CommandRow& command : command_table()) {
    std::vector<GivenFlag> flags;
    for (const FlagRow* row : flags_of(command.bit)) {
      if (row->name == "config" || row->name == "print-config" || row->name == "input")
        continue;  // a file has the shape
      if (row->own != nullptr) continue;
      flags.push_back({row, std::string(samples_of(row->name, row->commands == kBench)->values[2])});
    }
    const Config first = load_config(command.bit, flags);
    const std::string file = folder.write("printed.toml", print_config(first));
    const Config second = load_config(command.bit, {given(command.bit, "config", file)});
    for (std::size_t i = 0; i < first.values.size(); ++i) {
      if (first.values[i].row->name == "config") continue;
      EXPECT_EQ(first.values[i].text, second.values[i].text) << command.name << " " << first.values[i].row->name;
    }
  }
}

TEST(PrintedConfig, NamesSourcesAndPrintsSizesInFullDigits) {
  const ScopedEnvironment environment("RINGATTN_HEADS", "32");
  const std::string text =
      print_config(load_config(kRun, {given(kRun, "seq", "2m"), given(kRun, "trace", "a \"b\\\n")}));
  EXPECT_NE(text.find("seq = 2097152  # flag\n"), std::string::npos) << text;
  EXPECT_NE(text.find("heads = 32  # environment\n"), std::string::npos) << text;
  EXPECT_NE(text.find("mask = \"causal\"  # default\n"), std::string::npos) << text;
  EXPECT_NE(text.find("# output is not set\n"), std::string::npos) << text;
  EXPECT_NE(text.find("trace = \"a \\\"b\\\\\\u000A\"  # flag\n"), std::string::npos) << text;
}

TEST(PrintedConfig, DifferencesAreShownAsFlags) {
  const auto printed = [](const std::vector<GivenFlag>& flags) { return print_config(load_config(kRun, flags)); };
  const std::string plain = printed({given(kRun, "synthetic", "1")});
  EXPECT_EQ(config_difference(plain, printed({given(kRun, "synthetic", "0")})),
            "--synthetic 1 (flag) against --synthetic 0 (flag)");
  EXPECT_EQ(config_difference(plain, printed({})), "--synthetic 1 (flag) against --synthetic is not set");
  EXPECT_EQ(config_difference(printed({given(kRun, "mask", "full")}), printed({})),
            "--mask \"full\" (flag) against --mask \"causal\" (default)");
  const ScopedEnvironment environment("RINGATTN_SEQ", "4k");
  EXPECT_EQ(config_difference(printed({given(kRun, "synthetic", "1")}), plain),
            "--seq 4096 (environment) against --seq 16384 (default)");
}

TEST(PrintedConfig, LeavesTheShapeToTheInput) {
  const TemporaryFolder folder;
  const Config first = load_config(kRun, {given(kRun, "input", "a.safetensors")});
  const std::string text = print_config(first);
  EXPECT_NE(text.find("# seq comes from the input\n"), std::string::npos) << text;
  const Config second = load_config(kRun, {given(kRun, "config", folder.write("printed.toml", text))});
  EXPECT_TRUE(second.given("input"));
  EXPECT_FALSE(second.given("seq"));
}

TEST(FlagTable, IsConsistent) {
  for (const FlagRow& row : flag_table()) {
    EXPECT_FALSE(row.help.empty()) << row.name;
    EXPECT_EQ(row.value.empty(), row.kind == FlagKind::kSwitch) << row.name;
    for (const FlagRow& other : flag_table()) {
      if (&row == &other) continue;
      EXPECT_FALSE(row.name == other.name && (row.commands & other.commands) != 0) << row.name << " stands there twice";
      EXPECT_FALSE(row.key() == other.key() && row.name != other.name) << row.name << " and " << other.name;
      EXPECT_FALSE(row.letter != 0 && row.letter == other.letter) << row.name << " and " << other.name;
    }
  }
  EXPECT_EQ(environment_variable("softmax-scale"), "RINGATTN_SOFTMAX_SCALE");
}

}  // namespace
}  // namespace ringattn
