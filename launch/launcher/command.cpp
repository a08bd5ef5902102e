// SPDX-License-Identifier: Apache-2.0
#include "launch/launcher/command.hpp"

#include <fmt/format.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "launch/launcher/machine.hpp"

namespace ringattn::launcher {

namespace {

constexpr int kStartLimit = 300;  // seconds

bool is_given(const char* name) { return !environment_value(name).value_or("").empty(); }

// The program that ranks run, without symbolic links.
std::string rank_program() {
  const auto named = environment_value("RINGATTN_PROGRAM");
  const std::string path = named && !named->empty() ? *named : "/proc/self/exe";
  std::error_code error;
  if (::access(path.c_str(), X_OK) != 0 || std::filesystem::is_directory(path, error)) {
    fail(ErrorCode::kUnsupported, fmt::format("{} can't be run", path), "RINGATTN_PROGRAM names it",
         "Set it to the path of ringattn.");
  }
  return std::filesystem::canonical(path);
}

// The secret by which ranks that meet at RINGATTN_STORE prove their membership. It goes through the environment and by
// mpirun's -x NAME, never as an argument, because every user of the host can read arguments.
void make_secret() {
  constexpr const char* kSecret = "RINGATTN_STORE_SECRET";
  if (environment_value(kSecret) == "") {
    ::unsetenv(kSecret);  // the user wants none
  } else if (is_given("RINGATTN_STORE") && !is_given(kSecret) && !is_given("RINGATTN_STORE_SECRET_FILE")) {
    unsigned char bytes[32];
    if (::getrandom(bytes, sizeof(bytes), 0) != ssize_t{sizeof(bytes)}) {
      fail(ErrorCode::kUnsupported, "can't make a secret", "the system did not return 32 random bytes",
           "Set RINGATTN_STORE_SECRET.");
    }
    std::string text;
    for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
    ::setenv(kSecret, text.c_str(), 1);
  }
}

// A number that Slurm sets, or 0 if it isn't set.
int slurm_number(const char* name) {
  const std::string text = environment_value(name).value_or("");
  const int number = whole_number(text).value_or(0);
  if (!text.empty() && number == 0) {
    fail(ErrorCode::kUsage, fmt::format("{} is \"{}\"", name, text), "it takes a number",
         "Unset it, or start inside a Slurm allocation.");
  }
  return number;
}

void set_default(LaunchCommand& command, const char* name, const std::string& value) {
  if (!environment_value(name)) command.settings.emplace_back(name, value);
}

// Makes mpirun and its daemons notice a lost host soon after --timeout + 5 s, instead of after 8 minutes. They must not
// notice it earlier: until --timeout the link may recover, and within the next 5 s the ranks report which host is lost,
// more precisely than mpirun can. If a config file may set the timeout, mpirun's own values are kept.
void set_keepalive(LaunchCommand& command, const Words& rank_arguments) {
  constexpr std::string_view kTimeout = "--timeout";
  std::string timeout = environment_value("RINGATTN_TIMEOUT").value_or("60");
  for (std::size_t i = 0; i < rank_arguments.size(); ++i) {
    const std::string& word = rank_arguments[i];
    if (word == "--config" || word.starts_with("--config=")) return;
    if (i > 0 && rank_arguments[i - 1] == kTimeout) timeout = word;
    if (word.starts_with("--timeout=")) timeout = word.substr(kTimeout.size() + 1);
  }
  const int seconds = whole_number(timeout.substr(0, timeout.find('.'))).value_or(0);
  if (seconds == 0 || is_given("RINGATTN_CONFIG")) return;
  // The kernel probes a connection that was idle for a moment. It repeats an unanswered probe at most 127 times, and
  // then gives the connection up, so the timeout is the time that all probes take.
  const int interval = 1 + (seconds + 5) / 100;
  set_default(command, "OMPI_MCA_oob_tcp_keepalive_time", "2");
  set_default(command, "OMPI_MCA_oob_tcp_keepalive_intvl", std::to_string(interval));
  set_default(command, "OMPI_MCA_oob_tcp_keepalive_probes", std::to_string((seconds + 5) / interval + 1));
}

// The names of the variables that mpirun passes to ranks on all hosts.
std::set<std::string> exported_names(const LaunchCommand& command, const std::set<std::string>& given) {
  constexpr std::string_view kPrefixes[] = {"CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NCCL_", "OMP_", "RINGATTN_"};
  std::set<std::string> names;
  const auto add = [&](const std::string& name) {
    const auto begins = [&](std::string_view prefix) {
      return prefix.ends_with('_') ? name.starts_with(prefix) : name == prefix;
    };
    if (std::ranges::any_of(kPrefixes, begins) && name != "RINGATTN_PROGRAM" && !given.contains(name)) {
      names.insert(name);
    }
  };
  for (const EnvironmentEntry& entry : environment_entries(kPrefixes)) add(entry.name);
  for (const auto& [name, value] : command.settings) add(name);
  return names;
}

void append(Words& words, const Words& more) { words.insert(words.end(), more.begin(), more.end()); }

void make_srun(LaunchCommand& command, const LaunchOptions& options, int ranks) {
  if (!is_given("SLURM_JOB_ID")) {
    fail(ErrorCode::kUsage, "--launcher srun outside a Slurm allocation", "SLURM_JOB_ID isn't set",
         "Submit launch/ringattn.sbatch, or leave it out.");
  }
  if (!options.hostfile.empty() || !options.hosts.empty() || options.start_limit || !options.bind_to.empty() ||
      !options.map_by.empty() || !options.passed_on.empty()) {
    fail(ErrorCode::kUsage, "--launcher srun takes only -np and --dry-run", "the other options are mpirun's",
         "Leave them out.");
  }
  // All GPUs of a host are visible to each of its ranks: peers map one another's memory, and ranks choose by local id.
  command.words = {"srun", "--ntasks", std::to_string(ranks), "--mpi=pmix", "--gpu-bind=none", "--kill-on-bad-exit=1"};
  command.start_limit = 0;  // Slurm may hold a step back, and has limits of its own (--immediate, --time)
}

void make_mpirun(LaunchCommand& command, const LaunchOptions& options, int ranks, int gpus) {
  if (is_root()) {
    set_default(command, "OMPI_ALLOW_RUN_AS_ROOT", "1");
    set_default(command, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  set_keepalive(command, options.rank_arguments);  // also for one host: Open MPI's own configuration may name hosts
  // Kernels of containers often refuse this mechanism.
  if (in_container()) set_default(command, "OMPI_MCA_btl_vader_single_copy_mechanism", "none");
  command.start_limit = options.start_limit.value_or(kStartLimit);
  Words& words = command.words;
  words = {"mpirun"};
  if (ranks > 0) append(words, {"-np", std::to_string(ranks)});
  if (!options.hostfile.empty()) append(words, {"--hostfile", options.hostfile});
  if (!options.hosts.empty()) append(words, {"--host", options.hosts});
  if (options.bind_to.empty() && options.map_by.empty()) {
    // mpirun would bind one or two ranks to a core each.
    const auto each = command.local ? ranks_of_numa_node(ranks, gpus) : std::nullopt;
    if (each) append(words, {"--map-by", fmt::format("ppr:{}:numa", *each)});
    append(words, {"--bind-to", each ? "numa" : "none"});
  }
  if (!options.map_by.empty()) append(words, {"--map-by", options.map_by});
  if (!options.bind_to.empty()) append(words, {"--bind-to", options.bind_to});
  if (options.oversubscribe || (command.local && ranks > count_cores())) append(words, {"--oversubscribe"});
  append(words, options.passed_on);
  for (const std::string& name : exported_names(command, options.exported)) append(words, {"-x", name});
}

std::string quoted(const std::string& word) {
  constexpr std::string_view kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_@%-+=:./";
  if (word.empty()) return "''";
  std::string text;
  for (const char c : word) {
    if (c == '\n') {
      text += "$'\\n'";
    } else {
      if (kPlain.find(c) == std::string_view::npos) text += '\\';
      text += c;
    }
  }
  return text;
}

}  // namespace

std::string LaunchCommand::text() const {
  std::string line = "env -u RINGATTN_PROGRAM";
  for (const auto& [name, value] : settings) line += ' ' + quoted(name + '=' + value);
  for (const std::string& word : words) line += ' ' + quoted(word);
  return line;
}

LaunchCommand make_launch_command(const LaunchOptions& options) {
  const std::string program = rank_program();
  make_secret();
  const int gpus = count_gpus();
  const int slurm_hosts = slurm_number("SLURM_NNODES");
  const int slurm_tasks = slurm_number("SLURM_NTASKS");
  LaunchCommand command;
  command.slurm = options.launcher == "srun";
  command.local = options.hostfile.empty() && options.hosts.empty() && slurm_hosts <= 1;
  const HostSlots slots = options.hostfile.empty() ? HostSlots() : read_hostfile(options.hostfile);
  append(command.hosts, slots.hosts);
  append(command.hosts, host_names(options.hosts));
  if (command.hosts.empty() && !command.slurm && !command.local) {
    command.hosts = host_names(output_of({"scontrol", "show", "hostnames"}).value_or(""));  // those of the allocation
  }

  int ranks = 1;
  std::string chosen = "no GPU was found";
  if (options.ranks) {
    ranks = *options.ranks, chosen = "as asked for";
  } else if (!options.hostfile.empty()) {
    ranks = slots.slots, chosen = "the slots of " + options.hostfile;
  } else if (!options.hosts.empty()) {
    ranks = 0, chosen = "the slots of " + options.hosts;  // mpirun counts them
  } else if (is_given("SLURM_JOB_ID") && slurm_tasks > 0) {
    ranks = slurm_tasks, chosen = "the tasks of the Slurm allocation";
  } else if (gpus > 0) {
    ranks = gpus, chosen = "one for each GPU";
  }
  command.ranks = ranks;
  command.summary =
      fmt::format("{} ranks ({}), {} GPUs on this host", ranks > 0 ? std::to_string(ranks) : "all", chosen, gpus);

  set_default(command, "NCCL_NVLS_ENABLE", "0");  // no NVLink multicast
  if (command.slurm) {
    make_srun(command, options, ranks);
  } else {
    make_mpirun(command, options, ranks, gpus);
  }
  command.program = command.words.size();
  command.words.push_back(program);
  append(command.words, options.rank_arguments);
  return command;
}

}  // namespace ringattn::launcher
