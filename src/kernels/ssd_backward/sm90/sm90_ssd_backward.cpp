// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssd_backward/sm90/sm90_ssd_backward.hpp"

#include <fmt/format.h>

#include "kernels/ssd_backward/cuda/device_ssd_backward.hpp"
#include "kernels/ssd_backward/sm90/ssd_rows.hpp"

namespace ringattn::sm90 {

namespace {

template <const HopperSsdBackwardLauncher& kHopper>
constexpr cuda::SsdBackwardLauncher kLauncher = {
    [] { kHopper.load(); },
    [](const cuda::SsdStatesParams& params, bool reversed, int multiprocessors, cudaStream_t stream) {
      kHopper.accumulate(params, reversed, multiprocessors, stream);
    },
    [](const cuda::SsdStatesParams& params, const cuda::SsmTensor& dy, int multiprocessors, cudaStream_t stream) {
      return kHopper.accumulate_gated(params, dy, multiprocessors, stream);
    },
    [](const cuda::SsdStatesParams& params, bool reversed, int segments, int multiprocessors, cudaStream_t stream) {
      kHopper.expand(params, reversed, segments, multiprocessors, stream);
    },
    [](const cuda::SsdRowsParams& params, int segments, cudaStream_t stream) {
      kHopper.rows(params, segments, stream);
    },
    [](const cuda::SsdGateParams& params, int segments, int multiprocessors, cudaStream_t stream) {
      kHopper.gate(params, segments, multiprocessors, stream);
    }};

}  // namespace

std::vector<std::string> ssd_backward_missing(const SsdBackwardSpec& spec) {
  std::vector<std::string> missing = missing_in_ssd_backward(spec);
  const SsmSpec& forward = spec.forward;
  if (forward.dtype != Dtype::kBf16) missing.push_back(fmt::format("{} (supported: bf16)", dtype_name(forward.dtype)));
  if (forward.head_dim != kRowsDims) {
    missing.push_back(fmt::format("head_dim {} (supported: {})", forward.head_dim, kRowsDims));
  }
  if (forward.state_dim != 64 && forward.state_dim != 128) {
    missing.push_back(fmt::format("state_dim {} (supported: 64, 128)", forward.state_dim));
  }
  return missing;
}

std::unique_ptr<SsdBackwardKernel> make_ssd_backward(const SsdBackwardSpec& spec, Backend& backend) {
  const int state_dim = spec.forward.state_dim;
  const cuda::SsdBackwardLauncher& launcher =
      state_dim == 64 ? kLauncher<ssd_backward_64> : kLauncher<ssd_backward_128>;
  return cuda::make_device_ssd_backward(spec, launcher, kRowsDims, state_dim, backend);
}

}  // namespace ringattn::sm90
