// SPDX-License-Identifier: Apache-2.0
/* A client of the C interface, compiled against several versions of its header. Prints a sum over the bits of its job, or the
 * status and text of a refusal. "threads N": on N ranks of this process. "abi N": as one that asks for interface N. */
#include <pthread.h>

#include "client_job.h"

static void* play_rank(void* world) { return run_rank(world) == 0 ? world : NULL; }

int main(int argc, char** argv) {
  ringattn_world_options where;
  memset(&where, 0, sizeof where);
  where.size = sizeof where;
  where.abi = RINGATTN_ABI;
  if (argc > 2 && strcmp(argv[1], "threads") == 0) {
    enum { kMost = 8 };
    const int ranks = atoi(argv[2]) < kMost ? atoi(argv[2]) : kMost;
    ringattn_world* worlds[kMost];
    pthread_t threads[kMost];
    int failed = 0;
    if (ringattn_world_threads(&where, ranks, worlds) != RINGATTN_OK) return refused("worlds");
    for (int r = 0; r < ranks; ++r) failed |= pthread_create(&threads[r], NULL, play_rank, worlds[r]);
    for (int r = 0; r < ranks; ++r) {
      void* done = NULL;
      failed |= pthread_join(threads[r], &done) != 0 || done == NULL;
      ringattn_world_destroy(worlds[r]);
    }
    if (failed) return 1;
  } else {
    ringattn_world* world = NULL;
    // The struct of another header, whatever its `abi` says, as where a program asks for less than it was built with.
    if (argc > 2 && strcmp(argv[1], "abi") == 0) where.abi = atoi(argv[2]);
    if (ringattn_world_self(&where, &world) != RINGATTN_OK) return refused("world");
    const int code = run_rank(world);
    ringattn_world_destroy(world);
    if (code != 0) return code;
  }
  print_bits();
  return 0;
}
