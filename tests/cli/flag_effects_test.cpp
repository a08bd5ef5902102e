// SPDX-License-Identifier: Apache-2.0
// Every flag does something: for each there is a test here or in op_flag_effects.cpp, and a flag without one fails.
#include "tests/cli/flag_effects.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "kernels/common/simd_target.hpp"
#include "launch/flags.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

std::string digest(const Words& flags) { return digest_of(out_of(Words{"run", "--quiet"} + small_job() + flags)); }

// The flag changes the result.
void changes_result(const Words& flags) { EXPECT_NE(digest(flags), digest({})); }

// The flag shows in the output and changes no bit.
void shows(const Words& flags, std::string_view part) {
  const std::string out = out_of(Words{"run", "--verbose"} + small_job() + flags);
  EXPECT_TRUE(has(out, part)) << out;
  EXPECT_FALSE(has(out_of(Words{"run", "--verbose"} + small_job()), part)) << part << " shows without the flag";
  EXPECT_EQ(digest_of(out), digest({}));
}

// A synthetic job with one flag of its shape, whose table row shows `part`.
void shapes(const Words& flags, std::string_view part) {
  const std::string out = out_of(Words{"run", "--synthetic", "7", "--quiet"} + flags);
  EXPECT_TRUE(has(out, part)) << out;
}

std::string report(const Words& flags) { return out_of(Words{"run", "--json", "-"} + small_job() + flags); }

// In its place: a file that `use` gets the name of, with a result of the small job.
void with_file(const std::function<void(const TemporaryFolder&, const std::string&)>& use) {
  const TemporaryFolder folder;
  use(folder, folder.file("file"));
}

Words bench_words() {
  return {"bench", "--seq", "50", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--samples", "2"};
}

// The line of a benchmark's only point.
std::string bench_line(const Words& flags) { return out_of(bench_words() + Words{"--jsonl", "-"} + flags); }

const Effects& effects() {
  static const Effects table{
      {"input",
       [] {
         const TemporaryFolder folder;
         const std::string input = folder.write("in.safetensors", safetensors_bytes({}));
         EXPECT_TRUE(has(out_of({"run", "--input", input}), "# input: " + input));
       }},
      {"tensors",
       [] {
         const TemporaryFolder folder;
         FileShape shape;
         shape.prefix = "x.";
         const std::string input = folder.write("in.safetensors", safetensors_bytes(shape));
         EXPECT_EQ(tool({"run", "--input", input}).code, 3);
         EXPECT_EQ(tool({"run", "--input", input, "--tensors", "q=x.q,k=x.k,v=x.v"}).code, 0);
       }},
      {"synthetic",
       [] {
         EXPECT_NE(digest_of(out_of({"run", "--synthetic", "1", "--seq", "100"})),
                   digest_of(out_of({"run", "--synthetic", "2", "--seq", "100"})));
       }},
      {"order",
       [] {
         with_file([](const TemporaryFolder&, const std::string& path) {
           out_of(Words{"run", "--order", "htd", "--output", path} + small_job());
           EXPECT_TRUE(has(read_whole(path), R"("shape":[4, 300, 16])"));
         });
       }},
      {"page-order",
       [] {
         // 16 heads of 16 tokens, or 16 tokens of 16 heads.
         const TemporaryFolder folder;
         CacheShape shape;
         shape.heads = shape.kv_heads = 16;
         const std::string input = write_cache(folder.file("cache"), shape);
         EXPECT_EQ(tool({"run", "--input", input}).code, 3);
         const std::string thd = digest_of(out_of({"run", "--input", input, "--page-order", "thd"}));
         EXPECT_NE(digest_of(out_of({"run", "--input", input, "--page-order", "htd"})), thd);
       }},
      {"op",
       [] {
         const std::string out = out_of(Words{"run", "--op", "decode", "--q-len", "2"} + small_job());
         EXPECT_TRUE(has(out, "# cache: dense")) << out;
         EXPECT_EQ(digest_of(out), digest({"--q-len", "2"}));
       }},
      {"model-config",
       [] {
         const TemporaryFolder folder;
         const std::string config = folder.write("config.json", R"({"num_attention_heads": 4, "head_dim": 16})");
         EXPECT_TRUE(has(out_of({"run", "--synthetic", "7", "--seq", "50", "--model-config", config}), " 4   4   16 "));
       }},
      {"layer",
       [] {
         const TemporaryFolder folder;
         const std::string config = folder.write("config.json", R"({"num_attention_heads": 4, "head_dim": 16,
           "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]})");
         const Words job{"run", "--synthetic", "7", "--seq", "50", "--model-config", config, "--layer"};
         EXPECT_TRUE(has(out_of(job + Words{"1"}), " window:7"));
         EXPECT_TRUE(has(out_of(job + Words{"0"}), " causal"));
       }},
      {"q-len",
       [] {
         shapes({"--seq", "50", "--q-len", "3"}, " 3     1 ");
       }},
      {"page-size",
       [] {
         const Words step = Words{"run", "--op", "decode"} + small_job();
         const std::string paged = out_of(step + Words{"--page-size", "32"});
         EXPECT_TRUE(has(paged, "# cache: 10 pages of 32 tokens")) << paged;
         EXPECT_EQ(digest_of(paged), digest_of(out_of(step)));
       }},
      {"prefix",
       [] {
         // Each of 3 sequences has 10 pages, of which two are shared by all. The keys differ from those without a
         // prefix.
         const Words step = Words{"run", "--op", "decode", "--page-size", "32", "--batch", "3"} + small_job();
         const std::string shared = out_of(step + Words{"--prefix", "64"});
         EXPECT_TRUE(has(shared, "# cache: 26 pages of 32 tokens")) << shared;
         EXPECT_NE(digest_of(shared), digest_of(out_of(step)));
       }},
      {"seq",
       [] {
         shapes({"--seq", "123"}, " 123 ");
       }},
      {"batch",
       [] {
         shapes({"--seq", "50", "--batch", "3"}, " 150     3 ");
       }},
      {"heads",
       [] {
         shapes({"--seq", "50", "--heads", "6"}, " 6   2 ");
       }},
      {"kv-heads",
       [] {
         shapes({"--seq", "50", "--kv-heads", "4"}, " 8   4 ");
       }},
      {"head-dim",
       [] {
         shapes({"--seq", "50", "--head-dim", "24"}, " 24 ");
       }},
      {"head-dim-v",
       [] {
         shapes({"--seq", "50", "--head-dim-v", "24"}, " 128/24 ");
       }},
      {"dtype",
       [] {
         shapes({"--seq", "50", "--dtype", "fp16"}, " fp16 ");
       }},
      {"mask",
       [] {
         changes_result({"--mask", "full"});
       }},
      {"query-offset",
       [] {
         changes_result({"--query-offset", "-10"});
       }},
      {"window",
       [] {
         changes_result({"--window", "20,-1"});
       }},
      {"block-mask",
       [] {
         changes_result({"--block-mask", "window:0+block:128"});
       }},
      {"softmax-scale",
       [] {
         changes_result({"--softmax-scale", "0.5"});
       }},
      {"softcap",
       [] {
         changes_result({"--softcap", "2"});
       }},
      {"world",
       [] {
         EXPECT_TRUE(has(out_of({"plan", "--world", "5"}), "# rank 4 owns "));
       }},
      {"machine",
       [] {
         const TemporaryFolder folder;
         const std::string slow = folder.write(
             "m.json", R"({"flops_per_second": 1e6, "link_bytes_per_second": 1e6, "latency_seconds": 0.5})");
         EXPECT_NE(json_at(report({"--ranks", "2", "--machine", slow}), "/plan/estimated_ms"),
                   json_at(report({"--ranks", "2"}), "/plan/estimated_ms"));
       }},
      {"backend",
       [] {
         EXPECT_EQ(tool(Words{"run", "--backend", "cpu"} + small_job()).code, 0);
         EXPECT_EQ(tool(Words{"run", "--backend", "tpu"} + small_job()).code, 2);
       }},
      {"kernel",
       [] {
         shows({"--kernel", "cpu_attention"}, "forced: cpu_attention");
         EXPECT_EQ(tool(Words{"run", "--kernel", "cpu_fild"} + small_job()).code, 2);
       }},
      {"transport",
       [] {
         shows({"--transport", "threads", "--ranks", "1"}, "transport threads");
         EXPECT_EQ(tool(Words{"run", "--transport", "thread"} + small_job()).code, 2);
       }},
      {"ranks",
       [] {
         shows({"--ranks", "3"}, "world: 3 ranks");
       }},
      {"layout",
       [] {
         shows({"--layout", "zigzag", "--ranks", "2"}, "layout: zigzag");
       }},
      {"stripe",
       [] {
         shows({"--stripe", "16", "--ranks", "2"}, "stripe 16 tokens");
       }},
      {"block",
       [] {
         shows({"--block", "128"}, "# block 2: keys 256 to 300");
       }},
      {"memory",
       [] {
         EXPECT_EQ(tool(Words{"run", "--memory", "4k"} + small_job()).code, 5);
         EXPECT_EQ(digest({"--memory", "1g"}), digest({}));
       }},
      {"overlap",
       [] {
         // Without it a block is posted only once the one before it is computed.
         const TemporaryFolder folder;
         const auto posted = [&](const char* overlap) {
           const std::string path = folder.file(overlap);
           out_of(Words{"run", "--ranks", "2", "--block", "64", "--overlap", overlap, "--trace", path} + small_job());
           const std::string trace = read_whole(path);
           double compute_end = 0.0;
           double transfer = 0.0;
           for (int i = 0;; ++i) {
             const std::string at = "/traceEvents/" + std::to_string(i);
             if (json_at(trace, at) == "absent") break;
             if (json_at(trace, at + "/pid") != "0") continue;
             const std::string name = json_at(trace, at + "/name") + json_at(trace, at + "/cat");
             if (name == R"("block 0""compute")") {
               compute_end = std::stod(json_at(trace, at + "/ts")) + std::stod(json_at(trace, at + "/dur"));
             }
             if (name == R"("block 1""transfer")") transfer = std::stod(json_at(trace, at + "/ts"));
           }
           return transfer < compute_end;
         };
         EXPECT_TRUE(posted("on"));
         EXPECT_FALSE(posted("off"));
       }},
      {"simd-target",
       [] {
         const std::vector<std::string> here = simd_target_names_here();
         const std::string weakest = here.back();
         const auto devices = [](const std::string& name) {
           return json_at(report({"--simd-target", name}), "/world/devices/0");
         };
         if (here.size() > 1) {
           EXPECT_NE(devices(weakest), devices(here.front()));
         }
         const Finished lacking = tool({"info", "--simd-target", here.front() == "neon" ? "avx2" : "neon"});
         EXPECT_EQ(lacking.code, 4);
         EXPECT_TRUE(has(lacking.err, "can't be used here (processor and build have " + here.front())) << lacking.err;
         const Finished shown = tool({"info", "--simd-target", weakest});
         EXPECT_TRUE(has(shown.out, "(--simd-target " + weakest + "; here: " + here.front())) << shown.out;
         EXPECT_EQ(has(shown.out, "runs here: no (the SIMD target in use has no AMX tiles of bf16)"),
                   here.front() == "amx")
             << shown.out;
       }},
      {"threads",
       [] {
         shows({"--threads", "3"}, ", 3 threads a rank");
       }},
      {"numa-binding",
       [] {
         EXPECT_TRUE(has(out_of({"info", "--numa-binding", "none"}), "; ranks are not bound (--numa-binding none)"));
         EXPECT_FALSE(has(out_of({"info"}), "--numa-binding none"));
         EXPECT_FALSE(has(out_of({"info", "--numa-binding", "none"}), " 1 processors"));
         EXPECT_EQ(digest({"--ranks", "2", "--numa-binding", "none"}), digest({"--ranks", "2"}));
       }},
      {"output",
       [] {
         with_file([](const TemporaryFolder&, const std::string& path) {
           shows({"--output", path}, "# output: " + path);
           EXPECT_TRUE(has(read_whole(path), digest({})));  // in the metadata
         });
       }},
      {"force",
       [] {
         with_file([](const TemporaryFolder& folder, const std::string& path) {
           folder.write("file", "");
           EXPECT_EQ(tool(Words{"run", "--output", path} + small_job()).code, 3);
           EXPECT_EQ(tool(Words{"run", "--output", path, "--force"} + small_job()).code, 0);
         });
       }},
      {"json", [] { EXPECT_EQ(check_report(report({})), ""); }},
      {"trace",
       [] {
         with_file([](const TemporaryFolder&, const std::string& path) {
           shows({"--trace", path}, "# trace: " + path);
           EXPECT_TRUE(has(read_whole(path), "traceEvents"));
         });
       }},
      {"progress",
       [] {
         EXPECT_TRUE(has(tool(Words{"run", "--block", "128", "--progress", "on"} + small_job()).err, "block 3 of 3"));
         EXPECT_EQ(tool(Words{"run", "--block", "128", "--progress", "off"} + small_job()).err, "");
       }},
      {"color",
       [] {
         const Words job = Words{"verify", "--ranks", "1"} + small_job();
         EXPECT_TRUE(has(out_of(job + Words{"--color", "always"}), "\x1b[32mPASS"));
         EXPECT_FALSE(has(out_of(job + Words{"--color", "never"}), "\x1b"));
         EXPECT_FALSE(has(out_of(job), "\x1b"));  // no terminal
         EXPECT_TRUE(has(tool({"run", "--synthetic", "7", "--heads", "3", "--color", "always"}).err, "\x1b[31merror"));
       }},
      {"quiet",
       [] {
         EXPECT_FALSE(has(out_of(Words{"run", "--quiet"} + small_job()), "#"));
       }},
      {"verbose",
       [] {
         EXPECT_TRUE(has(out_of(Words{"run", "--verbose"} + small_job()), "# rank 0 on "));
         EXPECT_FALSE(has(out_of(Words{"run"} + small_job()), "# rank 0 on "));
       }},
      {"config",
       [] {
         const TemporaryFolder folder;
         const std::string file = folder.write("job.toml", "synthetic = 7\nseq = 77\n");
         EXPECT_TRUE(has(out_of({"run", "--config", file}), "77 tokens"));
       }},
      {"print-config",
       [] {
         EXPECT_TRUE(has(out_of({"run", "--print-config"}), "mask = \"causal\"  # default"));
       }},
      {"dry-run",
       [] {
         EXPECT_FALSE(has(out_of(Words{"run", "--dry-run"} + small_job()), "digest"));
         EXPECT_FALSE(has(out_of(Words{"verify", "--dry-run"} + small_job()), "PASS"));
       }},
      {"timeout",
       [] {
         // At 64 KiB per second the job's blocks take longer than the wait may last.
         const Words job{"run", "--synthetic", "7", "--seq", "2k", "--ranks", "2", "--head-dim", "64"};
         const Finished late = tool(job + Words{"--timeout", "0.2"}, {{"RINGATTN_PACE", "64k"}});
         EXPECT_EQ(late.code, 6) << late.err;
         EXPECT_EQ(count_messages(late.err), 1) << late.err;
       }},
      {"checksum",
       [] {
         EXPECT_NE(json_at(report({"--ranks", "2", "--checksum"}), "/plan/bytes_moved"),
                   json_at(report({"--ranks", "2"}), "/plan/bytes_moved"));
         EXPECT_EQ(digest({"--ranks", "2", "--checksum"}), digest({}));
       }},
      {"against",
       [] {
         EXPECT_TRUE(has(out_of(Words{"verify", "--against", "oracle"} + small_job()), "fp64 oracle"));
       }},
      {"decode",
       [] {
         const std::string out = out_of(Words{"verify", "--decode", "--rows", "3"} + small_job());
         EXPECT_TRUE(has(out, "the last 3 rows of each sequence, decoded one by one")) << out;
         EXPECT_TRUE(has(out, "PASS")) << out;
       }},
      {"rows",
       [] {
         EXPECT_TRUE(has(out_of(Words{"verify", "--against", "oracle", "--rows", "9"} + small_job()), "# 9 rows"));
       }},
      {"record",
       [] {
         with_file([](const TemporaryFolder&, const std::string& path) {
           out_of(Words{"verify", "--record", path} + small_job());
           EXPECT_EQ(json_at(read_whole(path), "/digest_out"), "\"" + digest({}) + "\"");
         });
       }},
      {"golden",
       [] {
         with_file([](const TemporaryFolder& folder, const std::string& path) {
           folder.write("file", "{}");
           EXPECT_EQ(tool(Words{"verify", "--golden", path} + small_job()).code, 3);
         });
       }},
      {"peer",
       [] {
         with_file([](const TemporaryFolder&, const std::string& path) {
           out_of(Words{"run", "--output", path} + small_job());
           EXPECT_TRUE(has(out_of(Words{"verify", "--peer", path} + small_job()), "theirs: out: greatest error"));
         });
       }},
      {"measure",
       [] {
         EXPECT_TRUE(has(out_of({"info", "--measure"}), "flops_per_second"));
       }},
      // What these show in full: bench_test.cpp.
      {"total-tokens",
       [] {
         EXPECT_EQ(json_at(bench_line({"--total-tokens", "100"}), "/job/batch"), "2");
       }},
      {"jsonl", [] { EXPECT_EQ(json_at(bench_line({}), "/schema"), "\"ringattn.bench/2\""); }},
      {"quick",
       [] {
         const std::string out = out_of({"bench", "--quick", "--dry-run", "--threads", "1"});
         EXPECT_TRUE(has(out, "ringattn bench --op linear --in-features 4096")) << out;
         EXPECT_TRUE(has(out, " --seq 1024 --threads 1\n")) << out;
       }},
      {"samples", [] { EXPECT_EQ(json_at(bench_line({}), "/samples"), "2"); }},
      {"compute-only", [] { EXPECT_EQ(json_at(bench_line({"--compute-only"}), "/mode"), "\"compute\""); }},
      {"baseline",
       [] {
         with_file([](const TemporaryFolder& folder, const std::string& path) {
           folder.write("file", bench_line({}));
           EXPECT_TRUE(has(tool(bench_words() + Words{"--baseline", path}).out, " 1 point"));
         });
       }},
      {"fail-above",
       [] {
         with_file([](const TemporaryFolder& folder, const std::string& path) {
           // Long enough that no pause of the machine is ten thousand times as long.
           const Words words = {"bench", "--seq", "2k", "--head-dim", "8", "--samples", "2"};
           folder.write("file", out_of(words + Words{"--jsonl", "-"}));
           EXPECT_TRUE(has(out_of(words + Words{"--baseline", path, "--fail-above", "1000000%"}), "PASS"));
         });
       }},
  };
  return table;
}

class FlagEffect : public ::testing::TestWithParam<std::string> {};

TEST_P(FlagEffect, IsSeen) {
  const Effects& table = effects().contains(GetParam()) ? effects() : op_effects();
  const auto effect = table.find(GetParam());
  ASSERT_NE(effect, table.end()) << "no test shows what --" << GetParam() << " does";
  effect->second();
}

std::vector<std::string> flag_names() {
  std::vector<std::string> names;
  for (const FlagRow& row : flag_table()) {
    if (row.own == nullptr && (names.empty() || names.back() != row.name)) names.emplace_back(row.name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Flags, FlagEffect, ::testing::ValuesIn(flag_names()), [](const auto& tested) {
  std::string name = tested.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace ringattn::testing
