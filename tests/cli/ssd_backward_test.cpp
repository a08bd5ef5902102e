// SPDX-License-Identifier: Apache-2.0
// The gradients of SSD by the program: files, seeds, checks, plans and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "io/safetensors_file.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kDim = 8;

// A job of a seed. Flags in `more` replace its own.
Words job(const std::string& command, const Words& more = {}) {
  Words words{command, "--op", "ssd_backward", "--synthetic", "7"};
  for (const auto& [flag, value] :
       {std::pair{"--seq", "300"}, {"--heads", "2"}, {"--head-dim", "8"}, {"--state-dim", "8"}, {"--dtype", "fp32"}}) {
    if (std::ranges::find(more, flag) == more.end()) words.insert(words.end(), {flag, value});
  }
  return words + more;
}

Finished done(const Words& words) {
  Finished finished = tool(words);
  EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
  return finished;
}

// A layer with dy, and states of each sequence.
NamedTensors layer(const std::vector<std::int64_t>& lengths) {
  NamedTensors tensors = ssm_tensors(
      {.lengths = lengths, .heads = kHeads, .head_dim = kDim, .state_dim = kDim, .dtype = Dtype::kF32, .seed = 9});
  NamedTensors other = ssm_tensors(
      {.lengths = lengths, .heads = kHeads, .head_dim = kDim, .state_dim = kDim, .dtype = Dtype::kF32, .seed = 10});
  tensors["dy"] = other.at("x");
  const auto sequences = static_cast<std::int64_t>(lengths.size());
  for (const char* name : {"initial_states", "dfinal_states"}) {
    std::vector<float> values(static_cast<std::size_t>(sequences * kHeads * kDim * kDim));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 37 % 101) / 50.0F - 1.0F;
    tensors[name] = float_list(values, {sequences, kHeads, kDim, kDim});
  }
  return tensors;
}

TEST(SsdBackward, FilesHaveTheSameBytesOnAnyRanks) {
  const TemporaryFolder folder;
  const std::string input = write_tensors(folder.file("in"), layer({66'000, 70, 1}));
  for (const char* ranks : {"1", "2", "3"}) {
    done({"run", "--input", input, "--ranks", ranks, "--output", folder.file(ranks)});
    EXPECT_TRUE(read_whole(folder.file(ranks)) == read_whole(folder.file("1"))) << ranks;
  }
  const SafetensorsFile out(folder.file("1"));
  using Shape = std::vector<std::int64_t>;
  for (const auto& [name, shape] : {std::pair<const char*, Shape>{"dx", {66'071, kHeads, kDim}},
                                    {"ddt", {66'071, kHeads}},
                                    {"dB", {66'071, 1, kDim}},
                                    {"dC", {66'071, 1, kDim}},
                                    {"dz", {66'071, kHeads, kDim}},
                                    {"dA", {kHeads}},
                                    {"dD", {kHeads}},
                                    {"ddt_bias", {kHeads}},
                                    {"dinitial_states", {3, kHeads, kDim, kDim}}}) {
    EXPECT_EQ(out.tensor(name).info->shape, shape) << name;
  }
  const Finished oracle = done({"verify", "--input", input, "--against", "oracle", "--ranks", "2"});
  EXPECT_TRUE(has(oracle.out, "PASS") && has(oracle.out, "dinitial_states: greatest error")) << oracle.out;
  EXPECT_TRUE(has(done({"verify", "--input", input, "--against", folder.file("1"), "--ranks", "3"}).out, "PASS"));
  EXPECT_TRUE(has(done({"verify", "--input", input, "--ranks", "3"}).out, "PASS"));
}

TEST(SsdBackward, IsVerified) {
  const TemporaryFolder folder;
  for (const char* dtype : {"bf16", "fp16"}) {
    const Words numerics{"--against", "oracle",   "--dtype", dtype,         "--batch",
                         "2",         "--groups", "2",       "--gradients", "fp32"};
    const Finished run = done(job("verify", numerics));
    EXPECT_TRUE(has(run.out, "1200 rows of dx against the fp64 oracle") && has(run.out, "ddt_bias: greatest error"))
        << run.out;
  }
  const std::string golden = folder.file("golden.json");
  done(job("verify", {"--record", golden}));
  EXPECT_EQ(json_at(read_whole(golden), "/digest_dA").size(), 34U);
  EXPECT_TRUE(has(done(job("verify", {"--golden", golden, "--ranks", "2"})).out, "PASS"));
  EXPECT_EQ(tool(job("verify", {"--golden", golden, "--dt-limit", "0,0.01"})).code, 2);  // another job
  const std::string result = folder.file("result");
  done(job("run", {"--output", result}));
  const Finished other = tool(job("verify", {"--against", result, "--dt-limit", "0.02,9"}));
  EXPECT_EQ(other.code, 1) << other.out << other.err;
  EXPECT_TRUE(has(other.out, "first difference: dx at sequence 0, token 0, head 0, dim 0: ")) << other.out;
}

TEST(SsdBackward, IsReportedPlannedAndMeasured) {
  const std::string run = done(job("run", {"--ranks", "2", "--json", "-"})).out;
  EXPECT_EQ(json_at(run, "/op"), "\"ssd_backward\"");
  EXPECT_EQ(json_at(run, "/job/gradients"), "\"fp32\"");
  EXPECT_EQ(json_at(run, "/digest/dA").size(), 34U);
  const std::string plan = done(job("plan", {"--seq", "200k", "--world", "1,3", "--json", "-"})).out;
  EXPECT_EQ(json_at(plan, "/rows/0/bytes_moved"), "0");
  EXPECT_EQ(json_at(plan, "/rows/1/bytes_moved"), "2048");  // two states of 512 bytes, and two gradients
  const std::string line = done(job("bench", {"--samples", "2", "--jsonl", "-"})).out;
  EXPECT_EQ(json_at(line, "/job/op"), "\"ssd_backward\"");
}

TEST(SsdBackward, RefusesWhatHasNoGradients) {
  const TemporaryFolder folder;
  const std::string path = folder.file("bad");
  const auto refused = [&](const NamedTensors& tensors, int code, std::string_view part) {
    const Finished run = tool({"run", "--input", write_tensors(path, tensors)});
    EXPECT_EQ(run.code, code) << run.out << run.err;
    EXPECT_TRUE(has(run.err, part)) << run.err;
  };
  NamedTensors selective = ssm_tensors({.selective = true});
  selective["dy"] = selective.at("u");
  refused(selective, 4, "no gradients for selective scans (Mamba-1)");
  NamedTensors tensors = layer({40});
  tensors["conv1d_weight"] = float_list(std::vector<float>(32 * 4), {32, 4});
  refused(tensors, 4, "no gradients for an SSM with a convolution");
  tensors = layer({40});
  tensors["dy"] = tensors.at("dt");
  refused(tensors, 3, "the layer asks for F32 [40, 2, 8]");
  tensors = layer({40});
  tensors["dfinal_states"] = tensors.at("A");
  refused(tensors, 3, "the layer asks for F32 [1, 2, 8, 8]");
  tensors = layer({40});
  tensors.erase("dy");
  tensors.erase("dfinal_states");
  // Without the gradient a file is that of the forward.
  EXPECT_TRUE(has(done({"run", "--input", write_tensors(path, tensors)}).out, "digest of y"));
  EXPECT_EQ(tool({"run", "--input", path, "--tensors", "dy=absent"}).code, 3);
  for (const Words& flags : {Words{"--gradients", "bf16"}, {"--conv-width", "4"}, {"--final-states"}}) {
    EXPECT_EQ(tool(job("run", flags)).code, 2) << flags.front();
  }
}

}  // namespace
}  // namespace ringattn::testing
