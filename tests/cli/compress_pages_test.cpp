// SPDX-License-Identifier: Apache-2.0
// Compressed caches in pages by the program: `compress` writes them, every command takes them, and their bits are those
// of the same quantized values in rows.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "io/safetensors_file.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

CacheShape small_pages() {
  CacheShape shape;
  shape.lengths = {300, 0, 64, 97};
  shape.q_lens = {2, 2, 2, 2};
  shape.head_dim = shape.head_dim_v = 64;
  return shape;
}

Words method_words(const std::string& method) {
  const std::size_t at = method.find(' ');
  if (at == std::string::npos) return {"--method", method};
  return {"--method", method.substr(0, at), "--ratio", method.substr(at + 1)};
}

// Quantized row by row, a token has the same values, wherever it lies: so O has the same bytes. Ranks, layouts of pages
// and ways to compute make no difference.
TEST(CompressedPages, GiveTheBytesOfCompressedRows) {
  const TemporaryFolder folder;
  for (const std::string method : {"fp8", "fp8 0.5", "int8", "int4", "int4 0.69"}) {
    for (const auto& [page_size, head_major] : {std::pair{16, false}, {64, true}}) {
      CacheShape shape = small_pages();
      shape.page_size = page_size;
      shape.head_major = head_major;
      shape.sinks = head_major;
      const std::string small = folder.file("small"), rows = folder.file("rows");
      const auto compress = [&](const std::string& input, const std::string& output) {
        const Finished made =
            tool(Words{"compress", "--input", input, "--output", output, "--force", "--report"} + method_words(method));
        ASSERT_EQ(made.code, 0) << method << made.err;
        EXPECT_TRUE(has(made.out, "of the bytes are removed")) << made.out;
        EXPECT_TRUE(has(made.out, "change of O")) << made.out;
      };
      compress(write_cache(folder.file("cache"), shape), small);
      compress(write_tensors(folder.file("plain"), row_tensors(shape)), rows);
      const std::string expected = digest_of(tool({"run", "--input", rows}).out);
      for (const char* ranks : {"1", "2", "5"}) {
        const Finished run = tool({"run", "--input", small, "--ranks", ranks});
        ASSERT_EQ(run.code, 0) << method << run.err;
        EXPECT_TRUE(has(run.out, ", stored as ")) << run.out;
        EXPECT_EQ(digest_of(run.out), expected) << method << " in pages of " << page_size << ", ranks " << ranks;
      }
    }
  }
}

TEST(CompressedPages, AreTakenByEveryCommand) {
  const TemporaryFolder folder;
  const std::string cache = write_cache(folder.file("cache"), small_pages());
  for (const std::string method : {"fp8", "int4", "vq"}) {
    const std::string small = folder.file(method);
    ASSERT_EQ(tool({"compress", "--method", method, "--input", cache, "--output", small}).code, 0);
    // verify decodes in other worlds and over caches of elements, which hold what decompression gives.
    for (const Words& words :
         {Words{"verify"}, {"verify", "--against", "oracle"}, {"plan", "--world", "4"}, {"bench", "--samples", "1"}}) {
      const Finished end = tool(words + Words{"--input", small});
      EXPECT_EQ(end.code, 0) << method << ' ' << words[0] << end.out << end.err;
    }
    EXPECT_NE(digest_of(tool({"run", "--input", small}).out), digest_of(tool({"run", "--input", cache}).out));
    const std::string again = folder.file("again");
    ASSERT_EQ(
        tool({"compress", "--method", method, "--input", cache, "--output", again, "--threads", "1", "--force"}).code,
        0);
    EXPECT_TRUE(read_whole(again) == read_whole(small)) << method;
  }
  // Without queries it is compressed all the same, if its order of axes is known.
  NamedTensors alone = cache_tensors(small_pages());
  alone.erase("q");
  const std::string path = write_tensors(folder.file("alone"), alone);
  EXPECT_EQ(
      tool({"compress", "--method", "int4", "--input", path, "--output", folder.file("alone_small"), "--report"}).code,
      0);
}

// Rows in larger numbers than a step's are computed as attention, over the same quantized values.
TEST(CompressedPages, OfManyRowsAreReadIntoRows) {
  const TemporaryFolder folder;
  CacheShape shape = small_pages();
  shape.q_lens = {20, 0, 1, 30};
  const std::string small = folder.file("small"), rows = folder.file("rows");
  const std::string cache = write_cache(folder.file("cache"), shape);
  const std::string plain = write_tensors(folder.file("plain"), row_tensors(shape));
  ASSERT_EQ(tool({"compress", "--method", "int4", "--input", cache, "--output", small}).code, 0);
  ASSERT_EQ(tool({"compress", "--method", "int4", "--input", plain, "--output", rows}).code, 0);
  const std::string expected = digest_of(tool({"run", "--input", rows}).out);
  for (const char* ranks : {"1", "3"}) {
    const Finished run = tool({"run", "--input", small, "--ranks", ranks});
    EXPECT_TRUE(has(run.out, "# cache: read into rows")) << run.out << run.err;
    EXPECT_EQ(digest_of(run.out), expected);
  }
}

TEST(CompressedPages, OfASeedAreThoseOfItsRows) {
  const Words shape{"--synthetic", "7",          "--seq", "300",        "--batch", "2",       "--heads",
                    "4",           "--kv-heads", "2",     "--head-dim", "64",      "--q-len", "3"};
  for (const std::string method : {"fp8", "fp8 tensor", "int8", "int4"}) {
    const Words stored = Words{"run", "--cache-format", method} + shape;
    const std::string expected = digest_of(tool(stored).out);
    for (const char* page : {"0", "16", "128"}) {
      for (const char* ranks : {"1", "3"}) {
        const Finished step = tool(stored + Words{"--op", "decode", "--page-size", page, "--ranks", ranks});
        ASSERT_EQ(step.code, 0) << step.err;
        EXPECT_TRUE(has(step.out, ", stored as ")) << step.out;
        EXPECT_EQ(digest_of(step.out), expected) << method << page << ranks;
      }
    }
    EXPECT_EQ(tool(Words{"plan", "--seq", "300", "--world", "4", "--cache-format", method}).code, 0);
    EXPECT_EQ(tool(Words{"bench", "--seq", "64", "--samples", "1", "--cache-format", method}).code, 0);
  }
  const Words decode = Words{"--op", "decode", "--cache-format", "int4", "--page-size", "16"} + shape;
  EXPECT_EQ(tool(Words{"verify"} + decode).code, 0);
  EXPECT_EQ(tool(Words{"verify", "--decode", "--rows", "3"} + Words{"--cache-format", "int4"} + shape).code, 0);
  const Finished prefix = tool(Words{"run", "--prefix", "32"} + decode);
  EXPECT_EQ(prefix.code, 2);
  EXPECT_TRUE(has(prefix.err, "--cache-format int4 with --prefix 32")) << prefix.err;
}

TEST(CompressedPages, LatentsOfASeedAreFp8Rows) {
  const Words shape{"--op",       "mla", "--synthetic",  "7",   "--seq",        "300",
                    "--batch",    "2",   "--heads",      "4",   "--head-dim",   "32",
                    "--rope-dim", "16",  "--latent-dim", "128", "--head-dim-v", "32"};
  for (const Words& form : {Words{}, Words{"--form", "absorbed", "--q-len", "2", "--page-size", "16"}}) {
    const Words job = shape + form;
    const std::string plain = digest_of(tool(Words{"run"} + job).out);
    EXPECT_EQ(digest_of(tool(Words{"run", "--cache-format", "bf16"} + job).out), plain);
    const Words codes = Words{"--cache-format", "fp8"} + job;
    const std::string expected = digest_of(tool(Words{"run"} + codes).out);
    EXPECT_NE(expected, "");
    EXPECT_NE(expected, plain);
    EXPECT_EQ(digest_of(tool(Words{"run", "--ranks", "3"} + codes).out), expected);
    EXPECT_EQ(tool(Words{"verify", "--against", "oracle"} + codes).code, 0);
  }
  const auto refused = [&](const Words& words, std::string_view message) {
    const Finished run = tool(Words{"run"} + words + shape);
    EXPECT_EQ(run.code, 2) << run.out;
    EXPECT_TRUE(has(run.err, std::string(message))) << run.err;
  };
  refused({"--cache-format", "int4"}, "--cache-format int4 with latents");
  refused({"--cache-format", "fp8 tensor"}, "--cache-format fp8 tensor with latents");
  refused({"--cache-format", "fp16"}, "--cache-format fp16 with --dtype bf16");
  refused({"--cache-format", "fp8", "--dtype", "fp16"}, "--cache-format fp8 with --dtype fp16");
}

TEST(CompressedPages, OfTheirOwnTypeAreAsTheyAre) {
  const Words shape{"--op", "decode", "--synthetic", "7", "--seq", "300", "--dtype", "fp16", "--head-dim", "32"};
  const std::string plain = digest_of(tool(Words{"run"} + shape).out);
  EXPECT_EQ(digest_of(tool(Words{"run", "--cache-format", "fp16"} + shape).out), plain);
  const Finished other = tool(Words{"run", "--cache-format", "bf16"} + shape);
  EXPECT_EQ(other.code, 2);
  EXPECT_TRUE(has(other.err, "--cache-format bf16 with --dtype fp16")) << other.err;
}

// A safetensors file, to be broken: where a tensor's bytes begin.
struct Bytes {
  explicit Bytes(const std::string& path) : all(read_whole(path)) {}

  std::size_t begin_of(const std::string& tensor) const {
    std::uint64_t header = 0;
    std::memcpy(&header, all.data(), sizeof header);
    const std::size_t at = all.find("data_offsets\":[", all.find("\"" + tensor + "\"")) + 15;
    return 8 + header + std::stoull(all.substr(at));
  }
  void replace(std::string_view from, std::string_view to) { all.replace(all.find(from), from.size(), to); }

  std::string all;
};

// Pages 0 to 2 belong to no sequence; a page of the pool, as the table of the file says.
std::int64_t page_of(const Bytes& file, std::size_t entry) {
  std::int32_t page = 0;
  std::memcpy(&page, file.all.data() + file.begin_of("block_table") + 4 * entry, sizeof page);
  return page;
}

TEST(CompressedPages, ThatAreBrokenAreRefusedByName) {
  const TemporaryFolder folder;
  for (const bool head_major : {false, true}) {
    CacheShape shape = small_pages();
    shape.head_major = head_major;
    const std::string cache = write_cache(folder.file("cache"), shape);
    const std::string small = folder.file("small");
    ASSERT_EQ(tool({"compress", "--method", "int8", "--input", cache, "--output", small, "--force"}).code, 0);
    const Bytes whole(small);
    const auto refused = [&](const Bytes& bytes, std::string_view text) {
      const std::string path = folder.file("broken");
      std::ofstream(path, std::ios::binary) << bytes.all;
      for (const char* const ranks : {"1", "3"}) {
        const Finished end = tool({"run", "--input", path, "--ranks", ranks, "--output", folder.file("out")});
        EXPECT_EQ(end.code, 3) << end.err;
        EXPECT_TRUE(has(end.err, text)) << end.err;
        EXPECT_FALSE(std::filesystem::exists(folder.file("out")));
      }
    };
    const auto with = [&](std::string_view from, std::string_view to) {
      Bytes bytes = whole;
      bytes.replace(from, to);
      return bytes;
    };
    const std::string axes = head_major ? "2, 16" : "16, 2";
    refused(with(R"("k_format":"int8")", R"("k_format":"int9")"), "\"int9\" is not a storage format");
    refused(with("k_pages_scales\":{\"dtype\":\"F32", "k_pages_scales\":{\"dtype\":\"I32"),
            fmt::format("int8 stores it as F32 [33, {}, 1]", axes));
    refused(with("v_pages_codes", "v_pages_cades"), "v_pages_codes");
    refused(with(R"("v_format":"int8")", R"("v_format":"fp16")"), "v_format in the metadata of");
    // The last token of sequence 3, of head 1: entry 6 of the table's fourth row has it at place 0.
    const std::int64_t page = page_of(whole, 3 * 19 + 6);
    Bytes broken = whole;
    std::memset(broken.all.data() + broken.begin_of("v_pages_scales") + 4 * (32 * page + (head_major ? 16 : 1)), 0xff,
                4);
    refused(broken, fmt::format("v_pages_scales[{}, {}, 0] is ", page, head_major ? "1, 0" : "0, 1"));
    broken = whole;
    broken.all[broken.begin_of("k_pages_codes") +
               static_cast<std::size_t>(64 * (32 * page + (head_major ? 16 : 1)) + 3)] = static_cast<char>(0x80);
    refused(broken, fmt::format("k_pages_codes[{}, {}, 3] is -128 (a quantized value is from -127 to 127)", page,
                                head_major ? "1, 0" : "0, 1"));
    // After a sequence's end nothing is checked.
    broken = whole;
    std::memset(broken.all.data() + broken.begin_of("v_pages_scales") + 4 * (32 * page + (head_major ? 1 : 2)), 0xff,
                4);
    std::memset(broken.all.data() + broken.begin_of("k_pages_scales"), 0xff, 3 * 32 * 4);  // of pages of no sequence
    std::ofstream(folder.file("broken"), std::ios::binary) << broken.all;
    EXPECT_EQ(digest_of(tool({"run", "--input", folder.file("broken"), "--ranks", "2"}).out),
              digest_of(tool({"run", "--input", small}).out));
  }
}

// Two sequences, the longer of which completes a quantization group of 64 tokens in pages that both have: of the
// shorter one these tokens are in its tail.
TEST(CompressedPages, MayBeSharedBySequences) {
  const TemporaryFolder folder;
  CacheShape shape = small_pages();
  shape.lengths = {32, 80};
  shape.q_lens = {2, 2};
  NamedTensors tensors = cache_tensors(shape);
  const auto entry = [&](std::size_t s, std::size_t i) -> std::int32_t& {
    return reinterpret_cast<std::int32_t*>(tensors["block_table"].bytes.data())[s * 5 + i];
  };
  entry(0, 0) = entry(1, 0);
  entry(0, 1) = entry(1, 1);
  const auto run = [&](const std::string& path, const std::string& ranks) {
    const Finished end = tool({"run", "--input", path, "--ranks", ranks});
    EXPECT_EQ(end.code, 0) << end.err;
    return digest_of(end.out);
  };
  const std::string cache = write_tensors(folder.file("cache"), tensors), small = folder.file("small");
  ASSERT_EQ(tool({"compress", "--method", "int4", "--ratio", "0.69", "--input", cache, "--output", small}).code, 0);
  for (const char* ranks : {"1", "2"}) EXPECT_EQ(run(small, ranks), run(small, "3"));
  EXPECT_EQ(tool({"verify", "--input", small}).code, 0);
  // A scale that only the longer sequence reads is checked, too.
  Bytes broken(small);
  const std::int64_t page = entry(0, 1);
  std::memset(
      broken.all.data() + broken.begin_of("k_pages_scales") + static_cast<std::size_t>((16 * page + 5) * 2 * 2) * 2,
      0xff, 2);
  std::ofstream(folder.file("broken"), std::ios::binary) << broken.all;
  const Finished end = tool({"run", "--input", folder.file("broken"), "--output", folder.file("out")});
  EXPECT_EQ(end.code, 3) << end.out;
  EXPECT_TRUE(has(end.err, fmt::format("k_pages_scales[{}, 5, 0, 0] is ", page))) << end.err;
  EXPECT_FALSE(std::filesystem::exists(folder.file("out")));
  // Groups of other pages than the first sequence's: their tokens can't have two scales.
  entry(0, 1) = entry(1, 2);
  const std::string torn = write_tensors(folder.file("torn"), tensors);
  const Finished refused = tool({"compress", "--method", "int4", "--input", torn, "--output", folder.file("no")});
  EXPECT_EQ(refused.code, 3);
  EXPECT_TRUE(has(refused.err, "sequence 1 has page ")) << refused.err;
  EXPECT_TRUE(has(refused.err, "(32 tokens, that is 2 pages, share their scales)")) << refused.err;
  EXPECT_FALSE(std::filesystem::exists(folder.file("no")));
  EXPECT_EQ(tool({"compress", "--method", "int8", "--input", torn, "--output", folder.file("yes")}).code, 0);
  EXPECT_EQ(tool({"verify", "--input", folder.file("yes")}).code, 0);
}

// Tokens are evicted from pages, and every command takes what is left: steps are decoded where queries stand after all
// of it, and other rows see what they saw.
TEST(CompressedPages, MayLoseTokens) {
  const TemporaryFolder folder;
  const std::string kept = folder.file("kept"), rows = folder.file("rows");
  for (const std::int64_t queries : {2, 40}) {
    CacheShape shape = small_pages();
    shape.lengths = {300, 50, 64, 97};
    shape.q_lens = {queries, queries, queries, queries};
    const std::string cache = write_cache(folder.file("cache"), shape);
    const std::string plain = write_tensors(folder.file("plain"), row_tensors(shape));
    for (const std::string method : {"snapkv:window=8", "streaming", "knorm", "expected:window=4"}) {
      const auto compress = [&](const std::string& input, const std::string& output) {
        const Finished made =
            tool({"compress", "--method", method, "--input", input, "--output", output, "--force", "--report"});
        ASSERT_EQ(made.code, 0) << method << made.err;
        EXPECT_TRUE(has(made.out, "255 of 511 tokens kept; ")) << made.out;
        EXPECT_TRUE(has(made.out, "change of O")) << made.out;
      };
      compress(cache, kept);
      compress(plain, rows);
      const std::string expected = digest_of(tool({"run", "--input", rows}).out);
      for (const char* ranks : {"1", "2", "5"}) {
        const Finished run = tool({"run", "--input", kept, "--ranks", ranks});
        ASSERT_EQ(run.code, 0) << method << run.err;
        EXPECT_EQ(digest_of(run.out), expected) << method << ", ranks " << ranks;
      }
      for (const Words& words : {Words{"verify"},
                                 {"verify", "--against", "oracle"},
                                 {"plan", "--world", "4"},
                                 {"bench", "--samples", "1"}}) {
        const Finished end = tool(words + Words{"--input", kept});
        EXPECT_EQ(end.code, 0) << method << ' ' << words[0] << end.out << end.err;
      }
    }
  }
}

// Codes of what is left say by which method it was chosen.
TEST(CompressedPages, KeepTheNameOfTheEviction) {
  const TemporaryFolder folder;
  const std::string kept = folder.file("kept"), small = folder.file("small");
  const std::string cache = write_cache(folder.file("cache"), small_pages());
  const auto evicted_by = [](const std::string& path) {
    const SafetensorsFile file(path);
    const std::string* const text = file.metadata("evicted_by");
    return text == nullptr ? std::string("nothing") : *text;
  };
  ASSERT_EQ(tool({"compress", "--method", "knorm:first=2", "--input", cache, "--output", kept}).code, 0);
  EXPECT_TRUE(has(evicted_by(kept), "knorm: first 2")) << evicted_by(kept);
  for (const char* const method : {"fp8", "int4"}) {
    ASSERT_EQ(tool({"compress", "--method", method, "--input", kept, "--output", small, "--force"}).code, 0);
    EXPECT_EQ(evicted_by(small), evicted_by(kept)) << method;
    ASSERT_EQ(tool({"compress", "--method", method, "--input", cache, "--output", small, "--force"}).code, 0);
    EXPECT_EQ(evicted_by(small), "nothing") << method;
  }
}

TEST(CompressedPages, WhatCanNotBeDoneIsNamed) {
  const TemporaryFolder folder;
  const CacheShape shape = small_pages();
  const auto refused = [&](const Words& words, int code, std::string_view text) {
    const Finished end = tool(Words{"compress", "--output", folder.file("out")} + words);
    EXPECT_EQ(end.code, code) << end.err;
    EXPECT_TRUE(has(end.err, text)) << end.err;
    EXPECT_FALSE(std::filesystem::exists(folder.file("out")));
  };
  const std::string cache = write_cache(folder.file("cache"), shape);
  refused({"--method", "knorm+int4", "--input", cache}, 3,
          "holds pages (a paged cache is evicted in one step and quantized in the next). Use "
          "--method knorm, then --method int4 for the file that it writes.");
  refused({"--method", "knorm", "--ratio", "1", "--input", cache}, 2, "--ratio 1 of the tokens");
  NamedTensors no_queries = cache_tensors(shape);
  no_queries.erase("q");
  refused({"--method", "snapkv", "--input", write_tensors(folder.file("no_q"), no_queries)}, 2,
          "snapkv without queries (it looks at the last ones of a sequence)");
  refused({"--method", "int4", "--ratio", "0.9", "--input", cache}, 2, "--ratio 0.9 with --method int4");
  const std::string small = folder.file("small");
  ASSERT_EQ(tool({"compress", "--method", "fp8", "--input", cache, "--output", small}).code, 0);
  refused({"--method", "int4", "--input", small}, 3, "holds a compressed cache");
  const std::string small_alone = folder.file("small_alone");
  ASSERT_EQ(tool({"compress", "--method", "fp8", "--input", folder.file("no_q"), "--output", small_alone}).code, 0);
  refused({"--method", "int4", "--input", small_alone}, 3, "holds a compressed cache");
  // A number of a token is looked at; one of a slot that holds none is not.
  NamedTensors tensors = cache_tensors(shape);
  std::int32_t page = 0;
  std::memcpy(&page, tensors["block_table"].bytes.data() + 4 * 18, sizeof page);  // of sequence 0, with 12 tokens
  for (const auto& [token, code] : {std::pair{11, 3}, {12, 0}}) {
    NamedTensors broken = tensors;
    store_element(broken["v_pages"].bytes.data() + 2 * (64 * (2 * (16 * page + token) + 1) + 9), shape.dtype,
                  std::numeric_limits<float>::infinity());
    const std::string path = write_tensors(folder.file("inf"), broken);
    for (const char* method : {"fp8", "int4", "knorm"}) {
      const Finished end =
          tool({"compress", "--method", method, "--input", path, "--output", folder.file("inf_small")});
      EXPECT_EQ(end.code, code) << end.err;
      EXPECT_TRUE(code == 0 || has(end.err, fmt::format("v_pages[{}, {}, 1, 9] is inf", page, token))) << end.err;
      EXPECT_EQ(std::filesystem::exists(folder.file("inf_small")), code == 0);
      std::filesystem::remove(folder.file("inf_small"));
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
