// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/machine_model.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <string_view>

#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "base/quotes.hpp"
#include "base/text_file.hpp"
#include "io/flat_table.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

struct Member {
  std::string_view name;
  double MachineModel::*value;
  bool may_be_zero;
};

constexpr Member kMembers[] = {{"flops_per_second", &MachineModel::flops_per_second, false},
                               {"link_bytes_per_second", &MachineModel::link_bytes_per_second, false},
                               {"latency_seconds", &MachineModel::latency_seconds, true}};

MessageTemplate how_to_make_one() { return {command("info", "measure"), " writes one."}; }

bool is_toml(std::string_view path) { return path.ends_with(".toml"); }

void take_member(MachineModel& machine, const Member& member, const FlatEntry& entry, const std::string& path) {
  double value = 0.0;
  const char* end = entry.text.data() + entry.text.size();
  const bool number = (entry.kind == FlatKind::kReal || entry.kind == FlatKind::kInteger) &&
                      std::from_chars(entry.text.data(), end, value).ptr == end;
  if (!number || !std::isfinite(value) || value < 0.0 || (value == 0.0 && !member.may_be_zero)) {
    fail(ErrorCode::kFile, fmt::format("{} is no machine model", path),
         fmt::format("{} is {}, and must be a {} number", member.name, shortened(entry.text),
                     member.may_be_zero ? "non-negative" : "positive"),
         how_to_make_one());
  }
  machine.*member.value = value;
}

}  // namespace

MachineModel default_machine(const KernelEntry& kernel, const Backend& backend) {
  MachineModel machine;
  if (kernel.backend == "cuda") machine = {"default GPU", 0.0, 2.5e11, 1.5e-5};  // NVLink of an H200, rounded down
  machine.flops_per_second = kernel.flops_per_second(backend);
  return machine;
}

MachineModel parse_machine_model(std::string_view text, const std::string& path) {
  MachineModel machine;
  machine.name.clear();
  bool seen[std::size(kMembers)] = {};
  const auto entries = is_toml(path) ? parse_toml_table(text, path, ErrorCode::kFile, how_to_make_one())
                                     : parse_json_table(text, path, ErrorCode::kFile, how_to_make_one());
  for (const FlatEntry& entry : entries) {
    bool known = entry.key == "name" && entry.kind == FlatKind::kText;
    if (known) machine.name = entry.text;
    for (std::size_t i = 0; i < std::size(kMembers); ++i) {
      if (entry.key != kMembers[i].name) continue;
      take_member(machine, kMembers[i], entry, path);
      seen[i] = known = true;
    }
    if (!known) {
      fail(ErrorCode::kFile, fmt::format("{} is no machine model", path),
           fmt::format("it names {}", shortened(entry.key)), how_to_make_one());
    }
  }
  for (std::size_t i = 0; i < std::size(kMembers); ++i) {
    if (!seen[i]) {
      fail(ErrorCode::kFile, fmt::format("{} is no machine model", path),
           fmt::format("{} is missing", kMembers[i].name), how_to_make_one());
    }
  }
  if (machine.name.empty()) machine.name = path;
  return machine;
}

MachineModel read_machine_model(const std::string& path) { return parse_machine_model(read_text_file(path), path); }

std::string machine_model_text(const MachineModel& machine, std::string_view path) {
  if (!is_toml(path)) {
    JsonWriter json;
    json.begin_object().member("name", machine.name);
    for (const Member& member : kMembers) json.member(member.name, machine.*member.value);
    return json.end_object().text();
  }
  std::string text = fmt::format("name = {}\n", toml_quoted(machine.name));
  for (const Member& member : kMembers) text += fmt::format("{} = {}\n", member.name, machine.*member.value);
  return text;
}

}  // namespace ringattn
