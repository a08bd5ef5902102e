// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sm80/sm80_attention.hpp"

#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention/cuda/export_state.hpp"
#include "kernels/attention/cuda/merge_state.hpp"
#include "kernels/attention/sm80/attention.hpp"
#include "kernels/attention/sm80/config.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::sm80 {

namespace {

constexpr cuda::CompiledAttention kCompiled[] = {
    {Dtype::kBf16, 64, &attention_bf16_64},   {Dtype::kBf16, 96, &attention_bf16_96},
    {Dtype::kBf16, 128, &attention_bf16_128}, {Dtype::kBf16, 192, &attention_bf16_192},
    {Dtype::kBf16, 256, &attention_bf16_256}, {Dtype::kF16, 64, &attention_fp16_64},
    {Dtype::kF16, 96, &attention_fp16_96},    {Dtype::kF16, 128, &attention_fp16_128},
    {Dtype::kF16, 192, &attention_fp16_192},  {Dtype::kF16, 256, &attention_fp16_256},
    {Dtype::kBf16, 512, &attention_bf16_512}, {Dtype::kF16, 512, &attention_fp16_512},
    {Dtype::kBf16, 576, &attention_bf16_576}, {Dtype::kF16, 576, &attention_fp16_576},
};

constexpr cuda::CompiledAttention kPositioned[] = {
    {Dtype::kBf16, 64, &positioned_bf16_64},   {Dtype::kBf16, 96, &positioned_bf16_96},
    {Dtype::kBf16, 128, &positioned_bf16_128}, {Dtype::kBf16, 192, &positioned_bf16_192},
    {Dtype::kBf16, 256, &positioned_bf16_256}, {Dtype::kF16, 64, &positioned_fp16_64},
    {Dtype::kF16, 96, &positioned_fp16_96},    {Dtype::kF16, 128, &positioned_fp16_128},
    {Dtype::kF16, 192, &positioned_fp16_192},  {Dtype::kF16, 256, &positioned_fp16_256},
};

}  // namespace

std::unique_ptr<AttentionKernel> make_attention(const AttentionSpec& spec, Backend& backend) {
  const auto config = choose_config(spec);
  const cuda::Launcher& launcher = spec.positions > 0
                                       ? cuda::launcher_of("sm80_attention", kPositioned, spec, config.has_value())
                                       : cuda::launcher_of("sm80_attention", kCompiled, spec, config.has_value());
  cuda::DeviceKernel kernel;
  kernel.shape = {config->query_tile(), config->query_tile(), config->key_tile};
  kernel.state_floats = static_cast<std::size_t>(cuda::state_floats(spec.head_dim_v));
  kernel.scratch_floats = static_cast<std::size_t>(config->scratch_floats());
  // softmax_offsets are unscaled scores, or capped and scaled ones if the maximum is taken of those.
  const cuda::AttentionParams::Softmax softmax = cuda::softmax_of(spec);
  kernel.offset_scale = {softmax.exponent, softmax.exponent_base2};
  kernel.launcher = &launcher;
  kernel.merge_state = cuda::merge_tensor_state;
  kernel.export_state = cuda::export_tensor_state;
  return cuda::make_cuda_attention(spec, kernel, backend);
}

}  // namespace ringattn::sm80
