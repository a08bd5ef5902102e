// SPDX-License-Identifier: Apache-2.0
// The kernels of sm80_gla: local states of segments and rows of y (kernels/ssm/ssm.hpp, 1 and 4) of linear attention
// with a decay per key dim.
//
// A CTA processes a segment of one head, chunk by chunk. Consumer warps hold the state in registers, 16 dims of v each,
// and multiply by it. Producer warps load the chunks and compute the consumers' operands, one chunk ahead of the
// consumers:
//
//   a_j = exp2(log-decay of token j), one for each key dim
//   within a sub-chunk of 16 tokens: the products of a up to token i, and after token j
//   q_i · (decay from the start of the chunk), k_j · (decay to its end)
//   scores_ij = Σ_n q_i[n] · k_j[n] · (decay after j up to i)[n]
//
// A decay is the product of the a of its tokens. So there is one exp2 for each token and dim, and its argument is never
// positive if log-decays are at most 0. Between sub-chunks the scores are an MMA of q_i · (decay from the end of the
// sub-chunk of j) and k_j · (decay to that end). In a diagonal block the decays of k_j are multiplied up from row to
// row, and each term is an fp32 fma.
//
// Rounding: in y, decayed q and k, the scores and the state before the chunk are rounded to the element type once. In
// local states, decayed k are a hi/lo pair of the element type. All sums are fp32.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "base/cuda.hpp"
#include "kernels/common/cuda/lane_sums.cuh"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/sm80/sm80_gla.hpp"
#include "kernels/ssm/sm80/ssd.cuh"

namespace ringattn::sm80 {

// Named barriers. Barrier 0 is that of the CTA. As in sync_head(), ids and counts are immediates.
inline constexpr int kGlaProducerBarrier = 1;
inline constexpr int kGlaFullBarrier = 2;   // of two sets of tiles
inline constexpr int kGlaEmptyBarrier = 4;  // also of two sets
template <int kBarrier, int kThreads>
__device__ __forceinline__ void gla_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
template <int kBarrier, int kThreads>
__device__ __forceinline__ void gla_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// The same for the barrier of a set, `set` being 0 or 1.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void gla_sync(int set) {
  set == 0 ? gla_sync<kBarrier, kThreads>() : gla_sync<kBarrier + 1, kThreads>();
}
template <int kBarrier, int kThreads>
__device__ __forceinline__ void gla_arrive(int set) {
  set == 0 ? gla_arrive<kBarrier, kThreads>() : gla_arrive<kBarrier + 1, kThreads>();
}

struct GlaCta {
  SegmentCoord segment;
  int head, group;

  __device__ __forceinline__ explicit GlaCta(const SsmParams& p)
      : segment(cuda::segment_coord(p, static_cast<int>(blockIdx.x) / p.head_count)),
        head(p.first_head + static_cast<int>(blockIdx.x) % p.head_count),
        group(head / p.group_heads) {}
  __device__ __forceinline__ int chunks() const { return (segment.tokens + kChunk - 1) / kChunk; }
};

// Producers.

// Loops are not unrolled further than registers ask for. The two long loops that warps run at a time were slower with
// more code, probably for the instruction cache (bench/notes/ssm.md).

// Copies `rows` rows to a tile of kChunk rows of kVectors 16-byte vectors, and zero-fills the rest. By all producers.
// Unaligned rows are copied synchronously.
template <int kVectors, int kPitch>
__device__ __forceinline__ void copy_gla_rows(std::uint32_t target, const char* source, std::int64_t token_bytes,
                                              int rows, bool aligned, int thread) {
  constexpr int kRowsAtOnce = kGlaProducers / kVectors;
  static_assert(kGlaProducers % kVectors == 0 && kChunk % kRowsAtOnce == 0);
  const int column = thread % kVectors * 16;
  const int first = thread / kVectors;
  target += static_cast<std::uint32_t>(first * kPitch + column);
  if (aligned) {
#pragma unroll
    for (int row = 0; row < kChunk; row += kRowsAtOnce) {
      const bool present = first + row < rows;
      cuda::copy_16(target + row * kPitch, present ? source + (first + row) * token_bytes + column : source, present);
    }
    return;
  }
#pragma unroll 1
  for (int row = 0; row < kChunk; row += kRowsAtOnce) {
    std::uint32_t words[4] = {};
    if (first + row < rows) {
      const auto* const halves = reinterpret_cast<const std::uint16_t*>(source + (first + row) * token_bytes + column);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = halves[2 * w] | static_cast<std::uint32_t>(halves[2 * w + 1]) << 16;
    }
    cuda::store_shared(target + row * kPitch, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

template <class Element, int kDim, int kDimV, bool kOutputs, int kStages>
class GlaProducer {
 public:
  using Layout = GlaLayout<kDim, kDimV, kOutputs, kStages>;

  __device__ __forceinline__ GlaProducer(const SsmParams& p, const GlaCta& cta, unsigned char* memory)
      : p_(p),
        cta_(cta),
        memory_(memory),
        base_(cuda::shared_address(memory)),
        thread_(static_cast<int>(threadIdx.x) - Layout::kConsumers) {}

  // Groups of copies are committed in this order: rows of chunk 0, its v, rows of chunk 1, then for each chunk the next
  // one's v and the rows of a later one. With one stage, rows of chunk 1 come after chunk 0.
  __device__ __forceinline__ void run() {
    const int chunks = cta_.chunks();
    issue_rows(0);
    issue_values(0);
    if constexpr (kStages == 2) issue_rows(1);
    float logs[2] = {};  // of the segment, in this thread's sub-chunks and dims
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      unsigned char* const stage = memory_ + chunk % kStages * Layout::kStageBytes;
      cuda::copy_wait<kStages == 2 ? 2 : 0>();
      sync();
      make_decays(stage, logs);
      sync();
      float diagonal[3];
      if constexpr (kOutputs) {
        multiply_own_sub_chunk(stage, diagonal);
        sync();
      }
      const int set = chunk % Layout::kSets;
      if (chunk >= Layout::kSets) gla_sync<kGlaEmptyBarrier, Layout::kThreads>(set);
      issue_values(chunk + 1);
      if constexpr (kOutputs) store_diagonal(diagonal);
      scale_rows(stage, memory_ + set * Layout::kSetBytes);
      sync();
      if constexpr (kOutputs) {
        multiply_earlier_sub_chunks(stage);
        sync();
      }
      issue_rows(chunk + kStages);
      cuda::copy_wait<kStages == 2 ? 3 : 2>();  // v of this chunk
      gla_arrive<kGlaFullBarrier, Layout::kThreads>(set);
    }
    if constexpr (!kOutputs) store_logs(logs);
  }

 private:
  static constexpr int kPairs = kDim / 2;  // pairs of dims
  static constexpr int kRowThreads = kSubChunks * kPairs;
  static_assert(kRowThreads <= kGlaProducers);

  __device__ __forceinline__ static void sync() { gla_sync<kGlaProducerBarrier, kGlaProducers>(); }
  __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(memory_ + offset); }
  __device__ __forceinline__ int warp() const { return thread_ / 32; }
  __device__ __forceinline__ int lane() const { return thread_ % 32; }
  // In make_decays() and scale_rows() a thread has two dims of a sub-chunk.
  __device__ __forceinline__ bool has_rows() const { return thread_ < kRowThreads; }
  __device__ __forceinline__ int own_sub_chunk() const { return thread_ / kPairs; }
  __device__ __forceinline__ int own_dim() const { return thread_ % kPairs * 2; }

  __device__ __forceinline__ int rows_of(int chunk) const {
    const int left = cta_.segment.tokens - chunk * kChunk;
    return left < kChunk ? left : kChunk;
  }
  __device__ __forceinline__ const char* row_of(const SsmTensor& tensor, int chunk, int head, int bytes) const {
    return static_cast<const char*>(tensor.data) +
           ((cta_.segment.row + chunk * kChunk) * tensor.token_stride + head * tensor.head_stride) * bytes;
  }

  __device__ __forceinline__ void issue_rows(int chunk) const {
    if (chunk < cta_.chunks()) {
      const std::uint32_t stage = base_ + static_cast<std::uint32_t>(chunk % kStages * Layout::kStageBytes);
      const int rows = rows_of(chunk);
      constexpr int kVectors = kDim / kVectorElements;
      copy_gla_rows<kVectors, Layout::kKeyPitch>(stage + Layout::kKeys, row_of(p_.b, chunk, cta_.group, 2),
                                                 p_.b.token_stride * 2, rows, p_.b.aligned, thread_);
      copy_gla_rows<kDim / 4, kDim * 4>(stage + Layout::kLogs, row_of(p_.dt, chunk, cta_.head, 4),
                                        p_.dt.token_stride * 4, rows, p_.dt.aligned, thread_);
      if constexpr (kOutputs) {
        copy_gla_rows<kVectors, Layout::kKeyPitch>(stage + Layout::kQueries, row_of(p_.c, chunk, cta_.group, 2),
                                                   p_.c.token_stride * 2, rows, p_.c.aligned, thread_);
      }
    }
    cuda::copy_commit();
  }
  __device__ __forceinline__ void issue_values(int chunk) const {
    if (chunk < cta_.chunks()) {
      copy_gla_rows<kDimV / kVectorElements, Layout::kValuePitch>(
          base_ + static_cast<std::uint32_t>(Layout::kValues + chunk % Layout::kValueTiles * Layout::kValueTile),
          row_of(p_.x, chunk, cta_.head, 2), p_.x.token_stride * 2, rows_of(chunk), p_.x.aligned, thread_);
    }
    cuda::copy_commit();
  }

  // Replaces the log-decays of the stage by decays, and stores their products over sub-chunks. Tokens after the last
  // one have decay 1.
  __device__ __forceinline__ void make_decays(unsigned char* stage, float (&segment_logs)[2]) const {
    if (!has_rows()) return;
    auto* const rows =
        reinterpret_cast<float2*>(stage + Layout::kLogs) + own_sub_chunk() * kSubChunk * kPairs + own_dim() / 2;
    float2 product = make_float2(1.0F, 1.0F);
    float2 sum = make_float2(0.0F, 0.0F);
#pragma unroll 4
    for (int i = 0; i < kSubChunk; ++i) {
      float2 log = rows[i * kPairs];
      log.x = __fmul_rn(log.x, cuda::kSsmLog2E);
      log.y = __fmul_rn(log.y, cuda::kSsmLog2E);
      if (log.x < cuda::kMinLog) log.x = cuda::kMinLog;
      if (log.y < cuda::kMinLog) log.y = cuda::kMinLog;
      const float2 decay = make_float2(cuda::exp2_approx(log.x), cuda::exp2_approx(log.y));
      rows[i * kPairs] = decay;
      product.x = __fmul_rn(product.x, decay.x);
      product.y = __fmul_rn(product.y, decay.y);
      sum.x = __fadd_rn(sum.x, log.x);
      sum.y = __fadd_rn(sum.y, log.y);
    }
    *reinterpret_cast<float2*>(floats(Layout::kSubDecays) + own_sub_chunk() * kDim + own_dim()) = product;
    segment_logs[0] = __fadd_rn(segment_logs[0], sum.x);
    segment_logs[1] = __fadd_rn(segment_logs[1], sum.y);
  }

  // The product of the decays of sub-chunks [first, end), in two dims.
  __device__ __forceinline__ float2 decay_of(int first, int end) const {
    float2 product = make_float2(1.0F, 1.0F);
    const float* const decays = floats(Layout::kSubDecays) + own_dim();
    for (int sub_chunk = first; sub_chunk < end; ++sub_chunk) {
      const float2 decay = *reinterpret_cast<const float2*>(decays + sub_chunk * kDim);
      product.x = __fmul_rn(product.x, decay.x);
      product.y = __fmul_rn(product.y, decay.y);
    }
    return product;
  }

  // Two elements of some rows of a tile, loaded before any is stored, and the rows' decays.
  static constexpr int kRowsAtOnce = 4;
  __device__ __forceinline__ static std::uint32_t& word(unsigned char* tile, int row) {
    return *reinterpret_cast<std::uint32_t*>(tile + row * Layout::kKeyPitch);
  }
  struct RowsAtOnce {
    std::uint32_t words[kRowsAtOnce];
    float2 decays[kRowsAtOnce];

    __device__ __forceinline__ RowsAtOnce(unsigned char* tile, const float2* all_decays, int first) {
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        words[i] = word(tile, first + i);
        decays[i] = all_decays[(first + i) * kPairs];
      }
    }
  };

  __device__ __forceinline__ static std::uint32_t pack_product(float2 a, float2 b) {
    return cuda::MmaTraits<Element>::pack(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y));
  }
  __device__ __forceinline__ static float2 multiply(float2 a, float2 b) {
    return make_float2(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y));
  }

  // Multiplies q and k of the chunk by their decays. The operands for the scores of later sub-chunks are computed in
  // place: k by the decay to the end of its sub-chunk, q by the decay from the start of its own. q with decays from
  // earlier ends are stored in the tiles kFarQueries: sub-chunk 2 from the end of sub-chunk 0, and sub-chunk 3 from the
  // ends of 1 and 0. `set` is the CTA's memory, offset to the chunk's set of tiles.
  __device__ __forceinline__ void scale_rows(unsigned char* stage, unsigned char* set) const {
    if (!has_rows()) return;
    const int sub_chunk = own_sub_chunk();
    const int offset = sub_chunk * kSubChunk * Layout::kKeyPitch + own_dim() * kElementBytes;
    const float2* const decays =
        reinterpret_cast<const float2*>(stage + Layout::kLogs) + sub_chunk * kSubChunk * kPairs + own_dim() / 2;
    unsigned char* const keys = stage + Layout::kKeys + offset;
    unsigned char* const state_keys = set + Layout::kStateKeys + offset;
    const float2 later = decay_of(sub_chunk + 1, kSubChunks);
    float2 decay = make_float2(1.0F, 1.0F);
#pragma unroll 1
    for (int first = kSubChunk - kRowsAtOnce; first >= 0; first -= kRowsAtOnce) {
      const RowsAtOnce rows(keys, decays, first);
#pragma unroll
      for (int i = kRowsAtOnce - 1; i >= 0; --i) {
        const float2 k = multiply(unpack(rows.words[i], Element()), decay);
        const float2 of_state = multiply(k, later);
        const std::uint32_t rounded = cuda::MmaTraits<Element>::pack(of_state.x, of_state.y);
        word(state_keys, first + i) = rounded;
        if constexpr (kOutputs) {
          word(keys, first + i) = cuda::MmaTraits<Element>::pack(k.x, k.y);
        } else {
          const float2 high = unpack(rounded, Element());
          word(set + Layout::kSecond + offset, first + i) =
              cuda::MmaTraits<Element>::pack(__fsub_rn(of_state.x, high.x), __fsub_rn(of_state.y, high.y));
        }
        decay = multiply(decay, rows.decays[i]);
      }
    }
    if (sub_chunk == 0) {
      reinterpret_cast<float2*>(set + Layout::kChunkDecay)[own_dim() / 2] = decay_of(0, kSubChunks);
    }
    if constexpr (kOutputs) {
      unsigned char* const queries = stage + Layout::kQueries + offset;
      unsigned char* const state_queries = set + Layout::kSecond + offset;
      unsigned char* const far = memory_ + Layout::kFarQueries + own_dim() * kElementBytes;
      constexpr int kFarTile = kSubChunk * Layout::kKeyPitch;
      const float2 earlier = decay_of(0, sub_chunk);
      const float2 from_second = sub_chunk < 2 ? earlier : decay_of(sub_chunk - 1, sub_chunk);
      const float2 from_third = sub_chunk < 2 ? earlier : decay_of(sub_chunk - 2, sub_chunk);
      decay = make_float2(1.0F, 1.0F);
#pragma unroll 1
      for (int first = 0; first < kSubChunk; first += kRowsAtOnce) {
        const RowsAtOnce rows(queries, decays, first);
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          decay = multiply(decay, rows.decays[i]);
          const float2 q = multiply(unpack(rows.words[i], Element()), decay);
          word(queries, first + i) = cuda::MmaTraits<Element>::pack(q.x, q.y);
          word(state_queries, first + i) = pack_product(q, earlier);
          if (sub_chunk >= 2) word(far + (sub_chunk - 2) * kFarTile, first + i) = pack_product(q, from_second);
          if (sub_chunk == 3) word(far + 2 * kFarTile, first + i) = pack_product(q, from_third);
        }
      }
    }
  }

  // Scores of the diagonal blocks. Each has two warps: warp w has sub-chunk w / 2 and, in lanes 8 g … 8 g + 7,
  // columns g + 4 · (w % 2) and 8 more. Lane l of eight has dims 4 l + 32 m … 4 l + 32 m + 3. Afterwards it has rows l
  // and 8 + l of the first column, and row 8 + l of the second.
  __device__ __forceinline__ void multiply_own_sub_chunk(const unsigned char* stage, float (&scores)[3]) const {
    constexpr int kParts = kDim / 32;
    const int first_row = warp() / 2 * kSubChunk;
    const int column = lane() / 8 + warp() % 2 * 4;
    const int first_dim = lane() % 8 * 4;
    const auto four = [&](int tile, int row, int part, float(&values)[4]) {
      const uint2 words = *reinterpret_cast<const uint2*>(stage + tile + (first_row + row) * Layout::kKeyPitch +
                                                          (first_dim + 32 * part) * kElementBytes);
      const float2 low = unpack(words.x, Element());
      const float2 high = unpack(words.y, Element());
      values[0] = low.x;
      values[1] = low.y;
      values[2] = high.x;
      values[3] = high.y;
    };
    float sums[3][8] = {};  // rows 0 … 7 and 8 … 15 of the first column, rows 8 … 15 of the second
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      float keys[2][4];  // of the columns, times their decays up to the row
      four(Layout::kKeys, column, part, keys[0]);
      four(Layout::kKeys, column + 8, part, keys[1]);
#pragma unroll
      for (int row = 0; row < kSubChunk; ++row) {
        const int i = row % 8;
        const float4 decays = *reinterpret_cast<const float4*>(stage + Layout::kLogs +
                                                               ((first_row + row) * kDim + first_dim + 32 * part) * 4);
        const float of_row[4] = {decays.x, decays.y, decays.z, decays.w};
        float q[4];
        four(Layout::kQueries, row, part, q);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // A select instead of a branch: branches would delay the loads of later rows.
          const float later = column < i ? of_row[e] : 1.0F;
          if (row >= 8) {
            keys[0][e] = __fmul_rn(keys[0][e], of_row[e]);
            keys[1][e] = __fmul_rn(keys[1][e], later);
            sums[1][i] = __fmaf_rn(q[e], keys[0][e], sums[1][i]);
            sums[2][i] = __fmaf_rn(q[e], keys[1][e], sums[2][i]);
          } else {
            keys[0][e] = __fmul_rn(keys[0][e], later);
            sums[0][i] = __fmaf_rn(q[e], keys[0][e], sums[0][i]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) scores[i] = cuda::sum_over_eight_lanes(sums[i]);
  }

  // Zeros above the diagonal.
  __device__ __forceinline__ void store_diagonal(const float (&scores)[3]) const {
    const int first = warp() / 2 * kSubChunk;
    const int row = lane() % 8;
    const int column = lane() / 8 + warp() % 2 * 4;
    const auto store = [&](int i, int j, float score) {
      cuda::store_shared_half(tile_at(base_ + Layout::kScores, first + i, first + j, kIntraChunkPitch),
                              cuda::MmaTraits<Element>::pack(score, 0.0F));
    };
    store(row, column, column <= row ? scores[0] : 0.0F);
    store(row, column + 8, 0.0F);
    store(row + 8, column, scores[1]);
    store(row + 8, column + 8, column <= row ? scores[2] : 0.0F);
  }

  // The six blocks left of the diagonal ones, each by one warp.
  __device__ __forceinline__ void multiply_earlier_sub_chunks(const unsigned char* stage) const {
    constexpr int kBlocks = kSubChunks * (kSubChunks - 1) / 2;
    constexpr int kPitch = Layout::kKeyPitch;
    if (warp() >= kBlocks) return;
    const int row = warp() < 1 ? 1 : warp() < 3 ? 2 : 3;
    const int column = warp() - row * (row - 1) / 2;
    const std::uint32_t raw = base_ + static_cast<std::uint32_t>(stage - memory_);
    const int far = row - 2 + (row == 3 && column == 0 ? 1 : 0);
    const std::uint32_t queries =
        (column + 1 == row ? raw + Layout::kQueries + static_cast<std::uint32_t>(row * kSubChunk * kPitch)
                           : base_ + Layout::kFarQueries + static_cast<std::uint32_t>(far * kSubChunk * kPitch)) +
        down_first(lane(), kPitch);
    const std::uint32_t keys =
        raw + Layout::kKeys + static_cast<std::uint32_t>(column * kSubChunk * kPitch) + right_first(lane(), kPitch);
    float sums[2][4] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t left[4];
      std::uint32_t right[4];
      cuda::load_matrix(left, queries + k * 32);
      cuda::load_matrix(right, keys + k * 32);
      cuda::MmaTraits<Element>::mma(sums[0], left, right[0], right[1], sums[0]);
      cuda::MmaTraits<Element>::mma(sums[1], left, right[2], right[3], sums[1]);
    }
    const std::uint32_t target = tile_at(base_ + Layout::kScores, row * kSubChunk + lane() / 4,
                                         column * kSubChunk + lane() % 4 * 2, kIntraChunkPitch);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      cuda::store_shared(target + t * 16, cuda::MmaTraits<Element>::pack(sums[t][0], sums[t][1]));
      cuda::store_shared(target + t * 16 + 8 * kIntraChunkPitch,
                         cuda::MmaTraits<Element>::pack(sums[t][2], sums[t][3]));
    }
  }

  // Stores the segment's log-decays. `logs` are sums over the sub-chunks at one index in their chunks, and are added
  // here over the four indices.
  __device__ __forceinline__ void store_logs(const float (&logs)[2]) const {
    float* const sums = floats(Layout::kSubDecays);
    sync();  // no thread reads decays there any more
    if (has_rows()) {
      *reinterpret_cast<float2*>(sums + own_sub_chunk() * kDim + own_dim()) = make_float2(logs[0], logs[1]);
    }
    sync();
    if (thread_ >= kDim) return;
    float log = sums[thread_];
#pragma unroll
    for (int sub_chunk = 1; sub_chunk < kSubChunks; ++sub_chunk) log = __fadd_rn(log, sums[sub_chunk * kDim + thread_]);
    p_.logs[(cta_.segment.index * p_.heads + cta_.head) * kDim + thread_] = log;
  }

  const SsmParams& p_;
  const GlaCta& cta_;
  unsigned char* memory_;
  std::uint32_t base_;
  int thread_;
};

// Consumers.

// S ← fma(decay of the chunk, S, Σ_j v_j ⊗ k_j), with decayed keys: one tile, or a hi and a lo tile.
template <class Element, int kDim, int kTiles>
__device__ __forceinline__ void accumulate_gla_chunk(StateTile<kDim>& state, const WarpCoord& coord, std::uint32_t v,
                                                     int v_pitch, std::uint32_t keys, const float* chunk_decay) {
  constexpr int kPitch = pitch_of(kDim);
  constexpr int kSteps = kChunk / 16;
  std::uint32_t values[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    load_matrix_transposed(values[k], tile_at(v, 16 * k, coord.first_dim, v_pitch) + right_first(coord.lane, v_pitch));
  }
  const std::uint32_t lane_keys = keys + down_first(coord.lane, kPitch);
#pragma unroll
  for (int n = 0; n < kDim / 16; ++n) {
    float added[2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        std::uint32_t raw[4];
        load_matrix_transposed(raw, tile_at(lane_keys, tile * kChunk + 16 * k, 16 * n, kPitch));
        cuda::MmaTraits<Element>::mma(added[0], values[k], raw[0], raw[1], added[0]);
        cuda::MmaTraits<Element>::mma(added[1], values[k], raw[2], raw[3], added[1]);
      }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float2 decay = *reinterpret_cast<const float2*>(chunk_decay + 16 * n + 8 * t + coord.column());
      float(&s)[4] = state.s[2 * n + t];
#pragma unroll
      for (int e = 0; e < 4; ++e) s[e] = __fmaf_rn(e % 2 == 0 ? decay.x : decay.y, s[e], added[t][e]);
    }
  }
}

// y = scale · (q · Sᵀ + scores · v), with decayed q and masked scores.
template <class Element, int kDim>
__device__ __forceinline__ void compute_gla_rows(OutputTile& rows, const StateTile<kDim>& state, const WarpCoord& coord,
                                                 std::uint32_t queries, std::uint32_t scores, std::uint32_t v,
                                                 int v_pitch, float scale) {
  constexpr int kPitch = pitch_of(kDim);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    std::uint32_t rounded[2][2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&s)[4] = state.s[2 * k + half];
        rounded[t][half] = cuda::MmaTraits<Element>::pack(s[2 * t], s[2 * t + 1]);
      }
    }
#pragma unroll
    for (int m = 0; m < kChunk / 16; ++m) {
      std::uint32_t raw[4];
      load_matrix(raw, tile_at(queries, 16 * m, 16 * k, kPitch) + down_first(coord.lane, kPitch));
      cuda::MmaTraits<Element>::mma(rows.y[m][0], raw, rounded[0][0], rounded[0][1], rows.y[m][0]);
      cuda::MmaTraits<Element>::mma(rows.y[m][1], raw, rounded[1][0], rounded[1][1], rows.y[m][1]);
    }
  }
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    std::uint32_t values[4];
    load_matrix_transposed(values, tile_at(v, 16 * k, coord.first_dim, v_pitch) + down_first(coord.lane, v_pitch));
#pragma unroll
    for (int m = k; m < kChunk / 16; ++m) {
      std::uint32_t raw[4];
      load_matrix(raw, tile_at(scores, 16 * m, 16 * k, kIntraChunkPitch) + down_first(coord.lane, kIntraChunkPitch));
      cuda::MmaTraits<Element>::mma(rows.y[m][0], raw, values[0], values[1], rows.y[m][0]);
      cuda::MmaTraits<Element>::mma(rows.y[m][1], raw, values[2], values[3], rows.y[m][1]);
    }
  }
#pragma unroll
  for (int m = 0; m < kChunk / 16; ++m) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rows.y[m][t][e] = __fmul_rn(rows.y[m][t][e], scale);
    }
  }
}

// Calls visit(pair of elements, dim of v, column) for all of a warp's state. Without bounds, so that loads are issued
// together.
template <int kDim, class Visit>
__device__ __forceinline__ void visit_gla_state(StateTile<kDim>& state, const WarpCoord& coord, Visit visit) {
#pragma unroll
  for (int t = 0; t < kDim / 8; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visit(state.s[t][2 * half], state.s[t][2 * half + 1], coord.first_dim + coord.row() + half * 8,
            t * 8 + coord.column());
    }
  }
}

// The state before the segment: fma(decay, T, M).
template <int kDim>
__device__ __forceinline__ void load_gla_state(const SsmParams& p, const GlaCta& cta, const WarpCoord& coord,
                                               StateTile<kDim>& state) {
  const std::int64_t state_floats = std::int64_t{p.head_dim} * kDim;
  const std::int64_t of_segment = cta.segment.index * p.heads + cta.head;
  const std::int64_t of_super = cta.segment.super_segment * p.heads + cta.head;
  if (!cta.segment.first_of_super) {
    visit_gla_state(state, coord,
                    [local = p.states + of_segment * state_floats](float& first, float& second, int dim, int column) {
                      const float2 m = cuda::state_pair(local, dim * kDim + column);
                      first = m.x;
                      second = m.y;
                    });
  }
  if (cta.segment.from_zero) return;
  const float* const before = p.super_states + of_super * state_floats;
  const float* const logs = cta.segment.first_of_super ? nullptr : p.logs_before + of_segment * kDim;
  visit_gla_state(state, coord, [&](float& first, float& second, int dim, int column) {
    const float2 t = cuda::state_pair(before, dim * kDim + column);
    const float2 log = cuda::state_pair(logs, column);
    first = __fmaf_rn(cuda::exp2_approx(log.x), t.x, first);
    second = __fmaf_rn(cuda::exp2_approx(log.y), t.y, second);
  });
}

template <class Element, int kDim, int kDimV, bool kOutputs, int kStages>
__device__ __forceinline__ void consume_gla_chunks(const SsmParams& p, const GlaCta& cta, unsigned char* memory) {
  using Layout = GlaLayout<kDim, kDimV, kOutputs, kStages>;
  const std::uint32_t base = cuda::shared_address(memory);
  const WarpCoord coord({cta.head, 1, cta.group}, {1, kDimV / kWarpDims, kStages});
  StateTile<kDim> state{};
  if constexpr (kOutputs) load_gla_state(p, cta, coord, state);
  const int chunks = cta.chunks();
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const std::uint32_t v =
        base + static_cast<std::uint32_t>(Layout::kValues + chunk % Layout::kValueTiles * Layout::kValueTile);
    const int set = chunk % Layout::kSets;
    const auto* const chunk_decay =
        reinterpret_cast<const float*>(memory + Layout::kChunkDecay + set * Layout::kSetBytes);
    gla_sync<kGlaFullBarrier, Layout::kThreads>(set);
    if constexpr (kOutputs) {
      OutputTile rows{};
      compute_gla_rows<Element>(rows, state, coord, base + Layout::kSecond, base + Layout::kScores, v,
                                Layout::kValuePitch, p.scale);
      store_output<Element>(p, coord, rows, cta.segment.row + chunk * kChunk, cta.segment.tokens - chunk * kChunk, 0,
                            0);
    }
    if (!kOutputs || chunk + 1 < chunks) {
      accumulate_gla_chunk<Element, kDim, kOutputs ? 1 : 2>(
          state, coord, v, Layout::kValuePitch, base + Layout::kStateKeys + set * Layout::kSetBytes, chunk_decay);
    }
    if (chunk + Layout::kSets < chunks) gla_arrive<kGlaEmptyBarrier, Layout::kThreads>(set);
  }
  if constexpr (!kOutputs) {
    float* const target =
        p.states + (cta.segment.index * p.heads + cta.head) * (std::int64_t{p.head_dim} * p.state_dim);
    visit_gla_state(state, coord, [target](float first, float second, int dim, int column) {
      *reinterpret_cast<float2*>(target + dim * kDim + column) = make_float2(first, second);
    });
  }
}

template <class Element, int kDim, int kDimV, bool kOutputs, int kStages>
__global__ void __launch_bounds__(GlaLayout<kDim, kDimV, kOutputs, kStages>::kThreads, 1)
    gla_kernel(const __grid_constant__ SsmParams p) {
  extern __shared__ __align__(16) unsigned char gla_memory[];
  const GlaCta cta(p);
  if (static_cast<int>(threadIdx.x) < GlaLayout<kDim, kDimV, kOutputs, kStages>::kConsumers) {
    consume_gla_chunks<Element, kDim, kDimV, kOutputs, kStages>(p, cta, gla_memory);
  } else {
    GlaProducer<Element, kDim, kDimV, kOutputs, kStages>(p, cta, gla_memory).run();
  }
}

// Launches of sm80_gla. kernels/instances.cmake lists its instantiations.

template <class Element, int kDim, int kDimV, bool kOutputs, int kStages>
void load_gla() {
  check_cuda(cudaFuncSetAttribute(gla_kernel<Element, kDim, kDimV, kOutputs, kStages>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  GlaLayout<kDim, kDimV, kOutputs, kStages>::kBytes),
             "cudaFuncSetAttribute");
}

template <class Element, int kDim, int kDimV, bool kOutputs, int kStages>
void launch_gla(const SsmParams& p, cudaStream_t stream) {
  using Layout = GlaLayout<kDim, kDimV, kOutputs, kStages>;
  const auto ctas = static_cast<unsigned>(p.head_count) * static_cast<unsigned>(p.segments);
  gla_kernel<Element, kDim, kDimV, kOutputs, kStages><<<ctas, Layout::kThreads, Layout::kBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "sm80_gla");
}

template <class Element, int kDimV, int kDim>
constexpr GlaLauncher gla_launcher() {
  return {[](int stages) {
            if (stages == 2) {
              load_gla<Element, kDim, kDimV, false, 2>();
              load_gla<Element, kDim, kDimV, true, 2>();
            } else {
              load_gla<Element, kDim, kDimV, false, 1>();
              load_gla<Element, kDim, kDimV, true, 1>();
            }
          },
          [](const SsmParams& p, int stages, cudaStream_t stream) {
            stages == 2 ? launch_gla<Element, kDim, kDimV, false, 2>(p, stream)
                        : launch_gla<Element, kDim, kDimV, false, 1>(p, stream);
          },
          [](const SsmParams& p, int stages, cudaStream_t stream) {
            stages == 2 ? launch_gla<Element, kDim, kDimV, true, 2>(p, stream)
                        : launch_gla<Element, kDim, kDimV, true, 1>(p, stream);
          },
          [](int stages) {
            return stages == 2
                       ? std::max(GlaLayout<kDim, kDimV, false, 2>::kBytes, GlaLayout<kDim, kDimV, true, 2>::kBytes)
                       : std::max(GlaLayout<kDim, kDimV, false, 1>::kBytes, GlaLayout<kDim, kDimV, true, 1>::kBytes);
          }};
}

}  // namespace ringattn::sm80
