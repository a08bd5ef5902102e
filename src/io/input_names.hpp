// SPDX-License-Identifier: Apache-2.0
// Finds the tensors of a job's roles in a file: by the names that the caller gives, by the roles' own names, or by
// aliases of other libraries (known_names.hpp). The other tensors are refused by name, or not read.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/known_names.hpp"
#include "io/safetensors_file.hpp"
#include "io/tensor_roles.hpp"

namespace ringattn {

// The name that a tensor is looked for by: one that is given, or its own.
std::string name_in(const InputNames& names, std::string_view tensor);

// True if any role is named. Then the caller knows the file, which may hold a whole model.
bool any_named(const InputNames& names);

// `names`, and for each role that is not named and not there by its own name the alias that is there. The sinks of a
// checkpoint's layer, model.layers.N.self_attn.sinks, are such an alias where they are the only ones. Throws kFile for
// a role that two tensors have and, unless any is named, for a tensor that is refused by its name.
InputNames resolve_names(const SafetensorsFile& file, const InputNames& names, JobKind job);

// True if the file has a tensor of that role, by its own name or by an alias.
bool has_role(const SafetensorsFile& file, std::string_view role, JobKind job);

// Tensors of its file that a job does not read.
struct UnreadTensors {
  std::size_t count = 0;
  std::vector<std::string> first;  // up to 8 names in quotes, ascending; none where tensors were named

  // "`a`, `b` and 3 more", or "5 tensors"; empty where all are read.
  std::string text() const;
};

// `given`: the names that the caller gave.
UnreadTensors unread_tensors(const SafetensorsFile& file, std::span<const TensorSource> used, const InputNames& given);

}  // namespace ringattn
