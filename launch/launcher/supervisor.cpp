// SPDX-License-Identifier: Apache-2.0
#include "launch/launcher/supervisor.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "base/file_descriptor.hpp"
#include "launch/launcher/cleanup.hpp"
#include "launch/launcher/verdict.hpp"

namespace ringattn::launcher {

namespace {

using Clock = std::chrono::steady_clock;
using Moment = std::optional<Clock::time_point>;

// How long mpirun may take to end by itself, in seconds.
constexpr double kFailedSeconds = 4.0;  // after the first rank has left with a code that isn't 0
constexpr double kGoneSeconds = 10.0;   // after all ranks of this host are gone
constexpr double kToldSeconds = 10.0;   // after a signal
// How much longer than its own time limit a rank may take to end once the job is done on all ranks.
constexpr double kUnendedSeconds = 5.0;
// The time for what follows. With kFailedSeconds, and at most three seconds in end_processes(), it is below ten seconds
// in total: ranks report a failure within --timeout + 5 s, and a job ends within --timeout + 15 s whatever mpirun does.
constexpr double kPipeSeconds = 2.0;    // for processes that hold mpirun's stdout but are not the job's
constexpr double kRemoteSeconds = 4.0;  // in addition: to remove files of lost daemons on other hosts
constexpr int kTick = 250;              // milliseconds

bool has_passed(const Moment& since, double seconds) {
  return since && std::chrono::duration<double>(Clock::now() - *since).count() >= seconds;
}

void note_first(Moment& moment, bool happened) {
  if (happened && !moment) moment = Clock::now();
}

sigset_t watched_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) ::sigaddset(&signals, signal);
  return signals;
}

// Returns true until the process is reaped.
bool is_child(pid_t process) { return ::kill(process, 0) == 0; }

class Supervisor {
 public:
  // `front` reaches its end when the front process ends.
  Supervisor(const LaunchCommand& command, std::string folder, FileDescriptor front)
      : command_(command),
        folder_(std::move(folder)),
        mark_(fmt::format("{}={}", kOutcomesVariable, folder_)),
        front_(std::move(front)),
        listener_(bind_outcome_socket(folder_.c_str())) {
    const sigset_t signals = watched_signals();
    signals_ = FileDescriptor(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  }

  int run();

 private:
  struct Peer {
    FileDescriptor socket;
    pid_t process = 0;
    RankOutcome outcome;
    bool begun = false;
  };

  void start();
  // Waits for events, at most a tick, and handles them. Returns false if there were none.
  bool step(int milliseconds = kTick);
  void hear_signals();
  bool hear(Peer& peer);
  void pass_on(int signal);
  void copy_output(bool readable, bool writable);
  void check_limits();
  void end_late(Overdue why);
  void end_processes(bool now);
  void await_output();
  void await_removers(const std::vector<pid_t>& removers, Moment since);
  RankCounts counts() const;

  const LaunchCommand& command_;
  const std::string folder_;
  const std::string mark_;  // in the environment of each process of the job
  FileDescriptor front_, listener_, signals_;
  FileDescriptor output_;  // mpirun's stdout
  std::string unwritten_;  // printed by mpirun and not yet written to stdout
  std::string untaken_;    // why stdout accepts no more
  std::vector<Peer> peers_;
  pid_t mpirun_ = -1;
  std::optional<int> status_;  // as waitpid() gives it
  std::optional<OpenMpiFiles> files_;
  int signal_ = 0;
  // Processes that mpirun has ended but not reaped before it ended itself, so that this process became their parent.
  // mpirun does that when it is told to stop. It reaps ranks that end before that.
  std::vector<pid_t> stopped_;
  bool ending_ = false;  // this process is ending processes itself
  Overdue overdue_ = Overdue::kNo;
  int unended_rank_ = -1;
  Moment started_, announced_, failed_, gone_, told_, leaving_;
  int leaving_seconds_ = 0;
  bool begun_ = false;
};

void Supervisor::start() {
  if (!listener_.valid() || !signals_.valid()) {
    fail(ErrorCode::kUnsupported, "can't watch the ranks", std::strerror(errno), "Look at the limits (ulimit -a).");
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // what mpirun leaves becomes a child of this process, and is reaped
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    fail(ErrorCode::kUnsupported, "can't make a pipe", std::strerror(errno), "Raise the limit on files (ulimit -n).");
  }
  output_ = FileDescriptor(ends[0]);
  const FileDescriptor input(ends[1]);
  Words settings{mark_};
  for (const auto& [name, value] : command_.settings) settings.push_back(name + '=' + value);
  Words words = command_.words;
  if (!command_.slurm) {
    const Words more{"-x", kOutcomesVariable};
    words.insert(words.begin() + static_cast<std::ptrdiff_t>(command_.program), more.begin(), more.end());
  }
  mpirun_ = start_process(words, settings, input.get());
  if (mpirun_ < 0) {
    fail(ErrorCode::kUnsupported, fmt::format("{} can't be started", words[0]), std::strerror(errno),
         "See whether it can be run alone.");
  }
  files_.emplace(mpirun_);
  started_ = Clock::now();
  begun_ = command_.start_limit == 0;
}

bool Supervisor::step(int milliseconds) {
  std::vector<pollfd> files{{signals_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}, {front_.get(), 0, 0}};
  files.push_back({unwritten_.empty() ? output_.get() : -1, POLLIN, 0});
  files.push_back({unwritten_.empty() ? -1 : STDOUT_FILENO, POLLOUT, 0});
  for (const Peer& peer : peers_) files.push_back({peer.socket.get(), POLLIN, 0});  // −1 is passed over
  if (::poll(files.data(), files.size(), milliseconds) <= 0) return false;
  const std::size_t known = peers_.size();
  constexpr std::size_t kFirstPeer = 5;
  for (std::size_t i = 0; i < known; ++i) {
    if (files[kFirstPeer + i].revents == 0) continue;
    Peer& peer = peers_[i];
    if (!hear(peer)) {
      peer.socket = FileDescriptor();
      peer.outcome.alive = false;
    }
  }
  if (files[0].revents != 0) hear_signals();
  if (files[1].revents != 0) {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    ucred process{};
    socklen_t size = sizeof(process);
    if (socket.valid()) {
      ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &process, &size);
      peers_.push_back({std::move(socket), process.pid, {}, false});
    }
  }
  if (files[2].revents != 0) {
    front_ = FileDescriptor();
    pass_on(SIGTERM);
  }
  copy_output(files[3].revents != 0, files[4].revents != 0);
  return true;
}

void Supervisor::hear_signals() {
  signalfd_siginfo info;
  while (::read(signals_.get(), &info, sizeof(info)) == ssize_t{sizeof(info)}) {
    // If a whole service or Slurm job is stopped, this process gets the signal, too.
    const bool from_front = static_cast<pid_t>(info.ssi_pid) == ::getppid();
    if (info.ssi_signo != SIGCHLD && from_front) pass_on(static_cast<int>(info.ssi_signo));
  }
  int status = 0;
  for (pid_t child = 0; (child = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    if (child == mpirun_) {
      status_ = status;
    } else if (!ending_ && WIFSIGNALED(status) && (WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGKILL)) {
      stopped_.push_back(child);
    }
  }
}

// Returns false once the rank's process has ended.
bool Supervisor::hear(Peer& peer) {
  Outcome outcome;
  const ssize_t size = ::recv(peer.socket.get(), &outcome, sizeof(outcome), MSG_TRUNC);
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  if (size == ssize_t{sizeof(outcome)} && outcome.format == Outcome::kFormat) {
    peer.begun = true;
    peer.outcome.hear(outcome);
  }
  return size != 0;
}

// Forwards one signal to mpirun; a second one ends it at once. (On a second signal mpirun exits and leaves its ranks
// running.)
void Supervisor::pass_on(int signal) {
  note_first(told_, true);
  if (!status_) ::kill(signal_ == 0 ? mpirun_ : -mpirun_, signal_ == 0 ? signal : SIGKILL);
  if (signal_ == 0) signal_ = signal;
}

// Forwards mpirun's output at once. If stdout doesn't accept it, the job goes on, because its ranks can't be told.
void Supervisor::copy_output(bool readable, bool writable) {
  if (writable) {
    const ssize_t written = ::write(STDOUT_FILENO, unwritten_.data(), unwritten_.size());
    if (written >= 0) {
      unwritten_.erase(0, static_cast<std::size_t>(written));
    } else if (errno != EAGAIN && errno != EINTR) {
      untaken_ = std::strerror(errno);
      unwritten_.clear();
    }
  }
  if (readable) {
    char bytes[PIPE_BUF];  // as much as a ready pipe accepts without blocking
    const ssize_t size = ::read(output_.get(), bytes, sizeof(bytes));
    if (size > 0 && untaken_.empty()) unwritten_.assign(bytes, static_cast<std::size_t>(size));
    if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR)) output_ = FileDescriptor();
  }
}

RankCounts Supervisor::counts() const {
  std::vector<RankOutcome> ranks;
  auto unbegun = static_cast<int>(stopped_.size());
  for (const Peer& peer : peers_) {
    if (!peer.begun) continue;
    ranks.push_back(peer.outcome);
    if (std::ranges::count(stopped_, peer.process) > 0) {
      ranks.back().stopped = true;
      --unbegun;
    }
  }
  RankCounts counts = count_ranks(ranks);
  if (command_.local) {
    counts.expected = std::max(counts.expected, command_.ranks);
    counts.stopped_unbegun = unbegun;
  }
  return counts;
}

void Supervisor::end_late(Overdue why) {
  overdue_ = why;
  ::kill(-mpirun_, SIGKILL);
}

void Supervisor::check_limits() {
  if (status_ || overdue_ != Overdue::kNo) return;
  const RankCounts ranks = counts();
  if (ranks.started > 0) {
    begun_ = true;
    files_->note_job();
  }
  const int limit = command_.start_limit;
  if (!begun_ && has_passed(started_, announced_ ? limit : (limit + 9) / 10)) {
    if (!command_.local && has_connection(mpirun_)) {
      begun_ = true;  // a daemon on another host has connected; ranks that run only there can't be seen
    } else if (!announced_) {
      note_first(announced_, true);
      fmt::print(stderr, "ringattn-mpirun: no rank has begun yet. {} is ended {} s after its start (--start-limit).\n",
                 command_.words[0], limit);
    } else {
      return end_late(Overdue::kUnstarted);
    }
  }
  note_first(failed_, ranks.worst > 0);
  const bool gone = ranks.alive == 0 && ranks.started > 0 && ranks.started >= ranks.expected;
  note_first(gone_, gone);
  if (!gone) gone_.reset();
  for (const Peer& peer : peers_) {
    if (!peer.outcome.leaving_seconds) continue;
    note_first(leaving_, true);
    leaving_seconds_ = std::max(leaving_seconds_, *peer.outcome.leaving_seconds);
  }
  if (has_passed(failed_, kFailedSeconds) || has_passed(gone_, kGoneSeconds) || has_passed(told_, kToldSeconds)) {
    end_late(Overdue::kLate);
  } else if (ranks.alive > 0 && has_passed(leaving_, leaving_seconds_ + kUnendedSeconds)) {
    for (const Peer& peer : peers_) {
      if (peer.outcome.alive) unended_rank_ = peer.outcome.rank;
    }
    end_late(Overdue::kUnended);
  }
}

// Ends the processes of the job that still run on this host. They get one second (`now`: none) to end by themselves,
// two more after SIGTERM, then SIGKILL. A process that calls exec() has no environment for a moment, so the processes
// are gone only if a second look finds none either.
void Supervisor::end_processes(bool now) {
  const Clock::time_point begin = Clock::now() + std::chrono::seconds(now ? 0 : 1);
  constexpr std::chrono::seconds kTerm{2}, kKill{3};
  bool told = false;
  for (int looks = 0; looks < 2 && Clock::now() < begin + kKill;) {
    const std::vector<pid_t> processes = processes_with(mark_);
    looks = processes.empty() ? looks + 1 : 0;
    const bool kill = Clock::now() >= begin + kTerm;
    if (kill || (!told && Clock::now() >= begin)) {
      ending_ = true;
      for (const pid_t process : processes) ::kill(process, kill ? SIGKILL : SIGTERM);
      told = told || !processes.empty();
    }
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(processes.empty() ? kTick / 4 : kTick);
    while (Clock::now() < end && step(kTick / 4)) {
    }
  }
}

// Waits until all of mpirun's output is forwarded, however slow the reader is. The wait is bounded only if a process
// that isn't the job's holds the pipe, or after a signal to the launcher.
void Supervisor::await_output() {
  Moment since = Clock::now();
  while ((output_.valid() || !unwritten_.empty()) && !has_passed(since, kPipeSeconds)) {
    if (!unwritten_.empty() && signal_ == 0) since = Clock::now();
    step();
  }
}

void Supervisor::await_removers(const std::vector<pid_t>& removers, Moment since) {
  while (std::ranges::any_of(removers, is_child) && !has_passed(since, kRemoteSeconds)) step(kTick / 4);
  for (const pid_t remover : removers) {
    if (is_child(remover)) ::kill(-remover, SIGKILL);
  }
}

int Supervisor::run() {
  start();
  while (!status_) {
    step();
    check_limits();
  }
  JobEnd end;
  end.launcher = command_.words[0];
  end.killed = WIFSIGNALED(*status_) && overdue_ == Overdue::kNo && signal_ == 0;
  end.code = WIFSIGNALED(*status_) ? 128 + WTERMSIG(*status_) : WEXITSTATUS(*status_);
  const Moment ended = Clock::now();
  std::vector<pid_t> removers;
  if (overdue_ != Overdue::kNo || end.code == kLostDaemon || end.killed) {
    files_->note_job();
    removers = files_->begin_remote_removal(command_);
  }
  end_processes(overdue_ != Overdue::kNo || !front_.valid());
  await_output();
  output_ = FileDescriptor();
  unwritten_.clear();
  await_removers(removers, ended);
  while (step(0)) {  // the last words of the ranks
  }
  files_->remove();
  end.local = command_.local;
  end.start_limit = command_.start_limit;
  end.signal = signal_;
  end.overdue = overdue_;
  end.unended_rank = unended_rank_;
  end.ranks = counts();
  end.untaken = untaken_;
  const Verdict verdict = judge(end);
  if (!verdict.note.empty()) fmt::print(stderr, "ringattn-mpirun: {}\n", verdict.note);
  if (!verdict.message.empty()) print_launch_error(verdict.message);
  return verdict.code;
}

// Passes signals on to the supervisor until it has ended; returns its status, as waitpid() gives it.
int await_supervisor(pid_t supervisor) {
  const sigset_t signals = watched_signals();
  while (true) {
    int status = 0;
    if (::waitpid(supervisor, &status, WNOHANG) == supervisor) return status;
    const int signal = ::sigwaitinfo(&signals, nullptr);
    if (signal > 0 && signal != SIGCHLD) ::kill(supervisor, signal);
  }
}

}  // namespace

void print_launch_error(const std::string& message) { fmt::print(stderr, "ringattn-mpirun: error: {}\n", message); }

int supervise(const LaunchCommand& command) {
  std::string folder = temporary_folder() + "/ringattn-mpirun.XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) {
    fail(ErrorCode::kFile, fmt::format("{} takes no temporary folder", temporary_folder()),
         "TMPDIR names it, or it is the default", "Set TMPDIR to a folder that can be written.");
  }
  const auto remove_folder = [&] {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  };
  const sigset_t signals = watched_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  int ends[2];
  const pid_t supervisor = ::pipe2(ends, O_CLOEXEC) == 0 ? ::fork() : -1;
  if (supervisor < 0) {
    const int error = errno;
    remove_folder();
    fail(ErrorCode::kUnsupported, "can't start a process", std::strerror(error), "Raise its limit (ulimit -u).");
  }
  if (supervisor == 0) {
    ::close(ends[1]);
    ::setpgid(0, 0);  // out of reach of the terminal's signals, which the front process passes on
    ::signal(SIGPIPE, SIG_IGN);
    int code = static_cast<int>(ErrorCode::kInternal);
    try {
      code = Supervisor(command, folder, FileDescriptor(ends[0])).run();
    } catch (const Error& error) {
      print_launch_error(error.what());
      code = static_cast<int>(error.code());
    }
    remove_folder();
    std::_Exit(code);
  }
  ::close(ends[0]);
  const int status = await_supervisor(supervisor);
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  // The supervisor was killed, and the job has lost its parent. One of these processes is mpirun.
  const std::vector<pid_t> processes = processes_with(fmt::format("{}={}", kOutcomesVariable, folder));
  for (const pid_t process : processes) ::kill(process, SIGKILL);
  for (const pid_t process : processes) OpenMpiFiles(process).remove();
  remove_folder();
  return 128 + WTERMSIG(status);
}

}  // namespace ringattn::launcher
