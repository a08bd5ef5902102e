// SPDX-License-Identifier: Apache-2.0
// Scores of KV blocks for query blocks, summed over the heads of one mask head (block_mask_choice.cu): for each head
// the dot product of the block means, in the summation order of kernels/attention/block_score.hpp.
//
// A CTA scores kTile query blocks by kTile KV blocks, and a thread 4 × 4 of them. A "lane" l of a dot product is the
// sum over the dims l, l + kScoreLanes, …. A thread computes the lanes in an order in which those that are added to
// each other follow each other, so that three unfinished sums per product suffice for the tree over 32 lanes.
//
// Lanes are grouped in eight quads: quad i has the lanes reversed(i) + {0, 8, 16, 24}, where reversed() reverses the
// three bits of i. A unit is kTerms elements of each of a quad's lanes. Dims after the last one are padded with zeros,
// which change only the sign of a zero sum, and no score comparison depends on it. One pipeline stage of kUnitsOfStage
// units is in shared memory while the next one is fetched.
#pragma once

#include "kernels/attention/block_mask_choice.hpp"
#include "kernels/attention/block_score.hpp"

namespace ringattn::cuda {

// kTerms_: elements of a lane that are read at once, 2 or 4. kWhole: a lane has no others.
template <int kTerms_, bool kWhole>
struct BlockMaskScores {
  static constexpr int kTerms = kTerms_;
  static constexpr int kThreads = 256;
  static constexpr int kTile = 64;  // query blocks per CTA, and KV blocks per CTA
  static constexpr int kUnitsOfStage = 4;
  static constexpr int kLanesOfUnit = 4;
  static constexpr int kQuads = kScoreLanes / kLanesOfUnit;
  static constexpr int kLevels = 3;  // levels of the tree over quads
  static constexpr int kPlanes = kUnitsOfStage * kLanesOfUnit;
  static constexpr int kRows = 2 * kTile;   // query blocks, then KV blocks
  static constexpr int kPitch = kRows + 1;  // a warp that stores 16 planes of two rows has no bank conflict
  // Rows that a thread fetches during a unit.
  static constexpr int kRowsOfUnit = kRows * kPlanes / kThreads / kUnitsOfStage;
  static constexpr int kSide = 4;  // a thread computes kSide x kSide products
  static_assert(kScoreLanes == 32 && kQuads == 1 << kLevels && kThreads == kTile / kSide * (kTile / kSide));

  struct alignas(sizeof(float) * kTerms) Terms {
    float of[kTerms];
  };
  static constexpr int kBytes = 2 * kPlanes * kPitch * int{sizeof(Terms)};

  // A thread's 4 × 4 products.
  using Products = float[kSide * kSide];

  __device__ __forceinline__ BlockMaskScores(const BlockMaskChoice& p, void* shared)
      : p_(p),
        shared_(static_cast<Terms*>(shared)),
        units_per_quad_(kWhole ? 1 : (p.spec.head_dim + kScoreLanes * kTerms - 1) / (kScoreLanes * kTerms)),
        first_key_(blockIdx.x * std::int64_t{kTile}),
        first_query_(blockIdx.y * std::int64_t{kTile}),
        query_rows_(rows_of(p.query_blocks - first_query_)),
        key_rows_(rows_of(p.key_blocks - first_key_)),
        query_stride_(p.spec.heads * p.spec.head_dim),
        key_stride_(p.spec.kv_heads * p.spec.head_dim),
        queries_(p.q + first_query_ * query_stride_),
        keys_(p.k + first_key_ * key_stride_) {}

  __device__ __forceinline__ void run() {
    const auto mask_head = static_cast<int>(blockIdx.z);
    const int heads = p_.spec.heads / p_.spec.block_mask.heads;
    const int first_head = mask_head * heads;
    const int stages = heads * units_per_quad_ * kQuads / kUnitsOfStage;
    const MeanScore score{p_.spec.softmax_scale};
    const Source begin = source(first_head, 0);
#pragma unroll 1
    for (int unit = 0; unit < kUnitsOfStage; ++unit) {
      Terms terms[kRowsOfUnit];
      fetch(begin, unit, terms);
      store(0, unit, terms);
    }
    __syncthreads();
    Products scores = {}, lanes[kLanesOfUnit] = {};
    alignas(16) Products pending[kLevels];  // in local memory: in registers they would be copied with every unit
    int unit_in_quad = 0, quad = 0;
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      const Source next = source(first_head, stage + 1 < stages ? stage + 1 : 0);  // the last stage's fetch is unused
#pragma unroll 1
      for (int unit = 0; unit < kUnitsOfStage; ++unit) {
        Terms terms[kRowsOfUnit];
        fetch(next, unit, terms);
        if (kWhole || unit_in_quad == 0) {
          add<true>(stage % 2, unit, lanes);
        } else {
          add<false>(stage % 2, unit, lanes);
        }
        store((stage + 1) % 2, unit, terms);
        if (++unit_in_quad < units_per_quad_) continue;
        unit_in_quad = 0;
        if (join(quad, lanes, pending)) {
#pragma unroll
          for (int i = 0; i < kSide * kSide; ++i) scores[i] = __fadd_rn(scores[i], score.of_head(lanes[0][i]));
        }
        quad = (quad + 1) % kQuads;
      }
      __syncthreads();
    }
    write(mask_head, scores);
  }

 private:
  __device__ __forceinline__ static int rows_of(std::int64_t left) {
    return static_cast<int>(left < kTile ? left : kTile);
  }

  // A thread's part of a stage: the offsets of its plane's elements in a row of means.
  struct Source {
    int q, k;
    int terms;  // elements that are within head_dim
  };
  __device__ __forceinline__ Source source(int first_head, int stage) const {
    const int plane = static_cast<int>(threadIdx.x) % kPlanes;
    const int unit = stage * kUnitsOfStage + plane / kLanesOfUnit;  // index among all units
    const int unit_in_quad = unit % units_per_quad_;
    const int quad = unit / units_per_quad_ % kQuads;
    const int head = first_head + unit / units_per_quad_ / kQuads;
    const int lane = static_cast<int>(__brev(static_cast<unsigned>(quad)) >> 29U) + plane % kLanesOfUnit * kQuads;
    const int dim = lane + unit_in_quad * kTerms * kScoreLanes;
    const int width = p_.spec.head_dim;
    return {head * width + dim, head / (p_.spec.heads / p_.spec.kv_heads) * width + dim,
            (width - dim + kScoreLanes - 1) / kScoreLanes};
  }
  // Row of this thread's `nth` fetch during a unit: query blocks in the first half of a stage, then KV blocks.
  __device__ __forceinline__ static int row_of(int unit, int nth) {
    return static_cast<int>(threadIdx.x) / kPlanes + (unit * kRowsOfUnit + nth) * (kThreads / kPlanes);
  }
  __device__ __forceinline__ void fetch(const Source& from, int unit, Terms (&terms)[kRowsOfUnit]) const {
    const bool is_query = unit < kUnitsOfStage / 2;
    const int row = row_of(unit, 0) - (is_query ? 0 : kTile);
    const int stride = is_query ? query_stride_ : key_stride_;
    const int rows = is_query ? query_rows_ : key_rows_;
    const float* at = (is_query ? queries_ + from.q : keys_ + from.k) + std::int64_t{row} * stride;
#pragma unroll
    for (int nth = 0; nth < kRowsOfUnit; ++nth, at += kThreads / kPlanes * std::int64_t{stride}) {
      const bool present = row + nth * (kThreads / kPlanes) < rows;
#pragma unroll
      for (int j = 0; j < kTerms; ++j) {
        terms[nth].of[j] = present && (kWhole || j < from.terms) ? __ldg(at + j * kScoreLanes) : 0.0F;
      }
    }
  }
  __device__ __forceinline__ void store(int stage, int unit, const Terms (&terms)[kRowsOfUnit]) {
    const int plane = static_cast<int>(threadIdx.x) % kPlanes;
#pragma unroll
    for (int nth = 0; nth < kRowsOfUnit; ++nth) {
      shared_[(stage * kPlanes + plane) * kPitch + row_of(unit, nth)] = terms[nth];
    }
  }

  // Adds a unit to the four lanes of its quad, or initializes them.
  template <bool kBegins>
  __device__ __forceinline__ void add(int stage, int unit, Products (&lanes)[kLanesOfUnit]) const {
    const int column = static_cast<int>(threadIdx.x) % (kTile / kSide);
    const int row = static_cast<int>(threadIdx.x) / (kTile / kSide) * kSide;
#pragma unroll
    for (int lane = 0; lane < kLanesOfUnit; ++lane) {
      const Terms* const plane = shared_ + (stage * kPlanes + unit * kLanesOfUnit + lane) * kPitch;
      Terms q[kSide];
#pragma unroll
      for (int m = 0; m < kSide; ++m) q[m] = plane[row + m];
#pragma unroll
      for (int n = 0; n < kSide; ++n) {
        const Terms k = plane[kTile + column + n * (kTile / kSide)];
#pragma unroll
        for (int m = 0; m < kSide; ++m) {
          float& sum = lanes[lane][m * kSide + n];
#pragma unroll
          for (int j = 0; j < kTerms; ++j) {
            const float product = __fmul_rn(q[m].of[j], k.of[j]);
            sum = kBegins && j == 0 ? product : __fadd_rn(sum, product);
          }
        }
      }
    }
  }

  // Adds up a quad's lanes, in halves, and then those of the quads before it. Returns true after the last quad:
  // lanes[0] then has the dot products.
  __device__ __forceinline__ static bool join(int quad, Products (&lanes)[kLanesOfUnit], Products (&pending)[kLevels]) {
#pragma unroll
    for (int i = 0; i < kSide * kSide; ++i) {
      lanes[0][i] = __fadd_rn(__fadd_rn(lanes[0][i], lanes[2][i]), __fadd_rn(lanes[1][i], lanes[3][i]));
    }
    // Adds the finished levels, one after another. A loop keeps `pending` in local memory.
    int level = 0;
#pragma unroll 1
    for (; (quad >> level & 1) != 0; ++level) {
#pragma unroll
      for (int i = 0; i < kSide * kSide; ++i) lanes[0][i] = __fadd_rn(pending[level][i], lanes[0][i]);
    }
    if (level == kLevels) return true;
#pragma unroll
    for (int i = 0; i < kSide * kSide; ++i) pending[level][i] = lanes[0][i];
    return false;
  }

  __device__ __forceinline__ void write(int mask_head, const Products& scores) const {
    const std::int64_t query = first_query_ + threadIdx.x / (kTile / kSide) * kSide;
    const std::int64_t key = first_key_ + threadIdx.x % (kTile / kSide);
#pragma unroll
    for (int m = 0; m < kSide; ++m) {
#pragma unroll
      for (int n = 0; n < kSide; ++n) {
        const std::int64_t block = key + n * (kTile / kSide);
        if (query + m < p_.query_blocks && block < p_.key_blocks) {
          p_.scores[(mask_head * p_.query_blocks + query + m) * p_.key_blocks + block] = scores[m * kSide + n];
        }
      }
    }
  }

  const BlockMaskChoice& p_;
  Terms* const shared_;
  const int units_per_quad_;
  const std::int64_t first_key_;
  const std::int64_t first_query_;
  const int query_rows_;  // of this tile
  const int key_rows_;
  const int query_stride_;  // elements of one block's means
  const int key_stride_;
  const float* const queries_;
  const float* const keys_;
};

// Returns true if a CTA's tile has a block that one of the tile's query blocks may choose or drop.
template <class Scores>
__device__ __forceinline__ bool tile_is_wanted(const BlockMaskChoice& p) {
  const std::int64_t first_key = blockIdx.x * std::int64_t{Scores::kTile};
  const std::int64_t query = blockIdx.y * std::int64_t{Scores::kTile} + threadIdx.x;
  bool wanted = false;
  if (threadIdx.x < Scores::kTile && query < p.query_blocks) {
    const BlockCandidates of = p.candidates[query];
    wanted = of.count < of.end - of.begin && of.begin < first_key + Scores::kTile && of.end > first_key;
  }
  return __syncthreads_or(wanted ? 1 : 0) != 0;
}

}  // namespace ringattn::cuda
