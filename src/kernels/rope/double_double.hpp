// SPDX-License-Identifier: Apache-2.0
// Logarithms and powers that don't depend on libm: pairs of doubles with about 100 bits (Dekker; Knuth's two-sum), from
// which results are rounded once.
#pragma once

#include <cmath>

namespace ringattn {

struct DoubleDouble {
  double high = 0.0;
  double low = 0.0;

  static DoubleDouble sum(double a, double b) {  // exact
    const double s = a + b;
    const double part = s - a;
    return {s, (a - (s - part)) + (b - part)};
  }
  static DoubleDouble product(double a, double b) {  // exact
    const double p = a * b;
    return {p, std::fma(a, b, -p)};
  }
  friend DoubleDouble operator+(DoubleDouble a, DoubleDouble b) {
    DoubleDouble s = sum(a.high, b.high);
    const DoubleDouble t = sum(a.low, b.low);
    s = sum(s.high, s.low + t.high);
    return sum(s.high, s.low + t.low);
  }
  friend DoubleDouble operator*(DoubleDouble a, DoubleDouble b) {
    const DoubleDouble p = product(a.high, b.high);
    return sum(p.high, p.low + (a.high * b.low + a.low * b.high));
  }
  DoubleDouble operator-() const { return {-high, -low}; }
  friend DoubleDouble operator/(DoubleDouble a, DoubleDouble b) {
    const double first = a.high / b.high;
    const DoubleDouble rest = a + -(b * DoubleDouble{first});
    const double second = rest.high / b.high;
    const DoubleDouble last = rest + -(b * DoubleDouble{second});
    return sum(first, second) + DoubleDouble{last.high / b.high};
  }
};

// For |x| below 700.
inline DoubleDouble exp(DoubleDouble x) {
  constexpr DoubleDouble kLn2{0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
  constexpr int kSquarings = 8;
  const double n = std::nearbyint(x.high / kLn2.high);
  DoubleDouble r = x + -(kLn2 * DoubleDouble{n});
  r = {std::ldexp(r.high, -kSquarings), std::ldexp(r.low, -kSquarings)};
  DoubleDouble sum{1.0}, term{1.0};
  for (int i = 1; i <= 12; ++i) {  // |r| < 2^-9, so the next term is below 2^-140
    term = term * r / DoubleDouble{static_cast<double>(i)};
    sum = sum + term;
  }
  for (int i = 0; i < kSquarings; ++i) sum = sum * sum;
  const int exponent = static_cast<int>(n);
  return {std::ldexp(sum.high, exponent), std::ldexp(sum.low, exponent)};
}

// For x > 0. One Newton step doubles the digits of libm's logarithm, whose own last digits then don't matter.
inline DoubleDouble log(DoubleDouble x) {
  const DoubleDouble first{std::log(x.high)};
  const DoubleDouble ratio = x * exp(-first);
  const DoubleDouble rest = ratio + DoubleDouble{-1.0};  // ln(1 + rest) = rest − rest² / 2 …
  return first + rest + -(rest * rest * DoubleDouble{0.5});
}

inline DoubleDouble pow(DoubleDouble base, DoubleDouble exponent) { return exp(log(base) * exponent); }

}  // namespace ringattn
