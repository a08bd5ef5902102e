// SPDX-License-Identifier: Apache-2.0
// Scans of packed batches by the program.
#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "tests/cli/tool.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// Packed batches of a server have sequences without tokens: their states pass through, on any number of ranks.
TEST(SsmBatches, MayHoldEmptySequences) {
  const TemporaryFolder folder;
  const auto states = [](std::size_t sequences) {
    std::vector<float> values;
    for (std::size_t i = 0; i < sequences * 2 * 8 * 8; ++i) values.push_back(static_cast<float>(i % 100) / 64);
    return values;
  };
  const auto final_states = [&](const std::string& path) {
    const SafetensorsFile output(path);
    const TensorSource source = output.tensor("final_states");
    std::vector<float> values(source.info->bytes() / sizeof(float));
    source.shard->read(*source.info, 0, std::as_writable_bytes(std::span(values)));
    return values;
  };
  const auto check = [&](const std::string& name, const std::vector<std::int64_t>& lengths) {
    NamedTensors tensors = ssm_tensors({.lengths = lengths, .heads = 2, .head_dim = 8, .state_dim = 8});
    const std::vector<float> initial = states(lengths.size());
    tensors["initial_states"] = float_list(initial, {static_cast<std::int64_t>(lengths.size()), 2, 8, 8});
    const std::string input = write_tensors(folder.file(name), tensors);
    for (const char* ranks : {"1", "3"}) {
      const std::string path = folder.file(name + ranks);
      const Finished run = tool({"run", "--input", input, "--final-states", "--ranks", ranks, "--output", path});
      ASSERT_EQ(run.code, 0) << run.err;
      EXPECT_TRUE(read_whole(path) == read_whole(folder.file(name + "1"))) << ranks << " ranks";
      for (std::size_t s = 0; s < lengths.size(); ++s) {
        if (lengths[s] > 0) continue;
        const auto at = static_cast<std::ptrdiff_t>(s * 2 * 8 * 8);
        const std::vector<float> final = final_states(path);
        EXPECT_TRUE(std::equal(initial.begin() + at, initial.begin() + at + 2 * 8 * 8, final.begin() + at)) << s;
      }
    }
    for (const Words& more : {Words{"--ranks", "3"}, {"--against", "oracle"}}) {
      const Finished verified = tool(Words{"verify", "--input", input} + more);
      EXPECT_EQ(verified.code, 0) << verified.out << verified.err;
    }
    EXPECT_EQ(tool({"plan", "--input", input, "--world", "1,3"}).code, 0);
  };
  check("mixed", {0, 131'100, 0, 0, 70, 0});
  check("none", {0, 0});
}

}  // namespace
}  // namespace ringattn::testing
