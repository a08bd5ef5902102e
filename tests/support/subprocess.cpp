// SPDX-License-Identifier: Apache-2.0
#include "tests/support/subprocess.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string_view>

#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {

Finished run_program(const std::vector<std::string>& words,
                     const std::vector<std::pair<std::string, std::string>>& variables) {
  const TemporaryFolder folder;  // files, not pipes: nothing to drain, whatever the program prints
  const std::string out = folder.file("out");
  const std::string err = folder.file("err");

  std::vector<std::string> environment;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view entry(*at);
    const auto replaces = [&](const auto& variable) { return entry.starts_with(variable.first + "="); };
    if (!entry.starts_with("RINGATTN_") && std::ranges::none_of(variables, replaces)) environment.emplace_back(entry);
  }
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  std::vector<char*> environment_pointers;
  for (std::string& entry : environment) environment_pointers.push_back(entry.data());
  environment_pointers.push_back(nullptr);
  std::vector<std::string> arguments = words;
  std::vector<char*> argument_pointers;
  for (std::string& word : arguments) argument_pointers.push_back(word.data());
  argument_pointers.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT, 0600);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, words.front().c_str(), &actions, nullptr, argument_pointers.data(),
                                   environment_pointers.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("can't start " + words.front());
  int status = 0;
  rusage usage{};
  while (::wait4(child, &status, 0, &usage) < 0 && errno == EINTR) {
  }
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_whole(out), read_whole(err),
          usage.ru_maxrss * 1024, seconds(usage.ru_utime) + seconds(usage.ru_stime)};
}

}  // namespace ringattn::testing
