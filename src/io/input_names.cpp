// SPDX-License-Identifier: Apache-2.0
#include "io/input_names.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "base/size.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kMaxNamesShown = 8;
constexpr std::string_view kSinksRole = "sinks";
constexpr std::string_view kLayerSinks = ".self_attn.sinks";  // of a layer in a checkpoint, after model.layers.N

bool is_named(const InputNames& names, std::string_view tensor) {
  return std::ranges::any_of(tensor_roles(), [&](const TensorRole& role) { return names.*role.member == tensor; });
}

void refuse_name(const SafetensorsFile& file, const KnownName& known) {
  fail(ErrorCode::kFile, fmt::format("{} has {}, which isn't read", file.path(), in_quotes(known.name)), known.why,
       {known.suggestion, ", or name the tensors that are meant with ", setting("tensors"), "."});
}

void refuse_both(const SafetensorsFile& file, std::string_view one, std::string_view other, std::string_view role) {
  require(false, file.tensor(other), fmt::format("{}, and both names mean {}", described(file.tensor(one)), role),
          {"Leave one of them out, or name the one that is meant with ", setting("tensors"), "."});
}

// The name of the sinks of a checkpoint's layer; empty if there are none. If the file has those of several layers,
// throws, but returns an empty name if the caller named any tensor, because the file may then be a whole model.
std::string_view layer_sinks(const SafetensorsFile& file, bool named) {
  std::string_view found;
  for (const std::string_view name : file.names()) {
    if (!name.ends_with(kLayerSinks)) continue;
    if (found.empty()) {
      found = name;
    } else if (named) {
      return {};
    } else {
      fail(ErrorCode::kFile,
           fmt::format("{} has {} and {}, the sinks of several layers", file.path(), in_quotes(found), in_quotes(name)),
           "a job is one layer's", {"Name one with ", setting("tensors", fmt::format("sinks={}", found)), "."});
    }
  }
  return found;
}

void take_layer_sinks(const SafetensorsFile& file, bool named, InputNames& names) {
  const std::string_view found = layer_sinks(file, named);
  if (found.empty()) return;
  const std::string other = names.sinks.value_or(std::string(kSinksRole));
  if (names.sinks || file.contains(kSinksRole)) refuse_both(file, other, found, kSinksRole);
  names.sinks = found;
}

}  // namespace

std::string name_in(const InputNames& names, std::string_view tensor) {
  const auto role = std::ranges::find(tensor_roles(), tensor, &TensorRole::name);
  if (role != tensor_roles().end()) return (names.*role->member).value_or(std::string(tensor));
  const auto other = names.others.find(tensor);
  return other == names.others.end() ? std::string(tensor) : other->second;
}

bool any_named(const InputNames& names) {
  return !names.others.empty() ||
         std::ranges::any_of(tensor_roles(), [&](const TensorRole& role) { return (names.*role.member).has_value(); });
}

InputNames resolve_names(const SafetensorsFile& file, const InputNames& names, JobKind job) {
  const bool named = any_named(names);
  InputNames resolved = names;
  for (const KnownName& known : known_names()) {
    if (!known.is_for(job) || !file.contains(known.name) || is_named(names, known.name)) continue;
    if (known.role.empty()) {
      if (!named && !file.contains(known.unless)) refuse_name(file, known);
      continue;
    }
    const auto role = std::ranges::find(tensor_roles(), known.role, &TensorRole::name);
    if (names.*role->member) continue;
    std::optional<std::string>& name = resolved.*role->member;
    if (name) refuse_both(file, *name, known.name, known.role);
    if (file.contains(known.role)) refuse_both(file, known.role, known.name, known.role);
    name = known.name;
  }
  if (!names.sinks && job < JobKind::kSsd) take_layer_sinks(file, named, resolved);
  return resolved;
}

bool has_role(const SafetensorsFile& file, std::string_view role, JobKind job) {
  return file.contains(role) || std::ranges::any_of(known_names(), [&](const KnownName& known) {
           return known.role == role && known.is_for(job) && file.contains(known.name);
         });
}

std::string UnreadTensors::text() const {
  if (count == 0) return {};
  if (first.empty()) return counted(count, "tensor");
  const std::size_t more = count - first.size();
  return fmt::format("{}{}", fmt::join(first, ", "), more > 0 ? fmt::format(" and {} more", more) : "");
}

UnreadTensors unread_tensors(const SafetensorsFile& file, std::span<const TensorSource> used, const InputNames& given) {
  std::set<std::string_view> read;
  for (const TensorSource& tensor : used) read.insert(tensor.info->name);
  const bool counted_alone = any_named(given);
  UnreadTensors unread;
  for (const std::string_view name : file.names()) {
    if (read.contains(name)) continue;
    ++unread.count;
    if (!counted_alone && unread.first.size() < kMaxNamesShown) unread.first.push_back(in_quotes(name));
  }
  return unread;
}

}  // namespace ringattn
