// SPDX-License-Identifier: Apache-2.0
#include "launch/python_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

namespace ringattn {

namespace {

constexpr std::size_t kLongestAnswer = std::size_t{64} << 10;

// Its stdin and stdout are `socket`. Returns 0 or an errno.
int start_python(const std::vector<std::string>& words, int socket, pid_t* child) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, socket, STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, socket, STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  const int error = ::posix_spawnp(child, arguments[0], &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  return error;
}

}  // namespace

PythonProcess::PythonProcess(std::string_view script, const std::vector<std::string>& arguments) {
  std::array<int, 2> ends{-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    why_ = fmt::format("no socket for python3: {}", std::strerror(errno));
    return;
  }
  socket_ = FileDescriptor(ends[0]);
  const FileDescriptor theirs(ends[1]);
  // Unlike `python3 -c`, does not search for modules in the current directory.
  std::vector<std::string> words{"python3", "-c",
                                 fmt::format("import sys; sys.path[:] = filter(None, sys.path)\n{}", script)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  if (const int error = start_python(words, theirs.get(), &child_); error != 0) {
    child_ = -1;
    why_ = error == ENOENT ? "there is no python3 on PATH"
                           : fmt::format("python3 can't be started: {}", std::strerror(error));
  }
}

PythonProcess::~PythonProcess() { end({}); }

bool PythonProcess::write_line(std::string_view line) {
  if (child_ < 0) return false;
  std::string text = fmt::format("{}\n", line);
  for (std::string_view left = text; !left.empty();) {
    // A process that has ended must not end this one by SIGPIPE.
    const ssize_t sent = uninterrupted([&] { return ::send(socket_.get(), left.data(), left.size(), MSG_NOSIGNAL); });
    if (sent <= 0) return false;
    left.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

std::optional<std::string> PythonProcess::read_line(const Deadline& deadline) {
  while (child_ >= 0) {
    if (const std::size_t newline = read_.find('\n'); newline != std::string::npos) {
      std::string line = read_.substr(0, newline);
      read_.erase(0, newline + 1);
      return line;
    }
    if (read_.size() > kLongestAnswer) return end("python3 printed no line");
    const int wait = static_cast<int>(std::clamp(-deadline.overdue() * 1e3, 0.0, 1e6));
    pollfd ready{socket_.get(), POLLIN, 0};
    if (::poll(&ready, 1, wait) < 0 && errno != EINTR) return end(std::strerror(errno));
    // Checked even if there is more to read, because a process may print without end.
    if (deadline.expired()) return end(fmt::format("python3 took more than {:.0f} s", deadline.seconds()));
    if (ready.revents == 0) continue;
    std::array<char, 4096> bytes{};
    const ssize_t size = uninterrupted([&] { return ::recv(socket_.get(), bytes.data(), bytes.size(), 0); });
    if (size <= 0) return end("python3 has ended");
    read_.append(bytes.data(), static_cast<std::size_t>(size));
  }
  return std::nullopt;
}

std::optional<std::string> PythonProcess::end(std::string why) {
  if (child_ >= 0) {
    ::kill(child_, SIGKILL);
    uninterrupted([this] { return ::waitpid(child_, nullptr, 0); });
    child_ = -1;
    why_ = std::move(why);
  }
  return std::nullopt;
}

}  // namespace ringattn
