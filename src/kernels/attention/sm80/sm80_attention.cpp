// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sm80/sm80_attention.hpp"

#include <fmt/format.h>

#include <span>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention/sm80/config.hpp"
#include "kernels/common/cuda/config_table.hpp"
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

std::optional<AttentionConfig> choose_config(const AttentionSpec& spec) {
  return cuda::find_config(std::span<const AttentionConfig>(kAttentionConfigs), spec);
}

std::vector<std::string> attention_missing(const AttentionSpec& spec) {
  const auto config = choose_config(spec);
  AttentionSpec asked = spec;
  if (!config || config->supports_positions()) asked.positions = 0;
  std::vector<std::string> missing = cuda::missing_in_table(std::span<const AttentionConfig>(kAttentionConfigs), asked);
  const std::string block_mask =
      config ? missing_for_block_mask(spec.block_mask, {config->query_tile(), config->key_tile}) : std::string();
  if (!block_mask.empty()) missing.push_back(block_mask);
  return missing;
}

std::string describe(const AttentionConfig& config) {
  const double kibibytes = static_cast<double>(config.shared_bytes()) / 1024.0;
  if (config.slices > 1) {
    return fmt::format("tile {}x{}, {} warps of {} columns, {} strips of keys, {:.1f} KiB", config.query_tile(),
                       config.key_tile, config.warps, config.head_dim_v / config.slices, config.stages, kibibytes);
  }
  return fmt::format("tile {}x{}, {} warps of {} rows, {} stage{} of keys, {:.1f} KiB", config.query_tile(),
                     config.key_tile, config.warps, config.rows_of_warp, config.stages, config.stages == 1 ? "" : "s",
                     kibibytes);
}

std::vector<std::string> attention_configs() {
  return cuda::config_lines(std::span<const AttentionConfig>(kAttentionConfigs));
}

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
