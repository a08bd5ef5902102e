// SPDX-License-Identifier: Apache-2.0
// Spike: a FoldKernel on a GPU. Turns a FoldTask's host tables into work items, uploads them through pinned staging
// that the stream gives back, and launches. Nothing here waits for the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "kernels/fold.hpp"
#include "sm90_turns.cuh"

#define CUDA_CHECK(call)                                                                              \
  do {                                                                                                \
    const cudaError_t error_ = (call);                                                                \
    if (error_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (0)

namespace ringattn {

// Pinned host memory with its device twin. A slot is reused once the stream has passed its event; when all are in use a
// slot is added, so nobody waits.
class StagingRing {
 public:
  struct Slot {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    std::size_t bytes = 0;
    cudaEvent_t done = nullptr;
  };
  explicit StagingRing(int slots, std::size_t bytes) {
    for (int i = 0; i < slots; ++i) slots_.push_back(make(bytes));
  }
  Slot& take(std::size_t bytes) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[(next_ + i) % slots_.size()];
      if (slot.bytes >= bytes && cudaEventQuery(slot.done) == cudaSuccess) {
        next_ = (next_ + i + 1) % slots_.size();
        return slot;
      }
    }
    ++grown;
    slots_.push_back(make(2 * bytes));
    next_ = 0;
    return slots_.back();
  }
  int grown = 0;

 private:
  static Slot make(std::size_t bytes) {
    Slot slot;
    slot.bytes = bytes;
    CUDA_CHECK(cudaMallocHost(&slot.host, bytes));
    CUDA_CHECK(cudaMalloc(&slot.device, bytes));
    CUDA_CHECK(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming));
    return slot;
  }
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
};

// The tensor map of one [rows, heads, dim] bf16 view, boxes of box_rows × 1 × 64 with the 128-byte swizzle.
inline CUtensorMap tensor_map(const TensorView& view, int box_rows) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    return reinterpret_cast<Encode>(f);
  }();
  CUtensorMap map{};
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(view.dim), static_cast<cuuint64_t>(view.heads),
                              static_cast<cuuint64_t>(view.tokens)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(view.head_stride) * 2,
                                 static_cast<cuuint64_t>(view.token_stride) * 2};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(box_rows)}, steps[3] = {1, 1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(view.data), dims, strides,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", static_cast<int>(result));
    std::exit(1);
  }
  return map;
}

template <class C>
constexpr bool is_hopper() {
  if constexpr (requires { C::kHopper; }) return true;
  return false;
}

template <class C>
constexpr bool is_turns() {
  if constexpr (requires { C::kTurns; }) return true;
  return false;
}

template <class C>
class CudaFold {
 public:
  std::int64_t l2_bytes = std::int64_t{32} << 20;
  bool section_sequences = true;

  explicit CudaFold(const FoldSpec& spec, std::size_t staging_bytes = std::size_t{1} << 20)
      : spec_(spec), ring_(4, staging_bytes) {
    if constexpr (is_turns<C>()) {
      for (auto* kernel : {sm90::turns_kernel<C, false>, sm90::turns_kernel<C, true>})
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
      CUDA_CHECK(cudaMalloc(&scratch_, std::size_t{256} * 2 * C::kScratchFloats * 4));
    } else if constexpr (is_hopper<C>()) {
      CUDA_CHECK(
          cudaFuncSetAttribute(sm90::fold_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
    } else {
      CUDA_CHECK(
          cudaFuncSetAttribute(sm80::fold_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
    }
  }
  CudaFold(const CudaFold&) = delete;
  ~CudaFold() { cudaFree(scratch_); }
  int key_tile() const { return C::kKeyTile; }
  int query_tile() const { return C::kQueryTile; }
  std::size_t state_bytes(std::int64_t rows) const {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>(spec_.heads) *
           ((is_turns<C>() ? 2 : 1) * C::kHeadDim + 8) * 4;
  }
  int grown() const { return ring_.grown; }

  void fold(const FoldTask& task, Stream stream) {
    items_.clear();
    sequences_.clear();
    std::map<std::int32_t, const KeyRun*> run_of;  // spike: one key run of a sequence
    for (const KeyRun& run : task.key_runs) run_of[run.sequence] = &run;
    for (const QueryRun& run : task.queries) {
      const auto found = run_of.find(run.sequence);
      const std::int64_t length = task.key_lengths[static_cast<std::size_t>(run.sequence)];
      for (std::int64_t begin = run.position; begin < run.position + run.rows;) {
        std::int64_t tile = begin / C::kQueryTile * C::kQueryTile;
        if (tile > begin) tile -= C::kQueryTile;
        const std::int64_t end = std::min(tile + C::kQueryTile, run.position + run.rows);
        sm80::Item item{};
        item.row = run.row + (tile - run.position);
        item.position = tile;
        item.key_length = length;
        item.slot_begin = static_cast<std::int32_t>(begin - tile);
        item.slot_end = static_cast<std::int32_t>(end - tile);
        if (found != run_of.end()) {
          const KeyRun& keys = *found->second;
          const TileRange all = folded_tiles(spec_.mask, begin, length, C::kQueryTile, C::kKeyTile);
          const std::int64_t first = std::max(all.begin, keys.first_tile);
          const std::int64_t last = std::min(all.end, keys.first_tile + keys.tiles);
          if (first < last) {
            item.first_tile = static_cast<std::int32_t>(first);
            item.tiles = static_cast<std::int32_t>(last - first);
            item.table = keys.table + (first - keys.first_tile);
          }
        }
        const bool must_write = task.finish != nullptr || (task.save && !task.resume);
        if (item.tiles > 0 || must_write) {
          items_.push_back(item);
          sequences_.push_back(run.sequence);
        }
        begin = end;
      }
    }
    if (items_.empty()) return;
    // Sections of sequences whose K and V fit the L2 cache; in each the longest first.
    std::vector<std::size_t> order(items_.size()), section(items_.size());
    std::int64_t filled = 0;
    for (std::size_t i = 0, now = 0; i < items_.size(); ++i) {
      order[i] = i;
      if (i == 0 || sequences_[i] != sequences_[i - 1]) {
        const std::int64_t bytes =
            task.key_lengths[static_cast<std::size_t>(sequences_[i])] * spec_.kv_heads * C::kHeadDim * 4;
        if (section_sequences && filled > 0 && filled + bytes > l2_bytes) {
          ++now;
          filled = 0;
        }
        filled += bytes;
      }
      section[i] = now;
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return section[a] != section[b] ? section[a] < section[b] : items_[a].tiles > items_[b].tiles;
    });
    const std::vector<sm80::Item> unsorted = items_;
    for (std::size_t i = 0; i < order.size(); ++i) items_[i] = unsorted[order[i]];

    const std::size_t item_bytes = items_.size() * sizeof(sm80::Item);
    const std::size_t tile_bytes = task.tiles.size() * sizeof(sm80::Tile);
    auto& slot = ring_.take(item_bytes + tile_bytes);
    std::memcpy(slot.host, items_.data(), item_bytes);
    auto* tiles = reinterpret_cast<sm80::Tile*>(slot.host + item_bytes);
    for (std::size_t i = 0; i < task.tiles.size(); ++i) tiles[i] = {task.tiles[i].source, 0, task.tiles[i].row};
    const auto s = static_cast<cudaStream_t>(stream.handle);
    CUDA_CHECK(cudaMemcpyAsync(slot.device, slot.host, item_bytes + tile_bytes, cudaMemcpyHostToDevice, s));

    sm80::Params p{};
    p.q = static_cast<const __nv_bfloat16*>(task.q.data);
    p.q_token_stride = task.q.token_stride;
    p.q_head_stride = task.q.head_stride;
    if (task.finish != nullptr) {
      p.out = static_cast<__nv_bfloat16*>(task.finish->out.data);
      p.out_token_stride = task.finish->out.token_stride;
      p.out_head_stride = task.finish->out.head_stride;
      p.lse = task.finish->lse.data;
      p.lse_token_stride = task.finish->lse.token_stride;
      p.lse_head_stride = task.finish->lse.head_stride;
    }
    p.items = reinterpret_cast<const sm80::Item*>(slot.device);
    p.tiles = reinterpret_cast<const sm80::Tile*>(slot.device + item_bytes);
    for (std::size_t i = 0; i < task.sources.size(); ++i) {
      const KeySource& from = task.sources[i];
      p.sources[i] = {static_cast<const __nv_bfloat16*>(from.k.data),
                      static_cast<const __nv_bfloat16*>(from.v.data),
                      from.k.token_stride,
                      from.k.head_stride,
                      from.v.token_stride,
                      from.v.head_stride};
    }
    p.state_o = static_cast<float*>(task.state);
    p.state_l = p.state_o + task.q.tokens * spec_.heads * C::kHeadDim;
    p.mask_left = spec_.mask.left;
    p.mask_right = spec_.mask.right;
    p.heads = spec_.heads;
    p.group = spec_.heads / spec_.kv_heads;
    p.scale = spec_.softmax_scale;
    p.scale_log2 = spec_.softmax_scale * 1.4426950408889634F;
    p.resume = task.resume;
    p.save = task.save;
    p.finish = task.finish != nullptr;
    const auto grid = static_cast<unsigned>(items_.size() * static_cast<std::size_t>(spec_.heads));
    if constexpr (is_hopper<C>()) {
      sm90::Params hopper{};
      hopper.base = p;
      hopper.q = tensor_map(task.q, C::kQueryTile);
      for (std::size_t i = 0; i < task.sources.size(); ++i) {
        hopper.k[i] = tensor_map(task.sources[i].k, C::kKeyTile);
        hopper.v[i] = tensor_map(task.sources[i].v, C::kKeyTile);
      }
      hopper.items = static_cast<int>(items_.size());
      std::int64_t most_tiles = 0;
      for (const KeyRun& run : task.key_runs) most_tiles = std::max(most_tiles, run.tiles);
      const std::int64_t head_bytes = std::max<std::int64_t>(1, most_tiles * C::kTileBytes * 2);
      int kv_heads = spec_.kv_heads;  // whose K and V fit the L2 cache beside everything else
      while (kv_heads > 1 && (kv_heads * head_bytes > l2_bytes || spec_.kv_heads % kv_heads != 0)) --kv_heads;
      hopper.section_heads = kv_heads * (spec_.heads / spec_.kv_heads);
      static const int multiprocessors = [] {
        int n = 0;
        CUDA_CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
        return n;
      }();
      hopper.scratch = scratch_;
      hopper.state_b = p.state_l + task.q.tokens * spec_.heads * 8;
      if constexpr (is_turns<C>()) {
        if (task.finish != nullptr) {
          TensorView out{};
          out.data = task.finish->out.data;
          out.dtype = task.finish->out.dtype;
          out.tokens = task.finish->out.tokens;
          out.heads = task.finish->out.heads;
          out.dim = task.finish->out.dim;
          out.token_stride = task.finish->out.token_stride;
          out.head_stride = task.finish->out.head_stride;
          hopper.out = tensor_map(out, 64);
        }
        auto* kernel = task.resume || task.save ? sm90::turns_kernel<C, true> : sm90::turns_kernel<C, false>;
        kernel<<<std::min(grid, static_cast<unsigned>(multiprocessors)), C::kThreads, C::kSharedBytes, s>>>(hopper);
      } else
        sm90::fold_kernel<C>
            <<<std::min(grid, static_cast<unsigned>(multiprocessors)), C::kThreads, C::kSharedBytes, s>>>(hopper);
    } else {
      sm80::fold_kernel<C><<<grid, C::kThreads, C::kSharedBytes, s>>>(p);
    }
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaEventRecord(slot.done, s));
  }

 private:
  FoldSpec spec_;
  StagingRing ring_;
  float* scratch_ = nullptr;
  std::vector<sm80::Item> items_;
  std::vector<std::int32_t> sequences_;
};

}  // namespace ringattn
