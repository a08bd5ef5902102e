// SPDX-License-Identifier: Apache-2.0
// Any bytes as a config file: refused with one kUsage message, or known flags with texts that are taken or refused. The
// same bytes as a machine model: refused with kFile, or taken.
#include "attention/ring/machine_model.hpp"
#include "base/error.hpp"
#include "launch/config.hpp"
#include "ops/common/values.hpp"
#include "tests/fuzz/fuzz_target.hpp"

namespace ringattn::testing {

std::vector<std::string> fuzz_seeds() {
  std::string all;
  for (const FlagRow& row : flag_table()) {
    if (!row.fallback.empty()) all += std::string(row.name) + " = \"" + std::string(row.fallback) + "\"\n";
  }
  std::string deep = "a";
  for (int i = 0; i < 50000; ++i) deep += ".b";
  return {deep + " = 1\n",
          "[" + deep + "]\nx = 1\n",
          "x = \"\"\"\"\"\"\n" + deep + " = 1\n",
          "flops_per_second = 1e9\nlink_bytes_per_second = 1e9\nlatency_seconds = 1e-6\n",
          "{\"flops_per_second\": 1e9, \"link_bytes_per_second\": 1e9, \"latency_seconds\": 0}",
          "synthetic = 7\nseq = \"16k\"\nmask = \"causal\" # a comment\n",
          "window = \"4095,0\"\nsoftmax-scale = 0.125\nchecksum = true\nquery-offset = -1\n",
          "tensors = 'q=layers.3.q,k=layers.3.k'\nmemory = 1_000_000\ntimeout = 1e3\n",
          "seq = \"\"\"8k-2m*2\"\"\"\nheads = 0x20\n",
          "[run]\nheads = 8\n",
          "a.b.c = {d = [1, 2]}\n",
          "heads = inf\nkv-heads = nan\n",
          "seq = 1979-05-27T07:32:00Z\n",
          all};
}

std::vector<std::string> fuzz_words() {
  std::vector<std::string> words{"=",    "\"", "'",    "\"\"\"",  "'''", "[",  "]",    "[[",   "]]",          "{",
                                 "}",    ",",  ".",    "#",       "\n",  "\r", "true", "inf",  "-nan",        "0x1f",
                                 "1e99", "_",  "\\u0", "8k-2m*2", "-1",  "k",  "g",    "\xff", "\xef\xbb\xbf"};
  words.emplace_back(1, '\0');
  for (const FlagRow& row : flag_table()) words.emplace_back(row.name);
  return words;
}

}  // namespace ringattn::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ringattn;
  using namespace ringattn::testing;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const char* path : {"FILE.toml", "FILE.json"}) {
    try {
      parse_machine_model(text, path);
    } catch (const Error& error) {
      fuzz_check(error.code() == ErrorCode::kFile, "a bad machine model is a bad file", error.what());
    }
  }
  const unsigned commands[] = {kRun, kVerify, kPlan, kInfo};
  const unsigned command = commands[size % 4];
  std::vector<GivenFlag> given;
  try {
    given = read_config_text(command, text, "FILE");
  } catch (const Error& error) {
    fuzz_check(error.code() == ErrorCode::kUsage, "a bad config file is a usage error", error.what());
    return 0;
  }
  for (const GivenFlag& flag : given) {
    fuzz_check(flag.row != nullptr, "only known keys come through");
    JobOptions options;
    try {
      flag.row->set(options, flag.text);
    } catch (const BadValue& bad) {
      fuzz_check(!bad.accepted.empty(), "a refused value says what is taken", flag.text);
    }
  }
  return 0;
}
