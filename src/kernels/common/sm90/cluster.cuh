// SPDX-License-Identifier: Apache-2.0
// Thread block cluster: distributed shared memory (DSMEM) and remote mbarriers. PTX ISA, "mapa", "barrier.cluster",
// "st.async".
#pragma once

#include <cstdint>

namespace ringattn::sm90 {

__device__ __forceinline__ std::uint32_t rank_in_cluster() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ std::uint32_t cluster_size() {
  std::uint32_t count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

// Maps an address of this CTA's shared memory to the same offset in the CTA `rank`, as a shared::cluster address.
__device__ __forceinline__ std::uint32_t map_to_cta(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Arrives at a barrier of any CTA of the cluster, after this thread's reads, such as wgmma that it has waited for. The
// arrival has no cluster scope, because a release at cluster scope is a fence for all of the device's memory.
__device__ __forceinline__ void barrier_arrive_at(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Predicated form, without a branch: arrives `arrivals` times if `arrives`.
__device__ __forceinline__ void barrier_arrive_at_if(bool arrives, std::uint32_t barrier, int arrivals) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.s32 arrives, %2, 0;\n"
      "@arrives mbarrier.arrive.shared::cluster.b64 _, [%0], %1;\n"
      "}" ::"r"(barrier),
      "r"(arrivals), "r"(static_cast<int>(arrives))
      : "memory");
}
// Arrives with release semantics at cluster scope: orders all earlier reads and writes of this thread.
__device__ __forceinline__ void barrier_release_at(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// As barrier_wait(), with acquire semantics at cluster scope: writes that other CTAs released before the phase ended
// are visible from here on.
__device__ __forceinline__ void barrier_acquire(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [%0], %1;\n"
      "@ended bra through;\n"
      "bra again;\n"
      "through:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Arrives at a barrier of any CTA of the cluster, and adds `bytes` to the transaction count of its phase.
__device__ __forceinline__ void barrier_arrive_expect_at(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Stores 4 bytes and completes them as a transaction at `barrier`, which is in the same CTA as `address`.
__device__ __forceinline__ void dsmem_store_async(std::uint32_t address, std::uint32_t barrier, int number) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(number),
               "r"(barrier)
               : "memory");
}
// Stores 4 bytes with an ordinary store.
__device__ __forceinline__ void dsmem_store(std::uint32_t address, int number) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(number) : "memory");
}
// As dsmem_store_async(), for two adjacent floats.
__device__ __forceinline__ void dsmem_store_pair_async(std::uint32_t address, std::uint32_t barrier, float x, float y) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(x), "f"(y), "r"(barrier)
               : "memory");
}

// Copies bytes from this CTA's shared memory to another CTA's. Arrives once at `barrier`, in the target CTA, whose
// phase ends after the bytes have landed. Ordinary stores to the source need a proxy_fence() first.
__device__ __forceinline__ void dsmem_copy(std::uint32_t to, std::uint32_t from, int bytes, std::uint32_t barrier) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%3], %2;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// The same without the arrival: another thread has announced the bytes to the barrier.
__device__ __forceinline__ void dsmem_copy_expected(std::uint32_t to, std::uint32_t from, int bytes,
                                                    std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// cluster_arrive() and cluster_wait() are the two halves of a barrier of all threads of all CTAs. Whole warps call
// them.
template <bool kReleases = true>
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kReleases) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

}  // namespace ringattn::sm90
