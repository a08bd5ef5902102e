// SPDX-License-Identifier: Apache-2.0
// mbarrier wrappers, on shared-window addresses. A phase ends when all expected arrivals and transaction bytes have
// come. PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include <cstdint>

namespace ringattn::sm90 {

inline constexpr int kBarrierBytes = 8;

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After this the memory may be reused, also for another barrier.
__device__ __forceinline__ void barrier_invalidate(std::uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Makes initialised barriers visible to TMA. A barrier of all threads must follow to make them visible to the threads.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Predicated form, without a branch: arrives `arrivals` times if `arrives`.
__device__ __forceinline__ void barrier_arrive_if(bool arrives, std::uint32_t barrier, int arrivals) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.s32 arrives, %2, 0;\n"
      "@arrives mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n"
      "}" ::"r"(barrier),
      "r"(arrivals), "r"(static_cast<int>(arrives))
      : "memory");
}
// Arrives, and adds `bytes` to the transaction count of the phase.
__device__ __forceinline__ void barrier_arrive_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives once (noinc: the arrival is part of the expected count) when this thread's earlier cp.async copies have
// landed.
__device__ __forceinline__ void cp_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of this parity has ended. On a new barrier, a wait for parity 1 returns at once.
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "@ended bra through;\n"
      "bra again;\n"
      "through:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Tests the same without waiting.
__device__ __forceinline__ bool barrier_ended(std::uint32_t barrier, std::uint32_t parity) {
  int ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.s32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

// CUTLASS's PipelineState in one register: the stage of a ring of kStages that comes next, and the parity of its phase.
template <int kStages>
struct PackedPipelineState {
  std::uint32_t at = 0;  // stage + kStages · parity

  __device__ __forceinline__ std::uint32_t stage() const {
    return (kStages & (kStages - 1)) == 0 ? at % kStages : at >= kStages ? at - kStages : at;
  }
  __device__ __forceinline__ std::uint32_t parity() const { return at / kStages; }
  __device__ __forceinline__ void advance() { at = at + 1 == 2 * kStages ? 0 : at + 1; }
};

}  // namespace ringattn::sm90
