// SPDX-License-Identifier: Apache-2.0
// fp64 reference of sampled rows of dQ, dK and dV.
#pragma once

#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "bench/backward_data.cuh"

namespace ringattn::spike {

template <class T>
std::vector<T> to_host(const T* data, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  CHECK(cudaMemcpy(host.data(), data, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

// Gradients in fp64, with exact P and dS and with P and dS rounded to bf16 where the kernels round them.
struct Reference {
  explicit Reference(const Data& data)
      : s(data.shape),
        q(widen(data.q, kHeads)),
        k(widen(data.k, kKvHeads)),
        v(widen(data.v, kKvHeads)),
        dout(widen(data.dout, kHeads)),
        lse2(to_host(data.lse2, s.tokens() * kHeads)),
        delta(to_host(data.delta, s.tokens() * kHeads)) {}

  using Rows = double[2][2][kDim];  // [first output, second output][exact, rounded]

  std::vector<float> widen(const bf16* data, int heads) const {
    const std::vector<bf16> narrow = to_host(data, s.tokens() * heads * kDim);
    std::vector<float> wide(narrow.size());
    for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = __bfloat162float(narrow[i]);
    return wide;
  }
  static double dot(const float* a, const float* b) {
    double sum = 0;
    for (int i = 0; i < kDim; ++i) sum += static_cast<double>(a[i]) * b[i];
    return sum;
  }
  static double rounded(double x) { return __bfloat162float(__float2bfloat16(static_cast<float>(x))); }
  const float* row(const std::vector<float>& x, std::int64_t token, int heads, int head) const {
    return x.data() + (token * heads + head) * kDim;
  }
  // P and dS of a query and a key, exact and rounded.
  void p_and_ds(std::int64_t query, std::int64_t key, int head, double (&p)[2], double (&ds)[2]) const {
    const int kv = head / (kHeads / kKvHeads);
    const double scale = 1.0 / std::sqrt(kDim);
    const double score = dot(row(q, query, kHeads, head), row(k, key, kKvHeads, kv));
    const double dp = dot(row(dout, query, kHeads, head), row(v, key, kKvHeads, kv));
    const double d = delta[static_cast<std::size_t>(head * s.tokens() + query)];
    p[0] = std::exp2(score * scale * kLog2E - lse2[static_cast<std::size_t>(head * s.tokens() + query)]);
    ds[0] = p[0] * (dp - d);
    p[1] = rounded(p[0]);
    ds[1] = rounded(ds[0]);
  }
  static void add(double (&sum)[2][kDim], const double (&weight)[2], const float* x) {
    for (int form = 0; form < 2; ++form) {
      for (int i = 0; i < kDim; ++i) sum[form][i] += weight[form] * x[i];
    }
  }
  void dq(std::int64_t token, int head, Rows& out) const {
    const std::int64_t begin = token / s.seq * s.seq;
    for (std::int64_t key = begin; key <= token; ++key) {
      double p[2], ds[2];
      p_and_ds(token, key, head, p, ds);
      const double scaled[2] = {ds[0] / std::sqrt(kDim), ds[1] / std::sqrt(kDim)};
      add(out[0], scaled, row(k, key, kKvHeads, head / (kHeads / kKvHeads)));
    }
  }
  void dkv(std::int64_t token, int kv, Rows& out) const {
    const std::int64_t end = (token / s.seq + 1) * s.seq;
    for (int head = kv * (kHeads / kKvHeads); head < (kv + 1) * (kHeads / kKvHeads); ++head) {
      for (std::int64_t query = token; query < end; ++query) {
        double p[2], ds[2];
        p_and_ds(query, token, head, p, ds);
        const double scaled[2] = {ds[0] / std::sqrt(kDim), ds[1] / std::sqrt(kDim)};
        add(out[0], scaled, row(q, query, kHeads, head));
        add(out[1], p, row(dout, query, kHeads, head));
      }
    }
  }

  Shape s;
  std::vector<float> q, k, v, dout, lse2, delta;
};

struct Sample {
  std::int64_t token;
  int head;
  Reference::Rows rows;
};

// Samples rows at boundaries of tiles, splits and the sequence, and others.
inline std::vector<Sample> sample(const Reference& reference, bool is_dq) {
  const Shape& s = reference.s;
  std::vector<Sample> samples;
  int n = 0;
  const auto take = [&](std::int64_t token) {
    if (token < 0 || token >= s.tokens()) return;
    samples.push_back({token, (7 * n + 3) % (is_dq ? kHeads : kKvHeads), {}});
    ++n;
  };
  for (const int position : {0, 1, 63, 64, 127, 128, 191, 1000, 1023, 1024, 4095, 8191, 8192, 8255, 16383, 20011}) {
    if (position < s.seq) take(position);
  }
  for (const int back : {1, 2, 64, 65, 129, 1025}) take(s.tokens() - back);
  for (int i = 1; i <= 10; ++i) take((i * 104729LL) % s.tokens());
  std::vector<std::thread> threads;
  for (std::size_t first = 0; first < 16; ++first) {
    threads.emplace_back([&, first] {
      for (std::size_t i = first; i < samples.size(); i += 16) {
        if (is_dq) {
          reference.dq(samples[i].token, samples[i].head, samples[i].rows);
        } else {
          reference.dkv(samples[i].token, samples[i].head, samples[i].rows);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return samples;
}

// The largest ‖x − reference‖ / ‖reference‖ of a sampled row.
inline double error_of(const std::vector<bf16>& got, const std::vector<Sample>& samples, int heads, int output,
                       int form) {
  double worst = 0;
  for (const Sample& one : samples) {
    double difference = 0, norm = 0;
    for (int i = 0; i < kDim; ++i) {
      const double want = one.rows[output][form][i];
      const double x = __bfloat162float(got[static_cast<std::size_t>((one.token * heads + one.head) * kDim + i)]);
      difference += (x - want) * (x - want);
      norm += want * want;
    }
    const double error = std::sqrt(difference / norm);
    if (!(error <= worst)) worst = error;  // NaN is the worst
  }
  return worst;
}

}  // namespace ringattn::spike
