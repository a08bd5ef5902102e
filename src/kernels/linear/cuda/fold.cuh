// SPDX-License-Identifier: Apache-2.0
// The order in which sums of splits or leaves are added (linear.hpp), for sums in registers.
#pragma once

namespace ringattn::cuda {

// A total starts at −0, to which every sum is added: −0 + x is x. (Copying the first sum instead would take registers.)
template <int kBlocks>
__device__ __forceinline__ void start_sums(float (&sums)[kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[i][e] = -0.0F;
  }
}
template <int kBlocks>
__device__ __forceinline__ void add_sums(float (&sums)[kBlocks][4], const float (&more)[kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[i][e] = __fadd_rn(sums[i][e], more[i][e]);
  }
}

// Adds the sums of chains, ascending: splits to one total, or leaves by the binary tree.
template <int kBlocks, bool kLeaves>
struct LinearFold {
  float splits[kBlocks][4];

  __device__ __forceinline__ void start() { start_sums(splits); }
  __device__ __forceinline__ void add(int, bool is_empty, const float (&sums)[kBlocks][4]) {
    if (!is_empty) add_sums(splits, sums);
  }
  __device__ __forceinline__ const float (&total(int) const)[kBlocks][4] { return splits; }
};

// Levels of the tree that are not complete: the sum of a leaf or two, of two pairs or one, and of the first four
// leaves.
template <int kBlocks>
struct LinearFold<kBlocks, true> {
  float pair[kBlocks][4];
  float four[kBlocks][4];
  float eight[kBlocks][4];

  __device__ __forceinline__ void start() {
    start_sums(pair);
    start_sums(four);
    start_sums(eight);
  }
  __device__ __forceinline__ void add(int leaf, bool is_empty, const float (&sums)[kBlocks][4]) {
    if (!is_empty) add_sums(pair, sums);
    if (leaf % 2 == 0) return;
    add_sums(four, pair);
    start_sums(pair);
    if (leaf % 4 != 3) return;
    add_sums(eight, four);
    start_sums(four);
  }
  // The sum of all leaves, 1, 2, 4 or 8.
  __device__ __forceinline__ const float (&total(int leaves))[kBlocks][4] {
    if (leaves == 1) add_sums(eight, pair);
    if (leaves == 2) add_sums(eight, four);
    return eight;
  }
};

}  // namespace ringattn::cuda
