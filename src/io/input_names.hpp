// SPDX-License-Identifier: Apache-2.0
// Finds the tensors of a job's roles in a file: by the names that the caller gives, by the roles' own names, or by
// aliases of other libraries (known_names.hpp). Other tensors are refused if their name is a known one, and otherwise
// not read.
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

// The name under which a tensor is looked up: the given one, or its own.
std::string name_in(const InputNames& names, std::string_view tensor);

// True if the caller named any role. The caller then knows the file, which may hold a whole model.
bool any_named(const InputNames& names);

// Returns `names` with aliases added: for each role that is not named, and whose own name is not in the file, the alias
// that is. The sinks of a checkpoint's layer, model.layers.N.self_attn.sinks, are such an alias if they are the only
// ones. Throws kFile if two tensors have one role and, unless any role is named, for a tensor that is refused by its
// name.
InputNames resolve_names(const SafetensorsFile& file, const InputNames& names, JobKind job);

// True if the file has a tensor of that role, by its own name or by an alias.
bool has_role(const SafetensorsFile& file, std::string_view role, JobKind job);

// Tensors of the file that a job does not read.
struct UnreadTensors {
  std::size_t count = 0;
  std::vector<std::string> first;  // up to 8 names in quotes, ascending; empty if tensors were named

  // "`a`, `b` and 3 more", or "5 tensors"; empty if all are read.
  std::string text() const;
};

// `given`: the names that the caller gave.
UnreadTensors unread_tensors(const SafetensorsFile& file, std::span<const TensorSource> used, const InputNames& given);

}  // namespace ringattn
