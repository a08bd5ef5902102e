// SPDX-License-Identifier: Apache-2.0
// Files as bytes, good and bad, for the tests and as seeds of the fuzzers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ringattn::testing {

struct FileCase {
  std::string name;
  std::string bytes;
  std::string why;  // part of the message for bad files; empty for good ones
};

// A length field, a header and data.
std::string safetensors_bytes(std::string_view header, std::string_view data = {});
std::string length_field(std::uint64_t length);

std::vector<FileCase> malformed_safetensors();
std::vector<FileCase> accepted_safetensors();
std::vector<FileCase> malformed_indexes();
std::vector<FileCase> accepted_indexes();

}  // namespace ringattn::testing
