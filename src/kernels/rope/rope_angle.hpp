// SPDX-License-Identifier: Apache-2.0
// cos and sin of an angle: the one formula of all RoPE kernels. It has only additions and multiplications of fp64, each
// rounded to nearest by itself, so all CPUs and GPUs give the same bits.
//
// n = angle · 2/π to the nearest integer, and r = angle − n · π/2 with π/2 in three parts of 20 bits and a rest. For
// |n| < 2^33 the products with the first three are exact, so r is within 2^-53 of the remainder. Then Taylor series to
// r^15 and r^16, whose first missing terms are below 2^-54 for |r| ≤ π/4. Results are within 2^-51 before they are
// rounded to fp32, so 0.50001 ulp afterwards unless they are near 0, where the error is absolute.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/host_device.hpp"

namespace ringattn {

// Operations that no compiler fuses. Host code is compiled without contraction (CMakeLists.txt).
RINGATTN_HOST_DEVICE inline double rounded_product(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
RINGATTN_HOST_DEVICE inline double rounded_sum(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

struct SinCos {
  float sin = 0.0F;
  float cos = 1.0F;
};

RINGATTN_HOST_DEVICE inline SinCos sin_cos(double angle) {
  constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
  constexpr double kPart0 = 0x1.921fap+0, kPart1 = 0x1.54442p-20, kPart2 = 0x1.a308cp-41, kPart3 = 0x1.313198a2e037p-61;
  // Adding 1.5 · 2^52 rounds to an integer, whose low bits are then those of the sum.
  constexpr double kRounder = 0x1.8p52;
  const double shifted = rounded_sum(rounded_product(angle, kTwoOverPi), kRounder);
  const double n = rounded_sum(shifted, -kRounder);
  std::int64_t quadrant = 0;
  std::memcpy(&quadrant, &shifted, sizeof(quadrant));
  double r = rounded_sum(angle, -rounded_product(n, kPart0));
  r = rounded_sum(r, -rounded_product(n, kPart1));
  r = rounded_sum(r, -rounded_product(n, kPart2));
  r = rounded_sum(r, -rounded_product(n, kPart3));

  const double z = rounded_product(r, r);
  double s = -1.0 / 1307674368000.0;  // −1 / 15!
  s = rounded_sum(rounded_product(s, z), 1.0 / 6227020800.0);
  s = rounded_sum(rounded_product(s, z), -1.0 / 39916800.0);
  s = rounded_sum(rounded_product(s, z), 1.0 / 362880.0);
  s = rounded_sum(rounded_product(s, z), -1.0 / 5040.0);
  s = rounded_sum(rounded_product(s, z), 1.0 / 120.0);
  s = rounded_sum(rounded_product(s, z), -1.0 / 6.0);
  s = rounded_sum(rounded_product(rounded_product(s, z), r), r);
  double c = 1.0 / 20922789888000.0;  // 1 / 16!
  c = rounded_sum(rounded_product(c, z), -1.0 / 87178291200.0);
  c = rounded_sum(rounded_product(c, z), 1.0 / 479001600.0);
  c = rounded_sum(rounded_product(c, z), -1.0 / 3628800.0);
  c = rounded_sum(rounded_product(c, z), 1.0 / 40320.0);
  c = rounded_sum(rounded_product(c, z), -1.0 / 720.0);
  c = rounded_sum(rounded_product(c, z), 1.0 / 24.0);
  c = rounded_sum(rounded_product(c, z), -0.5);
  c = rounded_sum(rounded_product(c, z), 1.0);

  const bool odd = (quadrant & 1) != 0;
  const double sin = odd ? c : s;
  const double cos = odd ? s : c;
  return {static_cast<float>((quadrant & 2) != 0 ? -sin : sin),
          static_cast<float>(((quadrant + 1) & 2) != 0 ? -cos : cos)};
}

// The angle of a pair at a position (rope.hpp).
RINGATTN_HOST_DEVICE inline double rope_angle(std::int64_t position, double frequency, bool exact) {
  if (exact) return rounded_product(static_cast<double>(position), frequency);
#ifdef __CUDA_ARCH__
  return static_cast<double>(__fmul_rn(__ll2float_rn(position), static_cast<float>(frequency)));
#else
  return static_cast<double>(static_cast<float>(position) * static_cast<float>(frequency));
#endif
}

}  // namespace ringattn
