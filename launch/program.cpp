// SPDX-License-Identifier: Apache-2.0
#include "launch/program.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "base/outcome.hpp"
#include "comm/failure.hpp"
#include "comm/launcher.hpp"
#include "comm/numa_binding.hpp"
#include "comm/timeouts.hpp"
#include "comm/world.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/common/simd_target.hpp"
#include "launch/collect_env.hpp"
#include "launch/commands.hpp"
#include "launch/help.hpp"
#include "launch/launcher/launcher.hpp"
#include "launch/message_text.hpp"
#include "launch/model_layer.hpp"
#include "launch/op_flags.hpp"
#include "launch/open_job.hpp"
#include "launch/outputs.hpp"
#include "launch/report.hpp"
#include "launch/report_file.hpp"
#include "launch/screen.hpp"

namespace ringattn {

namespace {

const CommandRow& find_command(const std::string& name) {
  std::vector<std::string_view> names{kLaunchCommand, kCollectEnvCommand};
  for (const CommandRow& command : command_table()) {
    if (command.name == name) return command;
    names.push_back(command.name);
  }
  if (name.starts_with("-")) {
    fail(ErrorCode::kUsage, fmt::format("{} comes before a subcommand", name),
         fmt::format("the first argument is a subcommand: {}", command_names(kAllCommands | kLaunch | kCollectEnv)),
         "See `ringattn --help`.");
  }
  const std::string nearest = nearest_name(name, names.data(), names.size());
  fail(ErrorCode::kUsage, fmt::format("unknown subcommand {}", name.empty() ? "\"\"" : name),
       fmt::format("there are {}", command_names(kAllCommands | kLaunch | kCollectEnv)),
       nearest.empty() ? "See `ringattn --help`." : fmt::format("Did you mean {}?", nearest));
}

// Makes a write beyond a file size limit return an error instead of ending the process, and prevents files that are
// opened later from taking the descriptor of a closed standard stream.
void prepare_process() {
#if defined(__GLIBC__)
  // Large blocks are returned to the system when they are freed. By default glibc raises the size from which blocks are
  // returned with each of them that is freed, so every thread would keep the memory that it once needed.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
  std::signal(SIGXFSZ, SIG_IGN);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // A closed stdout is replaced by a stream that can't be written to.
    if (::fcntl(fd, F_GETFD) == -1) static_cast<void>(::open("/dev/null", fd == STDERR_FILENO ? O_WRONLY : O_RDONLY));
  }
}

// The path of the report, as far as it is known without parsing the arguments: the value of the last --json, or else of
// its environment variable.
std::string report_asked_for(const std::vector<std::string>& arguments) {
  constexpr std::string_view kFlag = "--json";
  for (std::size_t i = arguments.size(); i-- > 1;) {
    const std::string_view argument = arguments[i];
    if (argument.starts_with("--json=")) return std::string(argument.substr(kFlag.size() + 1));
    if (argument != kFlag || i + 1 == arguments.size()) continue;
    const std::string& value = arguments[i + 1];
    if (value == "-" || !value.starts_with("-")) return value;  // otherwise it is another flag
  }
  return environment_value(environment_variable("json")).value_or("");
}

// The parsed arguments.
struct Request {
  const CommandRow* command = nullptr;
  Invocation invocation;
  std::string text;            // print only this text and exit
  std::optional<Error> error;  // an error in the arguments
};

Request read_arguments(const std::vector<std::string>& arguments) {
  Request request;
  request.invocation.arguments = arguments;
  // Reports name the program without its path on this machine.
  if (!arguments.empty()) {
    request.invocation.arguments[0] = std::filesystem::path(arguments[0]).filename().string();
  }
  request.invocation.first_process = prints_for_launcher();
  try {
    if (arguments.size() < 2) {
      fail(ErrorCode::kUsage, "no subcommand",
           fmt::format("there are {}", command_names(kAllCommands | kLaunch | kCollectEnv)), "See `ringattn --help`.");
    }
    const std::string& first = arguments[1];
    if (first == "help" && arguments.size() > 2 && arguments[2] == kLaunchCommand) {
      request.text = launcher::launch_help();
    } else if (first == "help" && arguments.size() > 2 && arguments[2] == kCollectEnvCommand) {
      request.text = collect_env_help();
    } else if (first == kCollectEnvCommand) {  // --help is handled here; without it this is not a request
      request.text = collect_env_help();
    } else if (first == "help" && arguments.size() > 2) {
      request.text = command_help(find_command(arguments[2]));
    } else if (first == "--help" || first == "-h" || first == "help") {
      request.text = program_help();
    } else if (first == "--version") {
      request.text = version_line();
    } else {
      // Set early, so that a command line or configuration that can't be read is reported.
      request.invocation.config.options.json = report_asked_for(arguments);
      request.command = &find_command(first);
      const CommandLine line =
          split_command_line(request.command->bit, request.command->name, {arguments.begin() + 2, arguments.end()});
      if (line.help) {
        if (line.flags.empty()) {
          request.text = command_help(*request.command);
        } else {
          Config config = load_config(request.command->bit, line.flags);
          fill_backward_op(config);
          request.text = command_help(*request.command, &op_entry(config.options.op));
        }
        return request;
      }
      request.invocation.config = load_config(request.command->bit, line.flags);
      JobOptions& options = request.invocation.config.options;
      try {  // before any file is opened, because errors of opening are reported
        check_distinct_files(options);
      } catch (const Error&) {
        options.json.clear();  // writing the report of this failure might overwrite that file
        throw;
      }
      set_simd_target(options.simd_target);
      fill_from_model(request.invocation.config);
      fill_backward_op(request.invocation.config);
      if (request.command->bit == kBench) fill_bench_op(request.invocation.config);
      if (options.quiet && options.verbose) {
        const Config& config = request.invocation.config;
        fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin("quiet"), config.origin("verbose")),
             "one says less, the other more", "Leave one of them out.");
      }
      if (options.print_config) {
        const Config& config = request.invocation.config;
        const bool of_file = config.given("input");
        const InputShape shape = of_file ? input_shape(config) : InputShape();
        request.text = print_config(config, of_file ? &shape : nullptr);
      }
    }
  } catch (const Error& error) {
    request.error = error;
  }
  return request;
}

// Ranks that were started on different hosts may have read different configurations, or been given another subcommand.
void agree_on_configuration(std::string_view command, const Config& config, Bootstrap& world) {
  const double pace = environment().pace;
  const std::string mine = fmt::format("`ringattn {}`\nRINGATTN_PACE is {}\n{}", command,
                                       pace > 0.0 ? fmt::format("{}", pace) : "not set", print_config(config));
  const auto gather = [&](const std::string& bytes) {
    return world.all_gather(bytes, Timeouts(config.options.timeout).for_peer());
  };
  // Gathers hashes first: with many ranks, gathering all texts would give each rank as many texts.
  const std::vector<std::string> marks = gather(fmt::format("{:x}", std::hash<std::string>()(mine)));
  const auto other = std::ranges::find_if(marks, [&](const std::string& mark) { return mark != marks.front(); });
  if (other == marks.end()) return;
  const auto rank = static_cast<int>(other - marks.begin());
  const std::vector<std::string> texts = gather(world.rank() == 0 || world.rank() == rank ? mine : std::string());
  throw AgreedError(Error(ErrorCode::kUsage, fmt::format("rank {} and rank 0 have different configurations", rank),
                          config_difference(texts[static_cast<std::size_t>(rank)], texts.front()),
                          "Give all ranks the same flags, environment and config file."));
}

// The kind of memory that the chosen kernel works in.
WantedMemory wanted_memory(const JobOptions& options) {
  std::string_view backend = options.backend;
  for (const OpKernel& kernel : all_kernels()) {
    if (kernel.row->name == options.kernel) backend = kernel.row->backend;
  }
  if (backend == "cpu") return WantedMemory::kHost;
  return backend == "cuda" ? WantedMemory::kDevice : WantedMemory::kAny;
}

// Runs the command in its world. Converts other exceptions to an Error.
int run_command(const CommandRow& command, Invocation& invocation, const std::function<void(const Error&)>& print_error,
                const std::function<void(const Error&)>& report) {
  const JobOptions& options = invocation.config.options;
  if (!command.needs_world(invocation.config)) return invocation.first_process ? command.main(invocation, nullptr) : 0;
  std::atomic<bool> begun{false};  // the command itself has begun, which reports its own failures
  WorldRequest request;
  request.transport = options.transport;
  request.ranks = command.ranks(invocation.config);
  request.memory = wanted_memory(options);
  request.pace = environment().pace;
  request.timeout = options.timeout;
  request.compare = [&](Bootstrap& world) { agree_on_configuration(command.name, invocation.config, world); };
  request.warn = [&](const MessageTemplate& warning) { print_warning_line(program_text(warning), options.color); };
  request.chosen = [&](std::string_view, const MessageTemplate& reason) {
    invocation.transport_reason = program_text(reason);
  };
  return run_world(
      request,
      [&](Transport& world) {
        // Called before the rank touches memory or starts threads, which inherit its processors.
        if (options.bind_to_numa_node && world.memory() == MemoryKind::kHost) {
          const std::string why = bind_rank_to_numa_node(Collective(world, Timeouts(options.timeout)));
          if (!why.empty()) {
            print_warning_line(fmt::format("rank {} can't be bound to a NUMA node ({}). Allow the system call "
                                           "sched_setaffinity, or use --numa-binding none.",
                                           world.rank(), why),
                               options.color);
          }
        }
        begun = true;
        try {
          return command.main(invocation, &world);
        } catch (const Error&) {
          throw;
        } catch (...) {
          throw as_error(std::current_exception());
        }
      },
      [&](const Error& error) {
        print_error(error);
        if (!begun) report(error);
      });
}

// A library may end the process with exit(1), the code of a wrong result: OpenMP does so if it can't start threads.
// While this object lives, such an exit becomes code 4, and `tell` is called with the error. There can be one such
// object at a time.
class LibraryExitGuard {
 public:
  explicit LibraryExitGuard(std::function<void(const Error&)> tell) {
    tell_ = std::move(tell);
    static const int registered = std::atexit(at_exit);
    watched_ = registered == 0 ? ::getpid() : 0;
  }
  ~LibraryExitGuard() { stop(); }
  LibraryExitGuard(const LibraryExitGuard&) = delete;
  LibraryExitGuard& operator=(const LibraryExitGuard&) = delete;

  // From here on the program exits by itself, with its own code.
  static void stop() noexcept { watched_ = 0; }

 private:
  static void at_exit() {
    if (watched_.exchange(0) != ::getpid()) return;  // a process that a library has forked may exit with any code
    const Error error(ErrorCode::kUnsupported, "a library ended the program",
                      "Open MPI or OpenMP; its own message is above",
                      "Check that TMPDIR names a folder that can be written to, and the limits on processes and memory "
                      "(ulimit -a).");
    tell_(error);
    end_process(static_cast<int>(error.code()));
  }

  static inline std::atomic<pid_t> watched_{0};
  // Constructed before at_exit() is registered, so exit() destroys it afterwards.
  static inline std::function<void(const Error&)> tell_;
};

// Prints how a model's config without model_type, or without values that the op reads, is interpreted.
void note_assumed_model(const JobOptions& options) {
  if (!options.model_assumed.empty()) {
    print_note_line(
        fmt::format("model config: {} has no model_type: read {}", options.model_config, options.model_assumed));
  }
  if (!options.model_note.empty()) print_note_line(fmt::format("model config: {}", options.model_note));
}

int execute(Request& request) {
  Invocation& invocation = request.invocation;
  const JobOptions& options = invocation.config.options;
  const std::string_view command = request.command == nullptr ? std::string_view() : request.command->name;
  ReportFile report_file(options);
  invocation.report_file = &report_file;
  const auto print_error = [&](const Error& error) {
    LibraryExitGuard::stop();
    print_error_line(program_text(error, invocation.config), options.color);
  };
  const auto report = [&](const Error& error) {
    if (invocation.first_process) report_failure(invocation, command, error);
  };
  const LibraryExitGuard watch([&](const Error& error) {
    if (invocation.first_process) print_error(error);
    report(error);
  });
  Error failure(ErrorCode::kInternal, "nothing failed");
  try {
    if (request.error) throw Error(*request.error);
    if (invocation.first_process && report_file.wanted()) {
      report_file.begin(unfinished_report_text(invocation, command));
    }
    return run_command(*request.command, invocation, print_error, report);
  } catch (...) {
    failure = as_error(std::current_exception());
  }
  report(failure);
  if (!request.error && !request.command->needs_world(invocation.config)) {  // the other ranks have started nothing
    print_error(failure);
    return static_cast<int>(failure.code());
  }
  return end_without_world(failure, print_error);
}

bool asks_for_help(const std::vector<std::string>& arguments) {
  return arguments.size() == 3 && (arguments[2] == "--help" || arguments[2] == "-h");
}

// One process prints for all processes that a launcher has started.
int collect_env(const std::vector<std::string>& arguments) {
  if (!prints_for_launcher()) return 0;
  try {
    collect_env_main(arguments);
    return 0;
  } catch (...) {
    const Error error = as_error(std::current_exception());
    print_error_line(program_text(error), When::kAuto);
    return static_cast<int>(error.code());
  }
}

}  // namespace

int run_program(const std::vector<std::string>& arguments) {
  prepare_process();
  if (arguments.size() > 1 && arguments[1] == kLaunchCommand) {
    return launcher::launch_main({arguments.begin() + 2, arguments.end()});
  }
  if (arguments.size() > 1 && arguments[1] == kCollectEnvCommand && !asks_for_help(arguments)) {
    return collect_env({arguments.begin() + 2, arguments.end()});
  }
  Request request = read_arguments(arguments);
  if (!request.error && request.invocation.first_process) note_assumed_model(request.invocation.config.options);
  if (!request.text.empty() && !request.error) {
    if (request.invocation.first_process) {
      std::fputs(request.text.c_str(), stdout);
      if (std::fflush(stdout) != 0) {
        print_error_line(
            fmt::format("the text can't be written to stdout ({}). Redirect stdout to a file that can be written.",
                        std::strerror(errno)),
            When::kAuto);
        return static_cast<int>(ErrorCode::kFile);
      }
    }
    return 0;
  }
  return execute(request);
}

}  // namespace ringattn
