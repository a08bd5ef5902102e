// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/sm80/sm80_attention_backward.hpp"

#include <fmt/format.h>

#include <span>

#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention_backward/cuda/cuda_attention_backward.hpp"
#include "kernels/attention_backward/sm80/backward_params.hpp"
#include "kernels/attention_backward/sm80/config.hpp"

namespace ringattn::sm80 {

namespace {

// Bytes of the other side's tensors in an L2 swizzle group: less than the smallest L2 of a large GPU, 40 MB. For dK and
// dV all heads are one group.
constexpr std::int64_t kDqSwizzleBytes = std::int64_t{32} << 20;
constexpr std::int64_t kDkvSwizzleBytes = std::int64_t{1} << 40;

constexpr cuda::Compiled<BackwardLauncher> kCompiled[] = {
    {Dtype::kBf16, 64, &attention_backward_bf16_64},   {Dtype::kBf16, 96, &attention_backward_bf16_96},
    {Dtype::kBf16, 128, &attention_backward_bf16_128}, {Dtype::kBf16, 192, &attention_backward_bf16_192},
    {Dtype::kF16, 64, &attention_backward_fp16_64},    {Dtype::kF16, 96, &attention_backward_fp16_96},
    {Dtype::kF16, 128, &attention_backward_fp16_128},  {Dtype::kF16, 192, &attention_backward_fp16_192},
    {Dtype::kBf16, 256, &attention_backward_bf16_256}, {Dtype::kF16, 256, &attention_backward_fp16_256},
};

cuda::BackwardKernelShape shape_of(const BackwardConfig& config) {
  return {kBackwardTile,
          {config.dq_head_tiles(), BackwardConfig::kDqCtas, kDqSwizzleBytes},
          {1, config.dkv_ctas(), kDkvSwizzleBytes},
          /*gathers_stats=*/false,
          /*shares_splits=*/false};
}

class AmpereAttentionBackward final : public cuda::CudaAttentionBackward {
 public:
  AmpereAttentionBackward(const AttentionBackwardSpec& spec, const BackwardConfig& config,
                          const BackwardLauncher& launcher, const cuda::CudaBackend& backend)
      : CudaAttentionBackward(spec, shape_of(config), backend), launcher_(launcher) {}

 private:
  void prepare() override { launcher_.prepare(); }

  void launch_dq(const DqTask& task, const cuda::BackwardCommon& common, int ctas, Stream stream) override {
    launcher_.dq({common, task.stats, cuda::gradient_of(task.dq)}, ctas, stream);
  }

  void launch_dkv(const DkvTask& task, const cuda::BackwardCommon& common, const float*, int ctas,
                  Stream stream) override {
    launcher_.dkv({common, cuda::gradient_of(task.dk), cuda::gradient_of(task.dv)}, ctas, stream);
  }

  const BackwardLauncher& launcher_;
};

}  // namespace

std::optional<BackwardConfig> choose_config(const AttentionBackwardSpec& spec) {
  return cuda::find_config(std::span<const BackwardConfig>(kBackwardConfigs), spec.forward);
}

std::vector<std::string> attention_backward_missing(const AttentionBackwardSpec& spec) {
  std::vector<std::string> missing = missing_in_backward(spec);
  for (std::string& text : cuda::missing_in_table(std::span<const BackwardConfig>(kBackwardConfigs), spec.forward)) {
    missing.push_back(std::move(text));
  }
  return missing;
}

std::string describe(const BackwardConfig& config) {
  const auto kibibytes = [](int bytes) { return static_cast<double>(bytes) / 1024.0; };
  return fmt::format("dQ: tile {}x{}, {} warps, {:.1f} KiB; dK, dV: tile {}x{}, {} warps, {:.1f} KiB",
                     config.dq_head_tiles() * kBackwardTile, config.dq_keys, config.dq_threads() / 32,
                     kibibytes(config.dq_bytes()), kBackwardTile, config.dkv_queries, config.dkv_threads() / 32,
                     kibibytes(config.dkv_bytes()));
}

std::vector<std::string> attention_backward_configs() {
  return cuda::config_lines(std::span<const BackwardConfig>(kBackwardConfigs));
}

std::unique_ptr<AttentionBackwardKernel> make_attention_backward(const AttentionBackwardSpec& spec, Backend& backend) {
  const auto config = choose_config(spec);
  const BackwardLauncher& launcher =
      cuda::launcher_of("sm80_attention_backward", kCompiled, spec.forward, config.has_value());
  return std::make_unique<AmpereAttentionBackward>(spec, *config, launcher,
                                                   static_cast<const cuda::CudaBackend&>(backend));
}

}  // namespace ringattn::sm80
