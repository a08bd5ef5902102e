// SPDX-License-Identifier: Apache-2.0
// threads N: the job on N ranks of this process, without MPI.
#include "comm/threads.hpp"

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "job.hpp"

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 1;
  Sum all;
  std::mutex mutex;
  ringattn::run_threads_world(ranks, {}, [&](ringattn::Transport& transport) {
    const Sum sum = run_job(transport);
    const std::lock_guard lock(mutex);
    all.low += sum.low;
    all.high += sum.high;
  });
  std::printf("%016llx%016llx\n", static_cast<unsigned long long>(all.high), static_cast<unsigned long long>(all.low));
}
