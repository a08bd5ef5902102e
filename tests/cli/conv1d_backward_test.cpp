// SPDX-License-Identifier: Apache-2.0
// The gradients of the causal convolution by the program: files, seeds, checks, plans and what is refused.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "io/safetensors_file.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kChannels = 8;

Words job_of_a_seed(const std::string& command, const Words& more) {
  return Words{command, "--op", "conv1d_backward", "--synthetic", "7", "--heads", "8"} + more;
}

Finished done(const Words& words) {
  Finished finished = tool(words);
  EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
  return finished;
}

NamedTensor numbers(const std::vector<std::int64_t>& shape, std::size_t seed) {
  std::size_t count = 1;
  for (const std::int64_t axis : shape) count *= static_cast<std::size_t>(axis);
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>((i * 37 + seed) % 101) / 50.0F - 1.0F;
  return float_list(values, shape);
}

// A convolution with dy, and the tokens before each sequence.
NamedTensors layer(const std::vector<std::int32_t>& cu) {
  const std::int64_t tokens = cu.back();
  NamedTensors tensors{{"x", numbers({tokens, kChannels}, 1)},
                       {"dy", numbers({tokens, kChannels}, 2)},
                       {"conv1d_weight", numbers({kChannels, 4}, 3)},
                       {"conv1d_bias", numbers({kChannels}, 4)},
                       {"conv_state", numbers({std::ssize(cu) - 1, kChannels, 3}, 5)}};
  tensors["cu_seqlens"] = int_list(cu);
  return tensors;
}

TEST(Conv1dBackward, FilesHaveTheSameBytesOnAnyRanks) {
  const TemporaryFolder folder;
  const std::string input = write_tensors(folder.file("in"), layer({0, 66'000, 66'070, 66'071}));
  for (const char* ranks : {"1", "2", "3"}) {
    done({"run", "--input", input, "--ranks", ranks, "--output", folder.file(ranks)});
    EXPECT_TRUE(read_whole(folder.file(ranks)) == read_whole(folder.file("1"))) << ranks;
  }
  const SafetensorsFile out(folder.file("1"));
  using Shape = std::vector<std::int64_t>;
  for (const auto& [name, shape] : {std::pair<const char*, Shape>{"dx", {66'071, kChannels}},
                                    {"dweight", {kChannels, 4}},
                                    {"dbias", {kChannels}},
                                    {"dconv_state", {3, kChannels, 3}}}) {
    EXPECT_EQ(out.tensor(name).info->shape, shape) << name;
  }
  const Finished oracle = done({"verify", "--input", input, "--against", "oracle", "--ranks", "2"});
  EXPECT_TRUE(has(oracle.out, "PASS") && has(oracle.out, "dconv_state: greatest error")) << oracle.out;
  EXPECT_TRUE(has(done({"verify", "--input", input, "--against", folder.file("1"), "--ranks", "3"}).out, "PASS"));
  EXPECT_TRUE(has(done({"verify", "--input", input, "--ranks", "3"}).out, "PASS"));
}

TEST(Conv1dBackward, IsVerified) {
  const TemporaryFolder folder;
  const Finished run =
      done(job_of_a_seed("verify", {"--seq", "300", "--against", "oracle", "--batch", "2", "--conv-width", "3"}));
  EXPECT_TRUE(has(run.out, "4800 elements of dx against the fp64 oracle, 8 of 8 channels") &&
              has(run.out, "dbias: greatest error"))
      << run.out;
  const std::string golden = folder.file("golden.json");
  done(job_of_a_seed("verify", {"--seq", "300", "--record", golden}));
  EXPECT_EQ(json_at(read_whole(golden), "/digest_dweight").size(), 34U);
  EXPECT_TRUE(has(done(job_of_a_seed("verify", {"--seq", "300", "--golden", golden, "--ranks", "2"})).out, "PASS"));
  EXPECT_EQ(tool(job_of_a_seed("verify", {"--seq", "300", "--golden", golden, "--conv-width", "2"})).code,
            2);  // another job
  NamedTensors tensors = layer({0, 100});
  const std::string input = write_tensors(folder.file("in"), tensors);
  done({"run", "--input", input, "--output", folder.file("result")});
  tensors["conv1d_bias"] = numbers({kChannels}, 6);
  const std::string other = write_tensors(folder.file("other"), tensors);
  const Finished differs = tool({"verify", "--input", other, "--against", folder.file("result")});
  EXPECT_EQ(differs.code, 1) << differs.out << differs.err;
  EXPECT_TRUE(has(differs.out, "first difference: dx at sequence 0, token 0, ")) << differs.out;
}

TEST(Conv1dBackward, IsReportedPlannedAndMeasured) {
  const std::string run = done(job_of_a_seed("run", {"--seq", "300", "--ranks", "2", "--json", "-"})).out;
  EXPECT_EQ(json_at(run, "/op"), "\"conv1d_backward\"");
  EXPECT_EQ(json_at(run, "/digest/dbias").size(), 34U);
  const std::string plan = done(job_of_a_seed("plan", {"--seq", "200k", "--world", "1,2", "--json", "-"})).out;
  EXPECT_EQ(json_at(plan, "/rows/0/bytes_moved"), "0");
  // One border: 3 tokens of x before it, and 3 of x and dy after it, of 16 bytes. 100 units and the sums, of 5 × 8
  // floats, half of each.
  EXPECT_EQ(json_at(plan, "/rows/1/bytes_moved"), std::to_string(3 * 3 * 16 + 100 * 80 + 2 * 80));
  const std::string line = done(job_of_a_seed("bench", {"--seq", "300", "--samples", "2", "--jsonl", "-"})).out;
  EXPECT_EQ(json_at(line, "/job/op"), "\"conv1d_backward\"");
  EXPECT_EQ(tool(job_of_a_seed("run", {"--seq", "300", "--memory", "1k"})).code, 5);
}

TEST(Conv1dBackward, RefusesWhatHasNoGradients) {
  const TemporaryFolder folder;
  const std::string path = folder.file("bad");
  const auto refused = [&](const NamedTensors& tensors, int code, std::string_view part) {
    const Finished run = tool({"run", "--input", write_tensors(path, tensors)});
    EXPECT_EQ(run.code, code) << run.out << run.err;
    EXPECT_TRUE(has(run.err, part)) << run.err;
  };
  NamedTensors tensors = layer({0, 40});
  for (const char* const name : {"dfinal_conv_state", "dfinal_states"}) {
    NamedTensors with_final = tensors;
    with_final[name] = tensors.at("conv_state");
    refused(with_final, 4, "no gradient of final states");
  }
  tensors = layer({0, 40});
  tensors["dy"] = tensors.at("conv1d_bias");
  refused(tensors, 3, "the convolution asks for F32 [40, 8]");
  tensors.erase("dy");
  // Without the gradient a file is that of the forward.
  EXPECT_TRUE(has(done({"run", "--input", write_tensors(path, tensors)}).out, "digest of y"));
  EXPECT_EQ(tool({"run", "--input", path, "--tensors", "dy=absent"}).code, 3);
  for (const Words& flags : {Words{"--gradients", "fp32"}, {"--final-states"}, {"--head-dim", "8"}}) {
    EXPECT_EQ(tool(job_of_a_seed("run", Words{"--seq", "300"} + flags)).code, 2) << flags.front();
  }
}

}  // namespace
}  // namespace ringattn::testing
