// SPDX-License-Identifier: Apache-2.0
// A spike of the attention backward's kernels on one H200 (notes/backward.md): checks sampled rows of dQ, dK and dV
// against fp64, compares runs and variants bitwise, and times each variant. Prints lines of JSON.
//
// Build: nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -I. -Isrc FILE -o
// backward_spike
//   backward_spike check [part of variants' names] [longest sequence]
//   backward_spike repeat [part of variants' names] [launches]
//   backward_spike speed [part of variants' names] [rounds] [sequence] [KV heads of an L2 swizzle group; 0: the
//   default]
//     [MiB of workspace, a power of two; less than all of dS: dQ is not right]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "bench/backward_data.cuh"
#include "bench/backward_dkv.cuh"
#include "bench/backward_dq.cuh"
#include "bench/backward_dq_spill.cuh"
#include "bench/backward_reference.cuh"

namespace ringattn::spike {
namespace {

constexpr unsigned kPoison = 0xFF;  // of every byte of an output: NaN in bf16

CUtensorMap map_rows(const bf16* data, std::int64_t rows, int heads, int box_rows) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  constexpr cuuint32_t kPanel = cuda::kPanelColumns;
  const cuuint64_t sizes[4] = {kPanel, static_cast<cuuint64_t>(rows), kDim / kPanel, static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(heads) * kRowBytes, kPanel * 2, kRowBytes};
  const cuuint32_t box[4] = {kPanel, static_cast<cuuint32_t>(box_rows), kDim / kPanel, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<bf16*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    std::fprintf(stderr, "the driver refuses a tensor map\n");
    std::exit(1);
  }
  return map;
}

struct Variant {
  const char* name;
  bool is_dq;
  const void* kernel;  // none: the delta pass
  int threads, shared, key_rows, matmuls;
  bool spills;
};
template <class C>
Variant dq_variant(const char* name) {
  return {name, true, reinterpret_cast<const void*>(&dq_kernel<C>), C::kThreads, C::kShared, C::kKeys, 3, false};
}
template <class C>
Variant dkv_variant(const char* name) {
  return {name, false, reinterpret_cast<const void*>(&dkv_kernel<C>), C::kThreads, C::kShared, C::kKeys, 4, C::kSpill};
}
// Reads the workspace that the last dK/dV kernel with a spill wrote.
template <class C>
Variant dq_spill_variant(const char* name) {
  return {name, true, reinterpret_cast<const void*>(&dq_spill_kernel<C>), C::kThreads, C::kShared, C::kKeys, 1, true};
}

const std::vector<Variant>& variants() {
  static const std::vector<Variant> all = {
      {"delta", true, nullptr, 0, 0, 64, 0, false},
      dq_variant<DqConfig<128, 2, 3, 2, DqForm::kInOrder, false>>("dq 2x64x128 in order"),
      dq_variant<DqConfig<128, 2, 3, 2, DqForm::kInOrder, true>>("dq 2x64x128 in order, ping-pong"),
      dq_variant<DqConfig<128, 2, 3, 2, DqForm::kPipelined, true>>("dq 2x64x128 pipelined, ping-pong"),
      dq_variant<DqConfig<64, 3, 4, 4, DqForm::kInOrder, false>>("dq 3x64x64 in order"),
      dkv_variant<DkvConfig<DkvForm::kInOrder, false>>("dkv 2x64x64 in order"),
      dkv_variant<DkvConfig<DkvForm::kInOrder, true>>("dkv 2x64x64 in order, ping-pong"),
      dkv_variant<DkvConfig<DkvForm::kEarlyDv, true>>("dkv 2x64x64 early dv, ping-pong"),
      dkv_variant<DkvConfig<DkvForm::kPipelined, true>>("dkv 2x64x64 pipelined, ping-pong"),
      dkv_variant<DkvConfig<DkvForm::kEarlyDv, true, true>>("spill: dkv 2x64x64 early dv, ping-pong"),
      dq_spill_variant<DqSpillConfig<3, 5>>("spill: dq 3x64x64"),
  };
  return all;
}

class Launcher {
 public:
  Launcher() {
    cudaDeviceProp device{};
    CHECK(cudaGetDeviceProperties(&device, 0));
    ctas_ = device.multiProcessorCount;
    taken_ = allocate<int>(1);
    scratch_ = allocate<float>(std::int64_t{ctas_} * kScratchFloats);
    for (const Variant& variant : variants()) {
      if (variant.kernel == nullptr) continue;
      CHECK(cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, variant.shared));
    }
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
  }
  // Milliseconds of one launch.
  float run(const Variant& variant, const Data& data) {
    const Shape& s = data.shape;
    const auto scale = static_cast<float>(1.0 / std::sqrt(kDim));
    Problem p{map_rows(data.q, s.tokens(), kHeads, kQueryTile),
              map_rows(data.dout, s.tokens(), kHeads, kQueryTile),
              map_rows(data.k, s.tokens(), kKvHeads, variant.key_rows),
              map_rows(data.v, s.tokens(), kKvHeads, variant.key_rows),
              data.lse2,
              data.delta,
              data.dq,
              data.dk,
              data.dv,
              data.spill,
              spill_mask,
              scratch_,
              taken_,
              s.batch,
              s.seq,
              kHeads,
              kKvHeads,
              variant.is_dq || swizzle_all ? s.swizzle_heads : s.batch * kKvHeads,
              scale,
              static_cast<float>(scale * kLog2E)};
    CHECK(cudaMemsetAsync(taken_, 0, sizeof(int)));
    CHECK(cudaEventRecord(begin_));
    void* arguments[] = {&p};
    if (variant.kernel == nullptr) {
      data.make_delta();
    } else {
      CHECK(cudaLaunchKernel(variant.kernel, dim3(static_cast<unsigned>(ctas_)),
                             dim3(static_cast<unsigned>(variant.threads)), arguments,
                             static_cast<std::size_t>(variant.shared), nullptr));
    }
    CHECK(cudaEventRecord(end_));
    CHECK(cudaEventSynchronize(end_));
    float ms = 0.0F;
    CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

  std::uint32_t spill_mask = ~0U;
  bool swizzle_all = false;  // an L2 swizzle for dK/dV kernels too

 private:
  int ctas_;
  int* taken_;
  float* scratch_;
  cudaEvent_t begin_, end_;
};

std::int64_t not_finite(const std::vector<bf16>& x) {
  return std::count_if(x.begin(), x.end(), [](bf16 e) { return !std::isfinite(__bfloat162float(e)); });
}
bool same(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0;
}

constexpr double kMaxExact = 1e-2, kMaxRounded = 3e-3;

bool check(Launcher& launcher, const Shape& shape, const std::string& wanted) {
  const Data data(shape);
  const Reference reference(data);
  const std::vector<Sample> dq_samples = sample(reference, true), dkv_samples = sample(reference, false);
  std::map<bool, std::vector<bf16>> first[2];  // of the first variant of each kernel
  bool good = true;
  for (const Variant& variant : variants()) {
    if (variant.kernel == nullptr || std::string(variant.name).find(wanted) == std::string::npos) continue;
    std::vector<bf16> outputs[2], again[2];
    const std::int64_t count = shape.tokens() * (variant.is_dq ? kHeads : kKvHeads) * kDim;
    for (auto* into : {outputs, again}) {
      for (bf16* output : {variant.is_dq ? data.dq : data.dk, variant.is_dq ? data.dq : data.dv}) {
        CHECK(cudaMemset(output, kPoison, static_cast<std::size_t>(count) * sizeof(bf16)));
      }
      launcher.run(variant, data);
      into[0] = to_host(variant.is_dq ? data.dq : data.dk, count);
      if (!variant.is_dq) into[1] = to_host(data.dv, count);
    }
    const bool repeats = same(outputs[0], again[0]) && same(outputs[1], again[1]);
    const bool is_first = first[0].count(variant.is_dq) == 0;
    if (is_first) {
      first[0][variant.is_dq] = outputs[0];
      first[1][variant.is_dq] = outputs[1];
    }
    const bool agrees = same(outputs[0], first[0][variant.is_dq]) && same(outputs[1], first[1][variant.is_dq]);
    for (int output = 0; output < (variant.is_dq ? 1 : 2); ++output) {
      const auto& samples = variant.is_dq ? dq_samples : dkv_samples;
      const int heads = variant.is_dq ? kHeads : kKvHeads;
      const double exact = error_of(outputs[output], samples, heads, output, 0);
      const double rounded = error_of(outputs[output], samples, heads, output, 1);
      const std::int64_t unwritten = not_finite(outputs[output]);
      const bool ok = exact <= kMaxExact && rounded <= kMaxRounded && unwritten == 0 && repeats && agrees;
      good = good && ok;
      std::printf(
          "{\"what\":\"check\",\"kernel\":\"%s\",\"output\":\"%s\",\"batch\":%d,\"seq\":%d,\"heads\":%d,"
          "\"kv_heads\":%d,\"head_dim\":%d,\"mask\":\"causal\",\"rows\":%zu,\"error\":%.3g,\"error_rounded\":%.3g,"
          "\"not_finite\":%lld,\"repeats\":%s,\"same_as_first_variant\":%s,\"ok\":%s}\n",
          variant.name,
          variant.is_dq ? "dq"
          : output == 0 ? "dk"
                        : "dv",
          shape.batch, shape.seq, kHeads, kKvHeads, kDim, samples.size(), exact, rounded,
          static_cast<long long>(unwritten), repeats ? "true" : "false", agrees ? "true" : "false",
          ok ? "true" : "false");
      std::fflush(stdout);
    }
  }
  return good;
}

// Times variants in turn, so that a change of the clock affects all of them.
void speed(Launcher& launcher, const Shape& shape, const std::string& wanted, int rounds) {
  const Data data(shape);
  std::map<const Variant*, std::vector<float>> times;
  constexpr int kLaunchesInARow = 4;  // timed launches of a variant in a round, after one warm-up
  for (int round = 0; round < rounds; ++round) {
    for (const Variant& variant : variants()) {
      if (std::string(variant.name).find(wanted) == std::string::npos) continue;
      launcher.run(variant, data);
      for (int i = 0; i < kLaunchesInARow; ++i) times[&variant].push_back(launcher.run(variant, data));
    }
  }
  for (const Variant& variant : variants()) {
    if (times.count(&variant) == 0) continue;
    std::vector<float>& of = times[&variant];
    std::sort(of.begin(), of.end());
    const std::int64_t workspace =
        !variant.spills
            ? 0
            : std::min<std::int64_t>(data.spill_bytes(), (std::int64_t{launcher.spill_mask} + 1) * kSpillTile);
    const double flops = variant.matmuls * shape.matmul_flops();
    const double median = of[of.size() / 2];
    std::printf(
        "{\"what\":\"speed\",\"kernel\":\"%s\",\"mask\":\"causal\",\"batch\":%d,\"seq\":%d,"
        "\"heads\":%d,\"kv_heads\":%d,\"head_dim\":%d,\"swizzle_heads\":%d,\"workspace_mib\":%lld,\"matmuls\":%d,"
        "\"launches\":%zu,\"ms\":%.4f,"
        "\"ms_min\":%.4f,"
        "\"raw_tflops\":%.1f}\n",
        variant.name, shape.batch, shape.seq, kHeads, kKvHeads, kDim, shape.swizzle_heads,
        static_cast<long long>(workspace >> 20), variant.matmuls, of.size(), median, of[0], flops / median * 1e-9);
    std::fflush(stdout);
  }
}

__global__ void count_different(const std::uint32_t* a, const std::uint32_t* b, std::int64_t count,
                                unsigned long long* different) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    if (a[i] != b[i]) atomicAdd(different, 1ULL);
  }
}
// Launches a variant many times and compares each poisoned and rewritten output with the first one.
bool repeat(Launcher& launcher, const Shape& shape, const std::string& wanted, int launches) {
  const Data data(shape);
  bool good = true;
  auto* different = allocate<unsigned long long>(1);
  for (const Variant& variant : variants()) {
    if (variant.kernel == nullptr || std::string(variant.name).find(wanted) == std::string::npos) continue;
    const std::int64_t count = shape.tokens() * (variant.is_dq ? kHeads : kKvHeads) * kDim;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(bf16);
    bf16* const outputs[2] = {variant.is_dq ? data.dq : data.dk, variant.is_dq ? data.dq : data.dv};
    bf16* const first[2] = {allocate<bf16>(count), allocate<bf16>(count)};
    CHECK(cudaMemset(different, 0, sizeof(*different)));
    for (int i = 0; i < launches; ++i) {
      for (bf16* output : outputs) CHECK(cudaMemset(output, kPoison, bytes));
      launcher.run(variant, data);
      for (int j = 0; j < 2; ++j) {
        if (i == 0) {
          CHECK(cudaMemcpy(first[j], outputs[j], bytes, cudaMemcpyDeviceToDevice));
        } else {
          count_different<<<2048, 256>>>(reinterpret_cast<const std::uint32_t*>(first[j]),
                                         reinterpret_cast<const std::uint32_t*>(outputs[j]), count / 2, different);
        }
      }
    }
    const unsigned long long found = to_host(different, 1)[0];
    good = good && found == 0;
    std::printf("{\"what\":\"repeat\",\"kernel\":\"%s\",\"batch\":%d,\"seq\":%d,\"launches\":%d,\"different\":%llu}\n",
                variant.name, shape.batch, shape.seq, launches, found);
    for (bf16* output : first) cudaFree(output);
  }
  cudaFree(different);
  return good;
}

}  // namespace

int run(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check", wanted = argc > 2 ? argv[2] : "";
  const auto number = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  Launcher launcher;
  bool good = true;
  if (mode == "check") {
    for (const Shape& shape : {Shape{2, 1024, 16}, Shape{1, 8192 + 1024, 8}, Shape{1, 32768, 2}}) {
      if (shape.seq <= number(3, shape.seq)) good = check(launcher, shape, wanted) && good;
    }
  } else if (mode == "repeat") {
    good = repeat(launcher, {1, 8192, 8}, wanted, number(3, 100));
  } else {
    for (Shape shape : {Shape{2, 8192, 16}, Shape{1, 16384, 8}, Shape{1, 32768, 2}}) {
      if (shape.seq != number(4, shape.seq)) continue;
      launcher.swizzle_all = number(5, 0) > 0;
      if (launcher.swizzle_all) shape.swizzle_heads = number(5, 0);
      if (argc > 6)
        launcher.spill_mask = static_cast<std::uint32_t>((std::int64_t{number(6, 0)} << 20) / kSpillTile - 1);
      speed(launcher, shape, wanted, number(3, 3));
    }
  }
  return good ? 0 : 1;
}

}  // namespace ringattn::spike

int main(int argc, char** argv) { return ringattn::spike::run(argc, argv); }
