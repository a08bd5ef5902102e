// SPDX-License-Identifier: Apache-2.0
// What every report must hold. Apart, so that one file of the tests includes a JSON library.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ringattn::testing {

// Empty if `text` is a report with all members of the right types; else what is wrong.
std::string check_report(const std::string& text);

// The value at a path such as "/plan/blocks", as JSON text; "absent" where there is none; "malformed" for no JSON.
std::string json_at(const std::string& text, std::string_view path);

// A small safetensors file with tensors q, k, v. Values are a function of their index; `extra` is JSON of further
// header members, whose bytes follow.
struct FileShape {
  std::vector<long long> q{40, 4, 16};
  std::vector<long long> k{40, 2, 16};
  std::vector<long long> v{40, 2, 16};
  std::string prefix = "";                                               // of the tensors' names
  std::vector<std::pair<std::string, std::vector<long long>>> integers;  // I64 tensors of rank 1
  std::vector<float> sinks;
  bool plant_nan = false;
};
std::string safetensors_bytes(const FileShape& shape);

}  // namespace ringattn::testing
