// SPDX-License-Identifier: Apache-2.0
// `ringattn compress` by the program: every method, what it writes and says, and what is refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "kernels/quant/compression_methods.hpp"
#include "kernels/quant/low_rank.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/mla_files.hpp"
#include "tests/support/ssm_files.hpp"
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
  if (has_low_rank()) names.emplace_back("lowrank:heads=2");
  names.emplace_back("fp8 tensor");  // formats by their words
  names.emplace_back("vector width 2");
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
    EXPECT_GT(json_at(made.out, "/quantized_on").size(), 3U) << made.out;
    EXPECT_TRUE(has(made.err, "decompress")) << made.err;
    EXPECT_TRUE(has(made.err, "# times: ")) << made.err;
    EXPECT_EQ(has(made.err, "tokens were evicted in "), evicts) << made.err;
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
  EXPECT_TRUE(has(line({"--method", "fp8 tensor"}), "k: fp8 tensor, v: fp8 tensor"));
  if (has_low_rank()) {
    EXPECT_TRUE(has(line({"--method", "lowrank", "--ratio", "0.7"}), "k: low_rank rank 16"));
    EXPECT_TRUE(has(line({"--method", "lowrank:heads=2", "--ratio", "0.7"}), "k: low_rank rank 32 heads 2"));
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
      const Words input{"--synthetic", "7", "--seq", "64", "--heads", "2", "--kv-heads", "2", "--head-dim", dim};
      expect_taken(input, method, method + " removes ", " of them at most");
    }
  }
  MlaFile latents;
  latents.latent_dim = 512;
  latents.rope_dim = 64;
  const Words input{"--input", write_tensors(folder.file("latents"), mla_tensors(latents))};
  expect_taken(input, "fp8", "FP8 rows remove ", " of them)");
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
  refused(Words{"--method", "plain "} + small_cache(), 2, "there is no method of compression \"plain \"");
  refused(Words{"--method", "fp8:tensor"} + small_cache(), 2, "or a full format string such as \"fp8 tensor\"");
  refused(Words{"--method", "fp8 tensr"} + small_cache(), 2,
          "fp8 names what shares a scale: tensor, head or token_head");
  refused(Words{"--method", "int8", "--dtype", "fp32"} + small_cache(), 2, "fp32 (supported: bf16 and fp16)");
  refused({"--method", "int4", "--synthetic", "7", "--seq", "64", "--head-dim", "40"}, 2,
          "groups of 32 in a dim of 40");
  refused({"--method", "fp8"}, 2, "the job has no input");
  refused(Words{"--method", "int4", "--rows", "3"} + small_cache(), 2, "--rows needs --report");

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
  for (const SsmFile& scan : {SsmFile{}, SsmFile{.selective = true}}) {
    refused({"--method", "int4", "--input", write_tensors(folder.file("scan"), ssm_tensors(scan))}, 3,
            "holds an SSM or a convolution (it has no keys and values to compress). Give a file with k and v");
  }
  NamedTensors convolution;
  convolution["x"] = {FileDtype::kF32, {4, 8}, std::vector<std::byte>(4 * 8 * 4)};
  convolution["conv1d_weight"] = {FileDtype::kF32, {8, 4}, std::vector<std::byte>(8 * 4 * 4)};
  refused({"--method", "knorm", "--input", write_tensors(folder.file("scan"), convolution)}, 3,
          "holds an SSM or a convolution");
  const Finished help = tool({"compress", "--help"});
  EXPECT_FALSE(has(help.out, "convolution in front")) << help.out;
}

// A report says how much O changes for finite numbers only, and refuses others before all else.
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

// A file that `compress` made of the small cache, whose bytes a test spoils.
class BrokenFile {
 public:
  explicit BrokenFile(const std::string& method) {
    const std::string small = folder_.file("small");
    const Finished made = tool(Words{"compress", "--method", method, "--output", small} + small_cache());
    EXPECT_EQ(made.code, 0) << made.err;
    whole_ = read_whole(small);
  }

  std::string whole() const { return whole_; }
  // With another text of the same length in its header.
  std::string replaced(std::string_view from, std::string_view to) const {
    std::string bytes = whole_;
    EXPECT_EQ(from.size(), to.size());
    bytes.replace(bytes.find(from), from.size(), to);
    return bytes;
  }
  // Where the data of a tensor begin, which stands in the header.
  std::size_t begin_of(const std::string& tensor) const {
    std::uint64_t header = 0;
    std::memcpy(&header, whole_.data(), sizeof header);
    const std::size_t at = whole_.find("data_offsets\":[", whole_.find("\"" + tensor + "\"")) + 15;
    return 8 + header + std::stoull(whole_.substr(at));
  }
  // Refused by its name on any number of ranks, and nothing is written.
  void expect_refused(const std::string& bytes, std::string_view text) const {
    const std::string path = folder_.file("broken"), out = folder_.file("out");
    std::ofstream(path, std::ios::binary) << bytes;
    for (const char* const ranks : {"1", "2"}) {
      const Finished end = tool({"run", "--input", path, "--ranks", ranks, "--output", out});
      EXPECT_EQ(end.code, 3) << end.err;
      EXPECT_TRUE(has(end.err, text)) << end.err;
      EXPECT_FALSE(std::filesystem::exists(out));
    }
  }

 private:
  TemporaryFolder folder_;
  std::string whole_;
};

TEST(CompressCommand, BrokenFilesAreRefusedByName) {
  const BrokenFile file("int8");
  const auto refused = [&](std::string_view from, std::string_view to, std::string_view text) {
    file.expect_refused(file.replaced(from, to), text);
  };
  refused(R"("k_format":"int8")", R"("k_format":"int9")", "\"int9\" is not a storage format");
  refused(R"("k_format":"int8")", R"("k_format":"fp16")", "k_format in the metadata of");
  refused(R"("k_scales":{"dtype":"F32")", R"("k_scales":{"dtype":"I32")", "int8 stores it as F32 [300, 2, 1]");
  refused("k_codes", "k_cades", "k_codes");
  std::string broken = file.whole();  // a scale of NaN, and −128
  std::memset(broken.data() + file.begin_of("v_scales") + 4 * (2 * 17 + 1), 0xff, 4);
  file.expect_refused(broken, "v_scales[17, 1, 0] is ");
  broken = file.whole();
  broken[file.begin_of("k_codes") + 128 * 299 + 64 + 3] = static_cast<char>(0x80);
  file.expect_refused(broken, "k_codes[299, 1, 3] is -128 (a quantized value is from -127 to 127)");
}

// Ranks that no head of 64 has, and a basis whose axes are the other way round.
TEST(CompressCommand, WrongRanksAreRefusedByFormat) {
  if (!has_low_rank()) GTEST_SKIP() << "skipped: needs Eigen";
  for (const auto& [method, format, behind] :
       {std::array{"lowrank", "low_rank", ""}, {"hybrid", "hybrid", " group 32 outliers 4"}}) {
    const BrokenFile file(method);
    const std::string rank = fmt::format("\"v_format\":\"{} rank ", format);
    for (const auto& [stored, rank_of] : {std::pair{"00", 0}, {"-8", -8}, {"72", 72}}) {
      file.expect_refused(
          file.replaced(rank + "16", rank + stored),
          fmt::format("v of 2 heads of 64 can't be stored as {} rank {}{} (rank {} of a dim of 64 (supported: "
                      "multiples of 8 below it)",
                      format, rank_of, behind, rank_of));
    }
    file.expect_refused(file.replaced(rank + "16", rank + "24"),
                        fmt::format("{} rank 24{} stores it as", format, behind));
    file.expect_refused(file.replaced("[2, 16, 64]", "[2, 64, 16]"),
                        fmt::format("k of 2 heads of 16 can't be stored as {} rank 16", format));
  }
}

// Heads that a group doesn't divide, in the command and in a file, and options that no method has.
TEST(CompressCommand, WrongGroupsOfHeadsAreRefused) {
  if (!has_low_rank()) GTEST_SKIP() << "skipped: needs Eigen";
  const TemporaryFolder folder;
  const auto refused = [&](const char* method) {
    const Finished made = tool(Words{"compress", "--method", method, "--output", folder.file("no")} + small_cache());
    EXPECT_EQ(made.code, 2) << method;
    EXPECT_FALSE(std::filesystem::exists(folder.file("no")));
    return made.err;
  };
  EXPECT_TRUE(has(refused("lowrank:heads=3"), "groups of 3 of 2 heads (supported: divisors)"));
  EXPECT_TRUE(has(refused("low_rank rank 16 heads 4"), "groups of 4 of 2 heads (supported: divisors)"));
  EXPECT_TRUE(has(refused("lowrank:heads=two"), "\"heads=two\" is not an option of lowrank"));
  EXPECT_TRUE(has(refused("vq:heads=2"), "\"heads=2\" is not an option of vq"));
  const BrokenFile file("lowrank:heads=2");
  const std::string stored = R"("v_format":"low_rank rank 32 heads )";
  // A head of 64 where the basis is of two of them: other rows than the job has.
  file.expect_refused(file.replaced(stored + "2", stored + "1"), "keys have 2 heads");
  file.expect_refused(file.replaced(stored + "2", stored + "0"), "low_rank rank 32 heads 0");
}

// What is stored and isn't finite can only be compressed anew: the rows that it was made of aren't there.
TEST(CompressCommand, StoredNumbersThatAreNotFiniteAreCompressedAnew) {
  const auto expect_refused = [](const std::string& method, const std::string& tensor, std::size_t place,
                                 std::string_view name) {
    const BrokenFile file(method);
    std::string broken = file.whole();
    broken.replace(file.begin_of(tensor) + 2 * place, 2, "\xc0\x7f");  // NaN of bf16
    file.expect_refused(broken, fmt::format("{} is nan (it must be finite). Compress it again.", name));
  };
  expect_refused("int4", "v_scales", 4 * (2 * 17 + 1) + 3, "v_scales[17, 1, 3]");  // a zero
  if (has_low_rank()) expect_refused("lowrank", "v_factors", 16 * (2 * 17 + 1) + 5, "v_factors[17, 1, 5]");
}

}  // namespace
}  // namespace ringattn::testing
