// SPDX-License-Identifier: Apache-2.0
// Lines on stderr about input that is legal and most often not what was meant.
#include <gtest/gtest.h>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

TEST(InputWarnings, NameQueriesWithoutKeys) {
  const TemporaryFolder folder;
  FileShape shape;
  shape.q = {8, 60, 64};
  shape.k = shape.v = {2, 60, 64};
  const std::string htd = folder.write("htd.safetensors", safetensors_bytes(shape));
  const std::string warning =
      "ringattn: warning: 6 of 8 queries see no key (q is [tokens, heads, head_dim] by --order thd). Say --order htd "
      "if "
      "heads come first; --mask full or --query-offset let queries see other keys.\n";
  for (const Words& command : {Words{"run", "-q"}, Words{"run", "--ranks", "2"}, Words{"plan", "-q"},
                               Words{"bench", "-q", "--samples", "1"}, Words{"verify", "--against", "oracle"}}) {
    const Finished done = tool(command + Words{"--input", htd});
    EXPECT_EQ(done.code, 0) << done.err;
    EXPECT_EQ(done.err, warning) << command[0];
  }
  for (const Words& meant : {Words{"--order", "htd"}, Words{"--mask", "full"}, Words{"--query-offset", "-6"}}) {
    EXPECT_EQ(tool(Words{"run", "--input", htd} + meant).err, "") << meant[1];
  }
  EXPECT_EQ(tool({"run", "--input", htd, "--window", "-1,4", "--mask", "full"}).err.substr(0, 29),
            "ringattn: warning: 2 of 8 que");
  shape.q = {1, 8, 60, 64};
  shape.k = shape.v = {1, 2, 60, 64};
  const std::string bhtd = folder.write("bhtd.safetensors", safetensors_bytes(shape));
  EXPECT_TRUE(
      has(tool({"run", "-q", "--input", bhtd}).err,
          "6 of 8 queries see no key (q is [batch, tokens, heads, head_dim] by --order bthd). Say --order bhtd"));
}

TEST(InputWarnings, NameTheModelThatIsAssumed) {
  const TemporaryFolder folder;
  const std::string path = folder.write("config.json", R"({"hidden_size": 64, "num_attention_heads": 4})");
  const std::string note =
      "# model config: " + path + " has no model_type: read as a plain decoder (causal, scale 1/sqrt(head_dim))\n";
  for (const Words& command : {Words{"run", "-q"}, Words{"run", "--ranks", "2"}, Words{"run", "--print-config"},
                               Words{"plan", "-q"}, Words{"bench", "-q", "--samples", "1"}, Words{"verify"}}) {
    const Words source = command[0] == "run" || command[0] == "verify" ? Words{"--synthetic", "1"} : Words{};
    const Finished done = tool(command + source + Words{"--seq", "64", "--model-config", path});
    EXPECT_EQ(done.code, 0) << done.err;
    EXPECT_EQ(done.err, note) << command[0];
  }
  const auto said = [&](const std::string& keys) {
    const std::string text = R"({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, )" + keys + "}";
    return tool({"run", "--synthetic", "1", "--seq", "64", "--print-config", "--model-config",
                 folder.write("other.json", text)})
        .err;
  };
  EXPECT_EQ(said(R"("model_type": "qwen3", "num_key_value_heads": 4)"), "");
  EXPECT_TRUE(has(said(R"("attention_multiplier": 1)"), "(causal, scale attention_multiplier)"));
  EXPECT_TRUE(has(said(R"("query_pre_attn_scalar": 4)"), "(causal, scale 1/sqrt(query_pre_attn_scalar))"));
  EXPECT_TRUE(
      has(said(R"("num_kv_heads": 4)"), "read by the rules of model_type `falcon`, for its key `num_kv_heads`"));
}

}  // namespace
}  // namespace ringattn::testing
