// SPDX-License-Identifier: Apache-2.0
// A `*.index.json`: which file of its folder contains each tensor of a model that was saved in several files.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace ringattn {

struct SafetensorsIndex {
  // Tensor → file, relative to the index's folder and inside it.
  std::map<std::string, std::string, std::less<>> weight_map;
};

inline constexpr std::string_view kIndexSuffix = ".index.json";

// Members other than `weight_map` describe the model and are skipped. Throws kFile with the reason if it is invalid.
SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& path);

// Reads the file in bounded pieces, so that a hostile one is refused early. Throws kFile.
SafetensorsIndex read_safetensors_index(const std::string& path);

}  // namespace ringattn
