// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sm90/sm90_attention.hpp"

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention/sm90/attention.hpp"
#include "kernels/attention/sm90/config.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::sm90 {

namespace {

constexpr cuda::CompiledAttention kCompiled[] = {
    {Dtype::kBf16, 64, &attention_bf16_64},   {Dtype::kBf16, 96, &attention_bf16_96},
    {Dtype::kBf16, 128, &attention_bf16_128}, {Dtype::kBf16, 192, &attention_bf16_192},
    {Dtype::kBf16, 256, &attention_bf16_256}, {Dtype::kF16, 64, &attention_fp16_64},
    {Dtype::kF16, 96, &attention_fp16_96},    {Dtype::kF16, 128, &attention_fp16_128},
    {Dtype::kF16, 192, &attention_fp16_192},  {Dtype::kF16, 256, &attention_fp16_256},
};

}  // namespace

std::unique_ptr<AttentionKernel> make_attention(const AttentionSpec& spec, Backend& backend) {
  const auto config = choose_config(spec);
  const cuda::Launcher& launcher = cuda::launcher_of("sm90_attention", kCompiled, spec, config.has_value());
  cuda::DeviceKernel kernel;
  kernel.shape = {kQueryTile, kQueryTile, config->key_tile, config->warpgroups};
  kernel.shape.cluster_ctas = config->cluster_ctas;
  kernel.state_floats = static_cast<std::size_t>(cuda::state_floats(spec.head_dim_v));
  kernel.scratch_floats = static_cast<std::size_t>(config->warpgroups * config->scratch_floats());
  kernel.offset_scale = {kLn2, kOffsetLog2Factor};  // powers of two
  kernel.launcher = &launcher;
  kernel.merge_state = cuda::merge_tensor_state;
  kernel.export_state = cuda::export_tensor_state;
  return cuda::make_cuda_attention(spec, kernel, backend);
}

}  // namespace ringattn::sm90
