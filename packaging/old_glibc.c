// SPDX-License-Identifier: Apache-2.0
// Linked into programs and libraries that must run on a glibc that is older than the one of the compiler's headers and
// libstdc++: the functions of newer versions that these call. Hidden, so that no other library uses them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

// Since 2.32. Zero: there may be threads, so reference counts are always atomic.
char __libc_single_threaded = 0;

// Since 2.36, for std::random_device.
uint32_t arc4random(void) {
  uint32_t value;
  while (getrandom(&value, sizeof value, 0) != sizeof value) {
  }
  return value;
}

typedef int (*ClockWait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);

// Since 2.30, for waits of std::condition_variable until a time of the monotonic clock. Takes glibc's own where it has
// one, else the same time of the real-time clock, as libstdc++ did before: a clock that is set meanwhile makes such a
// wait shorter or longer.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  static _Atomic(ClockWait) known;
  static _Atomic int looked;
  if (!looked) {
    known = (ClockWait)dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    looked = 1;
  }
  const ClockWait own = known;
  if (own != NULL) return own(condition, mutex, clock, until);
  struct timespec here, real, at = *until;
  clock_gettime(clock, &here);
  clock_gettime(CLOCK_REALTIME, &real);
  at.tv_sec += real.tv_sec - here.tv_sec;
  at.tv_nsec += real.tv_nsec - here.tv_nsec;
  if (at.tv_nsec < 0) {
    at.tv_nsec += 1000000000;
    at.tv_sec -= 1;
  } else if (at.tv_nsec >= 1000000000) {
    at.tv_nsec -= 1000000000;
    at.tv_sec += 1;
  }
  return pthread_cond_timedwait(condition, mutex, &at);
}
