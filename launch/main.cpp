// SPDX-License-Identifier: Apache-2.0
// ringattn: the subcommands and their flags are tables (commands.cpp, flags.cpp); the way from arguments to an exit
// code is program.cpp.
#include "launch/program.hpp"

int main(int argc, char** argv) { return ringattn::run_program({argv, argv + argc}); }
