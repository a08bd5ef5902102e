// SPDX-License-Identifier: Apache-2.0
// sm80_simt_backward: gradients of attention in fp32 with fused multiply-adds. A CTA owns 64 rows of a gradient,
// queries of one head for dQ or keys of one KV head for dK and dV, and loops over tiles of 64 rows of the other side:
//   S = X · Yᵀ    dP = X′ · Y′ᵀ     X, X′: q, dout of its queries, or k, v of its keys; Y, Y′ of the other side
//   dX += dS · Y, and for keys dX′ += P · Y′; S, P and dS are [own rows, other rows]
// Operands pass through shared memory as fp32: 32 columns of both sides for S and dP, 32 rows of the other side for the
// gradients. A thread has 4 × 4 scores, and 4 rows of up to 8 columns of each gradient.
//
// A score is one chain of multiply-adds over ascending dims, as in sm80_simt. In a gradient, each 32 rows of a tile and
// head of the other side are one chain from zero, and these are added to the split's sum in the order of
// attention_backward.hpp: a single chain over a split's 4,096 or 8,192 rows would lose digits. Of the sizes in this
// file, only this one affects bits. A CTA has at most kSimtBackwardColumns columns of a gradient. For wider heads,
// several CTAs compute the same scores.
#include <cmath>
#include <cstddef>

#include "base/cuda.hpp"
#include "base/dtype.hpp"
#include "kernels/attention/merge.hpp"
#include "kernels/attention_backward/cuda/backward_work.cuh"
#include "kernels/attention_backward/cuda/simt_backward.hpp"
#include "kernels/common/cuda/elements.cuh"
#include "kernels/common/cuda/load_kernel.hpp"

namespace ringattn::cuda {

namespace simt_backward {

inline constexpr int kThreads = 256;
inline constexpr int kDepth = 32;  // columns or rows in shared memory at a time, and rows of a chain
inline constexpr int kSide = 4;    // of a thread's blocks
inline constexpr int kBlocks = 2;  // of a thread, in the columns of a gradient
inline constexpr int kBlockColumns = kSimtBackwardColumns / kBlocks;
static_assert(kBlockColumns == kBackwardTile, "a block of a gradient's columns is dealt to threads as scores are");

struct alignas(16) Shared {
  BackwardWork<1> work;
  std::int32_t slice;                                       // of the gradients' columns
  alignas(16) float weights[kBackwardTile][kBackwardTile];  // P or dS: [other row, own row]
  union {
    struct {
      float own[kDepth][kBackwardTile];    // [column, row]
      float other[kDepth][kBackwardTile];  // [column, row]
    } operands;
    float rows[kDepth][kSimtBackwardColumns];  // of the other side
  };
};

// A block of a tile has rows row_of_block(), … and columns column_of_block(), …. A warp has 32 rows and 16 columns, so
// that it loads different rows from 128 bytes, and different columns from 64.
__device__ __forceinline__ int row_of_block() { return thread_of_cta() % 8 * kSide + thread_of_cta() / 32 % 2 * 32; }
__device__ __forceinline__ int column_of_block() {
  return thread_of_cta() % 32 / 8 * kSide + thread_of_cta() / 64 * 16;
}

// 64 rows of one head of a tensor. Rows outside [begin, end) may have no memory, and are zeros.
struct HeadRows {
  const char* data;     // of row 0
  std::int64_t stride;  // bytes
  std::int32_t begin, end;

  __device__ __forceinline__ HeadRows(const StridedRows<const void>& tensor, std::int64_t row, int head, int first,
                                      int last, int dtype)
      : begin(first), end(last) {
    const std::int64_t bytes = static_cast<Dtype>(dtype) == Dtype::kF32 ? 4 : 2;
    data = static_cast<const char*>(tensor.data) + (row * tensor.token_stride + head * tensor.head_stride) * bytes;
    stride = tensor.token_stride * bytes;
  }

  // Columns [column, column + kPieceElements) of a row. Columns from `columns` on are zeros.
  __device__ __forceinline__ void load(int row, int column, int columns, int dtype, float (&x)[kPieceElements]) const {
#pragma unroll
    for (float& value : x) value = 0.0F;
    if (row < begin || row >= end || column >= columns) return;
    const char* const at = data + row * stride;
    switch (static_cast<Dtype>(dtype)) {
      case Dtype::kF32:
        return load_at<float>(at, column, x);
      case Dtype::kBf16:
        return load_at<__nv_bfloat16>(at, column, x);
      default:
        return load_at<__half>(at, column, x);
    }
  }

 private:
  template <class Element>
  static __device__ __forceinline__ void load_at(const char* row, int column, float (&x)[kPieceElements]) {
    const char* const from = row + column * static_cast<int>(sizeof(Element));
    load_piece<Element>(from, reinterpret_cast<std::uintptr_t>(from) % 16 == 0, x);
  }
};

using Block = float[kSide][kSide];  // [row, column]

__device__ __forceinline__ void clear(Block& block) {
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) block[i][j] = 0.0F;
  }
}
// block += x · yᵀ
__device__ __forceinline__ void add_outer_product(Block& block, const float* x, const float* y) {
  const float4 rows = *reinterpret_cast<const float4*>(x), columns = *reinterpret_cast<const float4*>(y);
  const float a[kSide] = {rows.x, rows.y, rows.z, rows.w}, b[kSide] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) block[i][j] = __fmaf_rn(a[i], b[j], block[i][j]);
  }
}

// The thread's block of own · otherᵀ.
__device__ __forceinline__ void multiply_rows(Shared& shared, const HeadRows& own, const HeadRows& other, int dim,
                                              int dtype, Block& block) {
  clear(block);
  const int row = thread_of_cta() % kBackwardTile;
  const int first = thread_of_cta() / kBackwardTile * kPieceElements;
  static_assert(kThreads / kBackwardTile * kPieceElements == kDepth);
#pragma unroll 1
  for (int column = 0; column < dim; column += kDepth) {
    float a[kPieceElements], b[kPieceElements];
    own.load(row, column + first, dim, dtype, a);
    other.load(row, column + first, dim, dtype, b);
    __syncthreads();  // all threads are done with the operands before
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) {
      shared.operands.own[first + i][row] = a[i];
      shared.operands.other[first + i][row] = b[i];
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
      add_outer_product(block, &shared.operands.own[k][row_of_block()], &shared.operands.other[k][column_of_block()]);
    }
  }
}

// Adds Shared::weights · other, of columns [column, column + kUsed · kBlockColumns), to the thread's blocks of a
// gradient.
template <int kUsed>
__device__ __forceinline__ void add_weighted_rows(Shared& shared, const HeadRows& other, int column, int columns,
                                                  int dtype, Block (&sum)[kBlocks]) {
  constexpr int kPiecesOfRow = kUsed * kBlockColumns / kPieceElements;
  constexpr int kPieces = kDepth * kPiecesOfRow / kThreads;  // of a thread
#pragma unroll 1
  for (int first = 0; first < kBackwardTile; first += kDepth) {
    float x[kPieces][kPieceElements];
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int piece = thread_of_cta() + n * kThreads;
      other.load(first + piece / kPiecesOfRow, column + piece % kPiecesOfRow * kPieceElements, columns, dtype, x[n]);
    }
    __syncthreads();  // all threads are done with the rows before, and have stored their weights
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int piece = thread_of_cta() + n * kThreads;
      float* const to = &shared.rows[piece / kPiecesOfRow][piece % kPiecesOfRow * kPieceElements];
      *reinterpret_cast<float4*>(to) = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
      *reinterpret_cast<float4*>(to + 4) = make_float4(x[n][4], x[n][5], x[n][6], x[n][7]);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kUsed; ++n) {
      Block run;
      clear(run);
#pragma unroll 8
      for (int k = 0; k < kDepth; ++k) {
        add_outer_product(run, &shared.weights[first + k][row_of_block()],
                          &shared.rows[k][n * kBlockColumns + column_of_block()]);
      }
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) sum[n][i][j] = __fadd_rn(sum[n][i][j], run[i][j]);
      }
    }
  }
}

// The thread's blocks of dQ, or of dK and dV.
template <bool kOfKeys>
struct Sums {
  Block first[kBlocks];
  Block second[kOfKeys ? kBlocks : 1];  // of dV
  int flags;                            // RowTile::flags, of the sums so far

  __device__ __forceinline__ bool any_open() const { return (flags & RowTile::kHasOpenSum) != 0; }
  __device__ __forceinline__ bool any_closed() const { return (flags & RowTile::kHasClosedSum) != 0; }
  __device__ __forceinline__ void clear_all() {
#pragma unroll
    for (Block& block : first) clear(block);
#pragma unroll
    for (Block& block : second) clear(block);
  }
};

// A CTA's rows and columns of dQ, or of dK and dV.
template <bool kOfKeys>
class GradientTile {
 public:
  __device__ __forceinline__ GradientTile(const SimtBackwardParams& p, Shared& shared)
      : p_(p),
        shared_(shared),
        tile_(shared.work.row_tiles[0]),
        head_(head_of(p.common.tables, shared.work, 0)),
        first_column_(shared.slice * kSimtBackwardColumns) {}

  __device__ __forceinline__ void compute() const {
    const BackwardTables& tables = p_.common.tables;
    const RowTilePair& pair = shared_.work.pair;
    const int other_heads = kOfKeys ? p_.common.heads / tables.kv_heads : 1;  // of the KV head
    Sums<kOfKeys> sums;
    sums.clear_all();
    sums.flags = tile_.flags;
    if (sums.any_open()) update<Update::kBegin>(sums);
#pragma unroll 1
    for (int n = pair.run_begin; n < pair.run_end; ++n) {
      const TileRun run = tables.runs[n];
      const TileInterval range = common_tiles(run, tile_.begin_tile, tile_.end_tile);
#pragma unroll 1
      for (int t = range.begin; t < range.end; ++t) {
        if ((t + pair.split_phase) % tables.tiles_per_split == 0 && sums.any_open()) {
          update<Update::kClose>(sums);
          sums.clear_all();
          sums.flags = RowTile::kHasClosedSum;
        }
        sums.flags |= RowTile::kHasOpenSum;
#pragma unroll 1
        for (int head = 0; head < other_heads; ++head) {
          add_tile(sums, t, run.table + t - run.first_tile, shared_.work.kv_head * other_heads + head);
        }
      }
    }
    update<Update::kEnd>(sums);
  }

 private:
  // Loads an open sum, adds the split to those before it, or finishes the task.
  enum class Update { kBegin, kClose, kEnd };

  __device__ __forceinline__ HeadRows own_rows(int operand) const {
    return {p_.common.own[operand], tile_.row, head_, tile_.valid_begin, tile_.valid_end, p_.dtype};
  }

  // LSE · log2 e and delta of a query row and head.
  static __device__ __forceinline__ float2 load_stats(const float* stats, std::int64_t row, int heads, int head) {
    return *reinterpret_cast<const float2*>(stats + (row * heads + head) * kRowStats);
  }

  // Adds one head of a tile of the other side. Its rows are entry `index` of the tables.
  __device__ __forceinline__ void add_tile(Sums<kOfKeys>& sums, int number, int index, int other_head) const {
    const OtherTile other = p_.common.tables.tiles[index];
    const TileRows& tensors = p_.common.tables.tile_rows[index];
    const HeadRows other_first(tensors.rows[0], other.row, other_head, other.begin, other.end, p_.dtype);
    const HeadRows other_second(tensors.rows[1], other.row, other_head, other.begin, other.end, p_.dtype);
    Block p, dp;
    multiply_rows(shared_, own_rows(0), other_first, p_.head_dim, p_.dtype, p);
    float2 stats[kSide];  // of the block's queries: its rows, or its columns for keys
    unsigned seen = 0;    // a bit for each of the block's pairs
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const int row = row_of_block() + i, column = column_of_block() + i;
      const int from = kOfKeys ? other.begin : tile_.valid_begin, to = kOfKeys ? other.end : tile_.valid_end;
      stats[i] = {0.0F, 0.0F};
      if (kOfKeys ? column >= from && column < to : row >= from && row < to) {
        stats[i] = kOfKeys ? load_stats(other.stats, other.row + column, p_.common.heads, other_head)
                           : load_stats(p_.stats, tile_.row + row, p_.common.heads, head_);
      }
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        // of pair (j, i) of the block
        const int distance = number * kBackwardTile + column - tile_.offset - row_of_block() - j;
        const bool sees = column >= other.begin && column < other.end && distance >= -p_.common.tables.left &&
                          distance <= p_.common.tables.right;
        seen |= (sees ? 1U : 0U) << (j * kSide + i);
      }
    }
    Block factor;  // of dS
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        p[i][j] = probability(p[i][j], kOfKeys ? stats[j].x : stats[i].x, factor[i][j]);
      }
    }
    if constexpr (kOfKeys) {
      store_weights(p, seen);
      add_rows(other_second, p_.head_dim_v, sums.second);
    }
    multiply_rows(shared_, own_rows(1), other_second, p_.head_dim_v, p_.dtype, dp);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        dp[i][j] = factor[i][j] * (dp[i][j] - (kOfKeys ? stats[j].y : stats[i].y));
      }
    }
    store_weights(dp, seen);
    add_rows(other_first, p_.head_dim, sums.first);
  }

  // Returns P of a product, and sets its factor in dS: P, or with a soft-cap P · (1 − (s / softcap)²).
  __device__ __forceinline__ float probability(float product, float lse2, float& factor) const {
    const AttentionParams::Softmax& softmax = p_.common.softmax;
    const float score = __fmul_rn(product, softmax.scale);
    if (softmax.cap > 0.0F) {
      const float ratio = tanhf(__fdiv_rn(score, softmax.cap));
      const float p = exp2f(__fmaf_rn(__fmul_rn(softmax.cap, ratio), kLog2E, -lse2));
      factor = p * __fmaf_rn(-ratio, ratio, 1.0F);
      return p;
    }
    factor = exp2f(__fmaf_rn(score, kLog2E, -lse2));
    return factor;
  }

  // Rounds P or dS to the input dtype, with zeros where the mask excludes a pair. All threads have read the weights
  // before: they have multiplied rows since.
  __device__ __forceinline__ void store_weights(const Block& block, unsigned seen) const {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      float x[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        x[i] = (seen >> (i * kSide + j) & 1U) != 0 ? round_to(p_.dtype, block[i][j]) : 0.0F;
      }
      *reinterpret_cast<float4*>(&shared_.weights[column_of_block() + j][row_of_block()]) =
          make_float4(x[0], x[1], x[2], x[3]);
    }
  }

  __device__ __forceinline__ void add_rows(const HeadRows& other, int columns, Block (&sum)[kBlocks]) const {
    if (columns - first_column_ > kBlockColumns) {
      add_weighted_rows<2>(shared_, other, first_column_, columns, p_.dtype, sum);
    } else if (columns > first_column_) {
      add_weighted_rows<1>(shared_, other, first_column_, columns, p_.dtype, sum);
    }
  }

  // In memory, a sum of a row has `width` floats, dK's and then dV's.
  template <Update kUpdate>
  __device__ __forceinline__ void update(Sums<kOfKeys>& sums) const {
    const int width = p_.head_dim + (kOfKeys ? p_.head_dim_v : 0);
    update<kUpdate>(sums, sums.first, width, 0, p_.head_dim, p_.gradients[0], p_.common.softmax.scale);
    if constexpr (kOfKeys) {
      update<kUpdate>(sums, sums.second, width, p_.head_dim, p_.head_dim_v, p_.gradients[1], 1.0F);
    }
  }
  template <Update kUpdate>
  __device__ __forceinline__ void update(const Sums<kOfKeys>& sums, Block (&blocks)[kBlocks], int width, int begin,
                                         int columns, const BackwardGradient& gradient, float factor) const {
    const BackwardSums& memory = p_.common.sums;
    const int heads = kOfKeys ? p_.common.tables.kv_heads : p_.common.heads;
    const bool stays_open = kUpdate == Update::kEnd && sums.any_open() && (tile_.flags & RowTile::kStaysOpen) != 0;
    const bool saves = kUpdate == Update::kClose || (memory.save && sums.any_open() && !stays_open);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const int row = row_of_block() + i;
      if (row < tile_.valid_begin || row >= tile_.valid_end) continue;
      const std::int64_t index = memory.state != nullptr ? ((tile_.row + row) * heads + head_) * memory.sums_of_row
                                                         : std::int64_t{blockIdx.x} * kBackwardTile + row;
      float* const sum = (memory.state != nullptr ? memory.state : memory.scratch) + index * width + begin;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const int column = first_column_ + n * kBlockColumns + column_of_block();
        if (column >= columns) continue;
        float4& closed = *reinterpret_cast<float4*>(sum + column);
        float4& open = *reinterpret_cast<float4*>(sum + width + column);  // follows the closed sums of the row
        float(&x)[kSide] = blocks[n][i];
        if constexpr (kUpdate == Update::kBegin) {
          const float4 before = open;
          x[0] = before.x, x[1] = before.y, x[2] = before.z, x[3] = before.w;
          continue;
        }
        if (stays_open && memory.save) open = make_float4(x[0], x[1], x[2], x[3]);
        if (stays_open && !memory.finish) continue;
        if (sums.any_closed()) {
          const float4 before = closed;
          x[0] = sums.any_open() ? __fadd_rn(before.x, x[0]) : before.x;
          x[1] = sums.any_open() ? __fadd_rn(before.y, x[1]) : before.y;
          x[2] = sums.any_open() ? __fadd_rn(before.z, x[2]) : before.z;
          x[3] = sums.any_open() ? __fadd_rn(before.w, x[3]) : before.w;
        }
        if (saves) closed = make_float4(x[0], x[1], x[2], x[3]);
        if (kUpdate == Update::kEnd && memory.finish) write(gradient, row, column, factor, x);
      }
    }
  }

  __device__ __forceinline__ void write(const BackwardGradient& gradient, int row, int column, float factor,
                                        const float (&x)[kSide]) const {
    const std::int64_t at = (tile_.row + row) * gradient.rows.token_stride + head_ * gradient.rows.head_stride + column;
    const int dtype = gradient.is_f32 ? static_cast<int>(Dtype::kF32) : p_.dtype;
#pragma unroll
    for (int j = 0; j < kSide; ++j) store_to(gradient.rows.data, dtype, at + j, __fmul_rn(x[j], factor));
  }

  const SimtBackwardParams& p_;
  Shared& shared_;
  const RowTile& tile_;
  int head_;          // of the rows
  int first_column_;  // of the gradients
};

template <bool kOfKeys>
__global__ void __launch_bounds__(kThreads, kSimtBackwardCtas)
    simt_backward_kernel(const __grid_constant__ SimtBackwardParams p) {
  __shared__ Shared shared;
  const int widest = kOfKeys && p.head_dim_v > p.head_dim ? p.head_dim_v : p.head_dim;
  const int slices = (widest + kSimtBackwardColumns - 1) / kSimtBackwardColumns;
  for (;;) {
    __syncthreads();  // all threads are done with the work before
    if (thread_of_cta() < 32) {
      int taken = 0;
      if (thread_of_cta() == 0) taken = atomicAdd(p.common.tables.taken, 1);
      taken = __shfl_sync(0xffffffffU, taken, 0);
      publish_work(p.common.tables, taken / slices, shared.work);
      if (thread_of_cta() == 0) shared.slice = taken % slices;
    }
    __syncthreads();
    if (shared.work.kv_head == kNoWorkLeft) return;
    GradientTile<kOfKeys>(p, shared).compute();
  }
}

template <bool kOfKeys>
void launch_simt_backward(const SimtBackwardParams& params, int ctas, Stream stream) {
  simt_backward_kernel<kOfKeys><<<static_cast<unsigned>(ctas), kThreads, 0, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_simt_backward");
}

}  // namespace simt_backward

void prepare_simt_backward() {
  load_kernel(&simt_backward::simt_backward_kernel<false>);
  load_kernel(&simt_backward::simt_backward_kernel<true>);
}

void launch_simt_dq(const SimtBackwardParams& params, int ctas, Stream stream) {
  simt_backward::launch_simt_backward<false>(params, ctas, stream);
}

void launch_simt_dkv(const SimtBackwardParams& params, int ctas, Stream stream) {
  simt_backward::launch_simt_backward<true>(params, ctas, stream);
}

}  // namespace ringattn::cuda
