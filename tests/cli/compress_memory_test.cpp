// SPDX-License-Identifier: Apache-2.0
// What refusals of compression and of compressed caches may cost (hostile.hpp).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/cli/hostile.hpp"

namespace ringattn::testing {
namespace {

TEST_F(Hostile, CachesOfASeed) {
  for (const char* format : {"int8", "int4", "fp8"}) {
    const Words seed{"--synthetic", "1", "--seq", "4m", "--cache-format", format, "--memory", "1k"};
    for (const std::string command : {"run", "plan", "verify"}) expect_refused(Words{command} + seed, 5);
  }
}

TEST_F(Hostile, WhatIsCompressed) {
  constexpr std::int64_t kTokens = std::int64_t{8} << 20;
  const std::string file = sparse_file(
      "in.safetensors", {{"k", "BF16", "[8388608,1,8]", 16 * kTokens}, {"v", "BF16", "[8388608,1,8]", 16 * kTokens}});
  for (const char* method : {"int4", "snapkv"}) {
    expect_refused({"compress", "--method", method, "--input", file, "--output", folder_.file("out.safetensors")}, 2,
                   header_bytes(file));
  }
}

// What it needs is known before it is read, and no file takes more ranks.
TEST_F(Hostile, WhatIsTooLargeToBeCompressed) {
  constexpr std::int64_t kTera = std::int64_t{1} << 40;
  const auto refuse = [&](const Words& words, std::int64_t header = 0) {
    const Words all = Words{"compress", "--output", folder_.file("out.safetensors")} + words;
    expect_refused(all, 5, header);
    const std::string said = tool(all).err;
    EXPECT_NE(said.find(" bytes of host memory (this process may use "), std::string::npos) << said;
    EXPECT_EQ(said.find("rank"), std::string::npos) << said;
    EXPECT_EQ(said.find("hosts"), std::string::npos) << said;
  };
  const std::string rows = sparse_file("rows.safetensors", {{"k", "BF16", "[1073741824,8,128]", 2 * kTera},
                                                            {"v", "BF16", "[1073741824,8,128]", 2 * kTera}});
  for (const char* method : {"fp8", "int8", "int4", "vq", "knorm", "streaming+int4"}) {
    refuse({"--method", method, "--input", rows}, header_bytes(rows));
  }
  refuse({"--method", "knorm", "--ratio", "0.99", "--synthetic", "1", "--seq", "64g"});
  refuse({"--method", "fp8", "--synthetic", "1", "--seq", "64g"});
  // 65,536 pages of 128 MiB.
  std::vector<std::int64_t> entries;
  for (std::int64_t page = 0; page < 65536; page += 2) entries.push_back((page + 1) << 32 | page);
  const std::string pages = sparse_file("pages.safetensors", {{"k_pages", "BF16", "[65536,256,256,1024]", 8 * kTera},
                                                              {"v_pages", "BF16", "[65536,256,256,8]", kTera / 16},
                                                              {"block_table", "I32", "[1,65536]", 4 * 65536, entries},
                                                              {"lengths_k", "I64", "[1]", 8, {65536 * 256}}});
  refuse({"--method", "fp8", "--page-order", "thd", "--input", pages}, header_bytes(pages));
  // Tails of many sequences, which have a quantization group each.
  const std::string tails = sparse_file("tails.safetensors", {{"k", "BF16", "[1048576,1,256,1024]", kTera / 2},
                                                              {"v", "BF16", "[1048576,1,256,1024]", kTera / 2}});
  refuse({"--method", "int4", "--input", tails}, header_bytes(tails));
}

// The last number of a tensor that doesn't fit the bound.
TEST_F(Hostile, WhatIsCompressedAndNotFinite) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 27;
  const auto refuse = [&](const Words& words, const std::vector<Tensor>& tensors) {
    const std::string file = sparse_file("in.safetensors", tensors);
    expect_refused(Words{"compress", "--input", file, "--output", folder_.file("out.safetensors")} + words, 3,
                   header_bytes(file));
    EXPECT_FALSE(std::filesystem::exists(folder_.file("out.safetensors")));
  };
  const Tensor k{"k", "BF16", "[524288,1,128]", kBytes};
  const Tensor v{"v", "BF16", "[524288,1,128]", kBytes};
  const Tensor q{"q", "BF16", "[524288,1,128]", kBytes};
  for (const char* method : {"fp8", "int4", "vq", "knorm", "streaming+fp8"}) {
    refuse({"--method", method}, {k, broken(v)});
  }
  refuse({"--method", "fp8", "--order", "htd"},
         {{"k", "F16", "[128,4096,128]", kBytes}, broken({"v", "F16", "[128,4096,128]", kBytes})});
  refuse({"--method", "fp8"}, {broken(k), v, q});
  refuse({"--method", "fp8", "--report"}, {k, v, broken(q)});
  refuse({"--method", "fp8", "--report"}, {k, v, {"q", "BF16", "[64,1,64]", 8192}});  // which makes no job with k
  refuse({"--method", "snapkv"}, {k, v, {"q", "BF16", "[64,1,64]", 8192}});
  refuse({"--method", "snapkv"}, {k, v, broken({"q", "BF16", "[64,1,128]", 16384})});
  refuse({"--method", "lowrank"}, {{"k", "BF16", "[0,1,1099511627776]"}, {"v", "BF16", "[0,1,1099511627776]"}});
  const Tensor lengths{"lengths_k", "I64", "[1]", 8, {524288}};
  std::vector<std::int64_t> entries;
  for (std::int64_t page = 0; page < 8192; page += 2) entries.push_back((page + 1) << 32 | page);
  const Tensor table{"block_table", "I32", "[1,8192]", 4 * 8192, entries};
  const Tensor k_pages{"k_pages", "BF16", "[8192,64,1,128]", kBytes};
  const Tensor v_pages{"v_pages", "BF16", "[8192,64,1,128]", kBytes};
  for (const char* method : {"fp8", "int4", "vq"}) {
    refuse({"--method", method, "--page-order", "thd"}, {k_pages, broken(v_pages), table, lengths});
  }
  // As many entries as a table may have, of pages that don't lie together.
  constexpr std::int64_t kEntries = std::int64_t{1} << 22;
  std::vector<std::int64_t> apart;
  for (std::int64_t entry = 0; entry < kEntries; entry += 2) apart.push_back((2 * entry + 2) << 32 | 2 * entry);
  for (const char* method : {"fp8", "int4"}) {
    refuse({"--method", method, "--page-order", "thd"},
           {{"k_pages", "BF16", fmt::format("[{},16,1,64]", 2 * kEntries), 2 * kEntries * 2048, {-1}},
            {"v_pages", "BF16", fmt::format("[{},16,1,64]", 2 * kEntries), 2 * kEntries * 2048},
            {"block_table", "I32", fmt::format("[1,{}]", kEntries), 4 * kEntries, apart},
            {"lengths_k", "I64", "[1]", 8, {16 * kEntries}}});
  }
  // A page whose tokens are larger than what may be held.
  refuse({"--method", "fp8", "--page-order", "thd"},
         {broken({"k_pages", "BF16", "[1,16,8192,4096]", std::int64_t{1} << 30}),
          {"v_pages", "BF16", "[1,16,8192,8]", 1 << 21},
          {"block_table", "I32", "[1,1]", 4},
          {"lengths_k", "I64", "[1]", 8, {16}}});
  const Tensor latent{"latent", "BF16", "[262144,512]", kBytes};
  const Tensor rope{"k_rope", "BF16", "[262144,64]", kBytes / 8};
  refuse({"--method", "fp8"}, {broken(latent), rope});
  refuse({"--method", "fp8"}, {latent, broken(rope)});
  const Tensor w_uk{"w_uk", "BF16", "[1024,128,512]", kBytes / 2};
  const Tensor w_uv{"w_uv", "BF16", "[1024,128,512]", kBytes / 2};
  const Tensor one{"q", "BF16", "[1,1024,192]", 2 * 1024 * 192};
  const std::vector<Tensor> token{{"latent", "BF16", "[1,512]", 1024}, {"k_rope", "BF16", "[1,64]", 128}};
  refuse({"--method", "fp8"}, {broken(token[0]), token[1], w_uk, w_uv});
  refuse({"--method", "fp8", "--report"}, {token[0], token[1], one, w_uk, broken(w_uv)});
  // A pool of 30 million pages, of which one is in use. The matrices say where a rotary key begins.
  constexpr std::int64_t kPages = std::int64_t{30} << 20;
  Tensor pool{"latent_pages", "BF16", fmt::format("[{},64,576]", kPages), kPages * 64 * 1152, {-1}};
  const Tensor page{"block_table", "I32", "[1,1]", 4};
  const Tensor held{"lengths_k", "I64", "[1]", 8, {64}};
  refuse({"--method", "fp8"}, {pool, w_uk, w_uv, page, held});
  for (const char* method : {"fp8", "int4"}) {
    refuse({"--method", method, "--page-order", "thd"},
           {{"k_pages", "BF16", fmt::format("[{},16,1,128]", kPages), kPages * 16 * 256, {-1}},
            {"v_pages", "BF16", fmt::format("[{},16,1,128]", kPages), kPages * 16 * 256},
            {"block_table", "I32", "[1,4]", 16, {std::int64_t{1} << 32, 3LL << 32 | 2}},
            held});
  }
}

// What a compressed file has once for all its tokens.
TEST_F(Hostile, TablesThatAreNotFinite) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 27;
  const auto refuse = [&](const char* format, const std::vector<Tensor>& tensors) {
    const std::string file = sparse_file("in.safetensors", tensors, 0, fmt::format(R"({{"k_format":"{}"}})", format));
    for (const char* command : {"run", "plan", "verify", "bench"}) {
      expect_refused({command, "--input", file}, 3, header_bytes(file));
    }
    expect_refused({"run", "--input", file, "--ranks", "4"}, 3, header_bytes(file));
  };
  const Tensor q{"q", "BF16", "[1,2048,256]", 1 << 20};
  const Tensor v{"v", "BF16", "[1,2048,256]", 1 << 20};
  const Tensor factors{"k_factors", "BF16", "[1,2048,128]", 1 << 19};
  const Tensor basis{"k_basis", "BF16", "[2048,128,256]", kBytes};
  refuse("low_rank rank 128", {q, v, factors, broken(basis)});
  refuse(
      "vector width 4",
      {q, v, {"k_codes", "U8", "[1,2048,64]", 1 << 17}, broken({"k_codebook", "BF16", "[2048,64,256,4]", 2 * kBytes})});
  // The sequence of the last group has one token in its tail.
  constexpr std::int64_t kMany = 4096;
  const std::vector<Tensor> rows{{"q", "BF16", "[4096,1,8,128]", kMany * 2048},
                                 {"v", "BF16", "[4096,1,8,128]", kMany * 2048},
                                 {"k_codes", "U8", "[4096,8,64]", kMany * 512},
                                 {"k_scales", "BF16", "[4096,8,8]", kMany * 128}};
  refuse("int4_channel group 32",
         with(rows, {"k_tail", "BF16", "[4096,32,8,128]", kMany * 65536, {-1}, (kMany - 1) * 65536}));
  // Shapes come first, whatever the numbers are.
  refuse("low_rank rank 128", {q, {"v", "BF16", "[2,2048,256]", 1 << 21}, factors, basis});
}

}  // namespace
}  // namespace ringattn::testing
