// SPDX-License-Identifier: Apache-2.0
// ringattn: the subcommands and their flags are tables (commands.cpp, flags.cpp). program.cpp leads from the arguments
// to an exit code.
#include <malloc.h>

#include "base/outcome.hpp"
#include "base/unfinished_file.hpp"
#include "comm/launcher.hpp"
#include "launch/program.hpp"

// A wheel's program is a function of its library, so that both share one copy of the kernels. wheel_main.cpp calls it.
#if defined(RINGATTN_WHEEL)
extern "C" int ringattn_program(int argc, char** argv);
int ringattn_program(int argc, char** argv) {
#else
int main(int argc, char** argv) {
#endif
#ifdef M_ARENA_MAX
  // Each of glibc's arenas takes its own memory, by default up to eight arenas per processor. If hundreds of ranks are
  // threads, this is more memory than a job that is refused may take.
  mallopt(M_ARENA_MAX, 16);
#endif
  ringattn::remove_unfinished_files_on_signals();  // first: from here on a process reports its end
  ringattn::begin_outcome(ringattn::launched_rank(), ringattn::launched_local_ranks().value_or(0));
  return ringattn::end_outcome(ringattn::run_program({argv, argv + argc}));
}
