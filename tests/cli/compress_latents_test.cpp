// SPDX-License-Identifier: Apache-2.0
// `ringattn compress` of latents: FP8 rows, in rows and in pages, whose attention is that of what they come back
// as.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <string>

#include "io/safetensors_file.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/mla_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

std::vector<std::byte> bytes_of(const std::string& path, const std::string& tensor) {
  const SafetensorsFile file(path);
  const TensorSource source = file.tensor(tensor);
  std::vector<std::byte> bytes(static_cast<std::size_t>(source.info->bytes()));
  source.shard->read(*source.info, 0, bytes);
  return bytes;
}

class CompressLatents : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const NamedTensors& tensors) const {
    return write_tensors(folder_.file(name), tensors);
  }
  // What `compress` makes of it.
  std::string compressed(const std::string& input, const Words& flags = {}) const {
    const Finished made =
        tool(Words{"compress", "--method", "fp8", "--input", input, "--output", small(), "--force"} + flags);
    EXPECT_EQ(made.code, 0) << made.out << made.err;
    return made.out;
  }
  std::string small() const { return folder_.file("small"); }

  TemporaryFolder folder_;
};

std::string digest(const Words& words) {
  const Finished run = tool(words);
  EXPECT_EQ(run.code, 0) << run.out << run.err;
  return digest_of(run.out);
}

// Without matrices, which the caller multiplies: rows, and pages for which a flag must give latent_dim.
TEST_F(CompressLatents, NeedNoMatrices) {
  const MlaFile shape;
  NamedTensors alone = with_queries_in_latent(mla_tensors(shape), shape);
  alone.erase("w_uk");
  const Words scale{"--softmax-scale", "0.2"};
  const auto reported = scale + Words{"--report"};
  const std::string expected =
      digest(Words{"run", "--input", write("rounded", with_fp8_rounded_latent(alone))} + scale);
  compressed(write("values", alone), reported);
  EXPECT_EQ(digest(Words{"run", "--input", small()} + scale), expected);
  alone.erase("w_uv");
  const std::string latent = digest(Words{"run", "--input", write("rounded", with_fp8_rounded_latent(alone))} + scale);
  EXPECT_NE(latent, expected);
  compressed(write("rows", alone), reported);
  EXPECT_EQ(digest(Words{"run", "--input", small()} + scale), latent);
  const std::string pages = write("pages", with_pages(alone, shape));
  const Finished unsaid = tool(Words{"compress", "--method", "fp8", "--input", pages, "--output", folder_.file("no")});
  EXPECT_EQ(unsaid.code, 3);
  EXPECT_TRUE(has(unsaid.err, "--latent-dim 512")) << unsaid.err;
  compressed(pages, reported + Words{"--latent-dim", "128"});
  EXPECT_EQ(digest(Words{"run", "--input", small()} + scale), latent);
  NamedTensors cache = with_pages(alone, shape);
  cache.erase("q");
  cache.erase("cu_seqlens_q");
  compressed(write("cache", cache), {"--latent-dim", "128"});
  EXPECT_TRUE(bytes_of(small(), "latent_pages").size() > 0);
}

TEST_F(CompressLatents, RowsBecomeThoseOfFlashMla) {
  MlaFile shape;
  shape.latent_dim = 512;
  shape.rope_dim = 64;
  const NamedTensors plain = mla_tensors(shape);
  const std::string rounded = write("rounded", with_fp8_rounded_latent(plain));
  const std::string said = compressed(write("plain", plain));
  EXPECT_TRUE(has(said, "latent: latent rope 64; 122 tokens")) << said;
  EXPECT_TRUE(has(said, "0.4306 of the bytes are removed")) << said;  // 656 of 1,152
  EXPECT_TRUE(bytes_of(small(), "latent_fp8") == with_fp8_latent(plain).at("latent_fp8").bytes);
  const std::string expected = digest({"run", "--input", rounded});
  EXPECT_NE(expected, digest({"run", "--input", folder_.file("plain")}));
  for (const char* ranks : {"1", "3"}) EXPECT_EQ(digest({"run", "--input", small(), "--ranks", ranks}), expected);
  // The rows are sent as stored.
  const auto moved = [&](const std::string& input) {
    const Finished run = tool({"run", "--input", input, "--ranks", "3", "--json", "-", "--quiet"});
    EXPECT_EQ(run.code, 0) << run.out << run.err;
    return std::stoll(json_at(run.out, "/plan/bytes_moved"));
  };
  EXPECT_EQ(moved(small()) * 1152, moved(rounded) * 656);
  EXPECT_EQ(tool({"verify", "--input", small(), "--ranks", "2"}).code, 0);
  EXPECT_EQ(tool({"verify", "--input", small(), "--against", "oracle"}).code, 0);
  // The same file from one thread and from several, and from what comes back.
  const std::string whole = read_whole(small());
  compressed(folder_.file("plain"), {"--threads", "1"});
  EXPECT_TRUE(read_whole(small()) == whole);
  compressed(folder_.file("plain"), {"--threads", "3"});
  EXPECT_TRUE(read_whole(small()) == whole);
}

TEST_F(CompressLatents, EveryFormOfMatricesAndQueries) {
  const MlaFile shape;
  for (const NamedTensors& plain :
       {with_projection(mla_tensors(shape)), with_queries_in_latent(mla_tensors(shape), shape)}) {
    compressed(write("plain", plain), {"--report"});
    EXPECT_EQ(digest({"run", "--input", small()}), digest({"run", "--input", write("codes", with_fp8_latent(plain))}));
  }
  // A batch as an axis.
  MlaFile even;
  even.lengths = even.q_lens = {24, 24, 24};
  NamedTensors batch = mla_tensors(even);
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) batch.erase(name);
  batch["q"].shape = {3, 24, even.heads, batch["q"].shape.back()};
  for (const char* name : {"latent", "k_rope"}) batch[name].shape = {3, 24, batch[name].shape.back()};
  const std::string expected = digest({"run", "--input", write("rounded", with_fp8_rounded_latent(mla_tensors(even)))});
  compressed(write("batch", batch));
  EXPECT_EQ(SafetensorsFile(small()).tensor("latent_fp8").info->shape, (std::vector<std::int64_t>{3, 24, 148}));
  const std::string small_digest = digest({"run", "--input", small()});
  EXPECT_EQ(small_digest, expected);
}

TEST_F(CompressLatents, PagesKeepTheirPlaces) {
  for (const std::int64_t rows : {0, 1}) {  // a prefill, and steps
    MlaFile shape;
    if (rows == 1) {
      shape.lengths = {40, 3, 17, 65};
      shape.q_lens = {1, 1, 1, 1};
    }
    const NamedTensors plain = mla_tensors(shape);
    compressed(write("pages", with_pages(plain, shape)));
    const NamedTensors expected = with_pages(with_fp8_latent(plain), shape);
    // The same rows where tokens are, and 0 where none is.
    const std::vector<std::byte> got = bytes_of(small(), "latent_pages");
    const NamedTensor& pages = expected.at("latent_pages");
    ASSERT_EQ(SafetensorsFile(small()).tensor("latent_pages").info->shape, pages.shape);
    const auto row_bytes = static_cast<std::size_t>(pages.shape.back());
    std::int64_t held = 0;
    for (std::size_t row = 0; row < got.size(); row += row_bytes) {
      const bool none = std::all_of(pages.bytes.begin() + static_cast<std::ptrdiff_t>(row),
                                    pages.bytes.begin() + static_cast<std::ptrdiff_t>(row + row_bytes),
                                    [](std::byte byte) { return byte == std::byte{0xff}; });
      held += none ? 0 : 1;
      for (std::size_t i = row; i < row + row_bytes; ++i) {
        ASSERT_EQ(got[i], none ? std::byte{0} : pages.bytes[i]) << "row " << row / row_bytes;
      }
    }
    EXPECT_EQ(held, rows == 1 ? 125 : 122);
    const std::string codes = write("codes", expected);
    const std::string reference = digest({"run", "--input", codes});
    for (const char* ranks : {"1", "2"}) {
      const Finished run = tool({"run", "--input", small(), "--ranks", ranks});
      EXPECT_EQ(digest_of(run.out), reference) << run.out << run.err;
      EXPECT_EQ(has(run.out, "stored as latent rope 8"), rows == 1) << run.out;
    }
    EXPECT_EQ(tool({"verify", "--input", small()}).code, 0);
  }
}

// Only latents, as a server keeps them; for pages the matrices say where the rotary key begins.
TEST_F(CompressLatents, FilesWithoutQueries) {
  const MlaFile shape;
  const NamedTensors plain = mla_tensors(shape);
  const auto without = [](NamedTensors tensors, const std::vector<const char*>& names) {
    for (const char* const name : names) tensors.erase(name);
    return tensors;
  };
  const std::vector<std::byte> codes = with_fp8_latent(plain).at("latent_fp8").bytes;
  EXPECT_TRUE(has(compressed(write("alone", without(plain, {"q", "w_uk", "w_uv", "cu_seqlens_q"})), {"--report"}),
                  "the file has no q"));
  EXPECT_TRUE(bytes_of(small(), "latent_fp8") == codes);
  compressed(write("matrices", without(with_projection(plain), {"q", "cu_seqlens_q"})));
  EXPECT_TRUE(bytes_of(small(), "latent_fp8") == codes);
  EXPECT_TRUE(SafetensorsFile(small()).contains("kv_b_proj"));
  const NamedTensors pages = with_pages(plain, shape);
  compressed(write("pages", pages));
  const std::vector<std::byte> expected = bytes_of(small(), "latent_pages");
  compressed(write("pages", without(pages, {"q", "cu_seqlens_q"})));
  EXPECT_TRUE(bytes_of(small(), "latent_pages") == expected);
  const Finished blind = tool({"compress", "--method", "fp8", "--force", "--output", small(), "--input",
                               write("blind", without(pages, {"q", "cu_seqlens_q", "w_uk", "w_uv"}))});
  EXPECT_EQ(blind.code, 3);
  EXPECT_TRUE(has(blind.err, "latent_dim follows from the matrices, and the file has none")) << blind.err;
}

// O is that of the whole formula: the same whatever form the matrices and queries have.
TEST_F(CompressLatents, ReportsTheChangeOfO) {
  MlaFile shape;
  shape.lengths = shape.q_lens = {200, 90};
  const NamedTensors plain = mla_tensors(shape);
  const auto report = [&](const NamedTensors& tensors) {
    const Finished made = tool({"compress", "--method", "fp8", "--input", write("in", tensors), "--output", small(),
                                "--force", "--report", "--rows", "200", "--json", "-"});
    EXPECT_EQ(made.code, 0) << made.err;
    return made.out;
  };
  const auto number = [](const std::string& text, std::string_view path) { return std::stod(json_at(text, path)); };
  const std::string said = report(plain);
  EXPECT_EQ(json_at(said, "/k"), "absent") << said;
  EXPECT_EQ(json_at(said, "/latent/format"), "\"latent rope 8\"") << said;
  EXPECT_EQ(json_at(said, "/latent/bytes_before"), std::to_string(290 * 2 * (128 + 8)));
  EXPECT_EQ(json_at(said, "/latent/bytes_after"), std::to_string(290 * (128 + 4 + 16)));
  // A code of e4m3 has 4 significant bits: at most 1/16 of an element, and half of that on average.
  EXPECT_GT(number(said, "/latent/change"), 0.01);
  EXPECT_LT(number(said, "/latent/change"), 1.0 / 16);
  EXPECT_EQ(json_at(said, "/out/rows"), "200");
  EXPECT_GT(number(said, "/out/relative_error"), 0.001);
  EXPECT_LT(number(said, "/out/relative_error"), 2.0 / 16);
  EXPECT_GT(number(said, "/out/greatest_lse"), 0.0);
  const std::string joined = report(with_projection(plain));
  EXPECT_EQ(json_at(joined, "/out"), json_at(said, "/out"));
  const std::string paged = report(with_pages(plain, shape));
  EXPECT_EQ(json_at(paged, "/out"), json_at(said, "/out"));
  // Codes of what comes back change nothing more.
  const std::string again = report(with_fp8_rounded_latent(plain));
  EXPECT_EQ(number(again, "/out/relative_error"), 0.0) << again;
}

TEST_F(CompressLatents, WhatIsRefused) {
  const MlaFile shape;
  const NamedTensors plain = mla_tensors(shape);
  const auto refused = [&](const NamedTensors& tensors, const Words& flags, int code, std::string_view text) {
    const Finished end =
        tool(Words{"compress", "--input", write("in", tensors), "--output", folder_.file("out")} + flags);
    EXPECT_EQ(end.code, code) << end.out << end.err;
    EXPECT_TRUE(has(end.err, text)) << end.err;
    EXPECT_FALSE(std::filesystem::exists(folder_.file("out")));
  };
  const Words fp8{"--method", "fp8"};
  refused(plain, {"--method", "int8"}, 2, "--method int8 with latents (they are stored as they are, or in FP8 rows");
  refused(plain, {"--method", "snapkv"}, 3, "holds latents (tokens are evicted only from keys and values)");
  refused(plain, fp8 + Words{"--ratio", "0.5"}, 2,
          "--ratio 0.5 with latents (the ratio is the share of the bytes that");
  // Rotary keys that are too wide, or none: by their own name, beside queries and without them.
  for (const std::int64_t dims : {65537, 0}) {
    NamedTensors ropes = plain;
    const std::int64_t tokens = ropes["k_rope"].shape[0];
    ropes["k_rope"].shape = {tokens, dims};
    ropes["k_rope"].bytes.assign(static_cast<std::size_t>(tokens * dims) * 2, std::byte{0});
    refused(ropes, fp8, 3, fmt::format("has BF16 [{}, {}] (a rotary key has 1 to 65536 dims)", tokens, dims));
    for (const char* const name : {"q", "w_uk", "w_uv", "cu_seqlens_q"}) ropes.erase(name);
    refused(ropes, fp8, 3, "`k_rope` of ");
  }
  refused(with_fp8_latent(plain), fp8, 3, "FP8 latents are compressed already");
  refused(with_pages(with_fp8_latent(plain), shape), fp8, 3, "FP8 latents are compressed already");
  MlaFile half = shape;
  half.dtype = Dtype::kF16;
  refused(mla_tensors(half), fp8, 3, "FP8 latents are dequantized to BF16");
  // A method that no latents have is refused before advice that would not help.
  refused(with_pages(mla_tensors(half), half), {"--method", "snapkv"}, 3,
          "holds latents (tokens are evicted only from");
  refused(with_pages(mla_tensors(half), half), {"--method", "int4"}, 2, "--method int4 with latents");
  MlaFile narrow = shape;
  narrow.latent_dim = 96;
  refused(mla_tensors(narrow), fp8, 3, "128 numbers of a latent share a scale, and it has 96");
  MlaFile odd = shape;
  odd.rope_dim = 6;
  refused(mla_tensors(odd), fp8, 3, "its rotary keys have 6 numbers");
  NamedTensors keys = plain;
  keys["k"] = keys["latent"];
  refused(keys, fp8, 3, "holds keys and latents");
  // Numbers that are not finite, by name and place.
  const auto broken = [](NamedTensors tensors, const char* name, std::int64_t element, float value) {
    store_element(tensors[name].bytes.data() + 2 * element, Dtype::kBf16, value);
    return tensors;
  };
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  refused(broken(plain, "latent", 17 * 128 + 5, kNan), fp8, 3, "latent[17, 5] is nan");
  refused(broken(plain, "k_rope", 3 * 8 + 7, kInf), fp8, 3, "k_rope[3, 7] is inf");
  // Other tensors that O depends on are checked where O is compared.
  for (const auto& [tensors, name] :
       {std::pair{plain, "q"}, {plain, "w_uk"}, {plain, "w_uv"}, {with_projection(plain), "kv_b_proj"}}) {
    const NamedTensors inf = broken(tensors, name, 0, kInf);
    const std::string zeros = std::string_view(name) == "kv_b_proj" ? "[0, 0]" : "[0, 0, 0]";
    refused(inf, fp8 + Words{"--report"}, 3, fmt::format("{}{} is inf", name, zeros));
  }
  const NamedTensors pages = with_pages(plain, shape);
  std::int32_t page = 0;  // the first sequence's second
  std::memcpy(&page, pages.at("block_table").bytes.data() + sizeof page, sizeof page);
  refused(broken(pages, "latent_pages", (page * 16 + 2) * 136 + 130, kInf), fp8, 3,
          fmt::format("latent_pages[{}, 2, 130] is inf", page));
  EXPECT_EQ(
      tool({"compress", "--method", "fp8", "--output", folder_.file("out"), "--op", "mla", "--synthetic", "7"}).code,
      2);
}

}  // namespace
}  // namespace ringattn::testing
