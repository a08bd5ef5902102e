// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/sm80/sm80_simt_backward.hpp"

#include <utility>

#include "kernels/attention/sm80/sm80_simt.hpp"
#include "kernels/attention_backward/cuda/cuda_attention_backward.hpp"
#include "kernels/attention_backward/cuda/simt_backward.hpp"

namespace ringattn::sm80 {

namespace {

constexpr cuda::BackwardKernelShape kSimtBackwardShape{kBackwardTile,
                                                       // The loads of the other side take little time compared with the
                                                       // arithmetic.
                                                       {1, cuda::kSimtBackwardCtas, cuda::kWithoutSwizzle},
                                                       {1, cuda::kSimtBackwardCtas, cuda::kWithoutSwizzle},
                                                       /*gathers_stats=*/false,
                                                       /*shares_splits=*/false};

class SimtAttentionBackward final : public cuda::CudaAttentionBackward {
 public:
  SimtAttentionBackward(const AttentionBackwardSpec& spec, const cuda::CudaBackend& backend)
      : CudaAttentionBackward(spec, kSimtBackwardShape, backend), spec_(spec.forward) {}

 private:
  void prepare() override { cuda::prepare_simt_backward(); }

  void launch_dq(const DqTask& task, const cuda::BackwardCommon& common, int ctas, Stream stream) override {
    cuda::launch_simt_dq(params_of(common, task.stats, task.dq, nullptr), ctas, stream);
  }

  void launch_dkv(const DkvTask& task, const cuda::BackwardCommon& common, const float*, int ctas,
                  Stream stream) override {
    cuda::launch_simt_dkv(params_of(common, nullptr, task.dk, task.dv), ctas, stream);
  }

  cuda::SimtBackwardParams params_of(const cuda::BackwardCommon& common, const float* stats,
                                     const MutableTensorView* first, const MutableTensorView* second) const {
    return {common,
            stats,
            {cuda::gradient_of(first), cuda::gradient_of(second)},
            spec_.head_dim,
            spec_.head_dim_v,
            static_cast<std::int32_t>(spec_.dtype)};
  }

  AttentionSpec spec_;
};

}  // namespace

std::vector<std::string> simt_backward_missing(const AttentionBackwardSpec& spec) {
  AttentionSpec forward = spec.forward;
  forward.block_mask = {};  // missing_in_backward() names block masks
  std::vector<std::string> missing = simt_missing(forward);
  for (std::string& requirement : missing_in_backward(spec)) missing.push_back(std::move(requirement));
  return missing;
}

std::unique_ptr<AttentionBackwardKernel> make_simt_backward(const AttentionBackwardSpec& spec, Backend& backend) {
  return std::make_unique<SimtAttentionBackward>(spec, static_cast<const cuda::CudaBackend&>(backend));
}

}  // namespace ringattn::sm80
