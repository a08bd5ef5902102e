// SPDX-License-Identifier: Apache-2.0
// The fold in fp32, by fused multiply-adds. A CTA of four warps folds 16 rows of one head, each warp four of them; keys
// and values of 32 tokens at a time lie in shared memory as fp32. Each 32 keys are one step
//   x  = softcap(S · softmax_scale)         m′ = max(m, max x)      over the keys that the row sees
//   p  = exp(x − m′)                        s  = exp(m − m′)
//   l′ = l · s + Σ p                        O′ = O · s + Σ p · v
// and a step in which the row sees no key is left out. Steps begin at multiples of 32 in their sequence, so a row's
// numbers depend on nothing but the row and its keys.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "base/cuda.hpp"
#include "base/dtype.hpp"
#include "kernels/cuda/device/plain.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kStepKeys = 32;  // a lane each
constexpr int kWarps = 4;
constexpr int kRowsOfWarp = kPlainItemRows / kWarps;
constexpr int kDimsOfLane = kPlainMaxHeadDim / 32;
constexpr float kLog2E = 1.44269504F;
constexpr unsigned kAllLanes = 0xffffffffU;

__device__ float element(const void* data, int dtype, std::int64_t index) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kF32:
      return static_cast<const float*>(data)[index];
    case Dtype::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return __half2float(static_cast<const __half*>(data)[index]);
  }
}
__device__ void store(void* data, int dtype, std::int64_t index, float value) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kF32:
      static_cast<float*>(data)[index] = value;
      break;
    case Dtype::kBf16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<__half*>(data)[index] = __float2half_rn(value);
  }
}

// The weight 2^x of a score that lies x ≤ 0 from the reference maximum: 0 for −∞, NaN for NaN. A finite score never
// weighs 0, as in exact arithmetic: ∞ in V gives ∞ and not 0 · ∞.
__device__ float weight(float x) {
  if (x == -INFINITY) return 0.0F;
  return exp2f(x < -100.0F ? -100.0F : x);
}

__device__ float sum_of_lanes(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}
__device__ float greatest_of_lanes(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}

// Keys [low, high) of a sequence that the row at `position` sees.
struct Seen {
  std::int64_t low, high;
};
__device__ Seen keys_seen(const cuda::FoldParams& p, std::int64_t position, std::int64_t key_length) {
  Seen seen{0, key_length};
  if (p.mask.left >= 0 && position - p.mask.left > 0) seen.low = position - p.mask.left;
  if (p.mask.right >= 0 && position + p.mask.right + 1 < key_length) seen.high = position + p.mask.right + 1;
  return seen;
}

// One row on its way: m and l in every lane, O[lane + 32 i] in a lane.
struct Row {
  float m;
  float l;
  float o[kDimsOfLane];
};

// In shared memory: q [16, head_dim], k [32, head_dim + 1], v [32, head_dim_v]; the extra float keeps a column of k in
// different banks.
struct Shared {
  float* q;
  float* k;
  float* v;

  __device__ Shared(float* memory, const cuda::FoldParams& p)
      : q(memory), k(q + kPlainItemRows * p.head_dim), v(k + kStepKeys * (p.head_dim + 1)) {}
};
constexpr std::size_t shared_bytes(int head_dim, int head_dim_v) {
  return static_cast<std::size_t>(kPlainItemRows * head_dim + kStepKeys * (head_dim + 1) + kStepKeys * head_dim_v) *
         sizeof(float);
}

__device__ float score(const cuda::FoldParams& p, const float* q, const float* k) {
  float s = 0.0F;
  for (int dim = 0; dim < p.head_dim; ++dim) s = __fmaf_rn(q[dim], k[dim], s);
  s = __fmul_rn(s, p.softmax.scale);
  return p.softmax.cap > 0.0F ? __fmul_rn(p.softmax.cap, tanhf(__fdiv_rn(s, p.softmax.cap))) : s;
}

// Folds the keys of one step that the row sees: bits [low, high) of the 32.
__device__ void fold_step(const cuda::FoldParams& p, Row& row, const float* q, const Shared& shared, int low,
                          int high) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool seen = lane >= low && lane < high;
  const float x = seen ? score(p, q, shared.k + lane * (p.head_dim + 1)) : -INFINITY;
  const float m = fmaxf(row.m, greatest_of_lanes(x));  // passes NaN over: its weight is NaN
  const float reference = m == -INFINITY ? 0.0F : m;   // every score so far is −∞ and weighs 0
  // The difference first: an unchanged maximum scales by exactly 1.
  const float scale = weight(__fmul_rn(__fsub_rn(row.m, reference), kLog2E));
  const float mine = weight(__fmul_rn(__fsub_rn(x, reference), kLog2E));
  row.m = m;
  row.l = __fmaf_rn(row.l, scale, sum_of_lanes(mine));
  float sum[kDimsOfLane] = {};
  for (int key = low; key < high; ++key) {
    const float weight_of_key = __shfl_sync(kAllLanes, mine, key);
    const float* v = shared.v + key * p.head_dim_v;
#pragma unroll
    for (int i = 0; i < kDimsOfLane; ++i) {
      if (lane + 32 * i < p.head_dim_v) sum[i] = __fmaf_rn(weight_of_key, v[lane + 32 * i], sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kDimsOfLane; ++i) row.o[i] = __fmaf_rn(row.o[i], scale, __fadd_rn(sum[i], 0.0F));
}

// Divides, rounds and writes.
__device__ void finish_row(const cuda::FoldParams& p, const Row& row, std::int64_t at, int head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float reference = row.m;
  float l = row.l;
  float scale = 1.0F;
  if (p.sinks != nullptr) {
    // One more score, without a value.
    const float sink = p.sinks[head];
    if (sink > reference || sink != sink) reference = sink;
    const float finite = reference == -INFINITY ? 0.0F : reference;
    scale = weight(__fmul_rn(__fsub_rn(row.m, finite), kLog2E));
    l = __fmaf_rn(l, scale, expf(__fsub_rn(sink, finite)));
  }
  // Nothing was seen: O is 0, and log 0 is −∞.
  const float divisor = l == 0.0F ? 1.0F : l;
  const std::int64_t out = at * p.out.token_stride + head * p.out.head_stride;
#pragma unroll
  for (int i = 0; i < kDimsOfLane; ++i) {
    const int dim = lane + 32 * i;
    if (dim < p.head_dim_v) store(p.out.data, p.dtype, out + dim, __fdiv_rn(__fmul_rn(row.o[i], scale), divisor));
  }
  if (p.lse.data != nullptr && lane == 0) {
    p.lse.data[at * p.lse.token_stride + head * p.lse.head_stride] = __fadd_rn(reference, logf(l));
  }
}

// Rows of K or V of one step as fp32 in shared memory; keys that the sequence lacks become zeros.
__device__ void load_rows(const void* data, int dtype, std::int64_t offset, std::int64_t stride, int keys, int dim,
                          int pitch, float* target) {
  for (int i = static_cast<int>(threadIdx.x); i < kStepKeys * dim; i += kWarps * 32) {
    const int key = i / dim;
    target[key * pitch + i % dim] = key < keys ? element(data, dtype, offset + key * stride + i % dim) : 0.0F;
  }
}

__global__ void __launch_bounds__(kWarps * 32) plain_kernel(const __grid_constant__ cuda::FoldParams p) {
  extern __shared__ float memory[];
  const Shared shared(memory, p);
  const cuda::WorkItem item = p.tables.items[static_cast<int>(blockIdx.x) / p.heads];
  const int head = static_cast<int>(blockIdx.x) % p.heads;
  const int kv_head = head / (p.heads / p.kv_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t state_floats = p.head_dim_v + 2;

  Row rows[kRowsOfWarp];
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int slot = warp * kRowsOfWarp + r;
    const bool read = p.state.resume && slot < item.slot_end;
    const float* state = p.state.memory + ((item.row + slot) * p.heads + head) * state_floats;
    rows[r].m = read ? state[0] : -INFINITY;
    rows[r].l = read ? state[1] : 0.0F;
#pragma unroll
    for (int i = 0; i < kDimsOfLane; ++i) {
      rows[r].o[i] = read && lane + 32 * i < p.head_dim_v ? state[2 + lane + 32 * i] : 0.0F;
    }
  }
  if (item.tiles > 0) {
    for (int i = static_cast<int>(threadIdx.x); i < item.slot_end * p.head_dim; i += kWarps * 32) {
      const std::int64_t row = item.row + i / p.head_dim;
      shared.q[i] = element(p.q.data, p.dtype, row * p.q.token_stride + head * p.q.head_stride + i % p.head_dim);
    }
  }

  int run = item.run_begin;
  for (int t = 0; t < item.tiles; ++t) {
    const std::int64_t number = item.first + t;
    while (run + 1 < item.run_begin + item.runs && p.tables.runs[run + 1].first <= number) ++run;
    const cuda::RunEntry entry = p.tables.runs[run];
    const cuda::TileEntry tile = p.tables.tiles[entry.table + number - entry.first];
    const cuda::SourceEntry source =
        p.tables.all_near ? p.tables.near_sources[tile.source] : p.tables.sources[tile.source];
    for (int begin = 0; begin < kPlainKeyTile; begin += kStepKeys) {
      const std::int64_t first_key = (entry.first_tile + number - entry.first) * kPlainKeyTile + begin;
      const std::int64_t left = item.key_length - first_key;
      if (left <= 0) break;
      const int keys = left < kStepKeys ? static_cast<int>(left) : kStepKeys;
      __syncthreads();
      load_rows(source.k, p.dtype, (tile.row + begin) * source.k_token_stride + kv_head * source.k_head_stride,
                source.k_token_stride, keys, p.head_dim, p.head_dim + 1, shared.k);
      load_rows(source.v, p.dtype, (tile.row + begin) * source.v_token_stride + kv_head * source.v_head_stride,
                source.v_token_stride, keys, p.head_dim_v, p.head_dim_v, shared.v);
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const int slot = warp * kRowsOfWarp + r;
        if (slot >= item.slot_end) continue;
        const Seen seen = keys_seen(p, item.position + slot, item.key_length);
        const std::int64_t low = seen.low - first_key;
        const std::int64_t high = seen.high - first_key;
        if (low >= kStepKeys || high <= 0 || low >= high) continue;
        fold_step(p, rows[r], shared.q + slot * p.head_dim, shared, low < 0 ? 0 : static_cast<int>(low),
                  high > kStepKeys ? kStepKeys : static_cast<int>(high));
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int slot = warp * kRowsOfWarp + r;
    if (slot >= item.slot_end) continue;
    if (p.state.save) {
      float* state = p.state.memory + ((item.row + slot) * p.heads + head) * state_floats;
      if (lane == 0) {
        state[0] = rows[r].m;
        state[1] = rows[r].l;
      }
#pragma unroll
      for (int i = 0; i < kDimsOfLane; ++i) {
        if (lane + 32 * i < p.head_dim_v) state[2 + lane + 32 * i] = rows[r].o[i];
      }
    }
    if (p.finish) finish_row(p, rows[r], item.row + slot, head);
  }
}

// One kernel serves all head dims, so it is made ready for the largest.
void prepare_plain() {
  constexpr auto kMost = static_cast<int>(shared_bytes(kPlainMaxHeadDim, kPlainMaxHeadDim));
  check_cuda(cudaFuncSetAttribute(plain_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost),
             "cudaFuncSetAttribute");
}

void launch_plain(const cuda::FoldParams& params, Stream stream) {
  const std::size_t shared = shared_bytes(params.head_dim, params.head_dim_v);
  const auto blocks = static_cast<unsigned>(params.tables.item_count) * static_cast<unsigned>(params.heads);
  plain_kernel<<<blocks, kWarps * 32, shared, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_plain");
}

}  // namespace

constinit const Launcher plain_fold{prepare_plain, launch_plain};

}  // namespace ringattn::cuda
