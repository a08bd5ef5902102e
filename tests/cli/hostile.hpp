// SPDX-License-Identifier: Apache-2.0
// What a refusal may cost: at most 64 MB and twice the header, and a few seconds. Files that ask for more.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {

inline constexpr std::int64_t kMost = 64'000'000;
#if defined(RINGATTN_SANITIZED)
inline constexpr bool kShadows = true;  // a sanitizer's, which are memory, too
#else
inline constexpr bool kShadows = false;
#endif
inline constexpr double kMaxSeconds = kShadows ? 100.0 : 20.0;  // of the processors' time: others may be busy, too

// Bytes of a file's start whose reading explains memory.
inline std::int64_t header_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t bytes = 0;
  file.read(reinterpret_cast<char*>(&bytes), sizeof bytes);
  return static_cast<std::int64_t>(bytes);
}

class Hostile : public ::testing::Test {
 protected:
  // What a refusal costs that reads nothing and plans nothing.
  static void SetUpTestSuite() { baseline_ = tool({"run", "--nonsense"}).peak_bytes; }

  void expect_refused(const Words& words, int code, std::int64_t header = 0) const {
    std::string line;
    for (const std::string& word : words) line += word + " ";
    const Finished run = tool(words);
    EXPECT_EQ(run.code, code) << line << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << line << run.err;
    EXPECT_LE(run.cpu_seconds, kMaxSeconds) << line;
    if (!kShadows) {
      EXPECT_LE(run.peak_bytes - baseline_, kMost + 2 * header) << line << run.err;
    }
  }

  // A tensor of a file: its name, type, shape as JSON, the bytes that it needs, and some I64 entries at a byte of it.
  struct Tensor {
    std::string name;
    std::string dtype;
    std::string shape;
    std::int64_t bytes = 0;
    std::vector<std::int64_t> values = {};
    std::int64_t at = 0;
  };

  // The same with NaN as its last elements, of any dtype.
  static Tensor broken(Tensor tensor) {
    tensor.values = {-1};
    tensor.at = tensor.bytes - 8;
    return tensor;
  }

  // A sparse file: only a tensor's values take disk space. `spaces` follow the header's JSON.
  std::string sparse_file(const std::string& name, const std::vector<Tensor>& tensors, std::size_t spaces = 0,
                          const std::string& metadata = "") const {
    std::string json = metadata.empty() ? "{" : "{\"__metadata__\":" + metadata;
    std::int64_t end = 0;
    for (const Tensor& tensor : tensors) {
      json += fmt::format("{}\"{}\":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", json == "{" ? "" : ",",
                          tensor.name, tensor.dtype, tensor.shape, end, end + tensor.bytes);
      end += tensor.bytes;
    }
    const std::string path = header_file(name, json + "}", end, spaces);
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    std::int64_t at = 8 + header_bytes(path);
    for (const Tensor& tensor : tensors) {
      file.seekp(at + tensor.at);
      file.write(reinterpret_cast<const char*>(tensor.values.data()),
                 static_cast<std::streamsize>(tensor.values.size() * sizeof(std::int64_t)));
      at += tensor.bytes;
    }
    return path;
  }

  std::string header_file(const std::string& name, const std::string& json, std::int64_t data = 0,
                          std::size_t spaces = 0) const {
    const std::uint64_t length = json.size() + spaces;
    const std::string path = folder_.file(name);
    {
      std::ofstream file(path, std::ios::binary);
      file.write(reinterpret_cast<const char*>(&length), sizeof length);
      file << json;
      const std::string piece(4096, ' ');
      for (std::size_t left = spaces; left > 0; left -= std::min(left, piece.size())) {
        file.write(piece.data(), static_cast<std::streamsize>(std::min(left, piece.size())));
      }
    }
    std::filesystem::resize_file(path, 8 + length + static_cast<std::uint64_t>(data));
    return path;
  }

  // q, k and v of 64 tokens, one head and 8 dims.
  static std::vector<Tensor> small() {
    return {{"q", "BF16", "[64,1,8]", 1024}, {"k", "BF16", "[64,1,8]", 1024}, {"v", "BF16", "[64,1,8]", 1024}};
  }
  static std::vector<Tensor> with(std::vector<Tensor> tensors, const Tensor& more) {
    tensors.push_back(more);
    return tensors;
  }

  // `piece` of its number, `count` times.
  std::string repeated(const std::string& name, const std::string& before, int count,
                       const std::function<std::string(int)>& piece, const std::string& after) const {
    std::ofstream file(folder_.file(name), std::ios::binary);
    file << before;
    for (int i = 0; i < count; ++i) file << piece(i);
    file << after;
    return folder_.file(name);
  }

  TemporaryFolder folder_;
  inline static std::int64_t baseline_ = 0;
};

}  // namespace ringattn::testing
