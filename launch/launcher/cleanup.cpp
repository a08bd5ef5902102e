// SPDX-License-Identifier: Apache-2.0
#include "launch/launcher/cleanup.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fnmatch.h>
#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <sstream>
#include <string_view>

#include "base/environment.hpp"

namespace ringattn::launcher {

namespace {

namespace fs = std::filesystem;

// Calls `use` for each entry of a folder whose name matches a shell pattern.
void for_each_match(const fs::path& folder, const std::string& pattern,
                    const std::function<void(const fs::path&)>& use) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (::fnmatch(pattern.c_str(), at->path().filename().c_str(), 0) == 0) found.push_back(at->path());
  }
  for (const fs::path& path : found) use(path);
}

void for_each_session(const std::function<void(const fs::path&)>& use) {
  for_each_match(temporary_folder(), fmt::format("ompi.*.{}", ::getuid()), use);
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

std::string temporary_folder() {
  const std::string folder = environment_value("TMPDIR").value_or("");
  return folder.empty() ? "/tmp" : folder;
}

pid_t start_process(const Words& words, const Words& settings, int output) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  std::vector<char*> environment;
  for (char** at = environ; *at != nullptr; ++at) {
    if (!std::string_view(*at).starts_with("RINGATTN_PROGRAM=")) environment.push_back(*at);
  }
  for (const std::string& setting : settings) environment.push_back(const_cast<char*>(setting.c_str()));
  environment.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  if (output >= 0) {
    ::posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  } else {
    ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  }
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  pid_t child = -1;
  const int error = ::posix_spawnp(&child, arguments[0], &actions, &attributes, arguments.data(), environment.data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  errno = error;
  return error == 0 ? child : -1;
}

std::vector<pid_t> processes_with(const std::string& setting) {
  std::vector<pid_t> found;
  for_each_match("/proc", "[0-9]*", [&](const fs::path& folder) {
    const std::string variables = '\0' + read_file(folder / "environ");
    if (variables.find('\0' + setting + '\0') == std::string::npos) return;
    found.push_back(std::atoi(folder.filename().c_str()));
  });
  return found;
}

bool has_connection(pid_t process) {
  const fs::path folder = fmt::format("/proc/{}", process);
  std::set<std::string> sockets;  // their inodes
  for_each_match(folder / "fd", "*", [&](const fs::path& file) {
    constexpr std::string_view kSocket = "socket:[";
    std::error_code error;
    const std::string target = fs::read_symlink(file, error);
    if (target.starts_with(kSocket)) sockets.insert(target.substr(kSocket.size(), target.size() - kSocket.size() - 1));
  });
  for (const char* table : {"net/tcp", "net/tcp6"}) {
    std::istringstream lines(read_file(folder / table));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      const std::vector<std::string> columns(std::istream_iterator<std::string>(words), {});
      if (columns.size() > 9 && columns[3] == "01" && sockets.contains(columns[9])) return true;  // established
    }
  }
  return false;
}

void OpenMpiFiles::note_job() {
  if (job_) return;
  for_each_session([&](const fs::path& session) {
    const std::string text = read_file(session / fmt::format("pid.{}", mpirun_) / "contact.txt");
    std::uint32_t number = 0;
    const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
    if (read.ec == std::errc() && read.ptr != text.data() + text.size() && *read.ptr == '.') {
      job_ = static_cast<int>(number >> 16);
    }
  });
}

void OpenMpiFiles::remove() {
  note_job();
  std::error_code ignored;
  for_each_session([&](const fs::path& session) {
    fs::remove_all(session / fmt::format("pid.{}", mpirun_), ignored);
    if (job_) fs::remove_all(session / fmt::format("jf.{}", *job_), ignored);
    ::rmdir(session.c_str());
  });
  if (!job_) return;
  for_each_match("/dev/shm", fmt::format("vader_segment.*.{}.{:x}????.*", ::getuid(), *job_),
                 [&](const fs::path& segment) { fs::remove(segment, ignored); });
}

std::vector<pid_t> OpenMpiFiles::begin_remote_removal(const LaunchCommand& command) const {
  std::vector<pid_t> removers;
  if (!job_) return removers;
  const std::string script = fmt::format(
      "pgrep -f \"[e]ss_base_jobid {} \" >/dev/null && exit\n"
      "for base in \"${{TMPDIR:-/tmp}}\"/ompi.*.{}; do rm -rf \"$base/jf.{}\"; rmdir \"$base\"; done\n"
      "rm -f /dev/shm/vader_segment.*.{}.{:x}????.*",
      static_cast<std::int64_t>(*job_) << 16, ::getuid(), *job_, ::getuid(), *job_);
  Words reach;
  std::istringstream agent(environment_value("OMPI_MCA_plm_rsh_agent").value_or(""));  // an agent may have options
  reach.assign(std::istream_iterator<std::string>(agent), {});
  const bool slurm = reach.empty() && !environment_value("SLURM_JOB_ID").value_or("").empty();
  if (slurm) {
    reach = {"srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist"};
  } else if (reach.empty()) {
    reach = {"ssh"};
  }
  for (const std::string& host : command.hosts) {
    Words words = reach;
    words.push_back(host);
    if (slurm) {
      words.insert(words.end(), {"sh", "-c", script});
    } else {
      words.push_back("sh -c '" + script + "'");
    }
    if (const pid_t remover = start_process(words, {}, -1); remover > 0) removers.push_back(remover);
  }
  return removers;
}

}  // namespace ringattn::launcher
