// SPDX-License-Identifier: Apache-2.0
// The attention backward kernels, in order of preference.
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/attention_backward/cpu/cpu_attention_backward.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/attention_backward/sm80/config.hpp"
#include "kernels/attention_backward/sm80/sm80_attention_backward.hpp"
#include "kernels/attention_backward/sm80/sm80_simt_backward.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/attention_backward/sm90/config.hpp"
#include "kernels/attention_backward/sm90/sm90_attention_backward.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

constexpr KernelRow<AttentionBackwardSpec> kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{kHopperPlatform, "sm90_attention_backward",
      "bf16, fp16; head_dim 64, 96, 128, 256, and 192 with head_dim_v 128; every mask, softcap, sinks",
      [](const Backend&) { return 6.5e14; }, sm90::attention_backward_configs},
     sm90::attention_backward_missing,
     sm90::make_attention_backward},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{kCudaPlatform, "sm80_attention_backward",
      "bf16, fp16; head_dim 64, 96, 128, 256, and 192 with head_dim_v 128; every mask, softcap, sinks",
      [](const Backend&) { return 2.6e14; }, sm80::attention_backward_configs},
     sm80::attention_backward_missing,
     sm80::make_attention_backward},
    {{kCudaPlatform, "sm80_simt_backward",
      "fp32, bf16, fp16; head dims that are multiples of 8 up to 512; every mask, softcap, sinks",
      [](const Backend&) { return 2.3e13; }},
     sm80::simt_backward_missing,
     sm80::make_simt_backward},
#endif
    {{kCpuPlatform, "cpu_attention_backward",
      "fp32, bf16, fp16; head dims that are multiples of 8 up to 576; every mask, softcap, sinks",
      cpu::cpu_attention_backward_speed},
     cpu::cpu_attention_backward_missing,
     cpu::make_cpu_attention_backward,
     cpu::cpu_attention_backward_work},
};

}  // namespace

template <>
std::span<const KernelRow<AttentionBackwardSpec>> kernel_table<AttentionBackwardSpec>() {
  return kTable;
}

}  // namespace ringattn
