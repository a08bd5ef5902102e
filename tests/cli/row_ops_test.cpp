// SPDX-License-Identifier: Apache-2.0
// The ops whose rows are independent: batched_gemm, linear, rope and reshard.
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <span>
#include <sstream>

#include "io/safetensors_file.hpp"
#include "io/safetensors_writer.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words job(const std::string& command, const std::string& op, const Words& more = {}) {
  return Words{command,   "--op", op,        "--synthetic", "7",          "--seq", "137",
               "--batch", "3",    "--heads", "3",           "--head-dim", "16"} +
         more;
}

Finished done(const Words& words) {
  Finished finished = tool(words);
  EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
  return finished;
}

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

void write_floats(const std::string& path, const std::vector<OutputTensor>& tensors) {
  const auto writer = SafetensorsWriter::create(plan_safetensors(tensors, {}), path, true);
  float value = -2.0F;
  for (const OutputTensor& tensor : tensors) {
    std::size_t count = 1;
    for (const std::int64_t extent : tensor.shape) count *= static_cast<std::size_t>(extent);
    std::vector<float> values(count);
    for (float& element : values) element = value += 0.03125F;
    writer->write_bytes(tensor.name, std::as_bytes(std::span(values)));
  }
  writer->commit();
}

// The rows of a gated delta rule depend on earlier ones: ranks pass states on.
TEST(GatedDelta, IsRightAndHasTheSameBitsOnAnyRanks) {
  const TemporaryFolder folder;
  const auto words = [](const std::string& command, const Words& more) {
    return Words{command, "--op",       "gated_delta", "--synthetic", "7",    "--seq",   "4500", "--heads",
                 "2",     "--head-dim", "16",          "--dtype",     "fp16", "--decay", "dim"} +
           more;
  };
  for (const int ranks : {1, 3}) {
    const std::string file = folder.file(std::to_string(ranks));
    done(words("run", {"--final-states", "--ranks", std::to_string(ranks), "--output", file}));
    EXPECT_EQ(text_of(file), text_of(folder.file("1"))) << ranks;
  }
  const Finished shapes = done(words("verify", {"--ranks", "2"}));
  EXPECT_TRUE(has(shapes.out, "in-turn") && has(shapes.out, "resumed") && has(shapes.out, "PASS")) << shapes.out;
  const Finished oracle = done(words("verify", {"--against", "oracle", "--ranks", "2"}));
  EXPECT_TRUE(has(oracle.out, "final states: greatest error") && has(oracle.out, "PASS")) << oracle.out;
  // Values beyond fp16 are infinite there, not wrong.
  done(words("verify", {"--against", "oracle", "--rows", "8", "--scale", "1e5"}));
  const Finished plan = done(words("plan", {"--world", "9"}));
  EXPECT_TRUE(has(plan.out, "cpu_gated_delta")) << plan.out;
  EXPECT_TRUE(has(plan.out, "9 ranks in all; --verbose shows every one\n# beside attention in its zigzag layout: "))
      << plan.out;
  // Rows have 64 bytes. Rank 0 has tokens 0 to 2,048 of the layer; of attention, stripes of 1,152 tokens, the first and
  // last.
  const std::string planned = done(words("plan", {"--world", "1,2", "--json", "-"})).out;
  EXPECT_EQ(json_at(planned, "/rows/0/reshard"), "absent");
  EXPECT_EQ(json_at(planned, "/rows/1/reshard"),
            R"({"attention_layout":"zigzag","bytes_after":[66816,57344],"bytes_before":[57344,66816]})");

  // A file, whose last token is then a decode step from the state before it.
  const std::string in = folder.file("in.safetensors"), out = folder.file("out.safetensors");
  write_floats(in, {{"q", FileDtype::kF32, {3, 1, 8}},
                    {"k", FileDtype::kF32, {3, 1, 8}},
                    {"v", FileDtype::kF32, {3, 2, 8}},
                    {"log_decay", FileDtype::kF32, {3, 2}},
                    {"beta", FileDtype::kF32, {3, 2}},
                    {"state", FileDtype::kF32, {3, 2, 8, 8}}});
  const Finished step = done({"run", "--input", in, "--qk-norm", "on", "--output", out});
  EXPECT_TRUE(has(step.out, "update of one token, GDN")) << step.out;
  EXPECT_TRUE(SafetensorsFile(out).contains("final_states"));
  done({"verify", "--input", in, "--qk-norm", "on", "--against", "oracle"});
  const auto refused = [](const Words& flags, const std::string& text) {
    const Finished run = tool(Words{"run"} + flags);
    EXPECT_EQ(run.code, 2) << run.out << run.err;
    EXPECT_TRUE(has(run.err, text)) << run.err;
  };
  refused({"--input", in, "--key-heads", "2"}, "--key-heads 2 with a file");
  refused({"--input", in, "--decay", "dim"}, "--decay dim with a file");
  refused({"--input", in, "--scale", "0"}, "--scale 0 with a gated delta rule");
  refused({"--op", "gated_delta", "--synthetic", "7", "--q-len", "1", "--seq", "9"}, "--seq contradicts --q-len");
}

TEST(RowOps, HaveTheSameBitsOnAnyRanks) {
  const TemporaryFolder folder;
  for (const std::string op : {"batched_gemm", "reshard"}) {
    const auto file = [&](int ranks) { return folder.file(op + std::to_string(ranks)); };
    for (const int ranks : {1, 3, 7}) {
      done(job("run", op, {"--ranks", std::to_string(ranks), "--output", file(ranks)}));
      EXPECT_EQ(text_of(file(ranks)), text_of(file(1))) << op << " on " << ranks;
    }
    for (const char* dtype : {"bf16", "fp16", "fp32"}) {
      const Finished shapes = done(job("verify", op, {"--dtype", dtype}));
      EXPECT_TRUE(has(shapes.out, "# 5 shapes, bit for bit") && has(shapes.out, "PASS")) << shapes.out;
      const Finished oracle = done(job("verify", op, {"--dtype", dtype, "--against", "oracle", "--ranks", "2"}));
      EXPECT_TRUE(has(oracle.out, "PASS")) << oracle.out;
    }
    const std::string golden = folder.file(op + ".json");
    done(job("verify", op, {"--record", golden}));
    EXPECT_TRUE(has(done(job("verify", op, {"--golden", golden, "--ranks", "2"})).out, "PASS"));
    EXPECT_TRUE(has(done(job("plan", op, {"--world", "2,64"})).out, "# kernel: ")) << op;
    EXPECT_TRUE(has(done(job("bench", op, {"--samples", "2", "--jsonl", "-"})).out, "\"op\":\"" + op + "\"")) << op;
  }
}

Words layer(const std::string& command, const std::string& parallel, const Words& more = {}) {
  return Words{command,  "--op",          "linear", "--synthetic",    "7",  "--seq",   "21",   "--batch",
               "2",      "--in-features", "72",     "--out-features", "40", "--dtype", "fp32", "--activation",
               "swiglu", "--parallel",    parallel} +
         more;
}

TEST(RowOps, ALinearLayerHasTheSameBitsOnAnyRanks) {
  const TemporaryFolder folder;
  std::set<std::string> digests;
  for (const std::string parallel : {"none", "column", "row"}) {
    const auto file = [&](int ranks) { return folder.file(parallel + std::to_string(ranks)); };
    for (const int ranks : {1, 3, 8}) {
      const Finished run = done(layer("run", parallel, {"--ranks", std::to_string(ranks), "--output", file(ranks)}));
      EXPECT_EQ(text_of(file(ranks)), text_of(file(1))) << parallel << " on " << ranks;
      if (ranks == 1) digests.insert(digest_of(run.out));
    }
    const Finished shapes = done(layer("verify", parallel));
    EXPECT_TRUE(has(shapes.out, "# 5 shapes, bit for bit") && has(shapes.out, "PASS")) << shapes.out;
    EXPECT_TRUE(has(done(layer("verify", parallel, {"--against", "oracle", "--ranks", "2"})).out, "PASS"));
    EXPECT_TRUE(has(done(layer("plan", parallel, {"--world", "2,8"})).out, "# kernel: "));
    const Finished many = tool(layer("plan", parallel, {"--world", "16"}));
    EXPECT_EQ(many.code, parallel == "none" ? 0 : 2) << many.err;
  }
  EXPECT_EQ(digests.size(), 2U) << "row-parallel has other bits, and column-parallel the same";
  const std::string golden = folder.file("golden.json");
  done(layer("verify", "row", {"--record", golden}));
  EXPECT_TRUE(has(done(layer("verify", "row", {"--golden", golden, "--ranks", "5"})).out, "PASS"));
  EXPECT_TRUE(has(done(layer("bench", "row", {"--samples", "2", "--jsonl", "-"})).out, "\"op\":\"linear\""));
}

TEST(RowOps, LinearReadsFiles) {
  const TemporaryFolder folder;
  const std::string file = folder.file("layer.safetensors");
  write_floats(file,
               {{"x", FileDtype::kF32, {5, 8}}, {"weight", FileDtype::kF32, {6, 8}}, {"bias", FileDtype::kF32, {6}}});
  const std::string output = folder.file("y.safetensors");
  const Finished run = done({"run", "--input", file, "--activation", "geglu", "--output", output});
  EXPECT_TRUE(has(run.out, "# job: linear, fp32, 8 to 3 features, geglu, bias, 5 tokens")) << run.out;
  EXPECT_EQ(SafetensorsFile(output).tensor("y").info->shape, (std::vector<std::int64_t>{5, 3}));
  const Finished oracle = done({"verify", "--input", file, "--against", "oracle", "--parallel", "row", "--ranks", "4"});
  EXPECT_TRUE(has(oracle.out, "PASS") && has(oracle.out, ", feature ") && !has(oracle.out, "head")) << oracle.out;
  EXPECT_TRUE(has(done({"verify", "--input", file, "--activation", "geglu", "--against", output}).out, "PASS"));
  const Finished differs = tool({"verify", "--input", file, "--activation", "geglu_tanh", "--against", output});
  EXPECT_TRUE(has(differs.out, "first difference: y at sequence 0, token 0, feature ")) << differs.out;
  write_floats(file, {{"x", FileDtype::kF32, {5, 8}}, {"weight", FileDtype::kF32, {7, 8}}});
  const Finished refused = tool({"run", "--input", file, "--activation", "swiglu"});
  EXPECT_EQ(refused.code, 3) << refused.out;
  EXPECT_TRUE(has(refused.err, "weight is [7, 8] (x has 8 features, and the layer is gated")) << refused.err;
}

TEST(RowOps, RopeHasTheSameBitsOnAnyRanks) {
  const TemporaryFolder folder;
  const auto file = [&](int ranks) { return folder.file("rope" + std::to_string(ranks)); };
  const Words yarn{"--kv-heads",  "2",    "--rope-theta",   "1e6",
                   "--rope-type", "yarn", "--rope-scaling", "factor=4,original_max_position_embeddings=64"};
  for (const int ranks : {1, 2, 3, 5}) {
    done(job("run", "rope", yarn + Words{"--ranks", std::to_string(ranks), "--output", file(ranks)}));
    EXPECT_EQ(text_of(file(ranks)), text_of(file(1))) << ranks;
  }
  EXPECT_EQ(SafetensorsFile(file(1)).tensor("q").info->shape, (std::vector<std::int64_t>{3, 137, 3, 16}));
  EXPECT_EQ(SafetensorsFile(file(1)).tensor("k").info->shape, (std::vector<std::int64_t>{3, 137, 2, 16}));
  EXPECT_TRUE(has(done(job("verify", "rope", yarn + Words{"--against", file(1), "--ranks", "2"})).out, "PASS"));
  EXPECT_TRUE(has(done(job("verify", "rope", yarn)).out, "# 5 shapes, bit for bit"));
  for (const char* angles : {"fp32", "exact"}) {
    const Words other{"--rope-pairs",  "interleaved", "--rotary-factor", "0.5",
                      "--rope-angles", angles,        "--dtype",         "fp16"};
    EXPECT_TRUE(has(done(job("verify", "rope", other + Words{"--against", "oracle", "--ranks", "2"})).out, "PASS"));
  }
  EXPECT_TRUE(has(done(job("plan", "rope", {"--world", "2,64"})).out, "# kernel: "));
  EXPECT_TRUE(has(done(job("bench", "rope", {"--samples", "2", "--jsonl", "-"})).out, "\"op\":\"rope\""));
  const std::string golden = folder.file("golden.json");
  done(job("verify", "rope", yarn + Words{"--record", golden}));
  EXPECT_TRUE(has(done(job("verify", "rope", yarn + Words{"--golden", golden, "--ranks", "3"})).out, "PASS"));
  const Finished refused = tool(job("run", "rope", {"--rope-type", "dynamic", "--rope-scaling", "factor=2"}));
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(has(refused.err, "RoPE of type dynamic without a length")) << refused.err;
  EXPECT_TRUE(has(tool(job("run", "rope", {"--rope-scaling", "alpha=2"})).err, "original_max_position_embeddings"));
}

TEST(RowOps, AFileIsOfTheOpThatIsNamed) {
  const TemporaryFolder folder;
  const std::string rows = folder.file("rows.safetensors"), layer = folder.file("layer.safetensors");
  const auto refused = [&](const Words& words, int code, const std::string& part) {
    const Finished finished = tool(Words{"run"} + words);
    EXPECT_EQ(finished.code, code) << finished.out;
    EXPECT_TRUE(has(finished.err, part)) << finished.err;
  };
  write_floats(rows, {{"q", FileDtype::kF32, {5, 3, 16}}, {"k", FileDtype::kF32, {5, 1, 16}}});
  refused({"--input", rows}, 3,
          "has q, k and no v (these are rows to rotate by RoPE, or attention without its values). For RoPE give --op "
          "rope or one of its settings; for attention give v.");
  refused({"--input", rows, "--op", "attention"}, 3, "v");
  EXPECT_TRUE(has(done({"run", "--input", rows, "--op", "rope"}).out, "# job: rope, fp32"));
  EXPECT_TRUE(has(done({"run", "--input", rows, "--rope-theta", "1e6"}).out, "theta 1e6"));
  write_floats(layer, {{"x", FileDtype::kF32, {5, 8}}, {"weight", FileDtype::kF32, {3, 8}}});
  EXPECT_TRUE(has(done({"run", "--input", layer, "--op", "linear"}).out, "# job: linear, fp32"));
  refused({"--input", layer, "--op", "rope"}, 2, "--op rope contradicts --input " + layer);
  refused({"--input", layer, "--op", "rope"}, 2, "(the file has the tensors of linear). Leave --op out");
  // A square weight of 2 to 4 channels may be one of causal_conv1d, and one of 1 may not.
  for (const std::int64_t features : {1, 2}) {
    write_floats(layer, {{"x", FileDtype::kF32, {3, features}}, {"weight", FileDtype::kF32, {features, features}}});
    EXPECT_TRUE(has(done({"run", "--input", layer, "--op", "linear"}).out, "# job: linear, fp32")) << features;
  }
  refused({"--input", layer}, 4, "required: conv1d, fp32, 2 channels, width 2");
  refused({"--input", layer, "--op", "rope"}, 2, "--op rope contradicts --input " + layer);
  // Files that lack a tensor are those of the op that is named, or else of the one that lacks least.
  write_floats(layer, {{"x", FileDtype::kF32, {5, 8}}, {"bias", FileDtype::kF32, {3}}});
  refused({"--input", layer}, 3, "weight");
  refused({"--input", layer, "--op", "linear"}, 3, "weight");
}

TEST(RowOps, RopeReadsFilesAndModels) {
  const TemporaryFolder folder;
  const std::string file = folder.file("rows.safetensors"), model = folder.file("config.json");
  write_floats(file, {{"q", FileDtype::kF32, {5, 3, 64}}, {"k", FileDtype::kF32, {5, 1, 64}}});
  const auto with = [&](const std::string& config) {
    std::ofstream(model) << config;
    return tool({"verify", "--input", file, "--model-config", model, "--against", "oracle"});
  };
  const std::string dims =
      R"("num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 192, "num_hidden_layers": 2)";
  const Finished llama = with(R"({"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3",
      "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, )" +
                              dims + "}");
  EXPECT_TRUE(has(llama.out, "llama3, theta 500000, factor=8,") && has(llama.out, "PASS")) << llama.out << llama.err;
  const Finished assumed = with(R"({"model_type": "llama", )" + dims + "}");
  EXPECT_TRUE(has(assumed.err, "config.json has no rope_theta (10000 is the default of llama). Give --rope-theta"))
      << assumed.err;
  const Finished glm = with(R"({"model_type": "glm", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
      "partial_rotary_factor": 0.25}, "head_dim": 64, )" +
                            dims + "}");
  EXPECT_TRUE(has(glm.out, "rotary_dim 16, interleaved") && has(glm.out, "PASS")) << glm.out << glm.err;
  const Finished gemma = with(R"({"model_type": "gemma3_text", "rope_parameters": {
      "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
      "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}, "sliding_window": 4,
      "layer_types": ["sliding_attention", "full_attention"], "head_dim": 64, )" +
                              dims + "}");
  EXPECT_EQ(gemma.code, 2) << gemma.err;
  std::string ones = "[1.5";
  for (int i = 1; i < 32; ++i) ones += ", 1.5";
  std::ofstream(model) << R"({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": )" + ones +
                              R"(], "long_factor": )" + ones + R"(]}, "max_position_embeddings": 131072,
      "original_max_position_embeddings": 4096, )" +
                              dims + "}";
  const Words phi{"verify", "--input", file, "--model-config", model, "--against", "oracle"};
  EXPECT_TRUE(has(tool(phi).err, "RoPE of type longrope without a length"));
  EXPECT_TRUE(has(done(phi + Words{"--rope-length", "64k"}).out, "PASS"));
  const Finished unknown = with(R"({"model_type": "llama", "rope_interleave": true, )" + dims + "}");
  EXPECT_EQ(unknown.code, 4) << unknown.out;
  EXPECT_TRUE(has(unknown.err, "rope_interleave is not known")) << unknown.err;
  const Finished alpha =
      with(R"({"model_type": "llama", "rope_scaling": {"type": "dynamic", "alpha": 1000.0}, )" + dims + "}");
  EXPECT_TRUE(has(alpha.err, "alpha of its parameters is not known")) << alpha.err;
  write_floats(file, {{"k", FileDtype::kF32, {5, 2, 64}}});
  const std::string output = folder.file("out.safetensors");
  done({"run", "--op", "rope", "--input", file, "--output", output});
  EXPECT_EQ(SafetensorsFile(output).tensor("k").info->shape, (std::vector<std::int64_t>{5, 2, 64}));
}

TEST(RowOps, ReshardGivesRowsBackFromAnyLayout) {
  const std::string digest = digest_of(done(job("run", "reshard")).out);
  for (const Words& layout : {Words{"--layout", "zigzag"}, {"--layout", "contiguous"}, {"--stripe", "128"}}) {
    EXPECT_EQ(digest_of(done(job("run", "reshard", layout + Words{"--ranks", "4"})).out), digest);
  }
}

TEST(RowOps, AMatrixHasTheDimThatIsAskedFor) {
  EXPECT_TRUE(has(done(job("run", "batched_gemm", {"--out-dim", "24"})).out, "rows of 16 to 24"));
  const Finished refused = tool(job("run", "batched_gemm", {"--out-dim", "0"}));
  EXPECT_EQ(refused.code, 2) << refused.err;
}

TEST(RowOps, ReadFiles) {
  const TemporaryFolder folder;
  const std::string gemm = folder.file("gemm.safetensors");
  write_floats(gemm, {{"rows", FileDtype::kF32, {21, 2, 8}}, {"weights", FileDtype::kF32, {2, 16, 8}}});
  const Finished run = done({"run", "--input", gemm, "--ranks", "2"});
  EXPECT_TRUE(has(run.out, "# job: batched_gemm, fp32, heads 2, rows of 8 to 16, 21 tokens")) << run.out;
  EXPECT_TRUE(has(done({"verify", "--input", gemm, "--against", "oracle"}).out, "PASS"));
  const std::string rows = folder.file("rows.safetensors");
  write_floats(rows, {{"rows", FileDtype::kF32, {21, 2, 8}}});
  EXPECT_TRUE(has(done({"run", "--input", rows}).out, "# job: reshard, fp32, heads 2, head_dim 8, 21 tokens"));
  const std::string wrong = folder.file("wrong.safetensors");
  write_floats(wrong, {{"rows", FileDtype::kF32, {21, 2, 8}}, {"weights", FileDtype::kF32, {3, 16, 8}}});
  const Finished refused = tool({"run", "--input", wrong});
  EXPECT_EQ(refused.code, 3) << refused.out;
  EXPECT_TRUE(has(refused.err,
                  "weights are [3, 16, 8] (rows have 2 heads of 8). Give a matrix [out_dim, head_dim] for "
                  "each head of the rows."))
      << refused.err;
}

}  // namespace
}  // namespace ringattn::testing
