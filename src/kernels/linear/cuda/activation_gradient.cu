// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/activation_gradient.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kGradientThreads = 256;
constexpr int kWide = 8;  // elements of 16 bytes

// a'(z), with the instructions of activate().
template <LinearActivation kActivation>
__device__ __forceinline__ float slope(float z) {
  if constexpr (kActivation == LinearActivation::kSilu) {
    const float r = sigmoid(z);
    return __fmul_rn(r, __fmaf_rn(z, __fadd_rn(1.0F, -r), 1.0F));
  }
  if constexpr (kActivation == LinearActivation::kGeluTanh) {
    const float square = __fmul_rn(z, z);
    const float r = sigmoid(__fmul_rn(z, __fmaf_rn(square, kGeluTanhCubed, kGeluTanh)));
    const float inner = __fmaf_rn(square, 3.0F * kGeluTanhCubed, kGeluTanh);
    return __fmaf_rn(__fmul_rn(__fmul_rn(z, inner), r), __fadd_rn(1.0F, -r), r);
  }
  if constexpr (kActivation == LinearActivation::kGelu) {
    const float exponent = __fmul_rn(__fmul_rn(z, z), -0.5F * kLog2E);
    return __fmaf_rn(z, __fmul_rn(kNormalDensity, exp2_approx(exponent)), normal_cdf(z));
  }
  return 1.0F;
}

template <int kWidth>
struct alignas(2 * kWidth) Elements {
  std::uint16_t values[kWidth];
};

// One thread has kWidth columns of a row. It reads all of them before it writes, so dz may be z.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kGradientThreads)
    activation_gradient_kernel(const __grid_constant__ ActivationGradientParams p) {
  const std::int64_t runs = p.columns / kWidth;  // of a row
  const std::int64_t at = std::int64_t{blockIdx.x} * kGradientThreads + threadIdx.x;
  if (at >= p.rows * runs) return;
  const std::int64_t row = at / runs;
  const std::int64_t column = at % runs * kWidth;
  const auto load = [](const std::uint16_t* from) { return *reinterpret_cast<const Elements<kWidth>*>(from); };
  const auto store = [](std::uint16_t* to, const Elements<kWidth>& from) {
    *reinterpret_cast<Elements<kWidth>*>(to) = from;
  };
  const std::uint16_t* const z_row = p.z + row * p.z_stride + column;
  const Elements<kWidth> dy = load(p.dy + row * p.dy_stride + column), z = load(z_row);
  Elements<kWidth> u{}, dz, du;
  if (p.gated) u = load(z_row + p.columns);
  with_activation<false>(p.activation, [&](auto activation) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float z_value = widen<Element>(z.values[i]);
      float gradient = widen<Element>(dy.values[i]);
      if (p.gated) {
        du.values[i] = round_element<Element>(__fmul_rn(gradient, activation(z_value)));
        gradient = __fmul_rn(gradient, widen<Element>(u.values[i]));
      }
      dz.values[i] = round_element<Element>(__fmul_rn(gradient, slope<decltype(activation)::kActivation>(z_value)));
    }
  });
  std::uint16_t* const dz_row = p.dz + row * p.dz_stride + column;
  store(dz_row, dz);
  if (p.gated) store(dz_row + p.columns, du);
}

template <class Element, int kWidth>
void launch_of(const ActivationGradientParams& p, Stream stream) {
  const std::int64_t threads = p.rows * (p.columns / kWidth);
  const auto blocks = static_cast<unsigned>((threads + kGradientThreads - 1) / kGradientThreads);
  activation_gradient_kernel<Element, kWidth><<<blocks, kGradientThreads, 0, cuda_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), "gradient of an activation");
}

template <class Element>
void launch_as(const ActivationGradientParams& p, Stream stream) {
  const auto is_wide = [](const std::uint16_t* data, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % (2 * kWide) == 0 && stride % kWide == 0;
  };
  if (p.columns % kWide == 0 && is_wide(p.dy, p.dy_stride) && is_wide(p.z, p.z_stride) && is_wide(p.dz, p.dz_stride)) {
    launch_of<Element, kWide>(p, stream);
  } else {
    launch_of<Element, 1>(p, stream);
  }
}

}  // namespace

void prepare_activation_gradient() {
  load_kernel(activation_gradient_kernel<__nv_bfloat16, kWide>);
  load_kernel(activation_gradient_kernel<__nv_bfloat16, 1>);
  load_kernel(activation_gradient_kernel<__half, kWide>);
  load_kernel(activation_gradient_kernel<__half, 1>);
}

void launch_activation_gradient(const ActivationGradientParams& params, Stream stream) {
  if (params.rows == 0 || params.columns == 0) return;
  if (params.dtype == Dtype::kBf16) {
    launch_as<__nv_bfloat16>(params, stream);
  } else {
    launch_as<__half>(params, stream);
  }
}

}  // namespace ringattn::cuda
