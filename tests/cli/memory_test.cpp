// SPDX-License-Identifier: Apache-2.0
// What a refusal may cost (hostile.hpp), whatever files and flags ask for.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <limits>

#include "tests/cli/hostile.hpp"

namespace ringattn::testing {
namespace {

TEST_F(Hostile, BatchesThatTakeNoBytes) {
  for (const char* shape : {"[268435456,0,1,8]", "[1099511627776,0,1,8]", "[1048577,0,1,8]"}) {
    const std::string file =
        sparse_file("in.safetensors", {{"q", "BF16", shape}, {"k", "BF16", shape}, {"v", "BF16", shape}});
    for (const char* command : {"run", "plan", "verify", "bench"}) {
      expect_refused({command, "--input", file}, 3, header_bytes(file));
    }
    expect_refused({"run", "--input", file, "--ranks", "64"}, 3, header_bytes(file));
    for (const char* method : {"int4", "fp8", "snapkv"}) {
      expect_refused({"compress", "--method", method, "--input", file, "--output", folder_.file("out.safetensors")}, 3,
                     header_bytes(file));
    }
  }
}

TEST_F(Hostile, ListsThatAreLargerThanTheJob) {
  constexpr std::int64_t kEntries = std::int64_t{1} << 27;
  const std::string entries = fmt::format("[{}]", kEntries);
  for (const Tensor& list :
       {Tensor{"cu_seqlens_q", "I64", entries, 8 * kEntries}, Tensor{"cu_seqlens_q", "I32", entries, 4 * kEntries},
        Tensor{"cu_seqlens_k", "I64", entries, 8 * kEntries}, Tensor{"q_offset", "I64", entries, 8 * kEntries},
        Tensor{"sinks", "BF16", entries, 2 * kEntries}}) {
    const std::string file = sparse_file("in.safetensors", with(small(), list));
    expect_refused({"run", "--input", file}, 3, header_bytes(file));
    expect_refused({"run", "--input", file, "--ranks", "16"}, 3, header_bytes(file));
  }
  // As many sequences as there may be, all of them empty, of 64 tokens: read whole, and refused.
  const std::string largest =
      sparse_file("in.safetensors", with(small(), {"cu_seqlens_q", "I64", "[1048577]", 8 * 1048577}));
  expect_refused({"run", "--input", largest, "--ranks", "16"}, 3, header_bytes(largest));
}

TEST_F(Hostile, Caches) {
  constexpr std::int64_t kMany = std::int64_t{1} << 31;
  // A pool of one page of 16 tokens, with one head and 8 dims.
  const auto cache = [&](const Tensor& table, const Tensor& lengths) {
    return sparse_file("cache.safetensors", {{"q", "BF16", "[1,1,8]", 16},
                                             {"k_pages", "BF16", "[1,16,1,8]", 256},
                                             {"v_pages", "BF16", "[1,16,1,8]", 256},
                                             table,
                                             lengths});
  };
  const auto list = [](const char* name, const char* dtype, std::int64_t entries, std::int64_t bytes) {
    return Tensor{name, dtype, fmt::format("[{}]", entries), entries * bytes};
  };
  const auto refuse = [&](const Tensor& table, const Tensor& lengths, int code) {
    const std::string file = cache(table, lengths);
    for (const char* command : {"run", "plan", "verify", "bench"}) {
      expect_refused({command, "--input", file}, code, header_bytes(file));
    }
    expect_refused({"run", "--input", file, "--ranks", "16"}, code, header_bytes(file));
  };
  // All lengths are 0, and all pages too: only the numbers of rows, sequences and entries are wrong.
  refuse({"block_table", "I32", "[1,1]", 4}, list("lengths_k", "I64", kMany, 8), 3);
  refuse({"block_table", "I32", fmt::format("[{},1]", kMany), kMany * 4}, list("lengths_k", "I32", kMany, 4), 3);
  refuse({"block_table", "I32", fmt::format("[2,{}]", kMany), kMany * 8}, list("lengths_k", "I32", 1, 4), 3);
  refuse({"block_table", "I64", fmt::format("[1,{}]", kMany), kMany * 8}, list("lengths_k", "I32", 1, 4), 3);
  refuse({"block_table", "I32", "[1048577,1]", 4 * 1048577}, list("lengths_k", "I32", 1048577, 4), 3);
}

TEST_F(Hostile, Headers) {
  constexpr std::size_t kSpaces = 30'000'000;
  const std::string spaces = sparse_file("spaces.safetensors", {{"v", "BF16", "[64,1,8]", 1024}}, kSpaces);
  expect_refused({"run", "--input", spaces}, 3, header_bytes(spaces));
  expect_refused({"run", "--input", spaces, "--ranks", "4"}, 3, header_bytes(spaces));
  std::string zeros;
  for (int i = 0; i < 1'000'000; ++i) zeros += "0,";
  const std::string shape =
      header_file("shape.safetensors", R"({"q":{"dtype":"BF16","shape":[)" + zeros + R"(0],"data_offsets":[0,0]}})");
  expect_refused({"run", "--input", shape}, 3, header_bytes(shape));
  std::string many = "{";
  for (int i = 0; i < 65000; ++i) {
    many += fmt::format("{}\"t{}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", i == 0 ? "" : ",", i);
  }
  const std::string tensors = header_file("tensors.safetensors", many + "}");
  expect_refused({"run", "--input", tensors}, 3, header_bytes(tensors));
  std::string metadata = R"({"__metadata__":{)";
  for (int i = 0; i < 300000; ++i) metadata += fmt::format("{}\"k{}\":\"v\"", i == 0 ? "" : ",", i);
  const std::string keys = header_file("metadata.safetensors", metadata + "}}");
  expect_refused({"run", "--input", keys}, 3, header_bytes(keys));
}

TEST_F(Hostile, Tables) {
  const auto dots = [&](int segments) {
    return repeated(
        "deep.toml", "a", segments, [](int) { return ".a"; }, " = 1\n");
  };
  expect_refused({"run", "--config", dots(40000), "--dry-run"}, 2);
  expect_refused({"plan", "--machine", dots(300000)}, 3);
  const std::string brackets = repeated(
      "deep.toml", "a = ", 500000, [](int) { return "["; }, "\n");
  expect_refused({"run", "--config", brackets}, 2);
  const auto key = [](int i) { return fmt::format("{}\"k{}\":1", i == 0 ? "" : ",", i); };
  expect_refused({"plan", "--machine", repeated("keys.json", "{", 80000, key, "}")}, 3);
  const std::string nested = repeated(
      "deep.json", "", 100000, [](int) { return "{\"a\":"; }, "");
  expect_refused({"plan", "--machine", nested}, 3);
  expect_refused({"verify", "--synthetic", "1", "--seq", "128", "--golden", nested}, 3);

  const auto shard = [](int i) { return fmt::format("{}\"t{}\":\"f{}\"", i == 0 ? "" : ",", i, i); };
  const std::string index = repeated("m.index.json", "{\"weight_map\":{", 1000000, shard, "}}");
  expect_refused({"run", "--input", index}, 3);
  const std::string files = repeated("n.index.json", "{\"weight_map\":{", 260000, shard, "}}");
  expect_refused({"run", "--input", files}, 3, static_cast<std::int64_t>(std::filesystem::file_size(files)));
  const auto tensor = [](int i) { return fmt::format("{}\"t{}\":\"f\"", i == 0 ? "" : ",", i); };
  const std::string whole = repeated("o.index.json", "{\"weight_map\":{", 260000, tensor, "}}");
  expect_refused({"run", "--input", whole}, 3, static_cast<std::int64_t>(std::filesystem::file_size(whole)));

  const Words bench{"bench", "--seq", "128", "--against"};
  expect_refused(bench + Words{repeated(
                             "l.jsonl", "", 9000, [](int) { return std::string(2000, '['); }, "\n")},
                 3);
  expect_refused(
      bench + Words{repeated(
                  "l.jsonl", "{\"a\":[", 4000, [](int) { return "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"; }, "1]}\n")},
      3);
  expect_refused(bench + Words{repeated(
                             "l.jsonl", "", 1000000, [](int) { return "{\"schema\":1}\n"; }, "")},
                 3);
}

TEST_F(Hostile, Flags) {
  const Words seed{"run", "--synthetic", "1"};
  const Words cases[] = {{"--batch", "1048576", "--ranks", "64", "--dry-run"},
                         {"--seq", "1", "--batch", "1048576", "--ranks", "64", "--dry-run"},
                         {"--seq", "1", "--batch", "1048576", "--memory", "1k"},
                         {"--seq", "1024g"},
                         {"--seq", "1g", "--stripe", "1", "--ranks", "64"},
                         {"--seq", "16m", "--stripe", "1", "--ranks", "4", "--memory", "1k"},
                         {"--seq", "64m", "--stripe", "1"},
                         {"--seq", "128m", "--ranks", "64", "--memory", "1g"},
                         {"--seq", "128m", "--ranks", "512"},
                         {"--seq", "1m", "--heads", "65536", "--kv-heads", "65536", "--head-dim", "256"}};
  for (const Words& words : cases) expect_refused(seed + words, 5);
  expect_refused({"bench", "--dry-run", "--total-tokens", "8g"}, 5);
  const Words step = seed + Words{"--op", "decode"};
  expect_refused(step + Words{"--seq", "1g", "--page-size", "16"}, 5);
  expect_refused(step + Words{"--seq", "1", "--batch", "1048576", "--page-size", "16", "--memory", "1k"}, 5);
  expect_refused(step + Words{"--seq", "1g", "--batch", "1048576"}, 5);
  expect_refused(step + Words{"--seq", "2047m", "--heads", "65536", "--kv-heads", "65536", "--head-dim", "256"}, 5);
  expect_refused(step + Words{"--seq", "1g", "--ranks", "16"}, 5);
  expect_refused({"plan", "--seq", "1g", "--world", "1m"}, 5);
  expect_refused({"plan", "--seq", "1024g", "--world", "2-1m*2"}, 5);
  const Words contradictions[] = {
      {"bench", "--dry-run", "--total-tokens", "8g", "--seq", "16"},
      {"run", "--synthetic", "1", "--seq", "0", "--batch", "16777216"},
      {"plan", "--seq", "1", "--batch", "16777216", "--world", "1m"},
      {"plan", "--seq", "1-1g*1.0000001"},
      {"verify", "--synthetic", "1", "--against", "oracle", "--rows", "1152921504606846976"},
      {"run", "--synthetic", "1", "--seq", "1024g", "--heads", "65536", "--batch", "1024"},
      {"run", "--synthetic", "1", "--op", "decode", "--seq", "1024g"},
      {"plan", "--op", "decode", "--seq", "1024g", "--page-size", "16"}};
  for (const Words& words : contradictions) expect_refused(words, 2);
}

TEST_F(Hostile, Ssm) {
  const Words cases[] = {{"--batch", "1048576", "--seq", "1", "--ranks", "64", "--dry-run"},
                         {"--batch", "1048576", "--seq", "1", "--memory", "1k"},
                         {"--seq", "1024g", "--dry-run"},
                         {"--seq", "64g", "--ranks", "512", "--dry-run"},
                         {"--seq", "1g", "--memory", "1k"}};
  for (const std::string op : {"ssd", "selective_scan", "convolution"}) {
    for (const Words& words : cases) expect_refused(Words{"run", "--synthetic", "1", "--op", op} + words, 5);
    expect_refused({"plan", "--op", op, "--seq", "1", "--batch", "1048576", "--world", "1m"}, 5);
    expect_refused({"plan", "--op", op, "--seq", "1g", "--memory", "1k"}, 5);
  }
}

TEST_F(Hostile, FilesOfSsm) {
  constexpr std::int64_t kMany = 65536;
  const auto file_of = [&](std::int64_t states) {
    const std::string b = fmt::format("[4,{}]", states);
    return sparse_file("scan.safetensors", {{"u", "F32", "[4,65536]", 16 * kMany},
                                            {"delta", "F32", "[4,65536]", 16 * kMany},
                                            {"A", "F32", fmt::format("[65536,{}]", states), 4 * kMany * states},
                                            {"B", "F32", b, 16 * states},
                                            {"C", "F32", b, 16 * states}});
  };
  for (const std::string command : {"run", "plan"}) {
    const std::string file = file_of(1024);
    expect_refused({command, "--input", file}, 3, header_bytes(file));
  }
  // Head dims that no kernel takes. The number of a convolution's channels would exceed an int.
  const std::string wide = sparse_file("wide.safetensors", {{"x", "BF16", "[1,65536,65536]", 2 * kMany * kMany},
                                                            {"dt", "BF16", "[1,65536]", 2 * kMany},
                                                            {"A", "F32", "[65536]", 4 * kMany},
                                                            {"B", "BF16", "[1,1,64]", 128},
                                                            {"C", "BF16", "[1,1,64]", 128}});
  expect_refused({"run", "--input", wide}, 3, header_bytes(wide));
}

TEST_F(Hostile, PositionsThatDoNotAscend) {
  constexpr std::int64_t kTokens = std::int64_t{32} << 20;
  const std::string file = sparse_file("in.safetensors", {{"q", "BF16", "[16,1,8]", 256},
                                                          {"k", "BF16", "[33554432,1,8]", 16 * kTokens},
                                                          {"v", "BF16", "[33554432,1,8]", 16 * kTokens},
                                                          {"k_lengths", "I32", "[1]", 4},
                                                          {"k_positions", "I32", "[33554432,1]", 4 * kTokens}});
  expect_refused({"run", "--input", file}, 3, header_bytes(file));
}

TEST_F(Hostile, BlockMasksOfKeys) {
  const Words seed{"run", "--synthetic", "1"};
  const Words cases[] = {
      {"--seq", "1m", "--heads", "8", "--kv-heads", "8", "--block-mask", "window:1m", "--memory", "1k"},
      {"--seq", "8m", "--block-mask", "window:8m", "--dry-run"},
      {"--seq", "8m", "--block-mask", "window:8m", "--dry-run", "--ranks", "2"},
      {"--seq", "16m", "--heads", "64", "--kv-heads", "64", "--block-mask", "topk:64", "--dry-run"},
      {"--seq", "1m", "--block-mask", "topk:64", "--memory", "1k"},
      {"--seq", "16m", "--block-mask", "window:0+block:1", "--dry-run"},
      {"--op", "decode", "--seq", "1g", "--block-mask", "all+block:16", "--dry-run"}};
  for (const Words& words : cases) expect_refused(seed + words, 5);
  expect_refused({"plan", "--seq", "4m", "--block-mask", "strided:2"}, 5);
  expect_refused({"plan", "--seq", "8k", "--block-mask", "random:1g"}, 2);
  const std::string mask =
      sparse_file("mask.safetensors", {{"block_mask", "U8", "[1,16384,16384]", std::int64_t{16384} * 16384}});
  expect_refused(seed + Words{"--seq", "4m", "--block-mask", mask}, 3, header_bytes(mask));
  // An empty mask is not refused as too large.
  const Finished run = tool(seed + Words{"--seq", "2m", "--block-mask", mask, "--dry-run"});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_LE(run.cpu_seconds, kMaxSeconds);
  if (!kShadows) {
    EXPECT_LE(run.peak_bytes - baseline_, kMost) << run.err;
  }
}

// Mask rows in BSR form: 4 query blocks of 4 key blocks.
TEST_F(Hostile, RowsOfBlockMasks) {
  constexpr std::int64_t kMany = std::int64_t{1} << 31;
  constexpr std::int64_t kSome = std::int64_t{1} << 27;
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  using Values = std::vector<std::int64_t>;
  const auto list = [](const char* name, std::int64_t entries, const Values& values) {
    return Tensor{name, "I64", fmt::format("[{}]", entries), 8 * entries, values};
  };
  const auto begins = [&](const Values& values, std::int64_t entries = 5) {
    return list("block_indptr", entries, values);
  };
  const auto blocks = [&](const Values& values, std::int64_t entries = 4) {
    return list("block_indices", entries, values);
  };
  const auto typed = [](Tensor tensor, const char* dtype, const char* shape) {
    tensor.dtype = dtype;
    tensor.shape = shape;
    return tensor;
  };
  const Values good{0, 1, 2, 3, 4};
  const Values some{0, 1, 2, 3};
  const std::vector<Tensor> cases[] = {
      {begins({0, 2, 1, 3, 4}), blocks(some)},         // not monotone
      {begins({0, 1, 2, 3, 3}), blocks(some)},         // ends early
      {begins({0, 1, 2, 3, 5}), blocks(some)},         // ends late
      {begins({1, 1, 2, 3, 4}), blocks(some)},         // begins late
      {begins({-1, 1, 2, 3, 4}), blocks(some)},        // negative
      {begins({0, 1, -2, 3, 4}), blocks(some)},        //
      {begins({0, 1, 2, kLargest, 4}), blocks(some)},  // 2^63 - 1
      {begins({0, 1, 2, 3, kLargest}), blocks(some)},  //
      {begins({0, std::numeric_limits<std::int64_t>::min(), 2, 3, 4}), blocks(some)},
      {begins(good), blocks({0, 1, 2, 4})},                                 // beyond the blocks
      {begins(good), blocks({0, 1, 2, kLargest})},                          //
      {begins(good), blocks({0, -1, 2, 3})},                                // negative
      {begins({0, 2, 2, 3, 4}), blocks({1, 1, 2, 3})},                      // twice
      {begins({0, 2, 2, 3, 4}), blocks({2, 1, 2, 3})},                      // descending
      {typed(begins(good), "U64", "[5]"), blocks(some)},                    // dtypes
      {typed(begins(good), "F64", "[5]"), blocks(some)},                    //
      {begins(good), typed(blocks(some), "U64", "[4]")},                    //
      {begins(good), typed(blocks(some), "F32", "[8]")},                    //
      {typed(begins(good), "I64", "[1,5]"), blocks(some)},                  // ranks
      {begins(good), typed(blocks(some), "I64", "[2,2]")},                  //
      {typed(begins(good), "I64", "[9223372036854775808]"), blocks(some)},  // 2^63 entries
      {begins(good), typed(blocks(some), "I64", "[9223372036854775808]")},  //
      {begins({}, kMany), blocks(some)},                                    // far more lists than the job has
      {begins({}), blocks({}, kMany)},                                      // far more blocks than the lists name
      {begins({0, kMany, kMany, kMany, kMany}), blocks({}, kMany)},         // all of them block 0
      {begins({0, 0, 0, 0, kSome}), blocks({}, kSome)}};                    //
  for (const std::vector<Tensor>& tensors : cases) {
    const std::string file = sparse_file("lists.safetensors", tensors);
    const Words job{"--seq", "512", "--heads", "2", "--kv-heads", "2", "--head-dim", "16", "--block-mask", file};
    SCOPED_TRACE(tensors[0].shape + " " + tensors[1].shape);
    expect_refused(Words{"run", "--synthetic", "1"} + job, 3, header_bytes(file));
    expect_refused(Words{"plan"} + job, 3, header_bytes(file));
  }
  // Half a million lists of a file that is sound.
  const std::string sound = sparse_file("lists.safetensors", {begins({}, (std::int64_t{1} << 19) + 1), blocks({}, 0)});
  const Words job{"--seq", "64m", "--block-mask", sound, "--dry-run"};
  const Finished run = tool(Words{"run", "--synthetic", "1"} + job);
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_LE(run.cpu_seconds, kMaxSeconds);
}

}  // namespace
}  // namespace ringattn::testing
