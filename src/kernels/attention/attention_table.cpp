// SPDX-License-Identifier: Apache-2.0
// The attention kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/attention/cuda/cuda_attention.hpp"
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

std::vector<std::string> one_for_all() { return {}; }

#ifdef RINGATTN_HAVE_CUDA
// GPU speeds were measured on an H200 and rounded down (bench/notes/attention-portable.md).
constexpr double kSm80Flops = 3.5e14;
constexpr double kSimtFlops = 3e12;
#endif

constexpr AttentionRow kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{"sm90_attention", "cuda",
      "bf16, fp16; head_dim 64, 96, 128, 256, and 192 with head_dim_v 128; every mask, softcap, sinks",
      sm90::attention_configs, [](const Backend&) { return 6.5e14; }, sm90::attention_unavailable,
      cuda::make_cuda_backend},
     sm90::attention_missing,
     sm90::make_attention},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{"sm80_attention", "cuda",
      "bf16, fp16; head_dim 64, 96, 128, 256, 512, 192 with head_dim_v 128, 576 with 512; every mask, softcap, sinks",
      sm80::attention_configs, [](const Backend&) { return kSm80Flops; }, cuda::cuda_unavailable,
      cuda::make_cuda_backend},
     sm80::attention_missing,
     sm80::make_attention,
     // Above 256 dims eight warps share 32 rows (sm80/sliced/): 118.2 TFLOP/s at 4k, 121.1 at 16k.
     [](const AttentionSpec& spec, const Backend&, std::int64_t) {
       return spec.head_dim > 256 ? 1.18e14 : kSm80Flops;
     }},
    {{"sm80_simt", "cuda", "fp32, bf16, fp16; head dims that are multiples of 8 up to 512; every mask, softcap, sinks",
      one_for_all, [](const Backend&) { return kSimtFlops; }, cuda::cuda_unavailable, cuda::make_cuda_backend},
     sm80::simt_missing,
     sm80::make_simt,
     [](const AttentionSpec& spec, const Backend&, std::int64_t) { return spec.head_dim > 256 ? 2.1e12 : kSimtFlops; }},
#endif
    {{"cpu_attention", "cpu",
      "fp32, bf16, fp16; head dims that are multiples of 8 up to 576; every mask, softcap, sinks", one_for_all,
      cpu::cpu_attention_speed, [] { return std::string(); }, cpu::make_cpu_backend, /*amx_bf16=*/true},
     cpu::cpu_attention_missing,
     cpu::make_cpu_attention,
     cpu::cpu_attention_speed},
};

}  // namespace

template <>
std::span<const AttentionRow> kernel_table<AttentionSpec>() {
  return kTable;
}

}  // namespace ringattn
