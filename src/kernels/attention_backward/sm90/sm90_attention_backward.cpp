// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/sm90/sm90_attention_backward.hpp"

#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/attention_backward/cuda/cuda_attention_backward.hpp"
#include "kernels/attention_backward/sm90/backward_params.hpp"
#include "kernels/attention_backward/sm90/config.hpp"

namespace ringattn::sm90 {

namespace {

// Bytes of the other side's tensors in an L2 swizzle group, chosen by speed on an H200.
constexpr std::int64_t kDqSwizzleBytes = std::int64_t{64} << 20;
constexpr std::int64_t kDkvSwizzleBytes = std::int64_t{32} << 20;

constexpr cuda::Compiled<BackwardLauncher> kCompiled[] = {
    {Dtype::kBf16, 64, &attention_backward_bf16_64},   {Dtype::kBf16, 96, &attention_backward_bf16_96},
    {Dtype::kBf16, 128, &attention_backward_bf16_128}, {Dtype::kBf16, 192, &attention_backward_bf16_192},
    {Dtype::kF16, 64, &attention_backward_fp16_64},    {Dtype::kF16, 96, &attention_backward_fp16_96},
    {Dtype::kF16, 128, &attention_backward_fp16_128},  {Dtype::kF16, 192, &attention_backward_fp16_192},
    {Dtype::kBf16, 256, &attention_backward_bf16_256}, {Dtype::kF16, 256, &attention_backward_fp16_256},
};

MappedTensor mapped(const TensorView& view) {
  return {view.data, view.tokens, view.heads, view.dim, view.token_stride, view.head_stride};
}

CUtensorMap map_of(const TensorView& view, int box_rows) {
  return map_tensor(mapped(view), view.dtype, box_rows, BackwardConfig::box_columns(static_cast<int>(view.dim)));
}

// The key tile is that of dQ. dK and dV have tiles of half as many keys, which skip queries that see none of these
// keys.
cuda::BackwardKernelShape shape_of(const BackwardConfig& config) {
  return {
      config.dq_key_tile,
      {kBackwardConsumers, 1, kDqSwizzleBytes},
      {kBackwardConsumers, 1, kDkvSwizzleBytes},
      /*gathers_stats=*/true,
      /*shares_splits=*/true,
      config.spills() ? cuda::BackwardSideShape{kDsConsumers, 1, cuda::kWithoutSwizzle} : cuda::BackwardSideShape{}};
}

class HopperAttentionBackward final : public cuda::CudaAttentionBackward {
 public:
  HopperAttentionBackward(const AttentionBackwardSpec& spec, const BackwardConfig& config,
                          const BackwardLauncher& launcher, const cuda::CudaBackend& backend)
      : CudaAttentionBackward(spec, shape_of(config), backend), launcher_(launcher) {}

 private:
  void launch_dq_from_ds(const DqTask& task, const BackwardCommon& common, int ctas, Stream stream) {
    DqFromDsParams p{};
    p.common = common;
    for (std::size_t i = 0; i < task.sources.size(); ++i) {
      if (task.sources[i].k.tokens > 0) p.k[i] = map_of(task.sources[i].k, kBackwardTile);
    }
    p.dq = cuda::gradient_of(task.dq);
    launcher_.dq_from_ds(p, ctas, stream);
  }

  void prepare() override { launcher_.prepare(); }
  bool can_use_tma(const TensorView& view) const override { return can_map(mapped(view)); }

  void launch_dq(const DqTask& task, const BackwardCommon& common, int ctas, Stream stream) override {
    if (common.spill.tiles != nullptr) return launch_dq_from_ds(task, common, ctas, stream);
    DqParams p{};
    p.common = common;
    if (common.bulk) {
      p.q = map_of(task.q, kBackwardTile);
      p.dout = map_of(task.dout, kBackwardTile);
      for (std::size_t i = 0; i < task.sources.size(); ++i) {
        if (task.sources[i].k.tokens == 0) continue;  // an empty source has no map
        p.k[i] = map_of(task.sources[i].k, key_tile());
        p.v[i] = map_of(task.sources[i].v, key_tile());
      }
    }
    p.stats = task.stats;
    p.dq = cuda::gradient_of(task.dq);
    launcher_.dq(p, ctas, stream);
  }

  void launch_dkv(const DkvTask& task, const BackwardCommon& common, const float* stats, int ctas,
                  Stream stream) override {
    DkvParams p{};
    p.common = common;
    if (common.bulk) {
      p.k = map_of(task.k, kBackwardTile);
      p.v = map_of(task.v, kBackwardTile);
      for (std::size_t i = 0; i < task.sources.size(); ++i) {
        if (task.sources[i].q.tokens == 0) continue;  // an empty source has no map
        p.q[i] = map_of(task.sources[i].q, kBackwardTile);
        p.dout[i] = map_of(task.sources[i].dout, kBackwardTile);
      }
    }
    p.stats = stats;
    p.dk = cuda::gradient_of(task.dk);
    p.dv = cuda::gradient_of(task.dv);
    launcher_.dkv(p, ctas, stream);
  }

  const BackwardLauncher& launcher_;
};

}  // namespace

std::unique_ptr<AttentionBackwardKernel> make_attention_backward(const AttentionBackwardSpec& spec, Backend& backend) {
  const auto config = choose_config(spec);
  const BackwardLauncher& launcher =
      cuda::launcher_of("sm90_attention_backward", kCompiled, spec.forward, config.has_value());
  return std::make_unique<HopperAttentionBackward>(spec, *config, launcher,
                                                   static_cast<const cuda::CudaBackend&>(backend));
}

}  // namespace ringattn::sm90
