// SPDX-License-Identifier: Apache-2.0
// Bad flags, variables and config files: each is one message in the project's form and code 2, in whatever layer.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "launch/commands.hpp"
#include "launch/job_request.hpp"
#include "launch/message_text.hpp"
#include "launch/open_job.hpp"
#include "tests/support/scoped_environment.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::ScopedEnvironment;
using testing::TemporaryFolder;
using Words = std::vector<std::string>;

// All that `ringattn COMMAND words…` checks before it looks for ranks.
void read_all(std::string_view name, const Words& words) {
  for (const CommandRow& command : command_table()) {
    if (command.name != name) continue;
    const Config config = load_config(command.bit, split_command_line(command.bit, command.name, words).flags);
    check_source(config, command.bit != kPlan);
    open_planned_jobs(config);
    library_options(config);
    return;
  }
  FAIL() << "no such subcommand";
}

// The message of the failure, which must have the code and one line of the form "problem (why). suggestion."
std::string refusal(std::string_view command, const Words& words, ErrorCode code = ErrorCode::kUsage) {
  try {
    read_all(command, words);
  } catch (const Error& error) {
    const std::string message = program_text(error);
    EXPECT_EQ(error.code(), code) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_TRUE(message.ends_with(".") || message.ends_with("?")) << message;
    // All three parts: the problem, the reason in brackets, and a sentence after it.
    EXPECT_NE(message.find(" ("), std::string::npos) << message;
    EXPECT_NE(message.find("). "), std::string::npos) << message;
    return message;
  }
  ADD_FAILURE() << fmt::format("accepted: {}", fmt::join(words, " "));
  return {};
}

struct BadValueCase {
  std::string_view flag;
  std::string_view text;
  std::string_view expected;  // a part of the message
};

constexpr BadValueCase kBadValues[] = {
    {"synthetic", "-1", "a seed from 0 to 2^64 - 1"},
    {"synthetic", "seven", "a seed"},
    {"synthetic", "18446744073709551616", "a seed"},
    {"synthetic", "", "a seed"},
    {"input", "", "the name of a file"},
    {"output", "", "the name of a file"},
    {"json", "", "the name of a file"},
    {"trace", "", "the name of a file"},
    {"machine", "", "the name of a file"},
    {"tensors", "", "pairs such as"},
    {"tensors", "q", "pairs such as"},
    {"tensors", "y=1", "q, k, v"},
    {"tensors", "q=", "pairs such as"},
    {"tensors", "q=a,q=b", "each tensor once"},
    {"tensors", "q=a,", "pairs such as"},
    {"tensors", "sink=a", "Did you mean \"sinks\"?"},
    {"order", "hdt", "thd, htd, bthd or bhtd"},
    {"order", "THD", "thd, htd, bthd or bhtd"},
    {"seq", "-1", "a number of tokens"},
    {"seq", "16kb", "a number of tokens"},
    {"seq", "1.5k", "a number of tokens"},
    {"seq", "9223372036854775807", "at most"},
    {"seq", "99999999999999999999", "a number of tokens"},
    {"seq", "8589934592g", "a number of tokens"},
    {"seq", "", "a number of tokens"},
    {"batch", "0", "a whole number from 1"},
    {"batch", "1e2", "a whole number"},
    {"heads", "0", "a whole number from 1"},
    {"heads", "-8", "a whole number from 1"},
    {"heads", "70000", "to 65536"},
    {"kv-heads", "0", "a whole number from 1"},
    {"kv-heads", "two", "a whole number"},
    {"head-dim", "0", "a whole number from 1"},
    {"head-dim", "128.0", "a whole number"},
    {"head-dim-v", "-1", "a whole number from 1"},
    {"dtype", "bf61", "Did you mean \"bf16\"?"},
    {"dtype", "float32", "Did you mean \"fp32\"?"},
    {"dtype", "float16", "Did you mean \"fp16\"?"},
    {"dtype", "half", "Did you mean \"fp16\"?"},
    {"dtype", "bfloat16", "Did you mean \"bf16\"?"},
    {"op", "mamba2", "Did you mean \"ssd\"?"},
    {"op", "mamba", "Did you mean \"selective_scan\"?"},
    {"op", "latent", "Did you mean \"mla\"?"},
    {"mask", "casual", "Did you mean \"causal\"?"},
    {"mask", "sliding", "full or causal"},
    {"query-offset", "1.5", "a whole number"},
    {"query-offset", "9999999999999999999", "a whole number"},
    {"query-offset", "8k", "a whole number"},
    {"window", "128", "two numbers of tokens L,R"},
    {"window", "-2,0", "-1 for unlimited"},
    {"window", "1,2,3", "-1 for unlimited"},
    {"window", ",", "-1 for unlimited"},
    {"window", "a,b", "-1 for unlimited"},
    {"dt-limit", "1", "two numbers MIN,MAX"},
    {"dt-limit", "0,nan", "each inf or -inf for no limit"},
    {"dt-softplus", "yes", "on"},
    {"softmax-scale", "nan", "a finite number"},
    {"softmax-scale", "inf", "a finite number"},
    {"softmax-scale", "1e-40", "at least 1e-30"},
    {"softmax-scale", "0,5", "a finite number"},
    {"softcap", "-30", "a finite number, at least 0"},
    {"softcap", "1e-40", "at least 1e-30"},
    {"softcap", "off", "a finite number"},
    {"layout", "zig-zag", "Did you mean \"zigzag\"?"},
    {"layout", "ring", "striped, zigzag or contiguous"},
    {"stripe", "0", "at least 1"},
    {"stripe", "-128", "a number of tokens"},
    {"block", "0", "at least 1"},
    {"block", "4096 tokens", "a number of tokens"},
    {"memory", "-1", "a number of bytes"},
    {"memory", "0", "at least 1"},
    {"memory", "8gb", "a number of bytes"},
    {"memory", "8589934592g", "a number of bytes"},
    {"overlap", "yes", "on or off"},
    {"overlap", "", "on or off"},
    {"numa-binding", "socket", "node or none"},
    {"simd-target", "avx1024", "avx512"},
    {"threads", "0", "all, or a whole number from 1"},
    {"threads", "-2", "all, or a whole number from 1"},
    {"threads", "every", "all, or"},
    {"ranks", "0", "a whole number from 1"},
    {"ranks", "2000", "to 512"},
    {"backend", "", "a name"},
    {"kernel", "", "a name"},
    {"transport", "", "a name"},
    {"progress", "never", "auto, on or off"},
    {"color", "on", "auto, always or never"},
    {"timeout", "0", "at least 0.001"},
    {"timeout", "-5", "at least 0.001"},
    {"timeout", "60s", "a finite number"},
    {"timeout", "1e9", "at most"},
    {"force", "maybe", "on or off"},
    {"quiet", "2", "on or off"},
    {"checksum", "crc", "on or off"},
};

TEST(BadValues, OfFlagsNameTheFlagAndWhatItTakes) {
  for (const BadValueCase& bad : kBadValues) {
    const std::string word = fmt::format("--{}={}", bad.flag, bad.text);
    const std::string message = refusal("run", {word});
    if (bad.text.empty()) continue;  // CLI11 words for "--flag=" differ from ours for an empty value; the code counts
    EXPECT_TRUE(message.starts_with(fmt::format("--{} is \"{}\"", bad.flag, bad.text))) << message;
    EXPECT_NE(message.find(bad.expected), std::string::npos) << message;
  }
}

TEST(BadValues, OfVariablesNameTheVariable) {
  for (const BadValueCase& bad : kBadValues) {
    const std::string twin = environment_variable(bad.flag);
    const ScopedEnvironment environment(twin, std::string(bad.text));
    const std::string message = refusal("run", {"--synthetic=7"});
    EXPECT_TRUE(message.starts_with(fmt::format("{} is \"{}\"", twin, bad.text))) << message;
    EXPECT_NE(message.find(bad.expected), std::string::npos) << message;
  }
}

TEST(BadValues, OfKeysNameTheKeyAndTheFile) {
  const TemporaryFolder folder;
  for (const BadValueCase& bad : kBadValues) {
    const std::string file = folder.write("job.toml", fmt::format("{} = '{}'\n", bad.flag, bad.text));
    const std::string message = refusal("run", {"--synthetic", "7", "--config", file});
    EXPECT_TRUE(message.starts_with(fmt::format("{} in {} is \"{}\"", bad.flag, file, bad.text))) << message;
    EXPECT_NE(message.find(bad.expected), std::string::npos) << message;
  }
}

TEST(BadValues, AreAnsweredWithOneThatIsTaken) {
  for (const FlagRow& row : flag_table()) {
    const std::string_view value = row.example.empty() ? row.fallback : row.example;
    ASSERT_FALSE(value.empty()) << row.name << " has neither a default nor an example to suggest";
    JobOptions options;
    EXPECT_NO_THROW(row.apply(options, value)) << row.name;
  }
  EXPECT_EQ(refusal("run", {"--seq=-5"}),
            "--seq is \"-5\" (it takes a number of tokens such as 4096, 8k or 2m, at most 1152921504606846976). Try "
            "--seq 16k, the default.");
  EXPECT_EQ(refusal("run", {"--force=maybe"}),
            "--force is \"maybe\" (it takes on or off (also true, false, 1, 0)). Give --force alone, or leave it out.");
  const TemporaryFolder folder;
  const std::string file = folder.write("job.toml", "memory = '8gb'\n");
  EXPECT_TRUE(refusal("run", {"--config", file}).ends_with("). Try memory = \"8g\", for example."));
  const ScopedEnvironment environment("RINGATTN_SEQ", "many");
  EXPECT_TRUE(refusal("run", {}).ends_with("). Try RINGATTN_SEQ=16k, the default."));
}

// What another command's flag of the same name takes: `run` would write a file csv, and `bench` would print a table.
TEST(BadValues, OfAnotherMeaningAreRefused) {
  const TemporaryFolder folder;
  {
    const ScopedEnvironment environment("RINGATTN_OUTPUT", "csv");
    for (const char* command : {"run", "compress", "bench"}) {
      EXPECT_EQ(refusal(command, {}),
                "RINGATTN_OUTPUT is \"csv\" (csv is a value of --output of bench, which RINGATTN_BENCH_OUTPUT sets). "
                "Set RINGATTN_BENCH_OUTPUT; a file of this name is ./csv.");
    }
  }
  const std::string file = folder.write("job.toml", "against = 'compute'\n");
  for (const char* command : {"verify", "bench"}) {
    const std::string message = refusal(command, {"--config", file});
    EXPECT_NE(message.find("compute is a value of --against of bench, which the key bench-against sets"),
              std::string::npos)
        << message;
  }
  const ScopedEnvironment environment("RINGATTN_BENCH_OUTPUT", "a.safetensors");
  EXPECT_EQ(refusal("bench", {}),
            "RINGATTN_BENCH_OUTPUT is \"a.safetensors\" (it takes table, md, csv or jsonl). Try "
            "RINGATTN_BENCH_OUTPUT=csv, for example.");
}

TEST(BadValues, AreFoundInLayersThatOthersReplace) {
  const ScopedEnvironment environment("RINGATTN_HEADS", "none");
  EXPECT_NE(refusal("run", {"--synthetic", "7", "--heads", "8"}).find("RINGATTN_HEADS"), std::string::npos);
}

struct BadWords {
  std::string_view command;
  Words words;
  std::string_view expected;
};

TEST(BadArguments, AreRefusedWithASuggestion) {
  const BadWords cases[] = {
      {"run", {"--softcp", "3"}, "Did you mean --softcap?"},
      {"run", {"--head_dim=64"}, "Did you mean --head-dim?"},
      {"run", {"--SEQ", "4"}, "unknown flag --SEQ"},
      {"run", {"--world", "4"}, "--world is not a flag of run (it belongs to plan). Did you mean --ranks?"},
      {"run", {"--against=oracle"}, "it belongs to verify"},
      {"verify", {"--output", "a"}, "it belongs to run, bench, compress and quantize"},
      {"plan", {"--ranks", "4"}, "it belongs to run, verify, bench and info). Did you mean --world?"},
      {"info", {"--seq", "4"}, "it belongs to run, verify, bench, plan and compress"},
      {"run", {"--frobnicate"}, "unknown flag --frobnicate (run has no flag of that name). See `ringattn run --help`."},
      {"run", {"-x"}, "unknown flag -x"},
      {"run",
       {"-np", "4"},
       "unknown flag -np (run has no flag of that name). Use --ranks N. For one rank a GPU, use `mpirun"},
      {"plan", {"--gpus", "4"}, "Use --world LIST."},
      {"run", {"--causal"}, "Use --mask full|causal. causal is the default."},
      {"bench", {"--iters=10"}, "Use --samples N."},
      {"run", {"--iters=10"}, "--samples belongs to bench."},
      {"run", {"-o", "a"}, "Use --output"},
      {"run", {"--cp", "4"}, "Use --ranks N. Context parallelism is over all ranks."},
      {"plan", {"--world-size", "4"}, "Use --world LIST."},
      {"run", {"--logits-soft-cap", "30"}, "Use --softcap"},
      {"run", {"--window-left", "127"}, "Use --window L,R."},
      {"run", {"--gpu", "0"}, "Use --backend"},
      {"run", {"--bs", "2"}, "Use --batch"},
      {"run", {"--seqlen", "4k"}, "Use --seq TOKENS."},
      {"run", {"input.safetensors"}, "\"input.safetensors\" belongs to no flag"},
      {"run", {"--seq", "16k", "extra"}, "\"extra\" belongs to no flag"},
      {"run", {"-"}, "belongs to no flag"},
      {"run", {"--seq"}, "--seq has no value"},
      {"run", {"--heads", "8", "--mask"}, "--mask has no value"},
      {"run", {"--heads", "8", "--heads", "4"}, "--heads is given 2 times (one value would be ignored). Give it once."},
      {"run", {"--force", "--force"}, "--force is given 2 times"},
      {"run", {"--synthetic", "7", "--mask", "--softcap"}, "--mask has no value"},
  };
  for (const BadWords& bad : cases) {
    EXPECT_NE(refusal(bad.command, bad.words).find(bad.expected), std::string::npos) << refusal(bad.command, bad.words);
  }
}

TEST(BadJobs, ContradictThemselves) {
  const BadWords cases[] = {
      {"run", {}, "neither --input nor --synthetic"},
      {"run", {"--input", "a", "--synthetic", "7"}, "--input and --synthetic are both given"},
      {"run", {"--input", "a", "--seq", "4k"}, "--seq contradicts --input"},
      {"run", {"--input", "a", "--batch", "1"}, "--batch contradicts --input"},
      {"run", {"--input", "a", "--heads", "8"}, "--heads contradicts --input"},
      {"run", {"--input", "a", "--kv-heads", "2"}, "--kv-heads contradicts --input"},
      {"run", {"--input", "a", "--head-dim", "128"}, "--head-dim contradicts --input"},
      {"run", {"--input", "a", "--head-dim-v", "128"}, "--head-dim-v contradicts --input"},
      {"run", {"--input", "a", "--dtype", "bf16"}, "--dtype contradicts --input"},
      {"run", {"--synthetic", "7", "--tensors", "q=x"}, "--tensors needs --input"},
      {"run",
       {"--synthetic", "7", "--heads", "32", "--kv-heads", "12"},
       "K has 12 heads, Q has 32 (32 is not a multiple of 12). Check --heads and --kv-heads."},
      {"run", {"--synthetic", "7", "--window", "100,50"}, "--window contradicts the causal mask"},
      {"run", {"--synthetic", "7", "--layout", "zigzag", "--stripe", "128"}, "--stripe contradicts --layout"},
      {"run", {"--synthetic", "7", "--seq", "1152921504606846976", "--heads", "64"}, "more than 2^60 elements"},
  };
  for (const BadWords& bad : cases) {
    const std::string message = refusal(bad.command, bad.words);
    EXPECT_NE(message.find(bad.expected), std::string::npos) << message;
  }
  const ScopedEnvironment environment("RINGATTN_INPUT", "a");
  EXPECT_NE(refusal("run", {"--synthetic", "7"}).find("--input (environment) and --synthetic are both given"),
            std::string::npos);
}

TEST(BadEnvironment, UnknownVariablesAreRefused) {
  {
    const ScopedEnvironment environment("RINGATTN_TIMOUT", "5");
    EXPECT_EQ(refusal("run", {"--synthetic", "7"}),
              "unknown environment variable RINGATTN_TIMOUT (every RINGATTN_ variable must mean something). Did you "
              "mean RINGATTN_TIMEOUT?");
  }
  {
    const ScopedEnvironment environment("RINGATTN_FOO", "5");  // like all of them, were it for the prefix
    EXPECT_NE(refusal("run", {"--synthetic", "7"}).find("Unset it; `env -u RINGATTN_FOO ringattn info` lists"),
              std::string::npos);
  }
  const ScopedEnvironment environment("RINGATTN_", "5");
  EXPECT_NE(refusal("run", {"--synthetic", "7"}).find("unknown environment variable RINGATTN_ "), std::string::npos);
}

TEST(BadConfigFiles, AreRefused) {
  const TemporaryFolder folder;
  const std::pair<std::string_view, std::string_view> cases[] = {
      {"heads = ", "is not valid TOML (line 1"},
      {"heads = 8\nheads = 8\n", "is not valid TOML (line 2"},
      {R"( {"model_type": "llama", "hidden_size": 64})", "is a model's config.json"},
      {"[run]\nheads = 8\n", "there is no key run.heads"},
      {"head = 8\n", "Did you mean heads?"},
      {"heads = [8]\n", "heads is a list or a date"},
      {"heads = 2024-01-01\n", "heads is a list or a date"},
      {"heads = { x = 8 }\n", "there is no key heads.x"},
      {"heads = 8.5\n", "heads in "},
      {"heads = true\n", "heads in "},
      {"heads = 99999999999999999999\n", "is not valid TOML"},
      {"config = 'other.toml'\n", "a config file can't name another"},
      {"RINGATTN_HEADS = 8\n", "there is no key RINGATTN_HEADS"},
      {std::string_view("heads = \"8\0\"\n", 13), "TOML"},
      {"\xff\xfe", "is not valid TOML"},
      {"a = {b = {c = {d = {e = {f = {g = {h = {i = {j = 1}}}}}}}}}\n", "is nested deeper than 8 levels"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string file = folder.write("job.toml", text);
    const std::string message = refusal("run", {"--synthetic", "7", "--config", file});
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  }
}

TEST(BadConfigFiles, ThatCanNotBeReadAreFileErrors) {
  const TemporaryFolder folder;
  EXPECT_NE(refusal("run", {"--config", folder.file("none.toml")}, ErrorCode::kFile).find("No such file"),
            std::string::npos);
  EXPECT_NE(refusal("run", {"--config", folder.path()}, ErrorCode::kFile).find("not a regular file"),
            std::string::npos);
  const std::string longer = folder.write("long.toml", std::string((std::size_t{1} << 20) + 1, '#'));
  EXPECT_NE(refusal("run", {"--config", longer}, ErrorCode::kFile).find("is too long"), std::string::npos);
}

}  // namespace
}  // namespace ringattn
