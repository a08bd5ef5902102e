// SPDX-License-Identifier: Apache-2.0
// Files whose queries are in the latent, or whose O stays there: without w_uk, without w_uv, and without either, in
// every form that latents have. What multiplies is then the caller's, and the bits are those of the whole job.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "io/safetensors_file.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/mla_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// The scale for head_dim 16 and 8 rotary dims, which a file without w_uk doesn't give.
Words scale() { return {"--softmax-scale", "0.20412414523193154"}; }

NamedTensors without(NamedTensors tensors, const std::vector<std::string>& names) {
  for (const std::string& name : names) tensors.erase(name);
  return tensors;
}

struct Output {
  std::vector<std::int64_t> shape;  // of out
  std::vector<std::byte> out, lse;
};

Output output_of(const std::string& path) {
  const SafetensorsFile file(path);
  const auto read = [&](const char* name) {
    const TensorSource tensor = file.tensor(name);
    std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.info->bytes()));
    tensor.shard->read(*tensor.info, 0, bytes);
    return bytes;
  };
  return {file.tensor("out").info->shape, read("out"), read("lse")};
}

class AbsorbedFiles : public ::testing::Test {
 protected:
  std::string input(const NamedTensors& tensors) { return write_tensors(folder_.file("in"), tensors); }

  Output run(const NamedTensors& tensors, const Words& flags) {
    const std::string out = folder_.file("out");
    const Finished run = tool(Words{"run", "--input", input(tensors), "--output", out, "--force"} + flags);
    EXPECT_EQ(run.code, 0) << run.err;
    said_ = run.out;
    return run.code == 0 ? output_of(out) : Output();
  }

  void expect_refused(int code, const NamedTensors& tensors, const Words& flags,
                      const std::vector<std::string>& parts) {
    const std::string path = input(tensors);
    for (const char* command : {"run", "verify", "bench", "plan"}) {
      const Finished refused = tool(Words{command, "--input", path} + flags);
      EXPECT_EQ(refused.code, code) << command << refused.err;
      for (const std::string& part : parts) EXPECT_TRUE(has(refused.err, part)) << part << " is not in " << refused.err;
    }
  }

  TemporaryFolder folder_;
  std::string said_;  // by the last run
};

// Rows around the ring, whose sequences have unlike numbers of queries, and steps.
std::vector<MlaFile> shapes() {
  MlaFile steps;
  steps.lengths = {40, 9, 17, 65};
  steps.q_lens = {2, 2, 2, 2};
  return {MlaFile(), steps};
}

TEST_F(AbsorbedFiles, GiveOOfTheHeadsOrOfTheLatent) {
  for (const MlaFile& shape : shapes()) {
    const NamedTensors plain = mla_tensors(shape);
    for (const bool codes : {false, true}) {
      const NamedTensors tensors = codes ? with_fp8_latent(plain) : plain;
      const NamedTensors absorbed = with_queries_in_latent(tensors, shape);
      const Output whole = run(tensors, {"--form", "absorbed"});
      const auto expect_whole = [&](const Output& found) {
        EXPECT_EQ(found.out, whole.out);
        EXPECT_EQ(found.lse, whole.lse);
        EXPECT_EQ(found.shape, whole.shape);
      };
      const auto expect_mla = [&](const Output& found) {
        EXPECT_EQ(found.shape, (std::vector<std::int64_t>{whole.shape[0], shape.heads, shape.latent_dim}));
        EXPECT_EQ(multiplied_by_w_uv(found.out, plain.at("w_uv"), shape), whole.out);
        EXPECT_EQ(found.lse, whole.lse);
      };
      for (const char* ranks : {"1", "2", "3"}) {
        for (const bool paged : {false, true}) {
          SCOPED_TRACE(fmt::format("{} ranks{}{}", ranks, codes ? ", codes" : "", paged ? ", pages" : ""));
          const auto laid = [&](const NamedTensors& rows) { return paged ? with_pages(rows, shape) : rows; };
          const Words job{"--ranks", ranks};
          expect_whole(run(laid(absorbed), job));
          expect_whole(run(laid(without(absorbed, {"w_uk"})), job + scale()));
          expect_mla(run(laid(without(tensors, {"w_uv"})), job));
          EXPECT_TRUE(has(said_, "# form: absorbed (O stays in the latent)")) << said_;
          expect_mla(run(laid(without(absorbed, {"w_uv"})), job));
          const Words rows_say{"--latent-dim", "128"};  // only pages of plain rows need it
          expect_mla(
              run(laid(without(absorbed, {"w_uk", "w_uv"})), job + scale() + (paged && !codes ? rows_say : Words())));
          EXPECT_TRUE(has(said_, "head_dim 128+8/128, latent 128, queries and O in it")) << said_;
        }
      }
    }
  }
}

TEST_F(AbsorbedFiles, AreVerifiedMeasuredAndPlanned) {
  for (const MlaFile& shape : shapes()) {
    const NamedTensors absorbed = with_queries_in_latent(mla_tensors(shape), shape);
    const NamedTensors alone = with_pages(without(absorbed, {"w_uk", "w_uv"}), shape);
    const Words job = Words{"--input", input(alone), "--latent-dim", "128"} + scale();
    for (const Words& how : {Words{"--against", "oracle", "--rows", "200"},
                             {"--ranks", "3"},
                             {"--decode", "--rows", "7", "--ranks", "2"}}) {
      const Finished checked = tool(Words{"verify"} + job + how);
      EXPECT_EQ(checked.code, 0) << checked.out << checked.err;
    }
    // Another scale is another O: the oracle has the file's.
    const std::string out = folder_.file("out");
    ASSERT_EQ(tool(Words{"run", "--output", out, "--force"} + job).code, 0);
    EXPECT_EQ(tool(Words{"verify", "--against", out, "--ranks", "2"} + job).code, 0);
    EXPECT_EQ(tool(Words{"verify", "--against", out, "--softmax-scale", "0.25", "--input", folder_.file("in"),
                         "--latent-dim", "128"})
                  .code,
              1);
    const Finished bench = tool(Words{"bench", "--samples", "2", "--jsonl", "-"} + job);
    ASSERT_EQ(bench.code, 0) << bench.err;
    EXPECT_TRUE(has(bench.out, R"("op":"mla")")) << bench.out;
    const Finished report = tool(Words{"run", "--json", "-"} + job);
    EXPECT_EQ(check_report(report.out), "");
    EXPECT_EQ(json_at(report.out, "/job/head_dim"), "136");
    EXPECT_EQ(json_at(report.out, "/job/head_dim_v"), "128");

    // No matrices, and no rows of the heads beside those in the latent.
    const auto planned = [&](const Words& of) {
      const Finished plan = tool(Words{"plan", "--threads", "1", "--backend", "cpu", "--json", "-"} + of);
      EXPECT_EQ(plan.code, 0) << plan.err;
      return std::stoll(json_at(plan.out, "/rows/0/memory_per_rank"));
    };
    const std::string whole = write_tensors(folder_.file("whole"), with_pages(mla_tensors(shape), shape));
    const std::int64_t saved = planned({"--input", whole, "--form", "absorbed"}) - planned(job);
    std::int64_t queries = 0;
    for (const std::int64_t count : shape.q_lens) queries += count;
    const std::int64_t matrices = (16 + 24) * 128, rows = queries * (16 + 8 + 24);
    const std::int64_t least = (matrices + rows) * shape.heads * 2, scratch = 1 << 20;  // of products, at most
    EXPECT_GE(saved, least);
    EXPECT_LT(saved, least + scratch);
  }
}

TEST_F(AbsorbedFiles, AreRefusedWhereSomethingIsNotKnown) {
  const MlaFile shape;
  const NamedTensors tensors = mla_tensors(shape);
  const NamedTensors absorbed = with_queries_in_latent(tensors, shape);
  const NamedTensors alone = without(absorbed, {"w_uk", "w_uv"});
  // Queries of the heads, which nothing brings into the latent.
  for (const NamedTensors& narrow : {without(tensors, {"w_uk"}), without(tensors, {"w_uk", "w_uv"})}) {
    for (const NamedTensors& laid : {narrow, with_fp8_latent(narrow), with_pages(narrow, shape)}) {
      expect_refused(3, laid, scale(), {"has no tensor `w_uk`"});
    }
  }
  // The default softmax scale depends on the head_dim of the expanded heads, which is unknown here.
  for (const NamedTensors& unknown : {without(absorbed, {"w_uk"}), alone}) {
    expect_refused(2, unknown, {},
                   {"`q`", "[44, 3, 136], in the latent, and there is no w_uk", "1 / sqrt(head_dim + 8)",
                    "--softmax-scale 0.07216878364870322", "--model-config"});
  }
  expect_refused(2, without(tensors, {"w_uv"}), {"--form", "expanded"}, {"--form expanded without w_uv"});
  expect_refused(2, alone, scale() + Words{"--form", "expanded"}, {"--form expanded with queries in the latent"});
  // Rows of 136 numbers.
  const NamedTensors pages = with_pages(alone, shape);
  expect_refused(3, pages, scale(), {"`latent_pages`", "latent_dim follows from the matrices", "--latent-dim 512"});
  expect_refused(3, pages, scale() + Words{"--latent-dim", "136"},
                 {"`latent_pages`", "a rotary key follows the latent"});
  expect_refused(2, with_pages(absorbed, shape), {"--latent-dim", "64"},
                 {"--latent-dim contradicts --input", "latents have 128 numbers"});
  // Codes that are none of these queries.
  NamedTensors other = with_fp8_latent(alone);
  other["q"].shape = {44, 3, 128};
  other["q"].bytes.resize(44 * 3 * 128 * 2);
  expect_refused(3, other, scale(), {"has no tensor `w_uk`"});
  // A name that is given is there.
  expect_refused(3, alone, scale() + Words{"--tensors", "w_uv=values"}, {"`values`"});
}

// Shapes only, as Hugging Face writes them.
TEST_F(AbsorbedFiles, TakeScaleAndDimsFromAModel) {
  const MlaFile shape;
  const NamedTensors absorbed = with_queries_in_latent(mla_tensors(shape), shape);
  const auto config = [&](const char* dims) {
    return folder_.write("config.json", fmt::format(R"({{"num_attention_heads": 3, "kv_lora_rank": 128, {}}})", dims));
  };
  const std::string model = config(R"("qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24)");
  const NamedTensors pages = with_pages(without(absorbed, {"w_uk", "w_uv"}), shape);
  const Output expected = run(pages, scale() + Words{"--latent-dim", "128"});
  const Output found = run(pages, {"--model-config", model});
  EXPECT_EQ(found.out, expected.out);
  EXPECT_EQ(found.lse, expected.lse);
  // A tensor that says it has the last word.
  config(R"("qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 24)");
  expect_refused(2, absorbed, {"--model-config", model}, {"qk_nope_head_dim is 32 in the config and 16"});
  config(R"("qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24)");
  expect_refused(2, without(absorbed, {"w_uk"}), {"--model-config", model},
                 {"qk_rope_head_dim is 16 in the config and 8"});
}

}  // namespace
}  // namespace ringattn::testing
