// SPDX-License-Identifier: Apache-2.0
// The attention kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/attention/sm80/config.hpp"
#include "kernels/attention/sm80/sm80_attention.hpp"
#include "kernels/attention/sm80/sm80_simt.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/attention/sm90/config.hpp"
#include "kernels/attention/sm90/sm90_attention.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

#ifdef RINGATTN_HAVE_CUDA
// GPU speeds were measured on an H200 and rounded down (bench/notes/attention-portable.md).
constexpr double kSm80Flops = 3.5e14;
constexpr double kSimtFlops = 3e12;
#endif

constexpr AttentionRow kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{kHopperPlatform, "sm90_attention",
      "bf16, fp16; head_dim 64, 96, 128, 256, and 192 with head_dim_v 128; every mask, softcap, sinks",
      [](const Backend&) { return 6.5e14; }, sm90::attention_configs},
     sm90::attention_missing,
     sm90::make_attention},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{kCudaPlatform, "sm80_attention",
      "bf16, fp16; head_dim 64, 96, 128, 256, 512, 192 with head_dim_v 128, 576 with 512; every mask, softcap, sinks",
      [](const Backend&) { return kSm80Flops; }, sm80::attention_configs},
     sm80::attention_missing,
     sm80::make_attention,
     // Above 256 dims eight warps share 32 rows (sm80/sliced/): 118.2 TFLOP/s at 4k, 121.1 at 16k.
     /*host_work=*/nullptr,
     [](const AttentionSpec& spec, const Backend&, std::int64_t) {
       return spec.head_dim > 256 ? 1.18e14 : kSm80Flops;
     }},
    {{kCudaPlatform, "sm80_simt",
      "fp32, bf16, fp16; head dims that are multiples of 8 up to 512; every mask, softcap, sinks",
      [](const Backend&) { return kSimtFlops; }},
     sm80::simt_missing,
     sm80::make_simt,
     /*host_work=*/nullptr,
     [](const AttentionSpec& spec, const Backend&, std::int64_t) { return spec.head_dim > 256 ? 2.1e12 : kSimtFlops; }},
#endif
    {{kCpuPlatform, "cpu_attention",
      "fp32, bf16, fp16; head dims that are multiples of 8 up to 576; every mask, softcap, sinks",
      cpu::cpu_attention_speed, nullptr, /*amx_bf16=*/true},
     cpu::cpu_attention_missing,
     cpu::make_cpu_attention,
     cpu::cpu_attention_work},
};

}  // namespace

template <>
std::span<const AttentionRow> kernel_table<AttentionSpec>() {
  return kTable;
}

}  // namespace ringattn
