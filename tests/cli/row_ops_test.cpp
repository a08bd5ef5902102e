// SPDX-License-Identifier: Apache-2.0
// The ops whose rows are independent: batched_gemm, linear and reshard.
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <span>
#include <sstream>

#include "io/safetensors_file.hpp"
#include "io/safetensors_writer.hpp"
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
  EXPECT_TRUE(
      has(done({"verify", "--input", file, "--against", "oracle", "--parallel", "row", "--ranks", "4"}).out, "PASS"));
  EXPECT_TRUE(has(done({"verify", "--input", file, "--activation", "geglu", "--against", output}).out, "PASS"));
  write_floats(file, {{"x", FileDtype::kF32, {5, 8}}, {"weight", FileDtype::kF32, {7, 8}}});
  const Finished refused = tool({"run", "--input", file, "--activation", "swiglu"});
  EXPECT_EQ(refused.code, 3) << refused.out;
  EXPECT_TRUE(has(refused.err, "weight is [7, 8] (x has 8 features, and the layer is gated")) << refused.err;
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
