// SPDX-License-Identifier: Apache-2.0
// The attention backward kernels, in order of preference.
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/attention_backward/cpu/cpu_attention_backward.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention_backward/sm80/config.hpp"
#include "kernels/attention_backward/sm80/sm80_attention_backward.hpp"
#include "kernels/attention_backward/sm80/sm80_simt_backward.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/attention/sm90/sm90_attention.hpp"
#include "kernels/attention_backward/sm90/config.hpp"
#include "kernels/attention_backward/sm90/sm90_attention_backward.hpp"
#endif
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

std::vector<std::string> one_for_all_dims() { return {}; }

constexpr KernelRow<AttentionBackwardSpec> kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{"sm90_attention_backward", "cuda",
      "bf16, fp16; head_dim 64, 96, 128, 256, and 192 with head_dim_v 128; every mask, softcap, sinks",
      sm90::attention_backward_configs, [](const Backend&) { return 6.5e14; }, sm90::attention_unavailable,
      cuda::make_cuda_backend},
     sm90::attention_backward_missing,
     sm90::make_attention_backward},
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{"sm80_attention_backward", "cuda",
      "bf16, fp16; head_dim 64, 96, 128, 256, and 192 with head_dim_v 128; every mask, softcap, sinks",
      sm80::attention_backward_configs, [](const Backend&) { return 2.6e14; }, cuda::cuda_unavailable,
      cuda::make_cuda_backend},
     sm80::attention_backward_missing,
     sm80::make_attention_backward},
    {{"sm80_simt_backward", "cuda",
      "fp32, bf16, fp16; head dims that are multiples of 8 up to 512; every mask, softcap, sinks", one_for_all_dims,
      [](const Backend&) { return 2.3e13; }, cuda::cuda_unavailable, cuda::make_cuda_backend},
     sm80::simt_backward_missing,
     sm80::make_simt_backward},
#endif
    {{"cpu_attention_backward", "cpu",
      "fp32, bf16, fp16; head dims that are multiples of 8 up to 576; every mask, softcap, sinks", one_for_all_dims,
      cpu::cpu_attention_backward_speed, [] { return std::string(); }, cpu::make_cpu_backend},
     cpu::cpu_attention_backward_missing,
     cpu::make_cpu_attention_backward},
};

}  // namespace

template <>
std::span<const KernelRow<AttentionBackwardSpec>> kernel_table<AttentionBackwardSpec>() {
  return kTable;
}

}  // namespace ringattn
