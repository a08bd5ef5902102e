// SPDX-License-Identifier: Apache-2.0
// `ringattn compress` by the program: every method, what it writes and says, and what is refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "kernels/compression_methods.hpp"
#include "kernels/low_rank.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/latent_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words small_cache() {
  return {"--synthetic", "7", "--seq", "300", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"};
}

std::vector<std::string> methods() {
  std::vector<std::string> names;
  for (const CompressionMethod& method : compression_methods()) {
    const bool ranked = method.name == "lowrank" || method.name == "hybrid";
    if (!ranked || has_low_rank()) names.emplace_back(method.name);
  }
  return names;
}

// Bytes are those of any number of ranks, blocks and layouts, and of decoding; fp64 agrees.
TEST(CompressCommand, WritesWhatEveryCommandTakes) {
  const TemporaryFolder folder;
  for (const std::string& method : methods()) {
    const std::string small = folder.file(method);
    const Finished made = tool(Words{"compress", "--method", method, "--output", small, "--report"} + small_cache());
    ASSERT_EQ(made.code, 0) << method << made.err;
    EXPECT_TRUE(has(made.out, "of the bytes are removed")) << made.out;
    EXPECT_TRUE(has(made.out, "change of O")) << made.out;
    EXPECT_TRUE(has(read_whole(small), R"("k_format":")"));
    const Finished one = tool({"run", "--input", small});
    ASSERT_EQ(one.code, 0) << method << one.err;
    for (const char* const ranks : {"2", "3"}) {
      const Finished several = tool({"run", "--input", small, "--ranks", ranks, "--block", "128"});
      EXPECT_EQ(digest_of(several.out), digest_of(one.out)) << method << several.err;
    }
    EXPECT_EQ(tool({"verify", "--input", small, "--against", "oracle"}).code, 0) << method;
    EXPECT_EQ(tool({"verify", "--input", small, "--decode", "--rows", "3"}).code, 0) << method;
    EXPECT_EQ(tool({"plan", "--input", small, "--world", "4"}).code, 0) << method;
    EXPECT_EQ(tool({"bench", "--input", small, "--samples", "1"}).code, 0) << method;
    // Other bits than the cache had, and the same file again.
    EXPECT_NE(digest_of(one.out), digest_of(tool(Words{"run"} + small_cache()).out)) << method;
    const std::string again = folder.file("again");
    ASSERT_EQ(
        tool(Words{"compress", "--method", method, "--output", again, "--force", "--threads", "1"} + small_cache())
            .code,
        0);
    EXPECT_TRUE(read_whole(again) == read_whole(small)) << method;
  }
}

// What a method costs in time, of both tensors and of taking tokens out, and on what.
TEST(CompressCommand, ReportsTimes) {
  const TemporaryFolder folder;
  for (const std::string method : {"fp8", "int4", "vq", "snapkv:window=16", "snapkv:window=16+int8"}) {
    const Finished made = tool(Words{"compress", "--method", method, "--output", folder.file("out"), "--force",
                                     "--report", "--threads", "2", "--json", "-"} +
                               small_cache());
    ASSERT_EQ(made.code, 0) << method << made.err;
    const auto seconds = [&](std::string_view path) { return std::stod(json_at(made.out, path)); };
    const bool evicts = method.starts_with("snapkv");
    const bool codes = !evicts || method.ends_with("int8");
    for (const char* tensor : {"k", "v"}) {
      for (const char* what : {"compress_seconds", "decompress_seconds"}) {
        const double took = seconds(fmt::format("/{}/{}", tensor, what));
        EXPECT_EQ(took > 0.0, codes) << method << ": " << tensor << ", " << what;
        EXPECT_LT(took, 600.0) << method << ": " << tensor << ", " << what;
      }
    }
    EXPECT_EQ(seconds("/evict_seconds") > 0.0, evicts) << method;
    EXPECT_EQ(json_at(made.out, "/threads"), "2");
    EXPECT_GT(json_at(made.out, "/coded_on").size(), 3U) << made.out;
    EXPECT_TRUE(has(made.err, "decompress")) << made.err;
    EXPECT_TRUE(has(made.err, "# times: ")) << made.err;
    EXPECT_EQ(has(made.err, "tokens were taken out in "), evicts) << made.err;
  }
}

TEST(CompressCommand, TheRatioIsWhatIsRemoved) {
  const TemporaryFolder folder;
  const auto line = [&](const Words& flags) {
    const Finished made = tool(Words{"compress", "--output", folder.file("out"), "--force"} + small_cache() + flags);
    EXPECT_EQ(made.code, 0) << made.err;
    return made.out;
  };
  EXPECT_TRUE(has(line({"--method", "int4"}), "k: int4_channel group 32"));
  EXPECT_TRUE(has(line({"--method", "int4", "--ratio", "0.69"}), "k: int4_channel group 64"));
  EXPECT_TRUE(has(line({"--method", "vq", "--ratio", "0.9"}), "k: vector width 8"));
  EXPECT_TRUE(has(line({"--method", "fp8", "--ratio", "0.5"}), "k: fp8 head"));
  if (has_low_rank()) {
    EXPECT_TRUE(has(line({"--method", "lowrank", "--ratio", "0.7"}), "k: low_rank rank 16"));
  }
  const Finished beyond =
      tool(Words{"compress", "--method", "int8", "--ratio", "0.6", "--output", folder.file("no")} + small_cache());
  EXPECT_EQ(beyond.code, 2);
  EXPECT_TRUE(has(beyond.err,
                  "--ratio 0.6 with --method int8 (the ratio is the share of the bytes that is removed, and "
                  "int8 removes 0.46875 of them at most)"))
      << beyond.err;
  EXPECT_FALSE(std::filesystem::exists(folder.file("no")));
}

// What a refusal calls the most is a ratio that is taken, and a little more is not.
TEST(CompressCommand, TheGreatestRatioIsTakenAsItIsNamed) {
  const TemporaryFolder folder;
  const auto with = [&](const Words& input, const std::string& method, const std::string& ratio) {
    return tool(Words{"compress", "--method", method, "--ratio", ratio, "--output", folder.file("out"), "--force"} +
                input);
  };
  const auto expect_taken = [&](const Words& input, const std::string& method, const std::string& before,
                                const std::string& behind) {
    const Finished beyond = with(input, method, "0.999");
    EXPECT_EQ(beyond.code, 2) << method << beyond.err;
    const std::size_t at = beyond.err.find(before) + before.size();
    const std::size_t end = beyond.err.find(behind, at);
    ASSERT_LT(end, beyond.err.size()) << method << beyond.err;
    const std::string named = beyond.err.substr(at, end - at);
    EXPECT_EQ(with(input, method, named).code, 0) << method << " " << named;
    const std::string more = fmt::format("{:.6f}", std::stod(named) + 2e-6);
    const Finished refused = with(input, method, more);
    EXPECT_EQ(refused.code, 2) << method << " " << more;
    EXPECT_TRUE(has(refused.err, before + named + behind)) << refused.err;
  };
  for (const std::string& method : methods()) {
    for (const char* const dim : {"96", "128", "160"}) {  // whose shares have no end as decimals, and have one
      const Words input{"--synthetic", "7", "--seq", "64", "--heads", "2", "--kv-heads", "1", "--head-dim", dim};
      expect_taken(input, method, method + " removes ", " of them at most");
    }
  }
  LatentFile latents;
  latents.latent_dim = 512;
  latents.rope_dim = 64;
  const Words input{"--input", write_tensors(folder.file("latents"), latent_tensors(latents))};
  expect_taken(input, "fp8", "rows of 8 bits remove ", " of them)");
  // A scale for each token and head is more than rows of two dims have to give.
  const Finished none = with({"--synthetic", "7", "--seq", "64", "--head-dim", "2"}, "int8", "0");
  EXPECT_EQ(none.code, 2);
  EXPECT_TRUE(has(none.err, "int8 removes none of them at most). Choose another method")) << none.err;
}

// A packed batch with sinks, of queries at the end of their keys, keeps what stands beside k and v.
TEST(CompressCommand, KeepsWhatAJobNeeds) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.head_dim = shape.head_dim_v = 64;
  shape.sinks = true;
  const NamedTensors tensors = row_tensors(shape);
  const std::string input = write_tensors(folder.file("in"), tensors);
  const std::string small = folder.file("small");
  const Finished made = tool({"compress", "--method", "int4", "--input", input, "--output", small, "--report"});
  ASSERT_EQ(made.code, 0) << made.err;
  const Finished one = tool({"run", "--input", small});
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_TRUE(has(one.out, "sinks")) << one.out;
  EXPECT_EQ(digest_of(tool({"run", "--input", small, "--ranks", "3"}).out), digest_of(one.out));
  // Without queries it is compressed all the same.
  NamedTensors cache = tensors;
  cache.erase("q");
  const Finished alone = tool({"compress", "--method", "int4", "--input", write_tensors(folder.file("kv"), cache),
                               "--output", folder.file("kv_small"), "--report"});
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_TRUE(has(alone.out, "the file has no q")) << alone.out;
}

// Tokens are taken out: what is left is an input like any other, whatever stands where.
TEST(CompressCommand, EvictsTokens) {
  const TemporaryFolder folder;
  const std::string small = folder.file("small");
  for (const std::string method : {"streaming", "knorm:first=2,last=8", "snapkv:window=16",
                                   "expected:window=32,heads=all", "snapkv:window=8+fp8", "knorm+int4"}) {
    const Finished made =
        tool(Words{"compress", "--method", method, "--output", small, "--report", "--force"} + small_cache());
    ASSERT_EQ(made.code, 0) << method << made.err;
    EXPECT_TRUE(has(made.out, "150 of 300 tokens kept; ")) << made.out;
    EXPECT_TRUE(has(made.out, "change of O")) << made.out;
    EXPECT_TRUE(has(read_whole(small), R"("evicted_by":")"));
    const Finished one = tool({"run", "--input", small});
    ASSERT_EQ(one.code, 0) << method << one.err;
    EXPECT_TRUE(has(one.out, "keys at positions")) << one.out;
    for (const char* const ranks : {"2", "5"}) {
      const Finished several = tool({"run", "--input", small, "--ranks", ranks, "--block", "128"});
      EXPECT_EQ(digest_of(several.out), digest_of(one.out)) << method << several.err;
    }
    EXPECT_EQ(tool({"verify", "--input", small, "--against", "oracle"}).code, 0) << method;
    EXPECT_EQ(tool({"verify", "--input", small, "--window", "40,0", "--ranks", "3"}).code, 0) << method;
    EXPECT_EQ(tool({"plan", "--input", small, "--world", "4"}).code, 0) << method;
    EXPECT_EQ(tool({"bench", "--input", small, "--samples", "1"}).code, 0) << method;
    const std::string again = folder.file("again");
    ASSERT_EQ(
        tool(Words{"compress", "--method", method, "--output", again, "--force", "--threads", "1"} + small_cache())
            .code,
        0);
    EXPECT_TRUE(read_whole(again) == read_whole(small)) << method;
  }
  // With nothing taken out it is the same job, bit for bit.
  ASSERT_EQ(
      tool(Words{"compress", "--method", "knorm", "--ratio", "0", "--output", small, "--force"} + small_cache()).code,
      0);
  EXPECT_EQ(digest_of(tool({"run", "--input", small}).out), digest_of(tool(Words{"run"} + small_cache()).out));
}

// Queries behind everything that was taken out need no positions: every kernel and front door takes them.
TEST(CompressCommand, QueriesBehindTheGapsAreDecoded) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.head_dim = shape.head_dim_v = 64;
  shape.sinks = true;
  shape.lengths = {40, 9, 17, 65};
  shape.q_lens = {4, 1, 2, 3};
  const std::string input = write_tensors(folder.file("in"), row_tensors(shape));
  const std::string small = folder.file("small");
  const Finished made = tool({"compress", "--method", "snapkv:window=4,last=8", "--ratio", "0.4", "--input", input,
                              "--output", small, "--report"});
  ASSERT_EQ(made.code, 0) << made.err;
  const Finished one = tool({"run", "--input", small});
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_FALSE(has(one.out, "keys at positions")) << one.out;
  EXPECT_EQ(digest_of(tool({"run", "--input", small, "--ranks", "3"}).out), digest_of(one.out));
  const Finished decoded = tool({"verify", "--input", small, "--decode", "--rows", "2", "--ranks", "2"});
  EXPECT_EQ(decoded.code, 0) << decoded.out << decoded.err;
  EXPECT_EQ(tool({"verify", "--input", small, "--against", "oracle"}).code, 0);
  const Finished window = tool({"verify", "--input", small, "--decode", "--window", "20,0"});
  EXPECT_EQ(window.code, 2) << window.out;
  EXPECT_TRUE(has(window.err,
                  "(a window may end between tokens that were taken out, and a step's cache has no gaps). "
                  "Use --against oracle, which takes such jobs."))
      << window.err;
}

// What decodes a query is a key of its own: a single query sees all that is left whether it has one or not, and of
// several, the first one that lacks its key is named. A cache in pages and one in rows are the same job.
TEST(CompressCommand, QueriesWithoutAKeyAreNamed) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.head_dim = shape.head_dim_v = 64;
  shape.lengths = {40, 36};
  for (const std::int64_t queries : {1, 3}) {
    shape.q_lens = {queries, queries};
    const std::string in_rows = write_tensors(folder.file("rows"), row_tensors(shape));
    const std::string in_pages = write_tensors(folder.file("pages"), cache_tensors(shape));
    for (const std::string& input : {in_rows, in_pages}) {
      const std::string small = input + "_small";
      const Finished made =
          tool({"compress", "--method", "knorm", "--ratio", "0.75", "--input", input, "--output", small, "--force"});
      ASSERT_EQ(made.code, 0) << made.err;
      const Finished decoded = tool({"verify", "--input", small, "--decode"});
      EXPECT_EQ(decoded.code, queries == 1 ? 0 : 2) << input << decoded.out << decoded.err;
      if (queries == 1) continue;
      EXPECT_TRUE(has(decoded.err,
                      "of sequence 0 is to be decoded, and its own token was taken out (a row that is decoded adds its "
                      "key and value to the cache). Keep the tokens of all queries, as --method snapkv and --method "
                      "streaming do"))
          << decoded.err;
    }
    // Offsets count with the tokens that are not there any more, in pages as in rows: a step, and a row of attention.
    for (const char* const offset : {"39", "12"}) {
      const auto digest = [&](const std::string& input) {
        const Finished run = tool({"run", "--input", input + "_small", "--query-offset", offset});
        EXPECT_EQ(run.code, 0) << run.err;
        return digest_of(run.out);
      };
      EXPECT_EQ(digest(in_pages), digest(in_rows)) << offset;
    }
  }
}

TEST(CompressCommand, RefusesToEvict) {
  const TemporaryFolder folder;
  const std::string out = folder.file("out");
  const auto refused = [&](const Words& words, int code, std::string_view text) {
    const Finished end = tool(words);
    EXPECT_EQ(end.code, code) << end.out << end.err;
    EXPECT_TRUE(has(end.err, text)) << end.err;
    EXPECT_FALSE(std::filesystem::exists(out));
  };
  const auto compress = [&](const Words& words) { return Words{"compress", "--output", out} + words; };
  refused(compress(Words{"--method", "knorm", "--ratio", "1"} + small_cache()), 2,
          "--ratio 1 of the tokens (the ratio is the share that is taken out");
  refused(compress(Words{"--method", "snapkw"} + small_cache()), 2, "Did you mean snapkv?");
  refused(compress(Words{"--method", "snapkv:pool=2"} + small_cache()), 2, "pool=2 of snapkv");
  refused(compress(Words{"--method", "int4+snapkv"} + small_cache()), 2,
          "there is no method of compression \"int4+snapkv\"");
  CacheShape shape;
  shape.head_dim = shape.head_dim_v = 64;
  NamedTensors tensors = row_tensors(shape);
  const std::size_t heads = static_cast<std::size_t>(tensors["q"].shape[1]);
  const std::size_t rows = static_cast<std::size_t>(tensors["q"].shape[0]);
  NamedTensors broken = tensors;
  store_element(broken["q"].bytes.data() + 2 * (64 * (heads * (rows - 1) + 1) + 3), shape.dtype,
                std::numeric_limits<float>::quiet_NaN());
  refused(compress({"--method", "snapkv", "--input", write_tensors(folder.file("nan"), broken)}), 3,
          fmt::format("q[{}, 1, 3] is nan", rows - 1));
  tensors.erase("q");
  refused(compress({"--method", "expected", "--input", write_tensors(folder.file("kv"), tensors)}), 2,
          "expected without queries (it looks at the last ones of a sequence)");

  const std::string small = folder.file("small");
  ASSERT_EQ(tool(Words{"compress", "--method", "knorm", "--output", small} + small_cache()).code, 0);
  refused(compress({"--method", "knorm", "--input", small}), 3, "holds a cache that has lost tokens");
  refused({"run", "--input", small, "--output", out, "--block-mask", "window:64"}, 2,
          "--block-mask with keys at positions of their own");
  refused({"verify", "--input", small, "--decode"}, 2,
          "of sequence 0 is to be decoded, and its own token was taken out");
  // Positions that no cache has.
  const std::string whole = read_whole(small);
  const std::size_t at = whole.find("data_offsets\":[", whole.find("\"k_positions\"")) + 15;
  std::uint64_t header = 0;
  std::memcpy(&header, whole.data(), sizeof header);
  const std::size_t positions = 8 + header + std::stoull(whole.substr(at));
  for (const auto& [place, value, text] :
       {std::tuple{7, 299, "k_positions"}, {2 * 149 + 1, 300, "sequence 0 had 300 tokens"}, {0, -1, "[0, 0] is -1"}}) {
    std::string bytes = whole;
    const std::int32_t number = value;
    std::memcpy(bytes.data() + positions + 4 * static_cast<std::size_t>(place), &number, sizeof number);
    const std::string path = folder.file("broken");
    std::ofstream(path, std::ios::binary) << bytes;
    for (const char* const ranks : {"1", "2"})
      refused({"run", "--input", path, "--output", out, "--ranks", ranks}, 3, text);
  }
  std::string bytes = whole;
  bytes.replace(bytes.find("k_lengths"), 9, "k_langths");
  std::ofstream(folder.file("lengths"), std::ios::binary) << bytes;
  refused({"run", "--input", folder.file("lengths"), "--output", out}, 3, "k_lengths");
}

TEST(CompressCommand, RefusesWhatItCanNotDo) {
  const TemporaryFolder folder;
  const std::string out = folder.file("out");
  const auto refused = [&](const Words& words, int code, std::string_view text) {
    const Finished end = tool(Words{"compress", "--output", out} + words);
    EXPECT_EQ(end.code, code) << end.err;
    EXPECT_TRUE(has(end.err, text)) << end.err;
    EXPECT_FALSE(std::filesystem::exists(out));
  };
  refused(small_cache(), 2, "--method is missing (it says how keys and values are compressed)");
  refused(Words{"--method", "int5"} + small_cache(), 2, "there is no method of compression \"int5\"");
  refused(Words{"--method", "int8", "--dtype", "fp32"} + small_cache(), 2, "fp32 (supported: bf16 and fp16)");
  refused({"--method", "int4", "--synthetic", "7", "--seq", "64", "--head-dim", "40"}, 2,
          "groups of 32 in a dim of 40");
  refused({"--method", "fp8"}, 2, "the job has no input");

  CacheShape shape;
  shape.head_dim = shape.head_dim_v = 64;
  NamedTensors tensors = row_tensors(shape);
  store_element(tensors["v"].bytes.data() + 2 * (64 * 3 + 5), shape.dtype, std::numeric_limits<float>::infinity());
  const std::size_t kv_heads = static_cast<std::size_t>(tensors["v"].shape[1]);
  refused({"--method", "fp8", "--input", write_tensors(folder.file("inf"), tensors)}, 3,
          fmt::format("v[{}, {}, 5] is inf", 3 / kv_heads, 3 % kv_heads));
  const std::string small = folder.file("small");
  ASSERT_EQ(tool(Words{"compress", "--method", "fp8", "--output", small} + small_cache()).code, 0);
  refused({"--method", "int4", "--input", small}, 3, "holds a compressed cache");
}

// A report says how much O changes: of numbers, and in front of everything else.
TEST(CompressCommand, ReportsCompareNumbersAlone) {
  const TemporaryFolder folder;
  const std::string out = folder.file("out");
  CacheShape shape;
  shape.head_dim = shape.head_dim_v = 64;
  shape.sinks = true;
  NamedTensors tensors = row_tensors(shape);
  const std::size_t heads = static_cast<std::size_t>(tensors["q"].shape[1]);
  const std::size_t rows = static_cast<std::size_t>(tensors["q"].shape[0]);
  const auto compress = [&](const NamedTensors& input, const Words& flags) {
    return tool(Words{"compress", "--method", "int8", "--input", write_tensors(folder.file("in"), input), "--output",
                      out, "--force"} +
                flags);
  };
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    NamedTensors broken = tensors;
    store_element(broken["q"].bytes.data() + 2 * (64 * (heads * (rows - 1) + 1) + 3), shape.dtype, value);
    std::filesystem::remove(out);
    const Finished refused = compress(broken, {"--report"});
    EXPECT_EQ(refused.code, 3) << refused.err;
    EXPECT_TRUE(has(refused.err, fmt::format("q[{}, 1, 3] is {} (rows of O that depend on it", rows - 1, value)))
        << refused.err;
    EXPECT_TRUE(has(refused.err, "leave out --report.")) << refused.err;
    EXPECT_FALSE(std::filesystem::exists(out));
    EXPECT_EQ(compress(broken, {}).code, 0);  // queries are no part of what is compressed
  }
  // What no number comes of is said to be none.
  store_element(tensors["sinks"].bytes.data(), Dtype::kF32, std::numeric_limits<float>::quiet_NaN());
  const Finished made = compress(tensors, {"--report", "--json", "-"});
  EXPECT_EQ(made.code, 0) << made.err;
  for (const char* const member : {"relative_error", "greatest", "greatest_lse"}) {
    EXPECT_EQ(json_at(made.out, fmt::format("/out/{}", member)), "null") << made.out;
  }
  EXPECT_EQ(json_at(made.out, "/out/emptied"), "0") << made.out;
}

// What a file may not hold is found by whoever reads it, and nothing is written.
TEST(CompressCommand, BrokenFilesAreRefusedByName) {
  const TemporaryFolder folder;
  const std::string small = folder.file("small");
  ASSERT_EQ(tool(Words{"compress", "--method", "int8", "--output", small} + small_cache()).code, 0);
  const std::string whole = read_whole(small);
  const auto refused = [&](const std::string& bytes, std::string_view text) {
    const std::string path = folder.file("broken");
    std::ofstream(path, std::ios::binary) << bytes;
    for (const char* const ranks : {"1", "2"}) {
      const Finished end = tool({"run", "--input", path, "--ranks", ranks, "--output", folder.file("out")});
      EXPECT_EQ(end.code, 3) << end.err;
      EXPECT_TRUE(has(end.err, text)) << end.err;
      EXPECT_FALSE(std::filesystem::exists(folder.file("out")));
    }
  };
  const auto replaced = [&](std::string_view from, std::string_view to) {
    std::string bytes = whole;
    bytes.replace(bytes.find(from), from.size(), to);
    return bytes;
  };
  refused(replaced(R"("k_format":"int8")", R"("k_format":"int9")"), "\"int9\" is no format of rows");
  refused(replaced(R"("k_format":"int8")", R"("k_format":"fp16")"), "k_format in the metadata of");
  refused(replaced(R"("k_scales":{"dtype":"F32")", R"("k_scales":{"dtype":"I32")"),
          "int8 stores it as F32 [300, 2, 1]");
  refused(replaced("k_codes", "k_cades"), "k_codes");
  // A scale of NaN, and −128: where the data of a tensor begin stands in the header.
  const std::size_t data = 8 + [&] {
    std::uint64_t length = 0;
    std::memcpy(&length, whole.data(), sizeof length);
    return length;
  }();
  const auto begin_of = [&](const std::string& tensor) {
    const std::size_t at = whole.find("data_offsets\":[", whole.find("\"" + tensor + "\"")) + 15;
    return data + std::stoull(whole.substr(at));
  };
  std::string broken = whole;
  std::memset(broken.data() + begin_of("v_scales") + 4 * (2 * 17 + 1), 0xff, 4);
  refused(broken, "v_scales[17, 1, 0] is ");
  broken = whole;
  broken[begin_of("k_codes") + 128 * 299 + 64 + 3] = static_cast<char>(0x80);
  refused(broken, "k_codes[299, 1, 3] is -128 (a code is from -127 to 127)");
}

}  // namespace
}  // namespace ringattn::testing
