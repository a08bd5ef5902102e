// SPDX-License-Identifier: Apache-2.0
// The gradients of attention: files, seeds, checks, plans and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <span>
#include <sstream>

#include "io/safetensors_file.hpp"
#include "io/safetensors_writer.hpp"
#include "kernels/common/synthetic.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// A job of a seed. Flags in `more` replace its own.
Words made(const std::string& command, const Words& more = {}) {
  Words words{command, "--op", "attention_backward", "--synthetic", "7"};
  for (const auto& [flag, value] :
       {std::pair{"--seq", "300"}, {"--heads", "4"}, {"--kv-heads", "2"}, {"--head-dim", "16"}, {"--dtype", "fp32"}}) {
    if (std::ranges::find(more, flag) == more.end()) words.insert(words.end(), {flag, value});
  }
  return words + more;
}

Finished done(const Words& words) {
  Finished finished = tool(words);
  EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
  return finished;
}

std::string content_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

struct Tensor {
  OutputTensor tensor;
  std::string bytes;
};

void save(const std::string& path, const std::vector<Tensor>& tensors) {
  std::vector<OutputTensor> planned;
  for (const Tensor& tensor : tensors) planned.push_back(tensor.tensor);
  const auto writer = SafetensorsWriter::create(plan_safetensors(planned, {}), path, true);
  for (const Tensor& tensor : tensors) {
    writer->write_bytes(tensor.tensor.name, std::as_bytes(std::span(tensor.bytes.data(), tensor.bytes.size())));
  }
  writer->commit();
}

template <typename Value>
std::string bytes_of(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

// Values around `offset`, a function of name and index.
Tensor waves(const std::string& name, const std::vector<std::int64_t>& shape, double offset = 0.0) {
  std::size_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
  std::vector<float> values;
  const double step = 0.1 + 0.37 * static_cast<double>(name.front() % 7) + 0.11 * static_cast<double>(name.back() % 5);
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>(offset + std::sin(step * static_cast<double>(i + 1))));
  }
  return {{name, FileDtype::kF32, shape}, bytes_of(values)};
}

Tensor integers(const std::string& name, const std::vector<std::int64_t>& values) {
  return {{name, FileDtype::kI64, {static_cast<std::int64_t>(values.size())}}, bytes_of(values)};
}

// A file of `q_tokens` queries of 4 heads and `k_tokens` keys of 2 KV heads. The gradients' formulas hold for any out
// and lse.
std::vector<Tensor> backward_file(std::int64_t q_tokens, std::int64_t k_tokens) {
  return {waves("q", {q_tokens, 4, 16}),  waves("k", {k_tokens, 2, 16}),    waves("v", {k_tokens, 2, 8}),
          waves("out", {q_tokens, 4, 8}), waves("lse", {4, q_tokens}, 3.0), waves("dout", {q_tokens, 4, 8})};
}

Tensor& named(std::vector<Tensor>& tensors, const std::string& name) {
  for (Tensor& tensor : tensors) {
    if (tensor.tensor.name == name) return tensor;
  }
  throw std::logic_error(name);
}

void set_value(Tensor& tensor, std::size_t index, float value) {
  tensor.bytes.replace(index * sizeof value, sizeof value, bytes_of(std::vector<float>{value}));
}

TEST(AttentionBackward, OfASeedHasTheSameBytesOnAnyRanks) {
  const TemporaryFolder folder;
  const auto file = [&](int ranks) { return folder.file("dqkv" + std::to_string(ranks)); };
  for (const int ranks : {1, 2, 3}) {
    const Finished run = done(made("run", {"--ranks", std::to_string(ranks), "--output", file(ranks)}));
    EXPECT_TRUE(has(run.out, "# job: backward of fp32, heads 4/2 (GQA 2:1), head_dim 16, causal")) << run.out;
    EXPECT_TRUE(has(run.out, "# digest of dk: ") && has(run.out, "# digest of dv: ")) << run.out;
    EXPECT_EQ(content_of(file(ranks)), content_of(file(1))) << ranks;
  }
  const SafetensorsFile out(file(1));
  EXPECT_EQ(out.tensor("dq").info->shape, (std::vector<std::int64_t>{300, 4, 16}));
  EXPECT_EQ(out.tensor("dv").info->shape, (std::vector<std::int64_t>{300, 2, 16}));
  EXPECT_NE(out.metadata("digest.dq"), nullptr);
  const Finished earlier = done(made("verify", {"--against", file(1), "--ranks", "2"}));
  EXPECT_TRUE(has(earlier.out, "PASS")) << earlier.out;
  const Finished other = tool(made("verify", {"--against", file(1), "--mask", "full"}));
  EXPECT_EQ(other.code, 1) << other.out << other.err;
  EXPECT_TRUE(has(other.out, "first difference: dq at sequence 0, token 0, head 0, dim 0: ")) << other.out;
}

// What the forward writes, with a gradient, is the input: both ways have the same bits.
TEST(AttentionBackward, OfAForwardsOutputIsThatOfTheSeed) {
  const TemporaryFolder folder;
  const PackedRun all{0, 300};
  const auto synthetic = [&](const std::string& name, SyntheticTensor tensor, std::int64_t heads) {
    std::vector<float> values(static_cast<std::size_t>(300 * heads * 16));
    fill_synthetic(7, tensor, {&all, 1}, dense_view(static_cast<void*>(values.data()), Dtype::kF32, 300, heads, 16));
    return Tensor{{name, FileDtype::kF32, {300, heads, 16}}, bytes_of(values)};
  };
  std::vector<Tensor> tensors{synthetic("q", SyntheticTensor::kQ, 4), synthetic("k", SyntheticTensor::kK, 2),
                              synthetic("v", SyntheticTensor::kV, 2)};
  const std::string forward = folder.file("forward");
  save(forward, tensors);
  const std::string results = folder.file("results");
  EXPECT_TRUE(has(done({"run", "--input", forward, "--output", results}).out, "digest of out"));
  const SafetensorsFile file(results);
  for (const auto& [name, shape] :
       {std::pair<std::string, std::vector<std::int64_t>>{"out", {300, 4, 16}}, {"lse", {4, 300}}}) {
    const TensorSource source = file.tensor(name);
    std::string bytes(static_cast<std::size_t>(source.info->bytes()), '\0');
    source.shard->read(*source.info, 0, std::as_writable_bytes(std::span(bytes.data(), bytes.size())));
    tensors.push_back({{name, FileDtype::kF32, shape}, bytes});
  }
  tensors.push_back(synthetic("dout", SyntheticTensor::kDout, 4));
  const std::string input = folder.file("backward");
  save(input, tensors);
  const Finished run = done({"run", "--input", input, "--ranks", "3", "--json", "-"});
  const Finished seed = done(made("run", {"--json", "-"}));
  for (const char* tensor : {"/digest/dq", "/digest/dk", "/digest/dv"}) {
    EXPECT_EQ(json_at(run.out, tensor), json_at(seed.out, tensor)) << tensor;
  }
  EXPECT_EQ(json_at(run.out, "/op"), "\"attention_backward\"");
  EXPECT_EQ(json_at(run.out, "/job/gradients"), "\"fp32\"");
}

TEST(AttentionBackward, IsVerified) {
  const Finished shapes = done(made("verify", {"--ranks", "3", "--head-dim-v", "8"}));
  EXPECT_TRUE(has(shapes.out, "# 14 shapes, bit for bit") && has(shapes.out, "PASS")) << shapes.out;
  const Words numerics{"--against", "oracle", "--ranks", "2", "--head-dim-v", "8"};
  for (const char* dtype : {"bf16", "fp16", "fp32"}) {
    const Finished run = done(made("verify", numerics + Words{"--dtype", dtype}));
    EXPECT_TRUE(has(run.out, "64 rows of dq and 64 of dk and dv against the fp64 oracle")) << run.out;
  }
  done(made("verify", numerics + Words{"--dtype", "bf16", "--gradients", "fp32", "--window", "50,0"}));
  done(made("verify", numerics + Words{"--softcap", "2", "--q-len", "100", "--mask", "full"}));
  done(made("verify", numerics + Words{"--query-offset", "-130", "--json", "-"}));
  const TemporaryFolder folder;
  const std::string golden = folder.file("golden.json");
  done(made("verify", {"--record", golden}));
  EXPECT_EQ(json_at(content_of(golden), "/digest_dv").size(), 34U);
  EXPECT_TRUE(has(done(made("verify", {"--golden", golden, "--ranks", "3"})).out, "PASS"));
  EXPECT_EQ(tool(made("verify", {"--golden", golden, "--softcap", "3"})).code, 2);  // another job
  for (const char* flag : {"--peer", "--decode"}) {
    const Finished refused = tool(made("verify", flag == std::string("--peer") ? Words{flag, golden} : Words{flag}));
    EXPECT_EQ(refused.code, 2) << refused.out << refused.err;
  }
}

// Sequences of several queries, of one, of none, without keys, and with queries before the first key.
TEST(AttentionBackward, ReadsPackedSequences) {
  const TemporaryFolder folder;
  std::vector<Tensor> tensors = backward_file(141, 210);
  tensors.push_back(integers("cu_seqlens_q", {0, 70, 71, 71, 74, 141}));
  tensors.push_back(integers("cu_seqlens_k", {0, 130, 131, 140, 140, 210}));
  tensors.push_back(integers("q_offset", {60, 0, 0, 0, -20}));
  tensors.push_back(waves("dlse", {4, 141}));
  tensors.push_back(waves("sinks", {4}));
  // Rows without keys and without a sink's weight are as the forward writes them.
  const std::string input = folder.file("packed");
  save(input, tensors);
  const auto out = [&](int ranks) { return folder.file("out" + std::to_string(ranks)); };
  for (const int ranks : {1, 2, 3}) {
    done({"run", "--input", input, "--ranks", std::to_string(ranks), "--output", out(ranks)});
    EXPECT_EQ(content_of(out(ranks)), content_of(out(1))) << ranks;
  }
  EXPECT_EQ(SafetensorsFile(out(1)).tensor("dsinks").info->shape, (std::vector<std::int64_t>{4}));
  const Finished oracle = done({"verify", "--input", input, "--against", "oracle", "--ranks", "3", "--rows", "2000"});
  EXPECT_TRUE(has(oracle.out, "564 rows of dq and 420 of dk and dv") && has(oracle.out, "dsinks: error")) << oracle.out;
  EXPECT_TRUE(has(done({"verify", "--input", input, "--ranks", "2"}).out, "PASS"));
  const std::string one = folder.file("one");
  save(one, backward_file(1, 1));
  EXPECT_TRUE(has(done({"verify", "--input", one, "--against", "oracle", "--ranks", "2"}).out, "PASS"));
  std::vector<Tensor> none = backward_file(0, 0);
  for (Tensor& tensor : none) tensor.bytes.clear();
  const std::string empty = folder.file("empty");
  save(empty, none);
  EXPECT_EQ(tool({"run", "--input", empty, "--ranks", "2"}).code, tool({"run", "--input", empty}).code);
}

TEST(AttentionBackward, CountsNanAndKeepsTheOrderOfAxes) {
  const TemporaryFolder folder;
  std::vector<Tensor> tensors = backward_file(40, 40);
  set_value(named(tensors, "v"), 3, NAN);
  set_value(named(tensors, "dout"), 5, INFINITY);
  set_value(named(tensors, "lse"), 0, -INFINITY);
  const std::string input = folder.file("nan");
  save(input, tensors);
  const Finished run = done({"run", "--input", input, "--ranks", "3", "--json", "-"});
  EXPECT_TRUE(has(run.err, "1 of v, 0 of out, 0 of lse and 1 of its and out's gradients are NaN or infinite"))
      << run.err;
  EXPECT_EQ(json_at(run.out, "/non_finite_inputs/dout"), "1");
  const std::string out = folder.file("out");
  done(made("run", {"--order", "bhtd", "--batch", "2", "--seq", "60", "--output", out}));
  EXPECT_EQ(SafetensorsFile(out).tensor("dk").info->shape, (std::vector<std::int64_t>{2, 2, 60, 16}));
}

TEST(AttentionBackward, RefusesTensorsThatDoNotFit) {
  const TemporaryFolder folder;
  const std::string input = folder.file("bad");
  struct Case {
    std::string tensor;
    std::vector<std::int64_t> shape;  // empty: it is missing
    std::string_view part;
  };
  for (const Case& bad :
       {Case{"out", {}, "has no tensor out"}, Case{"lse", {}, "has no tensor lse"}, Case{"q", {}, "q"},
        Case{"out", {40, 4, 16}, "q, k and v ask for F32 [40, 4, 8]"},
        Case{"dout", {40, 2, 8}, "q, k and v ask for F32 [40, 4, 8]"},
        Case{"lse", {40, 4}, "q, k and v ask for F32 [4, 40]"}, Case{"v", {39, 2, 8}, "k has 40 tokens"}}) {
    std::vector<Tensor> tensors = backward_file(40, 40);
    std::erase_if(tensors, [&](const Tensor& tensor) { return tensor.tensor.name == bad.tensor; });
    if (!bad.shape.empty()) tensors.push_back(waves(bad.tensor, bad.shape));
    save(input, tensors);
    const Finished refused = tool({"run", "--input", input, "--ranks", "2"});
    EXPECT_EQ(refused.code, 3) << bad.tensor << refused.out << refused.err;
    EXPECT_TRUE(has(refused.err, bad.part)) << refused.err;
  }
  std::vector<Tensor> tensors = backward_file(40, 40);
  tensors.push_back(waves("dlse", {40, 4}));
  save(input, tensors);
  EXPECT_EQ(tool({"run", "--input", input}).code, 3);
  named(tensors, "dlse") = integers("sinks", {1, 2});
  save(input, tensors);
  EXPECT_EQ(tool({"run", "--input", input}).code, 3);
  // Without the gradient a file is that of the forward.
  tensors = backward_file(40, 40);
  std::erase_if(tensors, [](const Tensor& tensor) { return tensor.tensor.name == "dout"; });
  save(input, tensors);
  EXPECT_TRUE(has(done({"run", "--input", input}).out, "digest of out"));
  EXPECT_TRUE(has(done({"run", "--input", input, "--tensors", "dout=out"}).out, "digest of dq"));
}

// Tensors that belong to another op, or are misspelt, aren't left out silently.
TEST(AttentionBackward, RefusesTensorsThatItDoesNotRead) {
  const TemporaryFolder folder;
  const std::string input = folder.file("more");
  for (const auto& [name, words] :
       {std::pair<std::string, std::string>{"block_mask", "attention with a block-sparse mask has no gradients"},
        {"block_indptr", "attention with a block-sparse mask has no gradients"},
        {"d_lse", "Rename it, leave it out, or add --tensors dlse=d_lse."},
        {"grad_LSE", "the gradient of LSE is `dlse`"}}) {
    std::vector<Tensor> tensors = backward_file(40, 40);
    tensors.push_back(waves(name, {4, 40}));
    save(input, tensors);
    const Finished refused = tool({"run", "--input", input});
    EXPECT_NE(refused.code, 0) << name << refused.out;
    EXPECT_TRUE(has(refused.err, "has a tensor " + name + " (") && has(refused.err, words)) << refused.err;
  }
  done({"run", "--input", input, "--tensors", "dlse=grad_LSE"});
}

// A result without a finite value was not compared.
TEST(AttentionBackward, IsNotVerifiedWhereNothingIsFinite) {
  const TemporaryFolder folder;
  std::vector<Tensor> tensors = backward_file(40, 40);
  Tensor& v = named(tensors, "v");
  for (std::size_t i = 0; i < v.bytes.size() / sizeof(float); ++i) set_value(v, i, NAN);
  const std::string input = folder.file("nan");
  save(input, tensors);
  const Finished gradients = tool({"verify", "--input", input, "--against", "oracle"});
  EXPECT_EQ(gradients.code, 1) << gradients.out;
  EXPECT_TRUE(has(gradients.out, "dq: no value is finite both here and in fp64, so none is compared")) << gradients.out;
  std::erase_if(tensors, [](const Tensor& tensor) { return tensor.tensor.name == "dout"; });
  save(input, tensors);
  const Finished forward = tool({"verify", "--input", input, "--against", "oracle"});
  EXPECT_EQ(forward.code, 1) << forward.out;
  EXPECT_TRUE(has(forward.out, "out: no value is finite both here and in fp64, so none is compared")) << forward.out;
}

TEST(AttentionBackward, IsReportedPlannedAndMeasured) {
  const std::string run = done(made("run", {"--ranks", "2", "--block", "64", "--json", "-"})).out;
  EXPECT_EQ(json_at(run, "/job/q_tokens"), "300");
  EXPECT_GT(json_at(run, "/plan/state_per_rank").size(), 3U);
  const std::string plan = done(made("plan", {"--world", "1,2", "--block", "64", "--json", "-"})).out;
  EXPECT_EQ(json_at(plan, "/op"), "\"attention_backward\"");
  EXPECT_EQ(json_at(plan, "/rows/0/bytes_per_rank"), "0");
  EXPECT_GT(json_at(plan, "/rows/1/bytes_per_rank").size(), 3U);
  const Finished text = done(made("plan", {"--world", "2", "--block", "64"}));
  EXPECT_TRUE(has(text.out, "# sums of dQ, dK and dV: ")) << text.out;
  const std::string line = done(made("bench", {"--samples", "2", "--ranks", "2", "--jsonl", "-"})).out;
  EXPECT_EQ(json_at(line, "/job/op"), "\"attention_backward\"");
  EXPECT_EQ(json_at(line, "/job/kv_heads"), "2");
  EXPECT_NE(json_at(line, "/tflops_per_rank"), "null");
  EXPECT_EQ(json_at(done(made("bench", {"--samples", "2", "--compute-only", "--jsonl", "-"})).out, "/mode"),
            "\"compute\"");
}

// The flag names the gradients' op, whatever else the command does.
TEST(AttentionBackward, IsTheOpOfTheFlagBackward) {
  const Words job{"--backward", "--synthetic", "7",          "--seq", "300",     "--heads", "4",
                  "--kv-heads", "2",           "--head-dim", "16",    "--dtype", "fp32"};
  const auto json = [&](const Words& words) { return done(words + Words{"--json", "-"}).out; };
  EXPECT_EQ(json_at(json(Words{"run"} + job), "/digest/dq"), json_at(json(made("run")), "/digest/dq"));
  EXPECT_TRUE(has(done(Words{"verify", "--ranks", "3"} + job).out, "# 14 shapes, bit for bit"));
  EXPECT_EQ(json_at(json({"plan", "--backward", "--world", "2"}), "/op"), "\"attention_backward\"");
  EXPECT_TRUE(has(done(Words{"run", "--print-config"} + job).out, "op = \"attention_backward\"  # flag"));
  EXPECT_TRUE(has(done({"run", "--backward", "--help"}).out, "--gradients DTYPE"));
  const TemporaryFolder folder;
  const std::string with_op = folder.file("op");
  const std::string with_flag = folder.file("flag");
  done(made("run", {"--output", with_op}));
  done(Words{"run", "--output", with_flag} + job);
  EXPECT_EQ(content_of(with_flag), content_of(with_op));
  const auto own_row = [](const std::string& op) {  // of gradients
    return op == "ssd" || op == "conv1d" ? " or --op " + op + "_backward" : std::string();
  };
  for (const std::string op : {"ssd", "mla", "decode", "conv1d"}) {
    const Finished refused = tool({"run", "--synthetic", "7", "--op", op, "--backward"});
    EXPECT_EQ(refused.code, 2) << op;
    EXPECT_TRUE(has(refused.err, "--backward contradicts --op " + op +
                                     " (the flag is not for this op). Leave it out, or use --op attention" +
                                     own_row(op) + "."))
        << refused.err;
  }
  const Finished file = tool({"run", "--input", with_op, "--backward"});
  EXPECT_TRUE(has(file.err, "--backward contradicts --input (the file's tensors say what is computed)")) << file.err;
}

TEST(AttentionBackward, MakesSinksAndAGradientOfLse) {
  const Words more{"--sinks", "--dlse", "--head-dim-v", "8", "--q-len", "200"};
  const TemporaryFolder folder;
  const auto file = [&](int ranks) { return folder.file("out" + std::to_string(ranks)); };
  for (const int ranks : {1, 3}) {
    done(made("run", more + Words{"--ranks", std::to_string(ranks), "--output", file(ranks)}));
  }
  EXPECT_EQ(content_of(file(3)), content_of(file(1)));
  EXPECT_EQ(SafetensorsFile(file(1)).tensor("dsinks").info->shape, (std::vector<std::int64_t>{4}));
  const Finished oracle = done(made("verify", more + Words{"--against", "oracle", "--ranks", "2", "--rows", "200"}));
  EXPECT_TRUE(has(oracle.out, "dsinks: error") && has(oracle.out, "PASS")) << oracle.out;
}

TEST(AttentionBackward, TakesTheShapeOfAModelsLayer) {
  const TemporaryFolder folder;
  const std::string config = folder.write("config.json", R"({"model_type": "gpt_oss", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "sliding_window": 8})");
  const Words job{"run", "--synthetic", "7", "--seq", "64", "--sinks", "--model-config", config, "--layer", "0"};
  for (const Words& op : {Words{"--backward"}, {"--op", "attention_backward"}}) {
    const Finished run = done(job + op);
    EXPECT_TRUE(has(run.out, "# job: backward of bf16, heads 4/2 (GQA 2:1), head_dim 16, window 7,0, sinks"))
        << run.out;
  }
  const std::string input = folder.file("in");
  std::vector<Tensor> tensors = backward_file(40, 40);
  save(input, tensors);
  const Finished other = tool({"run", "--input", input, "--model-config", config, "--layer", "0"});
  EXPECT_EQ(other.code, 2);
  EXPECT_TRUE(has(other.err, "the dim of v is 16 in the config and 8 by the file's tensors")) << other.err;
}

// Of compute only, gradients alone and with the forward: one command for two ranks.
TEST(AttentionBackward, IsMeasuredBesideComputeOnly) {
  const Words bench = made("bench", {"--samples", "2", "--ranks", "2", "--block", "64", "--against", "compute"});
  for (const Words& more : {Words{}, {"--with-forward"}}) {
    const std::string lines = done(bench + more + Words{"--jsonl", "-"}).out;
    const std::string whole = lines.substr(0, lines.find('\n'));
    const std::string compute = lines.substr(whole.size() + 1);
    EXPECT_EQ(json_at(whole, "/mode"), "\"whole\"");
    EXPECT_EQ(json_at(compute, "/mode"), "\"compute\"");
    EXPECT_GT(std::stod(json_at(whole, "/exposed_comm_ms")), 0.0) << whole;
    EXPECT_EQ(json_at(whole, "/job/pass"), more.empty() ? "absent" : "\"forward+backward\"");
    const std::string table = done(bench + more).out;
    EXPECT_TRUE(has(table, "mem/rank  compute\n")) << table;
  }
  const TemporaryFolder folder;
  const std::string input = folder.file("in");
  save(input, backward_file(40, 40));
  const Finished file = tool({"bench", "--input", input, "--with-forward"});
  EXPECT_TRUE(has(file.err, "--with-forward contradicts --input")) << file.err;
}

TEST(AttentionBackward, HasItsFlagAndNoOther) {
  const Finished help = done({"run", "--op", "attention_backward", "--help"});
  EXPECT_TRUE(has(help.out, "the gradients of attention") && has(help.out, "--gradients DTYPE")) << help.out;
  EXPECT_TRUE(has(help.out, "dout            [tokens, heads, head_dim_v]")) << help.out;
  EXPECT_FALSE(has(help.out, "--cache-format")) << help.out;
  const std::string bf16 = done(made("run", {"--dtype", "bf16", "--gradients", "fp32", "--json", "-"})).out;
  EXPECT_EQ(json_at(bf16, "/job/gradients"), "\"fp32\"");
  for (const Words& flags : {Words{"--gradients", "bf16"},
                             {"--cache-format", "fp8"},
                             {"--block-mask", "bigbird:200,128,2,7"},
                             {"--page-size", "16"},
                             {"--form", "absorbed"}}) {
    const Finished refused = tool(made("run", flags));
    EXPECT_EQ(refused.code, 2) << flags.front() << refused.out << refused.err;
  }
  EXPECT_EQ(tool(made("run", {"--memory", "1k"})).code, 5);
  EXPECT_EQ(tool({"run", "--synthetic", "7", "--gradients", "fp32"}).code, 2);
  const TemporaryFolder folder;
  std::vector<Tensor> cached = backward_file(4, 64);
  named(cached, "k") = waves("k_pages", {4, 16, 2, 16});
  named(cached, "v") = waves("v_pages", {4, 16, 2, 8});
  cached.push_back(integers("cu_seqlens_q", {0, 4}));
  cached.push_back(integers("cu_seqlens_k", {0, 64}));
  cached.push_back({{"block_table", FileDtype::kI32, {1, 4}}, bytes_of(std::vector<std::int32_t>{0, 1, 2, 3})});
  const std::string input = folder.file("pages");
  save(input, cached);
  const Finished refused = tool({"run", "--input", input});
  EXPECT_NE(refused.code, 0) << refused.out;
  EXPECT_TRUE(has(refused.err, "pages")) << refused.err;
}

}  // namespace
}  // namespace ringattn::testing
