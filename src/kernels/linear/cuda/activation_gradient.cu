// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/linear/cuda/activation.cuh"
#include "kernels/linear/cuda/activation_gradient.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kGradientThreads = 256;
// Elements of 16 bytes.
template <class Element>
constexpr int kWide = 16 / static_cast<int>(sizeof(StoredElement<Element>));

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

template <class Stored, int kWidth>
struct alignas(sizeof(Stored) * kWidth) Elements {
  Stored values[kWidth];
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
  using Stored = StoredElement<Element>;
  using Run = Elements<Stored, kWidth>;
  const auto load = [](const Stored* from) { return *reinterpret_cast<const Run*>(from); };
  const auto store = [](Stored* to, const Run& from) { *reinterpret_cast<Run*>(to) = from; };
  const Stored* const z_row = static_cast<const Stored*>(p.z) + row * p.z_stride + column;
  const Run dy = load(static_cast<const Stored*>(p.dy) + row * p.dy_stride + column), z = load(z_row);
  Run u{}, dz, du;
  if (p.gated) u = load(z_row + p.columns);
  with_activation<false>(p.activation, [&](auto activation) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float z_value = load_element<Element>(z.values[i]);
      float gradient = load_element<Element>(dy.values[i]);
      if (p.gated) {
        du.values[i] = round_element<Element>(__fmul_rn(gradient, activation(z_value)));
        gradient = __fmul_rn(gradient, load_element<Element>(u.values[i]));
      }
      dz.values[i] = round_element<Element>(__fmul_rn(gradient, slope<decltype(activation)::kActivation>(z_value)));
    }
  });
  Stored* const dz_row = static_cast<Stored*>(p.dz) + row * p.dz_stride + column;
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
  const auto is_wide = [](const void* data, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % kWide<Element> == 0;
  };
  if (p.columns % kWide<Element> == 0 && is_wide(p.dy, p.dy_stride) && is_wide(p.z, p.z_stride) &&
      is_wide(p.dz, p.dz_stride)) {
    launch_of<Element, kWide<Element>>(p, stream);
  } else {
    launch_of<Element, 1>(p, stream);
  }
}

template <class Element>
void load_as() {
  load_kernel(activation_gradient_kernel<Element, kWide<Element>>);
  load_kernel(activation_gradient_kernel<Element, 1>);
}

}  // namespace

void prepare_activation_gradient() {
  load_as<__nv_bfloat16>();
  load_as<__half>();
  load_as<float>();
}

void launch_activation_gradient(const ActivationGradientParams& params, Stream stream) {
  if (params.rows == 0 || params.columns == 0) return;
  if (params.dtype == Dtype::kF32) return launch_as<float>(params, stream);
  if (params.dtype == Dtype::kBf16) return launch_as<__nv_bfloat16>(params, stream);
  launch_as<__half>(params, stream);
}

}  // namespace ringattn::cuda
