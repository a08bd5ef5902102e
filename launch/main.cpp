// SPDX-License-Identifier: Apache-2.0
// ringattn: the subcommands and their flags are tables (commands.cpp, flags.cpp); the way from arguments to an exit
// code is program.cpp.
#include <malloc.h>

#include "base/outcome.hpp"
#include "base/unfinished_file.hpp"
#include "comm/launcher.hpp"
#include "launch/program.hpp"

// A wheel's program is a function of its library, which has the kernels once for both; wheel_main.cpp calls it.
#if defined(RINGATTN_WHEEL)
extern "C" int ringattn_program(int argc, char** argv);
int ringattn_program(int argc, char** argv) {
#else
int main(int argc, char** argv) {
#endif
#ifdef M_ARENA_MAX
  // Each of glibc's arenas takes memory of its own, by default up to eight per processor. With hundreds of ranks as
  // threads that is more than a refused job may cost.
  mallopt(M_ARENA_MAX, 16);
#endif
  ringattn::remove_unfinished_files_on_signals();  // first: a process that has begun says which signal ends it
  ringattn::begin_outcome(ringattn::launched_rank(), ringattn::launched_local_ranks().value_or(0));
  return ringattn::end_outcome(ringattn::run_program({argv, argv + argc}));
}
