// SPDX-License-Identifier: Apache-2.0
// `ringattn compress` by the program, where tokens are taken out: what every command makes of what is left.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words small_cache() {
  return {"--synthetic", "7", "--seq", "300", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"};
}

// Tokens are taken out: what is left is an input like any other, whatever stands where.
TEST(EvictCommand, EvictsTokens) {
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

// Queries after all evicted tokens need no positions: every kernel and op class takes them.
TEST(EvictCommand, QueriesBehindTheGapsAreDecoded) {
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
                  "(a window may end between tokens that were evicted, and a step's cache has no gaps). "
                  "Use --against oracle, which takes such jobs."))
      << window.err;
}

// What decodes a query is a key of its own: a single query sees all that is left whether it has one or not, and of
// several, the first one that lacks its key is named. A cache in pages and one in rows are the same job.
TEST(EvictCommand, QueriesWithoutAKeyAreNamed) {
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
                      "of sequence 0 is to be decoded, and its own token was evicted (a row that is decoded adds its "
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

TEST(EvictCommand, RefusesToEvict) {
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
          "--ratio 1 of the tokens (the ratio is the fraction that is evicted");
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
  CacheShape one = shape;
  one.lengths = {40, 9};
  one.q_lens = {0, 4};
  refused(compress({"--method", "snapkv", "--input", write_tensors(folder.file("one"), row_tensors(one))}), 2,
          "snapkv of sequence 0 without queries of it (it looks at the last ones of every sequence that has keys)");

  const std::string small = folder.file("small");
  ASSERT_EQ(tool(Words{"compress", "--method", "knorm", "--output", small} + small_cache()).code, 0);
  refused(compress({"--method", "knorm", "--input", small}), 3, "holds a cache with evicted tokens");
  refused({"run", "--input", small, "--output", out, "--block-mask", "window:64"}, 2,
          "--block-mask with keys at positions of their own");
  refused({"verify", "--input", small, "--decode"}, 2, "of sequence 0 is to be decoded, and its own token was evicted");
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

}  // namespace
}  // namespace ringattn::testing
