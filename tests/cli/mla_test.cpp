// SPDX-License-Identifier: Apache-2.0
// Mla attention by the program: files in every form, seeds, model configs, and what is refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/mla_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// A job of milliseconds whose length divides nothing.
Words latent_job() {
  return {"--op",       "mla", "--synthetic", "7", "--seq",        "300", "--heads",      "4",
          "--head-dim", "16",  "--rope-dim",  "8", "--latent-dim", "32",  "--head-dim-v", "24"};
}

std::string digest_of_file(const std::string& path, const Words& flags = {}) {
  const Finished run = tool(Words{"run", "--input", path} + flags);
  EXPECT_EQ(run.code, 0) << run.err;
  return digest_of(run.out);
}

TEST(MlaFiles, GiveTheSameBytesOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  const std::string input = write_tensors(folder.file("in"), mla_tensors(MlaFile()));
  for (const char* form : {"expanded", "absorbed"}) {
    for (const char* ranks : {"1", "2", "3"}) {
      const std::string path = folder.file(fmt::format("{}{}", form, ranks));
      const Finished run = tool({"run", "--input", input, "--form", form, "--ranks", ranks, "--output", path});
      ASSERT_EQ(run.code, 0) << run.err;
      EXPECT_TRUE(has(run.out, fmt::format("# form: {}", form))) << run.out;
      EXPECT_TRUE(read_whole(path) == read_whole(folder.file(fmt::format("{}1", form)))) << ranks << " ranks";
    }
  }
  const std::string expanded = read_whole(folder.file("expanded1"));
  EXPECT_TRUE(has(expanded, R"("form":"expanded")"));
  EXPECT_TRUE(has(expanded, R"("latent_dim":"128")"));
  EXPECT_TRUE(has(expanded, R"("shape":[44, 3, 24])"));  // out
  EXPECT_TRUE(has(expanded, R"("shape":[3, 44])"));      // lse
  EXPECT_FALSE(expanded == read_whole(folder.file("absorbed1")));
}

TEST(MlaFiles, OfEveryFormHaveOneDigest) {
  const TemporaryFolder folder;
  const MlaFile shape;
  const NamedTensors tensors = mla_tensors(shape);
  const auto digest = [&](const NamedTensors& written) {
    return digest_of_file(write_tensors(folder.file("in"), written), {"--ranks", "2"});
  };
  const std::string rows = digest(tensors);
  EXPECT_EQ(digest(with_projection(tensors)), rows);
  EXPECT_EQ(digest(with_pages(tensors, shape)), rows);
  const std::string rounded = digest(with_fp8_rounded_latent(tensors));
  EXPECT_NE(rounded, rows);
  EXPECT_EQ(digest(with_fp8_latent(tensors)), rounded);
  EXPECT_EQ(digest(with_pages(with_fp8_latent(tensors), shape)), rounded);
}

TEST(MlaFiles, MayHaveQueriesInTheLatent) {
  const TemporaryFolder folder;
  const MlaFile shape;
  const NamedTensors tensors = mla_tensors(shape);
  const std::string plain = write_tensors(folder.file("plain"), tensors);
  const std::string absorbed = write_tensors(folder.file("absorbed"), with_queries_in_latent(tensors, shape));
  const std::string expected = digest_of_file(plain, {"--form", "absorbed"});
  EXPECT_EQ(digest_of_file(absorbed), expected);
  EXPECT_EQ(digest_of_file(absorbed, {"--ranks", "3"}), expected);
  EXPECT_EQ(tool({"verify", "--input", absorbed, "--against", "oracle"}).code, 0);
  const Finished refused = tool({"run", "--input", absorbed, "--form", "expanded"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(has(refused.err, "--form expanded with queries in the latent")) << refused.err;
}

TEST(MlaFiles, TakeTheirMatricesByOtherNames) {
  const TemporaryFolder folder;
  const NamedTensors tensors = mla_tensors(MlaFile());
  const std::string rows = write_tensors(folder.file("rows"), tensors);
  NamedTensors model = with_projection(tensors);
  model["self_attn.kv_b_proj.weight"] = model["kv_b_proj"];
  model.erase("kv_b_proj");
  const std::string renamed = write_tensors(folder.file("model"), model);
  EXPECT_EQ(tool({"run", "--input", renamed}).code, 3);
  EXPECT_EQ(digest_of_file(renamed, {"--tensors", "kv_b_proj=self_attn.kv_b_proj.weight"}), digest_of_file(rows));
}

// Every rank has all of the matrices.
TEST(MlaFiles, CountNanInTheirMatricesOnceOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  MlaFile step;
  step.lengths = {40, 17, 65};
  step.q_lens = {1, 1, 1};
  const MlaFile rows;
  const auto planted = [](NamedTensors tensors) {
    constexpr std::byte kNan{0xff};  // of both bytes
    for (const auto& [name, values] : {std::pair{"w_uk", 1}, {"w_uv", 2}}) {
      std::fill_n(tensors.at(name).bytes.begin() + 100, 2 * values, kNan);
    }
    return tensors;
  };
  const std::string prefill = write_tensors(folder.file("rows"), planted(mla_tensors(rows)));
  const std::string cache = write_tensors(folder.file("pages"), with_pages(planted(mla_tensors(step)), step));
  const std::string in_latent =
      write_tensors(folder.file("latent"), planted(with_queries_in_latent(mla_tensors(rows), rows)));
  struct Case {
    const std::string& input;
    const char* form;
    const char* values;  // of the matrices that are used
  };
  for (const Case& job : {Case{prefill, "expanded", "3"},
                          {prefill, "absorbed", "3"},
                          {cache, "absorbed", "3"},
                          {in_latent, "absorbed", "2"}}) {
    for (const char* ranks : {"1", "3"}) {
      const Finished run = tool({"run", "--input", job.input, "--form", job.form, "--ranks", ranks, "--json", "-"});
      ASSERT_EQ(run.code, 0) << run.err;
      EXPECT_EQ(json_at(run.out, "/non_finite_inputs/v"), job.values) << job.input << " on " << ranks;
      EXPECT_TRUE(has(run.err, fmt::format("and {} of matrices are NaN or infinite", job.values))) << run.err;
    }
  }
}

TEST(MlaFiles, AreRefusedByEveryCommandBeforeAnythingIsComputed) {
  const TemporaryFolder folder;
  NamedTensors tensors = mla_tensors(MlaFile());
  tensors["k_rope"].shape = {61, 16};
  const std::string bad = write_tensors(folder.file("bad"), tensors);
  for (const char* command : {"run", "verify", "bench", "plan"}) {
    const Finished refused = tool({command, "--input", bad});
    EXPECT_EQ(refused.code, 3) << refused.err;
    EXPECT_TRUE(has(refused.err, "`k_rope` of " + bad + " has BF16 [61, 16]")) << refused.err;
    EXPECT_TRUE(has(refused.err, "has BF16 [122, 128]")) << refused.err;
  }
}

TEST(Mla, RefusesFlagsByName) {
  for (const Words& flags : {Words{"--kv-heads", "2"}, {"--block-mask", "window:64"}}) {
    const Finished refused = tool(Words{"run"} + latent_job() + flags);
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_TRUE(has(refused.err, flags[0] + " contradicts --op mla")) << refused.err;
  }
  for (const Words& flags : {Words{"--latent-dim", "64"}, {"--rope-dim", "8"}, {"--form", "absorbed"}}) {
    for (const char* op : {"attention", "decode"}) {
      const Finished refused = tool(Words{"run", "--op", op} + small_job() + flags);
      EXPECT_EQ(refused.code, 2) << refused.err;
      EXPECT_TRUE(has(refused.err, flags[0] + " contradicts --op")) << refused.err;
    }
  }
}

TEST(Mla, HasDefaultsOfItsOwn) {
  const Finished plan = tool({"plan", "--op", "mla", "--seq", "1k", "--world", "2"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_TRUE(has(plan.out, "# job: mla, expanded, bf16, 16 heads, head_dim 128+64/128, latent 512")) << plan.out;
  const Finished printed = tool({"run", "--op", "mla", "--print-config"});
  EXPECT_TRUE(has(printed.out, "heads = 16  # default")) << printed.out;
  EXPECT_TRUE(has(printed.out, "# kv-heads does not belong to --op mla")) << printed.out;
  const TemporaryFolder folder;
  const std::string config = folder.write("job.toml", printed.out);
  EXPECT_EQ(tool({"plan", "--config", config, "--world", "1"}).code, 0);
}

TEST(Mla, AnnouncesTheFormThatItChooses) {
  const Finished many = tool(Words{"run", "--json", "-"} + latent_job());
  ASSERT_EQ(many.code, 0) << many.err;
  EXPECT_EQ(check_report(many.out), "");
  EXPECT_EQ(json_at(many.out, "/op"), "\"mla\"");
  EXPECT_EQ(json_at(many.out, "/plan/form"), "\"expanded\"");
  EXPECT_EQ(json_at(many.out, "/job/latent_dim"), "32");
  EXPECT_TRUE(has(many.err, "# form: expanded")) << many.err;
  const Finished few = tool(Words{"run", "--json", "-", "--q-len", "20", "--ranks", "2"} + latent_job());
  ASSERT_EQ(few.code, 0) << few.err;
  EXPECT_EQ(json_at(few.out, "/plan/form"), "\"absorbed\"");
  EXPECT_EQ(json_at(few.out, "/plan/heads_at_a_time"), "4");
  // K and V of 4 heads are 24 + 24 numbers each, where a latent and its rotary key are 32 + 8.
  const auto bytes = [&](const char* member) { return std::stod(json_at(few.out, member)); };
  EXPECT_GT(bytes("/plan/bytes_moved"), 0.0);
  EXPECT_DOUBLE_EQ(bytes("/plan/bytes_moved_expanded") / bytes("/plan/bytes_moved"), 4.0 * 48.0 / 40.0);
}

TEST(Mla, IsVerified) {
  for (const char* form : {"expanded", "absorbed"}) {
    const Finished shapes = tool(Words{"verify", "--form", form, "--ranks", "3"} + latent_job());
    ASSERT_EQ(shapes.code, 0) << shapes.out << shapes.err;
    EXPECT_TRUE(has(shapes.out, form == std::string("expanded") ? "# 15 shapes" : "# 14 shapes")) << shapes.out;
    for (const char* dtype : {"bf16", "fp16", "fp32"}) {
      const Finished oracle =
          tool(Words{"verify", "--form", form, "--dtype", dtype, "--against", "oracle", "--ranks", "2"} + latent_job());
      EXPECT_EQ(oracle.code, 0) << oracle.out << oracle.err;
      EXPECT_TRUE(has(oracle.out, "# 64 rows against the fp64 oracle")) << oracle.out;
    }
  }
  const TemporaryFolder folder;
  const std::string golden = folder.file("golden");
  EXPECT_EQ(tool(Words{"verify", "--record", golden} + latent_job()).code, 0);
  EXPECT_EQ(tool(Words{"verify", "--golden", golden, "--ranks", "2"} + latent_job()).code, 0);
  EXPECT_EQ(tool(Words{"verify", "--golden", golden, "--form", "absorbed"} + latent_job()).code, 2);  // another job
  const std::string out = folder.file("out");
  EXPECT_EQ(tool(Words{"run", "--output", out} + latent_job()).code, 0);
  EXPECT_EQ(tool(Words{"verify", "--against", out, "--ranks", "3"} + latent_job()).code, 0);
  // A file of another job says so itself.
  const Finished form = tool(Words{"verify", "--against", out, "--form", "absorbed"} + latent_job());
  EXPECT_EQ(form.code, 1);
  EXPECT_TRUE(has(form.out, "# the file is of the expanded form, the job of the absorbed")) << form.out;
  const Finished scale = tool(Words{"verify", "--against", out, "--softmax-scale", "0.25"} + latent_job());
  EXPECT_EQ(scale.code, 1);
  EXPECT_TRUE(has(scale.out, "# the file's scores are scaled by 0.20412415, the job's by 0.25")) << scale.out;
  EXPECT_TRUE(has(scale.out, "causal, scale 0.25; 1 sequence")) << scale.out;
  EXPECT_FALSE(has(scale.out, "the file is of")) << scale.out;
}

// Matrices that aren't finite: either form passes the oracle, whose order of products is that of one of them.
TEST(MlaFiles, WithInfiniteMatricesAreVerified) {
  const TemporaryFolder folder;
  const MlaFile shape;
  constexpr std::uint16_t kInfinity = 0x7f80;
  constexpr std::uint16_t kNan = 0x7fc0;
  for (const std::uint16_t planted : {kInfinity, kNan}) {
    NamedTensors tensors = mla_tensors(shape);
    const auto element = static_cast<std::size_t>((1 * shape.head_dim_v + 5) * shape.latent_dim + 9);
    std::memcpy(tensors["w_uv"].bytes.data() + element * sizeof planted, &planted, sizeof planted);
    const std::string input = write_tensors(folder.file("in"), tensors);
    for (const char* form : {"expanded", "absorbed"}) {
      for (const Words& more : {Words{}, {"--query-offset", "-3"}}) {  // rows that see no keys
        const Words job = Words{"--input", input, "--form", form, "--rows", "132", "--against", "oracle"} + more;
        const Finished checked = tool(Words{"verify"} + job);
        EXPECT_EQ(checked.code, 0) << form << checked.out << checked.err;
      }
    }
  }
}

TEST(Mla, IsMeasuredAndPlanned) {
  const Finished bench = tool({"bench", "--op", "mla", "--seq", "64", "--heads", "2", "--head-dim", "16", "--rope-dim",
                               "8", "--latent-dim", "32", "--samples", "2", "--jsonl", "-"});
  ASSERT_EQ(bench.code, 0) << bench.err;
  EXPECT_TRUE(has(bench.out, R"("op": "mla")") || has(bench.out, R"("op":"mla")")) << bench.out;
  const Finished plan = tool({"plan", "--op", "mla", "--seq", "8k,64k", "--q-len", "16", "--world", "2,4"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_TRUE(has(plan.out, "form: absorbed")) << plan.out;
}

// `job` is refused with `--memory 5`; with what the refusal counts it is done, with a byte less refused, and what it
// names is enough.
void expect_enough(const Words& job, const std::string& digest) {
  const Finished refused = tool(Words{"run", "--memory", "5"} + job);
  ASSERT_EQ(refused.code, 5) << refused.err;
  const std::size_t counted = refused.err.find('(') + 1;
  const std::size_t buffers = refused.err.find("scratch, and ") + 13;
  const long long needed = std::stoll(refused.err.substr(counted)) + std::stoll(refused.err.substr(buffers));
  const Finished exact = tool(Words{"run", "--memory", std::to_string(needed)} + job);
  EXPECT_EQ(exact.code, 0) << exact.err;
  EXPECT_EQ(digest_of(exact.out), digest);
  EXPECT_EQ(tool(Words{"run", "--memory", std::to_string(needed - 1)} + job).code, 5);
  const std::size_t named = refused.err.find("--memory ") + 9;
  const std::string enough = refused.err.substr(named, refused.err.find(' ', named) - named);
  EXPECT_EQ(tool(Words{"run", "--dry-run", "--memory", enough} + job).code, 0) << enough;
}

TEST(Mla, TheMemoryThatItNamesIsEnough) {
  for (const char* form : {"expanded", "absorbed"}) {
    const Words job{"--op", "mla", "--synthetic", "7", "--seq", "1500", "--heads", "16", "--form", form};
    const std::string digest = digest_of(tool(Words{"run"} + job).out);
    for (const Words& shape : {Words{"--ranks", "1"}, {"--ranks", "3"}, {"--ranks", "2", "--block", "512"}}) {
      expect_enough(job + shape, digest);
    }
  }
}

// Shapes only, as Hugging Face writes them.
constexpr const char* kModel = R"({"model_type": "deepseek_v2", "head_dim": 64, "num_attention_heads": 4,
  "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
  "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 0.707}, "time_step_limit": [0.0, Infinity]})";

TEST(ModelConfigFlag, GivesShapesAndScale) {
  const TemporaryFolder folder;
  const std::string config = folder.write("config.json", kModel);
  const Finished run = tool({"run", "--model-config", config, "--synthetic", "7", "--seq", "300", "--json", "-"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json_at(run.out, "/op"), "\"mla\"");
  EXPECT_EQ(json_at(run.out, "/job/heads"), "4");
  EXPECT_EQ(json_at(run.out, "/job/latent_dim"), "32");
  EXPECT_EQ(json_at(run.out, "/config_sources/heads"), "\"model config\"");
  // Flags override it: with the default scale the job is that of the flags only.
  const Finished scaled = tool(
      {"run", "--model-config", config, "--synthetic", "7", "--seq", "300", "--softmax-scale", "0.20412414523193154"});
  EXPECT_EQ(digest_of(scaled.out), digest_of(tool(Words{"run"} + latent_job()).out));
  EXPECT_NE(json_at(run.out, "/digest/out"), "\"" + digest_of(scaled.out) + "\"");
  const Finished other = tool({"run", "--op", "attention", "--model-config", config, "--synthetic", "7"});
  EXPECT_EQ(other.code, 2);
  EXPECT_TRUE(has(other.err, "--op contradicts --model-config")) << other.err;
}

TEST(ModelConfigFlag, IsComparedWithTheFile) {
  const TemporaryFolder folder;
  const std::string input = write_tensors(folder.file("in"), mla_tensors(MlaFile()));
  const auto config = [&](const std::string& heads, const std::string& dims) {
    return folder.write("config.json", R"({"num_attention_heads": )" + heads + ", " + dims + "}");
  };
  const std::string dims = R"("qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24)";
  const std::string good = config("6", R"("kv_lora_rank": 128, )" + dims);
  EXPECT_EQ(tool({"run", "--input", input, "--model-config", good}).code, 0) << "half of the heads";
  const std::string named = "--model-config " + good + " contradicts --input " + input;
  for (const auto& [text, what] :
       {std::pair(R"("kv_lora_rank": 512, )" + dims, "kv_lora_rank is 512 in the config and 128"),
        {R"("kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 8, "v_head_dim": 24)",
         "qk_nope_head_dim is 128 in the config and 16"},
        {R"("head_dim": 24)", "the file holds latents, and the config is of keys and values"}}) {
    config("3", text);
    for (const char* command : {"run", "verify", "bench", "plan"}) {
      const Finished refused = tool({command, "--input", input, "--model-config", good});
      EXPECT_EQ(refused.code, 2) << refused.err;
      EXPECT_TRUE(has(refused.err, named)) << refused.err;
      EXPECT_TRUE(has(refused.err, what)) << refused.err;
    }
  }
  config("4", R"("kv_lora_rank": 128, )" + dims);
  const Finished heads = tool({"run", "--input", input, "--model-config", good});
  EXPECT_EQ(heads.code, 2);
  EXPECT_TRUE(has(heads.err, "num_attention_heads is 4 in the config and 3")) << heads.err;
}

TEST(MlaFiles, SayTheirShapeInReportAndConfiguration) {
  const TemporaryFolder folder;
  const std::string input = write_tensors(folder.file("in"), mla_tensors(MlaFile()));
  const Finished printed = tool({"run", "--input", input, "--print-config"});
  for (const char* line :
       {"# op = mla comes from the input", "# heads = 3 comes from the input", "# head-dim = 16 comes from the input",
        "# latent-dim = 128 comes from the input", "# rope-dim = 8 comes from the input", "form = \"auto\""}) {
    EXPECT_TRUE(has(printed.out, line)) << line << "\n" << printed.out;
  }
  const std::string again = folder.write("job.toml", printed.out);
  const Finished run = tool({"run", "--config", again, "--json", "-"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json_at(run.out, "/config/op"), "\"mla\"");
  EXPECT_EQ(json_at(run.out, "/config/heads"), "3");
  EXPECT_EQ(json_at(run.out, "/config/latent-dim"), "128");
  EXPECT_EQ(json_at(run.out, "/config/kv-heads"), "null");
  EXPECT_EQ(json_at(run.out, "/config/seq"), "null") << "its sequences differ";
  EXPECT_EQ(json_at(run.out, "/config_sources/heads"), "\"input\"");
  const Finished plan = tool({"plan", "--input", input, "--json", "-"});
  EXPECT_EQ(json_at(plan.out, "/config/rope-dim"), "8");
}

TEST(ModelConfigFlag, GivesALayersWindow) {
  const TemporaryFolder folder;
  const std::string config = folder.write("config.json", R"({"model_type": "gemma2", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 50.0, "num_hidden_layers": 4})");
  const Words job{"run", "--synthetic", "7", "--seq", "300", "--dtype", "fp32", "--model-config", config};
  const Words numerics{"--softcap", "50", "--softmax-scale", "0.17677669529663687"};
  const Finished sliding = tool(job + Words{"--layer", "0"});
  ASSERT_EQ(sliding.code, 0) << sliding.err;
  EXPECT_EQ(digest_of(sliding.out),
            digest_of(tool(Words{"run"} + small_job() + numerics + Words{"--window", "63,0"}).out));
  const Finished full = tool(job + Words{"--layer", "1"});
  EXPECT_EQ(digest_of(full.out), digest_of(tool(Words{"run"} + small_job() + numerics).out));
  const Finished unnamed = tool(job);
  EXPECT_EQ(unnamed.code, 2);
  EXPECT_TRUE(has(unnamed.err, "Name one with --layer 0.")) << unnamed.err;
  EXPECT_EQ(tool(Words{"run", "--layer", "0"} + small_job()).code, 2);
  EXPECT_EQ(tool({"run", "--synthetic", "7", "--model-config", folder.write("bad.json", "{}")}).code, 3);
}

}  // namespace
}  // namespace ringattn::testing
