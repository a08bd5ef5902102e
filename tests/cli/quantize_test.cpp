// SPDX-License-Identifier: Apache-2.0
// `ringattn quantize`, and quantized layers in the files of `run`, `verify`, `bench` and `plan`.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "io/safetensors_file.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/layer_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

namespace fs = std::filesystem;

const std::string kDown = "model.layers.0.mlp.down_proj";

void write_text(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

std::string read_text(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::vector<std::uint16_t> bf16_values(std::int64_t count, int seed) {
  std::vector<std::uint16_t> values;
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(float_to_bf16(std::sin(static_cast<float>(i * (2 * seed + 1)) * 0.37F) / 8.0F));
  }
  return values;
}

void set_bf16(LayerFile& file, const std::string& name, std::vector<std::int64_t> shape, int seed) {
  const std::int64_t count = shape.size() == 1 ? shape[0] : shape[0] * shape[1];
  file.set(name, FileDtype::kBf16, std::move(shape), bf16_values(count, seed));
}

// A model of one layer: embeddings, two projections, a router, a norm and a head.
LayerFile small_model() {
  LayerFile file;
  set_bf16(file, "model.embed_tokens.weight", {32, 256}, 1);
  set_bf16(file, kDown + ".weight", {24, 256}, 2);
  set_bf16(file, kDown + ".bias", {24}, 3);
  set_bf16(file, "model.layers.0.self_attn.o_proj.weight", {16, 128}, 4);
  set_bf16(file, "model.layers.0.mlp.gate.weight", {4, 256}, 5);
  set_bf16(file, "model.norm.weight", {256}, 6);
  set_bf16(file, "lm_head.weight", {32, 256}, 7);
  return file;
}

Words quantize(const std::string& format, const std::string& input, const std::string& output, const Words& more = {}) {
  return Words{"quantize", "--format", format, "--input", input, "--output", output} + more;
}

// x and the tensors of a layer of another file.
void take_layer(const std::string& from, const std::string& layer, const std::string& to) {
  LayerFile file;
  set_bf16(file, "x", {7, 256}, 8);
  const SafetensorsFile model(from);
  for (const std::string_view name : model.names()) {
    if (!name.starts_with(layer + ".")) continue;
    const TensorSource tensor = model.tensor(name);
    LayerFile::Tensor& made = file.tensors[std::string(name)];
    made = {tensor.info->dtype, tensor.info->shape,
            std::vector<std::byte>(static_cast<std::size_t>(tensor.info->bytes()))};
    tensor.shard->read(*tensor.info, 0, made.bytes);
  }
  file.write(to);
}

TEST(Quantize, WritesAModelThatTheProgramReads) {
  const TemporaryFolder folder;
  fs::create_directory(folder.file("model"));
  const auto in_model = [&](const std::string& name) { return folder.file("model/" + name); };
  small_model().write(in_model("model.safetensors"));
  write_text(in_model("config.json"), "{\n  \"model_type\": \"llama\",\n  \"rope_theta\": 1e+06\n}\n");
  write_text(in_model("tokenizer.json"), "{}");
  write_text(in_model("weights.bin"), "not copied");
  for (const std::string format : {"int8", "int4"}) {
    const std::string out = folder.file(format);
    const Finished done = tool(quantize(format, folder.file("model"), out, {"--json", folder.file(format + ".json")}));
    ASSERT_EQ(done.code, 0) << done.err;
    EXPECT_TRUE(has(done.out, "# 2 layers quantized to " + format)) << done.out;
    EXPECT_TRUE(has(done.out, "left as they are: lm_head, model.embed_tokens, model.layers.0.mlp.gate")) << done.out;
    EXPECT_TRUE(has(done.out, kDown)) << done.out;
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(out)) names.insert(entry.path().filename().string());
    EXPECT_EQ(names, (std::set<std::string>{"config.json", "model.safetensors", "tokenizer.json"}));
    const std::string config = read_text(out + "/config.json");
    EXPECT_TRUE(has(config, "\"rope_theta\": 1e+06") && has(config, "\"compressed-tensors\"")) << config;
    EXPECT_TRUE(has(config, "\"model.layers.0.mlp.gate\"") && has(config, "\"lm_head\"")) << config;
    const SafetensorsFile made(out + "/model.safetensors");
    EXPECT_EQ(made.tensor("model.norm.weight").info->dtype, FileDtype::kBf16);
    EXPECT_EQ(made.tensor(kDown + ".weight_scale").info->shape,
              (std::vector<std::int64_t>{24, format == "int8" ? 1 : 2}));
    EXPECT_TRUE(has(read_text(folder.file(format + ".json")), "\"relative_error\""));

    const std::string layer = folder.file(format + ".safetensors");
    take_layer(out + "/model.safetensors", kDown, layer);
    std::set<std::string> digests;
    for (const std::string parallel : {"none", "column", "row"}) {
      for (const char* ranks : {"1", "3"}) {
        const Finished run = tool({"run", "--input", layer, "--parallel", parallel, "--ranks", ranks});
        EXPECT_EQ(run.code, 0) << run.err;
        EXPECT_TRUE(has(run.out, "bf16, 256 to 24 features, bias")) << run.out;
        digests.insert(parallel + digest_of(run.out));
      }
      EXPECT_EQ(tool({"verify", "--input", layer, "--parallel", parallel, "--against", "oracle"}).code, 0);
    }
    EXPECT_EQ(digests.size(), 3U) << "one for each kind, whatever the ranks";

    // The layer where quantize has written it, and x in a file of its own.
    LayerFile rows;
    set_bf16(rows, "x", {7, 256}, 8);
    rows.write(folder.file("x.safetensors"));
    for (const std::string& model : {out, out + "/model.safetensors"}) {
      const Words job{"--input", folder.file("x.safetensors"), "--model", model, "--tensors", "weight=" + kDown};
      const Finished run = tool(Words{"run", "--ranks", "2", "--parallel", "row"} + job);
      EXPECT_EQ(run.code, 0) << run.err;
      EXPECT_TRUE(digests.contains("row" + digest_of(run.out))) << run.out;
      EXPECT_TRUE(has(tool(Words{"verify", "--against", "oracle"} + job).out, "PASS"));
    }
  }
}

// Targets of the written config are all Linear modules: it names each matrix that is left, and no quantized one.
TEST(Quantize, TheConfigIgnoresWhatIsLeft) {
  const TemporaryFolder folder;
  const std::string input = folder.file("model.safetensors");
  LayerFile model = small_model();
  set_bf16(model, "embed_out.weight", {32, 256}, 9);
  model.write(input);
  const auto ignored = [&](const Words& more) {
    const std::string out = folder.file("out");
    EXPECT_EQ(tool(quantize("int8", input, out, more + Words{"--force"})).code, 0);
    const std::string config = read_text(out + "/config.json");
    const std::size_t begin = config.find("\"ignore\""), end = config.find(']', begin);
    std::set<std::string> names;
    for (const char* name : {"embed_out", "model.embed_tokens", "model.layers.0.mlp.gate", "lm_head", kDown.c_str()}) {
      if (config.substr(begin, end - begin).find(fmt::format("\"{}\"", name)) != std::string::npos) names.insert(name);
    }
    return names;
  };
  std::set<std::string> left{"embed_out", "model.embed_tokens", "model.layers.0.mlp.gate", kDown};
  EXPECT_EQ(ignored({"--ignore", "mlp.down_proj"}), left) << "lm_head is quantized";
  left.insert("lm_head");
  EXPECT_EQ(ignored({"--ignore", "mlp.down_proj,lm_head"}), left);
  model.tensors.erase("lm_head.weight");
  model.write(input);
  EXPECT_EQ(ignored({"--ignore", "mlp.down_proj"}), left) << "the head of a tied model";
}

TEST(QuantizedLayers, OfAModelAreRefusedByName) {
  const TemporaryFolder folder;
  LayerFile rows;
  set_bf16(rows, "x", {7, 256}, 8);
  rows.write(folder.file("x.safetensors"));
  small_model().write(folder.file("model.safetensors"));
  const auto said = [&](const Words& more) {
    const Finished run = tool(Words{"run", "--input", folder.file("x.safetensors")} + more);
    EXPECT_NE(run.code, 0) << run.out;
    return run.err;
  };
  const std::string none = said({"--tensors", "weight=model.layers.7.o_proj"});
  EXPECT_TRUE(has(none, "model.layers.7.o_proj") && has(none, "--model")) << none;
  const std::string other = said({"--model", folder.path(), "--tensors", "weight=model.layers.0.mlp.down_prj"});
  EXPECT_TRUE(has(other, "model.layers.0.mlp.down_prj")) << other;
  const std::string unnamed = said({"--model", folder.path()});
  EXPECT_TRUE(has(unnamed, "layers (") && has(unnamed, "Name one with --tensors weight=")) << unnamed;
  const std::string alone = said({"--op", "linear"});
  EXPECT_TRUE(has(alone, "it has x and no weights") && has(alone, "--model")) << alone;
  const Finished synthetic = tool({"run", "--op", "linear", "--synthetic", "7", "--model", folder.path()});
  EXPECT_EQ(synthetic.code, 2);
  EXPECT_TRUE(has(synthetic.err, "--model needs --input (x is read from it)")) << synthetic.err;
}

TEST(Quantize, ReplacesAnEmptyQuantizationConfig) {
  const TemporaryFolder folder;
  small_model().write(folder.file("model.safetensors"));
  const std::string text = R"("text_config": {"quantization_config": null}, "note": "quantization_config")";
  write_text(folder.file("config.json"), "{" + text + R"(, "quantization_config" : null, "last": 1})");
  ASSERT_EQ(tool(quantize("int8", folder.path(), folder.file("out"))).code, 0);
  const std::string config = read_text(folder.file("out/config.json"));
  EXPECT_TRUE(has(config, "{" + text + R"(, "quantization_config" : {)")) << config;
  EXPECT_TRUE(has(config, "}, \"last\": 1}")) << config;
  EXPECT_EQ(config.find("\"quantization_config\" : null"), std::string::npos) << config;
}

TEST(Quantize, RefusesWhatItCannotQuantize) {
  const TemporaryFolder folder;
  const std::string input = folder.file("model.safetensors"), output = folder.file("out");
  const auto refused = [&](const Words& words, int code, const std::string& text) {
    const Finished done = tool(words);
    EXPECT_EQ(done.code, code) << done.out << done.err;
    EXPECT_TRUE(has(done.err, text)) << done.err;
    EXPECT_TRUE(has(done.err, "). ")) << done.err;
    std::set<std::string> left;
    for (const auto& entry : fs::directory_iterator(folder.path())) left.insert(entry.path().filename().string());
    left.erase("model.safetensors");
    left.erase("config.json");
    left.erase("taken");
    EXPECT_TRUE(left.empty()) << *left.begin() << " is left of " << text;
  };
  small_model().write(input);
  refused({"quantize", "--input", input, "--output", output}, 2, "--format is missing");
  refused({"quantize", "--format", "int8", "--output", output}, 2, "--input is missing");
  refused({"quantize", "--format", "int8", "--input", input}, 2, "--output is missing");
  refused(quantize("fp8", input, output), 2, "--format is \"fp8\"");
  refused(quantize("int8", input, output, {"--ignore", "down_prj"}), 2, "--ignore names `down_prj`");
  refused(quantize("int8", input, output, {"--ignore", "re:("}), 2, "--ignore has `re:(`");
  refused(quantize("int8", folder.path(), folder.file("none/out")), 3, "Choose a folder that exists");
  fs::create_directory(folder.file("taken"));
  write_text(folder.file("taken/notes.txt"), "mine");
  refused(quantize("int8", input, folder.file("taken")), 3, "it exists");
  refused(quantize("int8", input, folder.file("taken"), {"--force"}), 3, "it exists and has no model.safetensors");
  EXPECT_EQ(read_text(folder.file("taken/notes.txt")), "mine");
  // A model, but no earlier output.
  small_model().write(folder.file("taken/model.safetensors"));
  const std::string float_model = read_text(folder.file("taken/model.safetensors"));
  refused(quantize("int8", input, folder.file("taken"), {"--force"}), 3,
          "it exists and has no config.json of compressed-tensors");
  write_text(folder.file("taken/config.json"), R"({"quantization_config": {"quant_method": "awq"}})");
  refused(quantize("int8", input, folder.file("taken"), {"--force"}), 3, "only an earlier output is replaced");
  EXPECT_EQ(read_text(folder.file("taken/model.safetensors")), float_model);

  LayerFile model = small_model();
  set_bf16(model, "model.layers.0.mlp.up_proj.weight", {8, 200}, 1);
  model.write(input);
  refused(quantize("int4", input, output), 3, "layer `model.layers.0.mlp.up_proj` has 200 input features");
  model = small_model();
  LayerFile::Tensor& down = model.tensors[kDown + ".weight"];
  down.bytes[2 * 256 * 5 + 1] = std::byte{0x7f};
  down.bytes[2 * 256 * 5] = std::byte{0xc0};
  model.write(input);
  refused(quantize("int8", input, output), 3, "layer `" + kDown + "` has NaN or infinite weights, in row 5");
  EXPECT_EQ(tool(quantize("int8", input, output, {"--ignore", "lm_head,mlp.down_proj"})).code, 0);
  fs::remove_all(output);
  model = small_model();
  write_text(folder.file("config.json"), R"({"model_type": "gpt2"})");
  model.write(input);
  refused(quantize("int8", input, output), 3, "model_type is `gpt2`");
  write_text(folder.file("config.json"), R"({"quantization_config": {"quant_method": "awq"}})");
  refused(quantize("int8", input, output), 3, "the model is quantized already");
  fs::remove(folder.file("config.json"));
  model.set_zeros(kDown + ".weight_scale", FileDtype::kF32, {24, 1});
  model.write(input);
  refused(quantize("int8", input, output), 3, "the model is quantized already");
}

TEST(Quantize, ReplacesAnEarlierOutputAsAWhole) {
  const TemporaryFolder folder;
  const std::string input = folder.file("model.safetensors"), output = folder.file("out");
  small_model().write(input);
  ASSERT_EQ(tool(quantize("int8", input, output)).code, 0);
  const std::string int8 = read_text(output + "/model.safetensors");
  const Finished kept = tool(quantize("int4", input, output));
  EXPECT_EQ(kept.code, 3);
  EXPECT_TRUE(has(kept.err, "replace it with --force")) << kept.err;
  EXPECT_EQ(read_text(output + "/model.safetensors"), int8);
  ASSERT_EQ(tool(quantize("int4", input, output, {"--force", "--search", "mse"})).code, 0);
  EXPECT_TRUE(SafetensorsFile(output + "/model.safetensors").contains(kDown + ".weight_packed"));
  EXPECT_TRUE(has(read_text(output + "/config.json"), "pack-quantized"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 2) << "the replaced folder is gone";
  fs::create_directory(folder.file("same"));
  small_model().write(folder.file("same/model.safetensors"));
  const Finished over = tool(quantize("int8", folder.file("same/model.safetensors"), folder.file("same"), {"--force"}));
  EXPECT_EQ(over.code, 2);
  EXPECT_TRUE(has(over.err, "is the folder of the input")) << over.err;
}

TEST(Quantize, ASignalLeavesNothing) {
  const TemporaryFolder folder;
  LayerFile model;
  set_bf16(model, "layer.weight", {2048, 2048}, 1);
  model.write(folder.file("model.safetensors"));
  const std::string script =
      "cd " + folder.path() + " || exit\n" + RINGATTN_TOOL +
      " quantize --format int4 --search mse --threads 1 --input model.safetensors --output out &\n"
      "job=$!\n"
      "until test -e out.*.tmp; do kill -0 $job || exit 9; sleep 0.01; done\n"
      "kill -TERM $job\nwait $job; echo code $?\n";
  const Finished run = run_program({"bash", "-c", script});
  EXPECT_TRUE(has(run.out, "code 143")) << run.out << run.err;
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << "only the model is there";
}

TEST(QuantizedLayers, AllFormatsHaveOneResult) {
  const TemporaryFolder folder;
  const Int4Layer layer{40, 256};
  const auto with_x = [&](const std::string& name, const auto& fill) {
    LayerFile file;
    set_bf16(file, "x", {7, 256}, 8);
    fill(file);
    file.write(folder.file(name));
    return folder.file(name);
  };
  const std::string pack = with_x("pack.safetensors", [&](LayerFile& file) { layer.pack_quantized(file, "", true); });
  const std::string awq = with_x("awq.safetensors", [&](LayerFile& file) { layer.awq(file, kDown + "."); });
  const std::string gptq = with_x("gptq.safetensors", [&](LayerFile& file) { layer.gptq(file, kDown + ".", 1); });
  const Finished first = tool({"run", "--input", pack});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_TRUE(has(first.out, "int4 (pack-quantized)")) << first.out;
  EXPECT_EQ(digest_of(tool({"run", "--input", awq}).out), digest_of(first.out));
  const Finished unknown = tool({"run", "--input", gptq});
  EXPECT_EQ(unknown.code, 3);
  EXPECT_TRUE(has(unknown.err, "Name the model's config with --quantization-config config.json.")) << unknown.err;
  write_text(folder.file("gptq.json"), R"({"quantization_config": {"quant_method": "gptq", "bits": 4}})");
  EXPECT_EQ(digest_of(tool({"run", "--input", gptq, "--quantization-config", folder.file("gptq.json")}).out),
            digest_of(first.out));
  write_text(folder.file("config.json"), R"({"quantization_config": {"quant_method": "gptq", "bits": 4}})");
  EXPECT_EQ(digest_of(tool({"run", "--input", gptq, "--ranks", "3", "--parallel", "column"}).out),
            digest_of(first.out));
  fs::remove(folder.file("config.json"));

  // A gate and an up matrix that are two layers, and their halves stacked.
  const std::string two = with_x("two.safetensors", [&](LayerFile& file) {
    Int4Layer{40, 256}.awq(file, "mlp.gate_proj.");
    Int4Layer{40, 256}.pack_quantized(file, "mlp.up_proj.", true);
  });
  const Finished several = tool({"run", "--input", two});
  EXPECT_EQ(several.code, 3);
  EXPECT_TRUE(has(several.err,
                  "has 2 layers (`mlp.gate_proj`, `mlp.up_proj`; a job is of one). Name one with --tensors "
                  "weight=mlp.gate_proj."))
      << several.err;
  const Words gated{"--input", two, "--tensors", "weight=mlp.gate_proj,up=mlp.up_proj", "--activation", "swiglu"};
  EXPECT_TRUE(has(tool(Words{"run"} + gated).out, "256 to 40 features, swiglu"));
  EXPECT_EQ(tool(Words{"verify", "--against", "oracle", "--ranks", "2", "--parallel", "row"} + gated).code, 0);
  EXPECT_EQ(tool({"run", "--input", two, "--tensors", "weight=mlp.gate_proj,up=mlp.up_proj"}).code, 2);
}

TEST(QuantizedLayers, SyntheticFormatsPlanBenchAndKeepTheirBits) {
  const TemporaryFolder folder;
  const auto job = [](const std::string& command, const std::string& format, const Words& more = {}) {
    return Words{command,         "--op", "linear",         "--synthetic", "7",         "--seq", "9",
                 "--in-features", "1152", "--out-features", "40",          "--weights", format} +
           more;
  };
  for (const std::string format : {"int8", "int4"}) {
    const std::string golden = folder.file(format + ".json");
    ASSERT_EQ(tool(job("verify", format, {"--record", golden, "--parallel", "row"})).code, 0);
    EXPECT_EQ(tool(job("verify", format, {"--golden", golden, "--ranks", "5", "--parallel", "row"})).code, 0);
    EXPECT_EQ(tool(job("verify", format, {"--against", "oracle"})).code, 0);
    const Finished bench = tool(job("bench", format, {"--samples", "2", "--jsonl", "-"}));
    EXPECT_TRUE(has(bench.out, "\"weights\":\"" + format + "\"")) << bench.out << bench.err;
  }
  // A rank of 8 has an eighth of the weight, and the plan says so; K and N are beyond 65,536.
  const auto memory = [](const std::string& format, const std::string& world) {
    const Finished plan = tool({"plan", "--op", "linear", "--seq", "1", "--in-features", "128k", "--out-features",
                                "65k", "--parallel", "row", "--weights", format, "--world", world, "--json", "-"});
    EXPECT_EQ(plan.code, 0) << plan.err;
    return std::stod(json_at(plan.out, "/rows/0/memory_per_rank")) / 0x1p20;
  };
  const double values = 131072.0 * 66560.0 / 0x1p20;
  EXPECT_NEAR(memory("float", "1"), 2.0 * values, 0.01 * values);
  EXPECT_NEAR(memory("int4", "1"), values * (0.5 + 5.0 / 128.0), 0.01 * values);
  EXPECT_NEAR(memory("int8", "8"), values / 8.0, 0.02 * values);
  EXPECT_TRUE(has(tool({"plan", "--op", "linear", "--backend", "cpu"}).out, "# machine: default\n"));
  const Finished refused =
      tool({"run", "--op", "linear", "--synthetic", "7", "--in-features", "1000", "--weights", "int4"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(has(refused.err, "--in-features 1000 (int4 weights have groups of 128 features)")) << refused.err;
}

}  // namespace
}  // namespace ringattn::testing
