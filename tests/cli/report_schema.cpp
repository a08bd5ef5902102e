// SPDX-License-Identifier: Apache-2.0
#include "tests/cli/report_schema.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

namespace ringattn::testing {

namespace {

using nlohmann::json;

struct Member {
  const char* path;
  const char* types;  // of json::type_name(), separated by '|'
};

constexpr Member kMembers[] = {
    {"/schema", "number"},
    {"/tool/version", "string"},
    {"/tool/git", "string"},
    {"/tool/dirty", "boolean"},
    {"/tool/build_id", "string"},
    {"/argv", "array"},
    {"/config", "object"},
    {"/environment", "object"},
    {"/world", "object|null"},
    {"/kernel", "string|null"},
    {"/plan", "object|null"},
    {"/samples_ms", "array|null"},
    {"/time_ms", "object|null"},
    {"/tflops_per_rank", "number|null"},
    {"/exposed_comm_ms", "number|null"},
    {"/memory_peak_bytes", "number|null"},
    {"/digest", "object|null"},
    {"/verdict", "string|null"},
    {"/error", "object|null"},
    {"/accuracy", "object|null"},
};
constexpr const char* kWithWorld[] = {"/world/ranks", "/world/hosts", "/world/devices"};
constexpr const char* kWithPlan[] = {"/plan/blocks", "/plan/stripe", "/plan/bytes_moved", "/plan/memory_per_rank"};
constexpr const char* kWithTimes[] = {"/time_ms/median", "/time_ms/p10", "/time_ms/p90", "/samples_ms/0/0"};
constexpr const char* kWithDigest[] = {"/digest/out", "/digest/lse"};
constexpr const char* kWithError[] = {"/error/code", "/error/message", "/error/rank", "/error/host"};

template <std::size_t kCount>
std::string check_all(const json& report, const char* parent, const char* const (&paths)[kCount]) {
  if (report.at(json::json_pointer(parent)).is_null()) return {};
  for (const char* path : paths) {
    if (!report.contains(json::json_pointer(path))) return std::string(path) + " is missing";
  }
  return {};
}

}  // namespace

std::string check_report(const std::string& text) {
  const json report = json::parse(text, nullptr, false);
  if (!report.is_object()) return "it is no JSON object: " + text;
  for (const Member& member : kMembers) {
    const json::json_pointer pointer(member.path);
    if (!report.contains(pointer)) return std::string(member.path) + " is missing";
    if (std::string(member.types).find(report.at(pointer).type_name()) == std::string::npos) {
      return std::string(member.path) + " is " + report.at(pointer).type_name();
    }
  }
  for (const std::string& wrong : {check_all(report, "/world", kWithWorld), check_all(report, "/plan", kWithPlan),
                                   check_all(report, "/time_ms", kWithTimes), check_all(report, "/digest", kWithDigest),
                                   check_all(report, "/error", kWithError)}) {
    if (!wrong.empty()) return wrong;
  }
  return {};
}

std::string json_at(const std::string& text, std::string_view path) {
  const json document = json::parse(text, nullptr, false);
  if (document.is_discarded()) return "malformed";
  const json::json_pointer pointer{std::string(path)};
  return document.contains(pointer) ? document.at(pointer).dump() : "absent";
}

std::string safetensors_bytes(const FileShape& shape) {
  json header = json::object();
  std::string data;
  const auto add = [&](const std::string& name, const char* dtype, const std::vector<long long>& dims,
                       const std::string& bytes) {
    header[name] = {{"dtype", dtype}, {"shape", dims}, {"data_offsets", {data.size(), data.size() + bytes.size()}}};
    data += bytes;
  };
  const auto floats = [](const std::vector<float>& values) {
    std::string bytes(values.size() * sizeof(float), '\0');
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  };
  const auto waves = [&](const std::vector<long long>& dims, double step, bool nan) {
    long long count = 1;
    for (const long long dim : dims) count *= dim;
    std::vector<float> values;
    for (long long i = 0; i < count; ++i) values.push_back(static_cast<float>(std::sin(step * static_cast<double>(i))));
    if (nan && !values.empty()) values[values.size() / 2] = std::numeric_limits<float>::quiet_NaN();
    return floats(values);
  };
  for (const auto& [name, values] : shape.integers) {
    std::string bytes(values.size() * sizeof(std::int64_t), '\0');
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::int64_t value = values[i];
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    }
    add(name, "I64", {static_cast<long long>(values.size())}, bytes);
  }
  add(shape.prefix + "q", "F32", shape.q, waves(shape.q, 0.37, false));
  add(shape.prefix + "k", "F32", shape.k, waves(shape.k, 0.73, false));
  add(shape.prefix + "v", "F32", shape.v, waves(shape.v, 0.11, shape.plant_nan));
  if (!shape.sinks.empty()) add("sinks", "F32", {static_cast<long long>(shape.sinks.size())}, floats(shape.sinks));

  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const std::uint64_t length = text.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + text + data;
}

}  // namespace ringattn::testing
