// SPDX-License-Identifier: Apache-2.0
#include "base/cuda.hpp"
#include "kernels/cuda/device/export_state.hpp"
#include "kernels/cuda/device/fold_state.cuh"

namespace ringattn::cuda {

namespace {

// sm80_fold: O [heads, rows, head_dim_v] in the order of fragments, then l0 l1 l2 l3 m - - - for each head and row.
struct FoldLayout {
  static __device__ std::int64_t index(const cuda::ExportParams& p, std::int64_t row, std::int64_t head) {
    return head * p.rows + row;
  }
  static __device__ float m(const cuda::ExportParams& p, std::int64_t index) {
    return p.state[p.rows * p.heads * p.head_dim_v + index * 8 + 4] * p.unit;
  }
  static __device__ float l(const cuda::ExportParams& p, std::int64_t index) {
    const float* partial = p.state + p.rows * p.heads * p.head_dim_v + index * 8;
    return (partial[0] + partial[1]) + (partial[2] + partial[3]);
  }
  static __device__ float o(const cuda::ExportParams& p, std::int64_t index, int dim) {
    return p.state[index * p.head_dim_v + place(dim)];
  }
  // Thread t of a quad holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, side by side.
  static __device__ int place(int dim) { return dim / 16 * 16 + dim % 8 / 2 * 4 + dim % 16 / 8 * 2 + dim % 2; }
};

// sm90_fold: the layout of fold_state.cuh; the open group joins the closed ones as the fold would merge it.
struct GroupedLayout : FoldLayout {
  static __device__ MergeStep merged(const cuda::ExportParams& p, std::int64_t index) {
    const float* n = p.state + p.rows * p.heads * p.head_dim_v + index * kStateNumbers;
    const int has = static_cast<int>(n[kStateParts]);
    const float l = (n[0] + n[1]) + (n[2] + n[3]);
    if ((has & kHasOpen) == 0)
      return {(has & kHasClosed) != 0 ? n[kClosedReference] : -INFINITY, (has & kHasClosed) != 0 ? n[kClosedSum] : 0.0F,
              false, 1.0F, 0.0F};
    if ((has & kHasClosed) == 0) return {n[kOpenReference], l, false, 0.0F, 1.0F};
    return merge_rows(n[kClosedReference], n[kClosedSum], n[kOpenReference], l, 1.0F);
  }
  static __device__ float m(const cuda::ExportParams& p, std::int64_t index) {
    return merged(p, index).reference * p.unit;
  }
  static __device__ float l(const cuda::ExportParams& p, std::int64_t index) { return merged(p, index).sum; }
  static __device__ float o(const cuda::ExportParams& p, std::int64_t index, int dim) {
    const std::int64_t all = p.rows * p.heads;
    const int has = static_cast<int>(p.state[all * p.head_dim_v + index * kStateNumbers + kStateParts]);
    const float* closed = p.state + all * (p.head_dim_v + kStateNumbers);
    const std::int64_t at = index * p.head_dim_v + place(dim);
    const MergeStep step = merged(p, index);
    const float before = (has & kHasClosed) != 0 ? multiply_flushed(closed[at], step.kept) : 0.0F;
    return (has & kHasOpen) != 0 ? add_flushed(before, multiply_flushed(p.state[at], step.factor)) : before;
  }
};

// sm80_plain: m, l, O[head_dim_v] for each row and head.
struct PlainLayout {
  static __device__ std::int64_t index(const cuda::ExportParams& p, std::int64_t row, std::int64_t head) {
    return row * p.heads + head;
  }
  static __device__ const float* at(const cuda::ExportParams& p, std::int64_t index) {
    return p.state + index * (p.head_dim_v + 2);
  }
  static __device__ float m(const cuda::ExportParams& p, std::int64_t index) { return at(p, index)[0]; }
  static __device__ float l(const cuda::ExportParams& p, std::int64_t index) { return at(p, index)[1]; }
  static __device__ float o(const cuda::ExportParams& p, std::int64_t index, int dim) { return at(p, index)[2 + dim]; }
};

template <class Layout>
__global__ void export_kernel(const __grid_constant__ cuda::ExportParams p) {
  for (std::int64_t n = blockIdx.x; n < p.rows * p.heads; n += gridDim.x) {
    const std::int64_t row = n / p.heads;
    const std::int64_t head = n % p.heads;
    const std::int64_t index = Layout::index(p, row, head);
    if (threadIdx.x == 0) {
      p.m[row * p.m_token_stride + head * p.m_head_stride] = Layout::m(p, index);
      p.l[row * p.l_token_stride + head * p.l_head_stride] = Layout::l(p, index);
    }
    float* o = p.o + row * p.o_token_stride + head * p.o_head_stride;
    for (int dim = static_cast<int>(threadIdx.x); dim < p.head_dim_v; dim += static_cast<int>(blockDim.x)) {
      o[dim] = Layout::o(p, index, dim);
    }
  }
}

template <class Layout>
void launch_export(const cuda::ExportParams& params, Stream stream) {
  constexpr std::int64_t kMostBlocks = 1 << 16;
  const std::int64_t rows = params.rows * params.heads;
  const auto blocks = static_cast<unsigned>(rows < kMostBlocks ? rows : kMostBlocks);
  export_kernel<Layout><<<blocks, 64, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "export_state");
}

}  // namespace

void export_fold_state(const cuda::ExportParams& params, Stream stream) { launch_export<FoldLayout>(params, stream); }
void export_grouped_state(const cuda::ExportParams& params, Stream stream) {
  launch_export<GroupedLayout>(params, stream);
}
void export_plain_state(const cuda::ExportParams& params, Stream stream) { launch_export<PlainLayout>(params, stream); }

}  // namespace ringattn::cuda
