// SPDX-License-Identifier: Apache-2.0
// Constants of the activations of linear layers, which every kernel uses (linear.hpp has the formulas).
#pragma once

namespace ringattn {

// GELU (erf): erfc(z) = t · exp(P(t) − z²) with t = 1 / (1 + z/2), z ≥ 0, within 1.2e-7 of its value (Numerical
// Recipes, erfcc). Φ(−x) = ½ erfc(x / √2), so −z² is −x²/2. Coefficients from the highest power of t to the constant.
inline constexpr float kErfcCoefficients[] = {0.17087277F,  -0.82215223F, 1.48851587F, -1.13520398F, 0.27886807F,
                                              -0.18628806F, 0.09678418F,  0.37409196F, 1.00002368F,  -1.26551223F};
inline constexpr float kHalfSqrtHalf = 0.35355339F;  // z/2 = |x| · √½ / 2
// GELU (tanh): t = x · (kGeluTanh + kGeluTanhCubed · x²).
inline constexpr float kGeluTanh = 1.59576912F;        // √(8/π)
inline constexpr float kGeluTanhCubed = 0.071354816F;  // √(8/π) · 0.044715
// The normal density φ(x) = kNormalDensity · exp(−x²/2), for the gradient of GELU (erf).
inline constexpr float kNormalDensity = 0.39894228F;  // 1 / √(2π)

}  // namespace ringattn
