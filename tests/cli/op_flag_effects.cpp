// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/cli/flag_effects.hpp"
#include "tests/support/layer_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {

std::string out_of(const Words& words, const Variables& variables) {
  const Finished run = tool(words, variables);
  EXPECT_EQ(run.code, 0) << run.err;
  return run.out;
}

namespace {

Words latent_words() {
  return {"run", "--op", "mla", "--synthetic", "7", "--seq", "50", "--heads", "2", "--head-dim", "8"};
}

// A cache of 50 tokens, compressed.
std::string compressed(const Words& words) {
  const TemporaryFolder folder;
  return out_of(Words{"compress", "--synthetic", "7", "--seq", "50", "--head-dim", "64", "--output", folder.file("a")} +
                words);
}

// A model of two layers, quantized.
std::string quantized(const Words& words) {
  const TemporaryFolder folder;
  LayerFile model;
  std::vector<float> values;
  for (int i = 0; i < 16 * 128; ++i) values.push_back(static_cast<float>(i % 37) - 18.0F);
  for (const char* name : {"a.up_proj.weight", "a.down_proj.weight"})
    model.set(name, FileDtype::kF32, {16, 128}, values);
  model.write(folder.file("model.safetensors"));
  return out_of(Words{"quantize", "--input", folder.file("model.safetensors"), "--output", folder.file("out")} + words);
}

Words ssm_words() { return {"run", "--op", "ssd", "--synthetic", "7", "--seq", "50", "--head-dim", "8"}; }

}  // namespace

const Effects& op_effects() {
  static const Effects table{
      {"cache-format",
       [] {
         // As a file that `compress` makes of the same seed.
         const Words cache{"--synthetic", "7", "--seq", "300", "--head-dim", "64"};
         const TemporaryFolder folder;
         const std::string file = folder.file("a");
         out_of(Words{"compress", "--method", "int4", "--output", file} + cache);
         const Words stored = Words{"run", "--cache-format", "int4"} + cache;
         EXPECT_EQ(digest_of(out_of(stored)), digest_of(out_of({"run", "--input", file})));
         EXPECT_EQ(digest_of(out_of(stored + Words{"--ranks", "3"})), digest_of(out_of(stored)));
         EXPECT_EQ(tool(Words{"verify", "--against", "oracle", "--cache-format", "int4"} + cache).code, 0);
         EXPECT_EQ(tool(Words{"plan", "--world", "4", "--seq", "300", "--cache-format", "int4"}).code, 0);
         EXPECT_TRUE(has(out_of(stored + Words{"--op", "decode"}), "cache: dense, stored as k int4_channel"));
         EXPECT_EQ(tool(stored + Words{"--op", "mla"}).code, 2);
       }},
      {"method",
       [] {
         EXPECT_TRUE(has(compressed({"--method", "int8"}), "k: int8"));
       }},
      {"ratio",
       [] {
         EXPECT_TRUE(has(compressed({"--method", "vq", "--ratio", "0.9"}), "k: vector width 8"));
         EXPECT_TRUE(has(compressed({"--method", "vq", "--ratio", "0.7"}), "k: vector width 2"));
       }},
      {"format",
       [] {
         EXPECT_TRUE(has(quantized({"--format", "int8"}), "2 layers quantized to int8 (int-quantized)"));
         EXPECT_TRUE(has(quantized({"--format", "int4"}), "2 layers quantized to int4 (pack-quantized)"));
       }},
      {"search",
       [] {
         const Words int4{"--format", "int4"};
         EXPECT_TRUE(has(quantized(int4), "scales by the greatest magnitude"));
         EXPECT_TRUE(has(quantized(int4 + Words{"--search", "mse"}), "scales by the least squared error"));
         EXPECT_NE(digest_of(quantized(int4)), digest_of(quantized(int4 + Words{"--search", "mse"})));  // the error
       }},
      {"ignore",
       [] {
         const std::string out = quantized({"--format", "int8", "--ignore", "down_proj"});
         EXPECT_TRUE(has(out, "1 layer quantized to int8") && has(out, "left as they are: a.down_proj")) << out;
         EXPECT_TRUE(has(quantized({"--format", "int8", "--ignore", "re:.*up_"}), "left as they are: a.up_proj"));
       }},
      {"report",
       [] {
         EXPECT_TRUE(has(compressed({"--method", "fp8", "--report"}), "change of O"));
         EXPECT_FALSE(has(compressed({"--method", "fp8"}), "change of O"));
       }},
      {"backward",
       [] {
         const Words job{"run", "--synthetic", "7", "--seq", "50", "--head-dim", "8"};
         const std::string gradients = out_of(job + Words{"--backward"});
         EXPECT_TRUE(has(gradients, "# digest of dk: ")) << gradients;
         EXPECT_EQ(digest_of(gradients), digest_of(out_of(job + Words{"--op", "attention_backward"})));
       }},
      {"sinks",
       [] {
         const Words job{"run", "--synthetic", "7", "--seq", "50", "--head-dim", "8"};
         const std::string with = out_of(job + Words{"--sinks"});
         EXPECT_TRUE(has(with, ", sinks")) << with;
         EXPECT_NE(digest_of(with), digest_of(out_of(job)));
         EXPECT_EQ(tool({"run", "--op", "mla", "--synthetic", "7", "--sinks"}).code, 2);
       }},
      {"dlse",
       [] {
         const Words job{"run", "--backward", "--synthetic", "7", "--seq", "50", "--head-dim", "8"};
         const std::string with = out_of(job + Words{"--dlse"});
         EXPECT_TRUE(has(with, ", with dlse")) << with;
         EXPECT_NE(digest_of(with), digest_of(out_of(job)));
       }},
      {"with-forward",
       [] {
         const Words job{"bench", "--backward", "--seq", "50", "--head-dim", "8", "--samples", "1", "--jsonl", "-"};
         EXPECT_EQ(json_at(out_of(job + Words{"--with-forward"}), "/job/pass"), "\"forward+backward\"");
         EXPECT_EQ(tool({"bench", "--with-forward"}).code, 2);
       }},
      {"rope-dim",
       [] {
         EXPECT_TRUE(has(out_of(latent_words() + Words{"--rope-dim", "16"}), "head_dim 8+16/8")) << "rope-dim";
       }},
      {"latent-dim",
       [] {
         EXPECT_TRUE(has(out_of(latent_words() + Words{"--latent-dim", "32"}), "latent 32"));
       }},
      {"form",
       [] {
         const std::string absorbed = out_of(latent_words() + Words{"--form", "absorbed"});
         EXPECT_TRUE(has(absorbed, "# form: absorbed")) << absorbed;
         EXPECT_NE(digest_of(absorbed), digest_of(out_of(latent_words() + Words{"--form", "expanded"})));
       }},
      {"state-dim",
       [] {
         EXPECT_TRUE(has(out_of(ssm_words() + Words{"--state-dim", "24"}), "state 24, "));
       }},
      {"groups",
       [] {
         EXPECT_TRUE(has(out_of(ssm_words() + Words{"--groups", "4"}), "4 groups"));
       }},
      {"conv-width",
       [] {
         const std::string wide = out_of(ssm_words() + Words{"--conv-width", "3"});
         EXPECT_TRUE(has(wide, "after a convolution of width 3, its bias and silu")) << wide;
         EXPECT_NE(digest_of(wide), digest_of(out_of(ssm_words())));
       }},
      {"dt-softplus",
       [] {
         const std::string off = out_of(ssm_words() + Words{"--dt-softplus", "off"});
         EXPECT_FALSE(has(off, "softplus")) << off;
         EXPECT_NE(digest_of(off), digest_of(out_of(ssm_words())));
       }},
      {"dt-limit",
       [] {
         const std::string limited = out_of(ssm_words() + Words{"--dt-limit", "0,0.01"});
         EXPECT_TRUE(has(limited, "dt from 0 to 0.01")) << limited;
         EXPECT_NE(digest_of(limited), digest_of(out_of(ssm_words())));
       }},
      {"final-states",
       [] { EXPECT_TRUE(has(out_of(ssm_words() + Words{"--final-states"}), "# digest of final_states: ")); }},
  };
  return table;
}

}  // namespace ringattn::testing
