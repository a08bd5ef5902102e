// SPDX-License-Identifier: Apache-2.0
#include "launch/collect_env.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "launch/python_process.hpp"
#include "launch/screen.hpp"
#include "ops/common/environment_facts.hpp"
#include "python_facts_script.hpp"  // written by the build: kPythonFactsScript

namespace ringattn {

namespace {

constexpr double kPythonSeconds = 20.0;
constexpr std::size_t kMaxPythonLines = 100;

std::string python_facts() {
  std::string text = "Python\n";
  PythonProcess python(kPythonFactsScript, {});
  const Deadline deadline = Deadline::after(kPythonSeconds);
  std::size_t lines = 0;
  for (; lines < kMaxPythonLines; ++lines) {
    const auto line = python.read_line(deadline);
    if (!line) break;
    text += fmt::format("  {}\n", printable_utf8(*line));  // python3 may be any program
  }
  if (lines == 0) {
    text += fmt::format("  {:<17} none ({})\n", "Python", python.why());
  } else if (lines == kMaxPythonLines) {
    text += fmt::format("  {:<17} unknown (python3 printed more than {} lines)\n", "more", lines);
  } else if (deadline.expired()) {
    text += fmt::format("  {:<17} unknown ({})\n", "more", python.why());
  }
  return text;
}

}  // namespace

std::string collect_env_help() {
  return fmt::format(
      "Examples:\n"
      "  ringattn collect-env\n"
      "  ringattn collect-env > environment.txt\n"
      "\nringattn collect-env: {}.\n"
      "Takes no flags. The lines have no host names and no addresses. Of the environment they have variables of\n"
      "ringattn, CUDA, NCCL, OpenMP, MPI and PyTorch, without secrets. An item that is missing says why. Python's\n"
      "packages are those of the python3 on PATH. `python -m ringattn collect-env` prints the same for another\n"
      "Python and its library. `ringattn info` lists kernels, transports and variables in full.\n",
      kCollectEnvSummary);
}

void collect_env_main(const std::vector<std::string>& arguments) {
  if (!arguments.empty()) {
    fail(ErrorCode::kUsage, fmt::format("\"{}\" belongs to no flag", arguments.front()), "collect-env takes none",
         "See `ringattn collect-env --help`.");
  }
  const Screen screen(JobOptions(), true);
  screen.print_result(environment_facts() + python_facts());
}

}  // namespace ringattn
