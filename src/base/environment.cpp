// SPDX-License-Identifier: Apache-2.0
#include "base/environment.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>

#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

bool is_secret(std::string_view text) {
  constexpr std::size_t kShortest = 32;  // an attacker who has recorded a proof can try short secrets offline
  constexpr std::size_t kMaxNameLength = 1024;
  return text.size() >= kShortest && text.size() <= kMaxNameLength &&
         std::ranges::all_of(text, [](char c) { return c > ' ' && c < '\x7f'; });
}

namespace {

constexpr EnvironmentVariable kTable[] = {
    {"RINGATTN_PACE", "bytes per second, e.g. 100m",
     "slows host transports down to this link rate, to measure overlap on machines whose links are too fast to matter",
     [](Environment& environment, std::string_view value) {
       const auto pace = parse_size(value);
       if (!pace || *pace == 0) return false;
       environment.pace = static_cast<double>(*pace);
       return true;
     }},
    {"RINGATTN_STORE", "HOST:PORT, of rank 0's host",
     "ranks are the processes that connect there, without MPI; torchrun's or Slurm's variables say which rank is which",
     [](Environment&, std::string_view value) { return value.find(':') != std::string_view::npos; }},
    {"RINGATTN_JOB", "a name of up to 127 bytes",
     "tells jobs that connect to one RINGATTN_STORE from each other; torchrun's or Slurm's own name if it isn't set",
     [](Environment&, std::string_view value) { return !value.empty() && value.size() < 128; }},
    {"RINGATTN_STORE_SECRET", "32 to 1024 printable characters without blanks, equal on all ranks",
     "ranks prove to each other that they know it before they form a world; launch/ringattn-mpirun makes one",
     [](Environment&, std::string_view value) { return is_secret(value); }, true},
    {"RINGATTN_STORE_SECRET_FILE", "the path of a file that only its owner can read",
     "the same as the first line of a file", [](Environment&, std::string_view value) { return !value.empty(); }},
    {"RINGATTN_OUTCOMES", "a folder",
     "launch/ringattn-mpirun sets it: where each rank writes how it ended; a program removes it from its environment",
     [](Environment&, std::string_view value) { return !value.empty(); }},
    {"RINGATTN_LIBRARY", "a path",
     "the Python package loads this libringattn_c.so instead of its own; nothing else looks at it",
     [](Environment&, std::string_view value) { return !value.empty(); }},
    {"RINGATTN_PROGRAM", "a path", "launch/ringattn-mpirun starts this program; nothing else looks at it",
     [](Environment&, std::string_view value) { return !value.empty(); }},
    {"RINGATTN_RANGES", "0 or 1",
     "1: calls and ring steps have names in profilers, by NVTX in builds with CUDA, in Python also by torch.profiler",
     [](Environment& environment, std::string_view value) {
       environment.ranges = value == "1";
       return value == "0" || value == "1";
     }},
    {"RINGATTN_TEST_LONG", "0 or 1", "the project's own tests also run their long variants",
     [](Environment&, std::string_view value) { return value == "0" || value == "1"; }},
    {"RINGATTN_TEST_SEED", "a whole number", "the project's own property tests replay this one case",
     [](Environment&, std::string_view value) {
       std::uint64_t seed = 0;
       const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), seed);
       return error == std::errc{} && end == value.data() + value.size();
     }},
};

Environment read_environment() {
  Environment result;
  for (const EnvironmentVariable& variable : kTable) {
    const auto value = environment_value(variable.name);
    if (value && !variable.set(result, *value)) {
      fail(ErrorCode::kUsage, fmt::format("{} is \"{}\"", variable.name, shown_value(variable.name, *value)),
           fmt::format("it takes {}", variable.accepts), "Unset it, or give it such a value.");
    }
  }
  return result;
}

}  // namespace

std::span<const EnvironmentVariable> environment_table() { return kTable; }

const Environment& environment() {
  static const Environment values = read_environment();
  return values;
}

std::string shown_value(std::string_view name, std::string_view value) {
  const bool secret = std::ranges::any_of(
      kTable, [&](const EnvironmentVariable& variable) { return variable.secret && variable.name == name; });
  return std::string(secret ? "(not shown)" : value);
}

std::vector<EnvironmentEntry> environment_entries(std::span<const std::string_view> prefixes) {
  std::vector<EnvironmentEntry> entries;
  for (char** at = environ; at != nullptr && *at != nullptr; ++at) {
    const std::string_view pair = *at;
    const std::size_t equals = pair.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = pair.substr(0, equals);
    if (std::any_of(prefixes.begin(), prefixes.end(), [&](std::string_view p) { return name.starts_with(p); })) {
      entries.push_back({std::string(name), shown_value(name, pair.substr(equals + 1))});
    }
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return entries;
}

std::optional<std::string> environment_value(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace ringattn
