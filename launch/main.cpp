// SPDX-License-Identifier: Apache-2.0
// ringattn: the subcommands and their flags are tables (commands.cpp, flags.cpp); the way from arguments to an exit
// code is program.cpp.
#include "base/outcome.hpp"
#include "comm/launcher.hpp"
#include "launch/program.hpp"

int main(int argc, char** argv) {
  ringattn::begin_outcome(ringattn::launched_ranks_here().value_or(0));
  return ringattn::end_outcome(ringattn::run_program({argv, argv + argc}));
}
