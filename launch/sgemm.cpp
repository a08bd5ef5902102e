// SPDX-License-Identifier: Apache-2.0
#include "launch/sgemm.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/error.hpp"

namespace ringattn {

namespace {

constexpr int kSize = 2048;
constexpr int kRuns = 7;
// Not libblas.so.3, which may be the slow reference implementation.
constexpr const char* kLibraries[] = {"libopenblas.so.0", "libopenblas.so"};

// cblas.h: row major is 101, not transposed 111.
using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a,
                       int lda, const float* b, int ldb, float beta, float* c, int ldc);
using SetThreads = void (*)(int threads);

struct Blas {
  Sgemm sgemm = nullptr;
  SetThreads set_threads = nullptr;
  std::string name;
};

Blas find_blas() {
  for (const char* name : kLibraries) {
    void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);  // never closed: its threads use it to the end
    if (library == nullptr) continue;
    const auto sgemm = reinterpret_cast<Sgemm>(::dlsym(library, "cblas_sgemm"));
    const auto set_threads = reinterpret_cast<SetThreads>(::dlsym(library, "openblas_set_num_threads"));
    if (sgemm != nullptr && set_threads != nullptr) return {sgemm, set_threads, name};
  }
  fail(ErrorCode::kUnsupported, "SGEMM can't be measured", "no BLAS is installed: libopenblas.so.0 isn't found",
       "Install libopenblas0-pthread, or leave --against sgemm out.");
}

}  // namespace

SgemmRate measure_sgemm(int threads) {
  const Blas blas = find_blas();
  blas.set_threads(threads);
  const std::vector<float> a(std::size_t{kSize} * kSize, 0.5F);
  const std::vector<float> b(a);
  std::vector<float> c(a.size());
  std::vector<double> seconds;
  for (int run = 0; run <= kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    blas.sgemm(101, 111, 111, kSize, kSize, kSize, 1.0F, a.data(), kSize, b.data(), kSize, 0.0F, c.data(), kSize);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (run > 0) seconds.push_back(taken.count());  // the first run also starts threads, so it is not counted
  }
  std::sort(seconds.begin(), seconds.end());
  return {2.0 * kSize * kSize * kSize / seconds[seconds.size() / 2], blas.name};
}

}  // namespace ringattn
