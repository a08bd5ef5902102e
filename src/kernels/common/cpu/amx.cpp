// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/cpu/amx.hpp"

#include <cstdint>

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/common/simd_target.hpp"

namespace ringattn::cpu {

namespace {

#if defined(__linux__) && defined(__x86_64__)

constexpr std::uint32_t kOsxsave = 1U << 27;       // CPUID leaf 1, ecx
constexpr std::uint32_t kAvx512Vbmi = 1U << 1;     // CPUID leaf 7, ecx
constexpr std::uint32_t kAmxBf16 = 1U << 22;       // CPUID leaf 7, edx
constexpr std::uint32_t kAmxTile = 1U << 24;       // CPUID leaf 7, edx
constexpr std::uint32_t kAmxInt8 = 1U << 25;       // CPUID leaf 7, edx
constexpr std::uint32_t kAvx512Bf16 = 1U << 5;     // CPUID leaf 7, subleaf 1, eax
constexpr std::uint32_t kTileState = 3U << 17;     // XCR0: XTILECFG and XTILEDATA
constexpr long kRequestXstatePermission = 0x1023;  // ARCH_REQ_XCOMP_PERM (asm/prctl.h of Linux 5.16)
constexpr long kXtileData = 18;

bool cpuid_has_amx_bf16() {
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::uint32_t c = 0;
  std::uint32_t d = 0;
  if (__get_cpuid_count(1, 0, &a, &b, &c, &d) == 0 || (c & kOsxsave) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  if ((c & kAvx512Vbmi) == 0) return false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a & kAvx512Bf16) == 0) return false;
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
}

bool permitted() {
  static const bool result =
      cpuid_has_amx_bf16() && ::syscall(SYS_arch_prctl, kRequestXstatePermission, kXtileData) == 0;
  return result;
}

bool processor_has_amx_int8() {
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::uint32_t c = 0;
  std::uint32_t d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxInt8) != 0;
}

#else

bool permitted() { return false; }
bool processor_has_amx_int8() { return false; }

#endif

}  // namespace

bool processor_has_amx_bf16() { return permitted(); }

bool has_amx_bf16() { return amx_in_use() && permitted(); }

std::string amx_unavailable() {
  return permitted() && !amx_in_use() ? "the SIMD target in use has no AMX tiles of bf16"
                                      : "this processor or its Linux kernel has no AMX tiles of bf16";
}

bool has_amx_int8() {
  static const bool processor_has = processor_has_amx_int8();
  return has_amx_bf16() && processor_has;
}

}  // namespace ringattn::cpu
