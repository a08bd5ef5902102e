// SPDX-License-Identifier: Apache-2.0
// Any bytes as a *.index.json: refused with one kFile message, or a map of names to files inside the folder.
#include <filesystem>
#include <optional>

#include "base/error.hpp"
#include "io/safetensors_index.hpp"
#include "tests/fuzz/fuzz_target.hpp"
#include "tests/io/safetensors_cases.hpp"

namespace ringattn::testing {

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> seeds;
  for (const auto& cases : {accepted_indexes(), malformed_indexes()}) {
    for (const FileCase& file : cases) {
      if (file.bytes.size() < (std::size_t{1} << 16)) seeds.push_back(file.bytes);
    }
  }
  return seeds;
}

std::vector<std::string> fuzz_words() {
  return {"{",
          "}",
          "[",
          "]",
          ",",
          ":",
          "\"",
          "\\",
          "\"weight_map\":",
          "\"metadata\":",
          "\"q\":",
          "\"a.safetensors\"",
          "../",
          "/",
          "..",
          ".",
          "\\u0000",
          "\\u002e",
          "\\/",
          "\\n",
          "null",
          "1",
          "-1",
          "1e9",
          "{}",
          "[]",
          std::string(1, '\0'),
          "\xef\xbb\xbf",
          "\xff"};
}

}  // namespace ringattn::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ringattn;
  using namespace ringattn::testing;
  std::optional<SafetensorsIndex> index;
  try {
    index = parse_safetensors_index({reinterpret_cast<const char*>(data), size}, "FILE");
  } catch (const Error& error) {
    const std::string_view message = error.what();
    fuzz_check(error.code() == ErrorCode::kFile, "refusals are about the file", message);
    fuzz_check(message.find_first_of(std::string_view("\n\r\0", 3)) == std::string_view::npos && message.size() < 1000,
               "a message is one line", message);
  }
  if (!index) return 0;
  for (const auto& [tensor, file] : index->weight_map) {
    fuzz_check(file.find('\0') == std::string::npos, "file names hold no byte of value 0", file);
    const auto path = (std::filesystem::path("/folder") / file).lexically_normal().string();
    fuzz_check(path.starts_with("/folder/") && path.size() > 8, "files lie inside the folder", file);
  }
  return 0;
}
