// SPDX-License-Identifier: Apache-2.0
#include "launch/launcher/options.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>

#include "base/error.hpp"

namespace ringattn::launcher {

namespace {

constexpr const char* kSeeHelp = "See `ringattn launch --help`.";
constexpr int kMostDigits = 6;

bool is_digits(std::string_view text) {
  return !text.empty() && text.size() <= kMostDigits && text.find_first_not_of("0123456789") == std::string_view::npos;
}

bool is_host_list(std::string_view list) {
  while (true) {
    const std::string_view host = list.substr(0, list.find(','));
    const std::size_t colon = host.find(':');
    if (!is_host_name(host.substr(0, colon))) return false;
    if (colon != std::string_view::npos && !is_digits(host.substr(colon + 1))) return false;
    if (host.size() == list.size()) return true;
    list.remove_prefix(host.size() + 1);
  }
}

[[noreturn]] void refuse(std::string_view option, const std::string& value, const char* why, const char* suggestion) {
  fail(ErrorCode::kUsage, fmt::format("{} is \"{}\"", option, value), why, suggestion);
}

void set_export(LaunchOptions& options, const std::string& text) {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789";
  const std::string name = text.substr(0, text.find('='));
  if (name == "RINGATTN_STORE_SECRET" && name != text) {
    fail(ErrorCode::kUsage, "-x RINGATTN_STORE_SECRET has a value",
         "everybody on the host can read a command's arguments",
         "Export the variable, and leave -x out: it is handed on.");
  }
  if (name.empty() || name.find_first_not_of(kLetters) != std::string::npos || (name[0] >= '0' && name[0] <= '9')) {
    refuse("-x", text, "it takes NAME or NAME=VALUE", "Try -x NCCL_DEBUG=INFO.");
  }
  options.passed_on.insert(options.passed_on.end(), {"-x", text});
  options.exported.insert(name);
}

struct OptionRow {
  std::array<std::string_view, 3> names;
  int values;  // 0, 1 or 2
  std::string_view shown, help;
  // `value` points to the values.
  void (*set)(LaunchOptions& options, std::string_view name, const std::string* value);
};

constexpr OptionRow kOptions[] = {
    {{"-np", "-n", "--np"},
     1,
     "-np, -n N",
     "ranks [the hostfile's slots, the tasks of a Slurm allocation, this host's GPUs, or 1]",
     [](LaunchOptions& options, std::string_view name, const std::string* value) {
       options.ranks = whole_number(*value);
       if (options.ranks.value_or(0) == 0) refuse(name, *value, "it takes a number of ranks", "Try -np 8.");
     }},
    {{"--hostfile", "-hostfile", "--machinefile"},
     1,
     "--hostfile FILE",
     "hosts with their slots: launch/hostfile.example",
     [](LaunchOptions& options, std::string_view name, const std::string* value) {
       std::error_code error;
       if (!std::filesystem::is_regular_file(*value, error) || ::access(value->c_str(), R_OK) != 0) {
         fail(ErrorCode::kFile, fmt::format("{} can't be read", *value),
              fmt::format("{} names a regular file of hosts", name), "See launch/hostfile.example.");
       }
       options.hostfile = *value;
     }},
    {{"--host", "-H"},
     1,
     "--host LIST",
     "hosts with their slots, such as node1:8,node2:8",
     [](LaunchOptions& options, std::string_view name, const std::string* value) {
       if (!is_host_list(*value)) {
         refuse(name, *value, "it takes hosts with their slots", "Try --host node1:8,node2:8.");
       }
       options.hosts = *value;
     }},
    {{"--launcher"},
     1,
     "--launcher NAME",
     "mpirun, or srun inside a Slurm allocation [mpirun]",
     [](LaunchOptions& options, std::string_view name, const std::string* value) {
       if (*value != "mpirun" && *value != "srun") refuse(name, *value, "it takes mpirun or srun", "Leave it out.");
       options.launcher = *value;
     }},
    {{"--start-limit"},
     1,
     "--start-limit S",
     "end mpirun where no rank has begun within S seconds, 0: never [300]. On other hosts this can't\n"
     "be seen; there it counts until the first of them answers. srun has none: a step may queue",
     [](LaunchOptions& options, std::string_view name, const std::string* value) {
       options.start_limit = whole_number(*value);
       if (!options.start_limit) refuse(name, *value, "it takes whole seconds", "Try --start-limit 300.");
     }},
    {{"--dry-run", "--print"},
     0,
     "--dry-run, --print",
     "print the command and stop",
     [](LaunchOptions& options, std::string_view, const std::string*) { options.dry_run = true; }},
    {{"--bind-to"},
     1,
     "--bind-to X, --map-by X, --oversubscribe, --mca NAME VALUE, -x NAME[=VALUE], --report-bindings",
     "mpirun's own; they replace what would be chosen here",
     [](LaunchOptions& options, std::string_view, const std::string* value) { options.bind_to = *value; }},
    {{"--map-by"},
     1,
     "",
     "",
     [](LaunchOptions& options, std::string_view, const std::string* value) { options.map_by = *value; }},
    {{"--oversubscribe"},
     0,
     "",
     "",
     [](LaunchOptions& options, std::string_view, const std::string*) { options.oversubscribe = true; }},
    {{"--mca", "-mca"},
     2,
     "",
     "",
     [](LaunchOptions& options, std::string_view, const std::string* value) {
       options.passed_on.insert(options.passed_on.end(), {"--mca", value[0], value[1]});
     }},
    {{"-x"},
     1,
     "",
     "",
     [](LaunchOptions& options, std::string_view, const std::string* value) { set_export(options, *value); }},
    {{"--report-bindings"},
     0,
     "",
     "",
     [](LaunchOptions& options, std::string_view name, const std::string*) { options.passed_on.emplace_back(name); }},
    {{"-h", "--help"},
     0,
     "-h, --help",
     "this text",
     [](LaunchOptions& options, std::string_view, const std::string*) { options.help = true; }},
};

}  // namespace

std::optional<int> whole_number(std::string_view text) {
  if (!is_digits(text) || (text.size() > 1 && text[0] == '0')) return std::nullopt;
  int number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

bool is_host_name(std::string_view text) {
  constexpr std::string_view kFirst = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.+@%-";
  return !text.empty() && text.find_first_not_of(kFirst) == std::string_view::npos &&
         std::string_view("@%-").find(text[0]) == std::string_view::npos;
}

Words host_names(const std::string& list) {
  Words names;
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find_first_of(",\n", begin), list.size());
    const std::string host = list.substr(begin, end - begin);
    const std::string name = host.substr(0, host.find(':'));
    if (is_host_name(name)) names.push_back(name);
    begin = end + 1;
  }
  return names;
}

LaunchOptions read_launch_options(const Words& arguments) {
  LaunchOptions options;
  std::size_t at = 0;
  while (at < arguments.size() && arguments[at].starts_with("-")) {
    const std::string& name = arguments[at];
    const auto* const row =
        std::ranges::find_if(kOptions, [&](const OptionRow& option) { return std::ranges::count(option.names, name); });
    if (row == std::end(kOptions)) {
      fail(ErrorCode::kUsage, fmt::format("unknown option {}", name),
           "ringattn's flags come after a subcommand such as run", kSeeHelp);
    }
    const auto values = static_cast<std::size_t>(row->values);
    if (at + values >= arguments.size() || (values > 0 && arguments[at + 1].empty())) {
      fail(ErrorCode::kUsage, fmt::format("{} has no value", name),
           values == 2 ? "it takes a name and a value" : "it takes one", kSeeHelp);
    }
    row->set(options, name, arguments.data() + at + 1);
    at += 1 + values;
    if (options.help) return options;
  }
  if (at == arguments.size()) {
    fail(ErrorCode::kUsage, "no subcommand", "there is nothing to start", "Try `ringattn launch run --synthetic 7`.");
  }
  options.rank_arguments.assign(arguments.begin() + static_cast<std::ptrdiff_t>(at), arguments.end());
  return options;
}

std::string launch_options_help() {
  constexpr std::size_t kColumn = 23;
  std::string text;
  for (const OptionRow& row : kOptions) {
    if (row.shown.empty()) continue;
    std::string line = fmt::format("  {:<{}}", row.shown, kColumn - 2);
    if (row.shown.size() + 2 >= kColumn) line += '\n' + std::string(kColumn, ' ');
    for (const char c : row.help) line += c == '\n' ? '\n' + std::string(kColumn, ' ') : std::string(1, c);
    text += line + '\n';
  }
  return text;
}

}  // namespace ringattn::launcher
