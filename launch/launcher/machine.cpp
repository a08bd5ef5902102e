// SPDX-License-Identifier: Apache-2.0
#include "launch/launcher/machine.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string_view>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "base/file_descriptor.hpp"

namespace ringattn::launcher {

namespace {

constexpr std::chrono::seconds kToolSeconds{10};
constexpr std::size_t kMostBytes = 1'000'000;
constexpr std::string_view kBlanks = " \t\n\v\f\r";

Words lines_of(const std::string& text) {
  Words lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

Words lscpu(const std::string& columns) {
  Words lines = lines_of(output_of({"lscpu", "-p=" + columns}).value_or(""));
  std::erase_if(lines, [](const std::string& line) { return line.empty() || line[0] == '#'; });
  return lines;
}

// The device files of GPUs, because containers may have the driver but not its tools.
Words gpu_files() {
  Words names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("nvidia") && name.size() > 6 && name[6] >= '0' && name[6] <= '9') names.push_back(name);
  }
  return names;
}

// One line for each GPU of the host, whatever CUDA_VISIBLE_DEVICES says.
Words list_gpus() {
  if (find_on_path("nvidia-smi").empty()) return gpu_files();
  const auto listing = output_of({"nvidia-smi", "-L"});
  if (!listing) {
    std::fputs("ringattn-mpirun: nvidia-smi did not answer within 10 s; GPUs are counted in /dev instead.\n", stderr);
    return gpu_files();
  }
  Words gpus = lines_of(*listing);
  std::erase_if(gpus, [](const std::string& line) { return !line.starts_with("GPU "); });
  return gpus;
}

std::string without_blanks(std::string text) {
  std::erase_if(text, [](char c) { return kBlanks.find(c) != std::string_view::npos; });
  return text;
}

// A number of at most six digits, leading zeros not counted.
std::optional<int> padded_number(std::string_view text) {
  const std::size_t first = std::min(text.find_first_not_of('0'), text.size() - 1);
  return text.empty() ? std::nullopt : whole_number(text.substr(first));
}

// The number of slots that a line of a hostfile gives: "slots=8", "slots = 8", not "max_slots=8".
std::optional<int> slots_of(const std::string& line) {
  constexpr std::string_view kKey = "slots";
  for (std::size_t at = line.find(kKey); at != std::string::npos; at = line.find(kKey, at + 1)) {
    if (at == 0 || kBlanks.find(line[at - 1]) == std::string_view::npos) continue;
    const std::size_t equals = line.find_first_not_of(kBlanks, at + kKey.size());
    if (equals == std::string::npos || line[equals] != '=') continue;
    const std::size_t begin = std::min(line.find_first_not_of(kBlanks, equals + 1), line.size());
    const std::size_t end = std::min(line.find_first_of(kBlanks, begin), line.size());
    if (begin < end) {
      if (const auto slots = padded_number(std::string_view(line).substr(begin, end - begin))) return slots;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string find_on_path(const std::string& name) {
  const std::string path = environment_value("PATH").value_or("/usr/bin:/bin");
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = path.substr(begin, end - begin);
    const std::string file = (folder.empty() ? "." : folder) + "/" + name;
    std::error_code error;
    if (::access(file.c_str(), X_OK) == 0 && !std::filesystem::is_directory(file, error)) return file;
    begin = end + 1;
  }
  return {};
}

std::optional<std::string> output_of(const Words& command) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return "";
  const FileDescriptor from(ends[0]);
  FileDescriptor to(ends[1]);
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, to.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, words[0], &actions, nullptr, words.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  to = FileDescriptor();
  if (error != 0) return "";
  const auto end = std::chrono::steady_clock::now() + kToolSeconds;
  std::string text;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    pollfd ready{from.get(), POLLIN, 0};
    const int count = left.count() > 0 ? ::poll(&ready, 1, static_cast<int>(left.count())) : 0;
    char bytes[4096];
    const ssize_t read = count > 0 ? uninterrupted([&] { return ::read(from.get(), bytes, sizeof(bytes)); }) : 0;
    if (count > 0 && read <= 0) break;
    text.append(bytes, static_cast<std::size_t>(read));
    if (count == 0 || text.size() > kMostBytes) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, WNOHANG);
      return std::nullopt;
    }
  }
  uninterrupted([&] { return ::waitpid(child, nullptr, 0); });
  return text;
}

int count_gpus() {
  const Words gpus = list_gpus();
  const auto visible = environment_value("CUDA_VISIBLE_DEVICES");
  if (!visible) return static_cast<int>(gpus.size());
  int count = 0;
  // CUDA reads the list up to the first entry that is not a GPU.
  for (std::size_t begin = 0; begin < visible->size(); ++count) {
    const std::size_t end = std::min(visible->find(',', begin), visible->size());
    const std::string entry = without_blanks(visible->substr(begin, end - begin));
    begin = end + 1;
    const auto index = padded_number(entry);
    const auto lists = [&](const std::string& gpu) { return gpu.find("UUID: " + entry) != std::string::npos; };
    const bool is_gpu = index                       ? *index < static_cast<int>(gpus.size())
                        : entry.starts_with("MIG-") ? !gpus.empty()
                                                    : entry.starts_with("GPU-") && std::ranges::any_of(gpus, lists);
    if (!is_gpu) break;
  }
  return count;
}

int count_processors() {
  const auto count = whole_number(without_blanks(output_of({"nproc"}).value_or("")));
  return std::max(count.value_or(1), 1);
}

int count_cores() {
  const Words lines = lscpu("CORE,SOCKET");
  const auto cores = static_cast<int>(std::set<std::string>(lines.begin(), lines.end()).size());
  const int allowed = count_processors();
  return cores > 0 ? std::min(cores, allowed) : allowed;
}

bool is_root() { return without_blanks(output_of({"id", "-u"}).value_or("")) == "0"; }

bool in_container() {
  const auto is_set = [](const char* name) { return !environment_value(name).value_or("").empty(); };
  return ::access("/.dockerenv", F_OK) == 0 || ::access("/run/.containerenv", F_OK) == 0 || is_set("container") ||
         is_set("KUBERNETES_SERVICE_HOST");
}

std::optional<int> ranks_of_numa_node(int ranks, int gpus) {
  const Words processors = lscpu("NODE");
  std::set<int> nodes;
  for (const std::string& line : processors) {
    if (const auto node = whole_number(line)) nodes.insert(*node);
  }
  const auto count = static_cast<int>(nodes.size());
  if (count < 2 || ranks <= 2 || ranks % count != 0) return std::nullopt;
  if (static_cast<int>(processors.size()) != count_processors()) return std::nullopt;  // a part of the machine
  const int each = ranks / count;
  if (gpus == 0) return each;
  if (environment_value("CUDA_VISIBLE_DEVICES") || ranks != gpus) return std::nullopt;
  const Words buses =
      lines_of(output_of({"nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader"}).value_or(""));
  if (static_cast<int>(buses.size()) != ranks) return std::nullopt;
  for (int rank = 0; rank < ranks; ++rank) {
    std::string bus = buses[static_cast<std::size_t>(rank)];
    std::ranges::transform(bus, bus.begin(),
                           [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
    constexpr std::size_t kShort = std::string_view("0000:1b:00.0").size();  // nvidia-smi writes a longer domain
    if (bus.size() > kShort) bus.erase(0, bus.size() - kShort);
    const std::string node = output_of({"cat", "/sys/bus/pci/devices/" + bus + "/numa_node"}).value_or("");
    if (whole_number(without_blanks(node)) != *std::next(nodes.begin(), rank / each)) return std::nullopt;
  }
  return each;
}

HostSlots read_hostfile(const std::string& path) {
  constexpr std::uintmax_t kMostFileBytes = 999'999;
  constexpr std::size_t kMostLines = 10'000;
  constexpr const char* kExample = "See launch/hostfile.example.";
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  const auto text = error || size > kMostFileBytes ? std::nullopt : output_of({"cat", "--", path});
  const Words lines = text ? lines_of(*text) : Words();
  if (!text || lines.size() > kMostLines) {
    fail(ErrorCode::kFile, fmt::format("{} is not a hostfile", path),
         "it has more than 999999 bytes or 10000 lines, or can't be read within 10 s", kExample);
  }
  HostSlots found;
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string line = lines[i].substr(0, lines[i].find('#'));
    const auto refuse = [&](const char* problem, const char* why, const char* suggestion) {
      fail(ErrorCode::kFile, fmt::format("{}, line {}, {}", path, i + 1, problem), why, suggestion);
    };
    const std::size_t begin = line.find_first_not_of(kBlanks);
    if (begin == std::string::npos) continue;
    if (line.find('\r') != std::string::npos) {
      refuse("ends with a carriage return", "mpirun doesn't read it", "Write lines that end as on Unix.");
    }
    const std::string host = line.substr(begin, std::min(line.find_first_of(kBlanks, begin), line.size()) - begin);
    if (!is_host_name(host)) {
      refuse("names no host", "it begins with a character that no host's name has", kExample);
    }
    const auto slots = slots_of(line);
    if (!slots) refuse("has no slots", "mpirun would start a rank for every core", "Write slots=8 for eight GPUs.");
    sum += *slots;
    found.hosts.push_back(host);
  }
  constexpr std::int64_t kMostSlots = 999'999;
  if (sum == 0 || sum > kMostSlots) {
    fail(ErrorCode::kFile, fmt::format("{} has no slots", path), "no line names a host, or they are more than 999999",
         kExample);
  }
  found.slots = static_cast<int>(sum);
  return found;
}

}  // namespace ringattn::launcher
