// SPDX-License-Identifier: Apache-2.0
// Decode from a compressed cache: loads of its tiles, the kernel, and its launch. Work tiles, KV tiles and tile steps
// are those of decode.cuh. The threads of a CTA dequantize a tile instead of copying it, so a stage is complete at the
// next barrier. Most decode steps have warps without rows: these dequantize a tile while the other warps compute the
// previous one.
#pragma once

#include "kernels/attention/sm80/sliced/tile_step.cuh"
#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/decode/sm80/decode.cuh"
#include "kernels/decode/sm80/decode_common.cuh"
#include "kernels/decode/sm80/sm80_decode.hpp"
#include "kernels/quant/cuda/row_quads.cuh"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn::sm80 {

// Loads of quantized K and V tiles. Each thread dequantizes some elements with the functions of decompression
// (quant/cuda/row_quads.cuh), and stores them where copy_keys() would copy elements. A reader of the tile waits at a
// barrier after the stores of all threads. There are no cp.async copies to wait for.

// Packs eight rounded elements.
template <class Element>
__device__ __forceinline__ uint4 eight_elements(const cuda::Quad& first, const cuda::Quad& second) {
  const uint2 low = cuda::narrow<Element>(first);
  const uint2 high = cuda::narrow<Element>(second);
  return {low.x, low.y, high.x, high.y};
}

template <class Value>
__device__ __forceinline__ Value load_as(const std::byte* from) {
  return __ldg(reinterpret_cast<const Value*>(from));
}

// Loads a tile of K or V for the work tile's KV head. Eight threads share a row, and each has 8 columns of every 64.
// Rows after the sequence's last key become zeros. For these the tile's first row is read, which exists.
template <class C, int kDim>
class TileDequantizer {
 public:
  using Element = typename C::Element;

  __device__ __forceinline__ TileDequantizer(const WorkTileParams& p, const QuantizedTensor& t,
                                             const DecodeWorkTile& work_tile, const std::int32_t* pages, int tile,
                                             std::uint32_t target)
      : p_(p),
        t_(t),
        work_tile_(work_tile),
        pages_(pages),
        quantized_(t.quantized.of_head(work_tile.kv_head)),
        qparams_(t.qparams.of_head(work_tile.kv_head)),
        first_(tile * C::kKeyTile + work_tile.cache_offset),
        keys_(work_tile.length - tile * C::kKeyTile),
        target_(target) {}

  __device__ __forceinline__ void dequantize() const {
    switch (t_.encoding) {
      case RowEncoding::kFp8:
        dequantize_8_bit([](std::uint32_t quantized, float scale) { return cuda::fp8_quad(quantized, scale); });
        break;
      case RowEncoding::kInt8:
        dequantize_8_bit([](std::uint32_t quantized, float scale) { return cuda::int8_quad(quantized, scale); });
        break;
      case RowEncoding::kInt4Token:
        dequantize_runs();
        break;
      case RowEncoding::kInt4Channel:
        if (kDim % 64 == 0 && t_.group == 64) {
          dequantize_groups<64>();
        } else {
          dequantize_groups<32>();
        }
        break;
      default:
        copy_elements();
        break;
    }
  }

 private:
  static constexpr int kPanels = (kDim + cuda::kPanelColumns - 1) / cuda::kPanelColumns;
  static constexpr int kRowsOfPass = C::kThreads / 8;
  static constexpr int kPasses = C::kKeyTile / kRowsOfPass;
  static constexpr int kPassesInFlight = kPanels > 2 ? 2 : 4;  // passes whose loads are in flight together
  static_assert(kPasses % kPassesInFlight == 0 && 32 % kRowsOfPass == 0);

  __device__ static int first_row() { return static_cast<int>(threadIdx.x) / 8; }
  __device__ static int chunk() { return static_cast<int>(threadIdx.x) % 8; }
  __device__ static int column(int panel) { return panel * cuda::kPanelColumns + chunk() * 8; }
  __device__ static bool has(int panel) {
    return (panel + 1) * cuda::kPanelColumns <= kDim || column(panel) < kDim;  // the last panel may be narrower
  }

  __device__ __forceinline__ CachedKeyCoord page_slot_of(int row) const {
    return locate_key(p_, work_tile_, pages_, first_ + row);
  }
  __device__ __forceinline__ void store(int row, int panel, const uint4& elements) const {
    cuda::store_shared(
        target_ + static_cast<std::uint32_t>(panel * cuda::panel_bytes(C::kKeyTile)) + cuda::swizzled(row, chunk()),
        row < keys_ ? elements : uint4{0, 0, 0, 0});
  }

  // load(coord, column) loads the inputs of eight elements, and make() dequantizes them.
  template <class Load, class Make>
  __device__ __forceinline__ void dequantize_rows(const Load& load, const Make& make) const {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kPassesInFlight) {
      const int begin = pass * kRowsOfPass + first_row();
      decltype(load(CachedKeyCoord{}, 0)) raw[kPassesInFlight][kPanels];
#pragma unroll
      for (int i = 0; i < kPassesInFlight; ++i) {
        const int row = begin + i * kRowsOfPass;
        const CachedKeyCoord at = page_slot_of(row < keys_ ? row : 0);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          if (has(panel)) raw[i][panel] = load(at, column(panel));
        }
      }
#pragma unroll
      for (int i = 0; i < kPassesInFlight; ++i) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          if (has(panel)) store(begin + i * kRowsOfPass, panel, make(raw[i][panel]));
        }
      }
    }
  }

  template <class QuadOf>
  __device__ __forceinline__ void dequantize_8_bit(const QuadOf& quad_of) const {
    struct Raw {
      uint2 quantized;
      float scale;
    };
    const bool by_row = has_row_qparams();
    const float scale =
        by_row ? 0.0F : load_as<float>(t_.table + (t_.scales == ScaleGrain::kHead ? 4 * work_tile_.kv_head : 0));
    dequantize_rows(
        [&](const CachedKeyCoord& at, int column) {
          return Raw{load_as<uint2>(quantized_.at(at.page, at.in_page) + column),
                     by_row ? load_as<float>(qparams_.at(at.page, at.in_page)) : scale};
        },
        [&](const Raw& raw) {
          return eight_elements<Element>(quad_of(raw.quantized.x, raw.scale), quad_of(raw.quantized.y, raw.scale));
        });
  }

  // Dequantizes int4 with scales per run of a row's columns.
  __device__ __forceinline__ void dequantize_runs() const {
    dequantize_rows(
        [&](const CachedKeyCoord& at, int column) {
          return uint2{load_as<std::uint32_t>(quantized_.at(at.page, at.in_page) + column / 2),
                       load_as<std::uint32_t>(qparams_.at(at.page, at.in_page) + column / cuda::kPairChannels * 4)};
        },
        [](const uint2& raw) {
          return eight_elements<Element>(cuda::int4_quad<Element>(raw.x, raw.y),
                                         cuda::int4_quad<Element>(raw.x >> 16, raw.y));
        });
  }

  // Dequantizes int4 with scales per group of tokens. A tile has whole groups of its sequence, and the group that is
  // not full yet, whose tokens are in the tail.
  template <int kGroup>
  __device__ __forceinline__ void dequantize_groups() const {
    constexpr int kPassesOfGroup = kGroup / kRowsOfPass;
#pragma unroll 1
    for (int group = 0; group < C::kKeyTile; group += kGroup) {
      if (group + kGroup > keys_) {
        copy_tail<kGroup>(group);
        continue;
      }
      const std::byte* quantized[kPassesOfGroup];
#pragma unroll
      for (int i = 0; i < kPassesOfGroup; ++i) {
        const CachedKeyCoord at = page_slot_of(group + first_row() + i * kRowsOfPass);
        quantized[i] = quantized_.at(at.page, at.in_page);
      }
#pragma unroll 2
      for (int panel = 0; panel < kPanels; ++panel) {
        if (!has(panel)) break;
        std::uint32_t raw[kPassesOfGroup];
#pragma unroll
        for (int i = 0; i < kPassesOfGroup; ++i) raw[i] = load_as<std::uint32_t>(quantized[i] + column(panel) / 2);
        std::uint32_t pairs[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] = pair_of_channel<kGroup>(group, column(panel) + i);
#pragma unroll
        for (int i = 0; i < kPassesOfGroup; ++i) {
          store(group + first_row() + i * kRowsOfPass, panel,
                eight_elements<Element>(cuda::int4_quad<Element>(raw[i], pairs[0]),
                                        cuda::int4_quad<Element>(raw[i] >> 16, pairs[1])));
        }
      }
    }
  }
  // Loads the scale and zero point of a channel, at scale_offset_of().
  template <int kGroup>
  __device__ __forceinline__ std::uint32_t pair_of_channel(int group, int channel) const {
    constexpr unsigned kPairsPerToken = kDim / kGroup;
    const unsigned token = static_cast<unsigned>(channel) / kPairsPerToken;
    const CachedKeyCoord at = page_slot_of(group + static_cast<int>(token));
    return load_as<std::uint32_t>(qparams_.at(at.page, at.in_page) +
                                  (static_cast<unsigned>(channel) - token * kPairsPerToken) * 4);
  }
  template <int kGroup>
  __device__ __forceinline__ void copy_tail(int group) const {
    const std::byte* const tail =
        t_.table +
        (static_cast<std::int64_t>(work_tile_.sequence) * kGroup * p_.attention.kv_heads + work_tile_.kv_head) *
            (2 * kDim);
    const std::int64_t token_stride = static_cast<std::int64_t>(p_.attention.kv_heads) * (2 * kDim);
#pragma unroll 1
    for (int token = first_row(); token < kGroup; token += kRowsOfPass) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (has(panel)) {
          store(group + token, panel, load_as<uint4>(tail + token * token_stride + 2 * column(panel)));
        }
      }
    }
  }

  __device__ __forceinline__ void copy_elements() const {
    dequantize_rows([&](const CachedKeyCoord& at,
                        int column) { return load_as<uint4>(quantized_.at(at.page, at.in_page) + 2 * column); },
                    [](const uint4& elements) { return elements; });
  }

  __device__ __forceinline__ bool has_row_qparams() const { return t_.qparams.data != nullptr; }

  const WorkTileParams& p_;
  const QuantizedTensor& t_;
  const DecodeWorkTile& work_tile_;
  const std::int32_t* const pages_;
  const PagedBytes quantized_;
  const PagedBytes qparams_;
  const int first_;  // index of the first row in the cache
  const int keys_;   // of the sequence, from the first row on; may exceed the tile's
  const std::uint32_t target_;
};

// Decode from an FP8 latent cache with column slices of O: loads strips of KV tiles
// (attention/sm80/sliced/tile_step.cuh), which the threads dequantize. Strips are requested in order, so each thread
// holds the quantized values of the next strip in registers while it computes the strip before it. K and V are the same
// rows of the cache: V is their first columns.

template <class C>
class LatentStrips {
 public:
  using S = Strips<C>;

  __device__ __forceinline__ LatentStrips(const CompressedParams& p, const DecodeWorkTile& work_tile,
                                          const std::int32_t* pages)
      : p_(p), work_tile_(work_tile), pages_(pages) {}

  __device__ int end() const { return work_tile_.end; }  // end of the work tile's range of KV tiles

  // Loads this thread's values of a strip, and their scales, into registers. Rotary keys are not prefetched.
  __device__ __forceinline__ void prefetch(int tile, int strip) {
    const QuantizedTensor& t = p_.k;
    if (strip < kQuantizedStrips) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const CachedKeyCoord at = key_coord(tile, i * kStripKeys + row());
        quantized_[i] =
            load_as<uint2>(t.quantized.at(at.page, at.in_page) + strip * kStripColumns + column_chunk() * 8);
        scales_[i] = load_as<float>(t.qparams.at(at.page, at.in_page) + strip * 4);
      }
    } else if (strip >= S::kKStrips) {
      const CachedKeyCoord at = key_coord(tile, (strip - S::kKStrips) * kStripKeys + row());
      const std::byte* const quantized = t.quantized.at(at.page, at.in_page) + column_chunk() * 8;
      const std::byte* const scales = t.qparams.at(at.page, at.in_page);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        quantized_[i] = load_as<uint2>(quantized + i * kStripColumns);
        scales_[i] = load_as<float>(scales + i * 4);
      }
    }
  }

  // Dequantizes the prefetched values into the pipeline stage at `target`, or copies the strip of rotary keys to it.
  __device__ __forceinline__ void write(int tile, int strip, std::uint32_t target) const {
    if (strip + 1 == S::kKStrips) {
      copy_rotary_keys(tile, target);
      return;
    }
    const bool is_k = strip < S::kKStrips;
    const std::uint32_t chunk =
        target + static_cast<std::uint32_t>(column_chunk() / 8 * cuda::panel_bytes(is_k ? C::kKeyTile : kStripKeys)) +
        cuda::swizzled(row(), column_chunk() % 8);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int row_offset = is_k ? i * kStripKeys : 0;
      const std::uint32_t to =
          chunk + static_cast<std::uint32_t>(is_k ? i * kStripKeys * cuda::kPanelRowBytes
                                                  : i * (kThreadsOfRow / 8) * cuda::panel_bytes(kStripKeys));
      const uint4 elements = eight_elements<typename C::Element>(cuda::fp8_quad(quantized_[i].x, scales_[i]),
                                                                 cuda::fp8_quad(quantized_[i].y, scales_[i]));
      const int row_in_tile = (is_k ? 0 : (strip - S::kKStrips) * kStripKeys) + row_offset + row();
      cuda::store_shared(to, present(tile, row_in_tile) ? elements : uint4{0, 0, 0, 0});
    }
  }

 private:
  static constexpr int kThreadsOfRow = kStripColumns / 8;
  // Vectors of 8 values that a thread has of a strip: one of each of kVectors rows of K, or kVectors of one row of V.
  static constexpr int kVectors = C::kKeyTile / kStripKeys;
  // Number of strips of quantized columns of K. One strip of rotary keys follows them.
  static constexpr int kQuantizedStrips = C::kDimV / kStripColumns;
  static_assert(kStripColumns == kLatentScaleBlock && kQuantizedStrips == kVectors &&
                kQuantizedStrips + 1 == S::kKStrips);
  static_assert(C::kThreads == kStripKeys * kThreadsOfRow);

  // This thread's row among 16, and the index of its first 8 columns.
  __device__ static int row() { return static_cast<int>(threadIdx.x) / kThreadsOfRow; }
  __device__ static int column_chunk() { return static_cast<int>(threadIdx.x) % kThreadsOfRow; }
  // Whether the sequence has the tile's row `row`.
  __device__ bool present(int tile, int row) const { return row < work_tile_.length - tile * C::kKeyTile; }
  // Locates a row of the tile in the cache. For a row after the sequence's last key, locates the tile's first row.
  __device__ __forceinline__ CachedKeyCoord key_coord(int tile, int row) const {
    return locate_key(p_, work_tile_, pages_,
                      tile * C::kKeyTile + work_tile_.cache_offset + (present(tile, row) ? row : 0));
  }

  __device__ __forceinline__ void copy_rotary_keys(int tile, std::uint32_t target) const {
    if (column_chunk() >= S::columns(S::kKStrips - 1) / 8) return;
#pragma unroll 1
    for (int i = row(); i < C::kKeyTile; i += kStripKeys) {
      const CachedKeyCoord at = key_coord(tile, i);
      cuda::copy_16(target + static_cast<std::uint32_t>(column_chunk() / 8 * cuda::panel_bytes(C::kKeyTile)) +
                        cuda::swizzled(i, column_chunk() % 8),
                    p_.k.rotary.at(at.page, at.in_page) + column_chunk() * 16, present(tile, i));
    }
  }

  const CompressedParams& p_;
  const DecodeWorkTile& work_tile_;
  const std::int32_t* const pages_;
  uint2 quantized_[kVectors];
  float scales_[kVectors];
};

// Overloads of the functions in attention/sm80/sliced/tile_step.cuh. In copy_strip(), each thread writes the values
// that it has prefetched, and prefetches the next strip.
template <class C>
__device__ __forceinline__ void prefetch_strip(LatentStrips<C>& strips, int tile, int strip) {
  strips.prefetch(tile, strip);
}
template <class C>
__device__ __forceinline__ void copy_strip(LatentStrips<C>& strips, int tile, int strip, std::uint32_t target) {
  strips.write(tile, strip, target);
  if (strip + 1 < LatentStrips<C>::S::kTileStrips) {
    strips.prefetch(tile, strip + 1);
  } else if (tile + 1 < strips.end()) {
    strips.prefetch(tile + 1, 0);
  }
}

// A work tile without column slices of O.

template <class C>
__device__ __forceinline__ void decode_compressed_tile(const CompressedParams& params, const DecodeWorkTile& work_tile,
                                                       unsigned char* shared) {
  using Layout = DecodeLayout<C>;
  const WorkTileParams& p = params;
  const std::uint32_t q_tile = cuda::shared_address(shared);
  const std::uint32_t k_tiles = q_tile + Layout::kQBytes;
  const std::uint32_t v_tiles = k_tiles + C::kStages * Layout::kKBytes;
  auto* const pages = reinterpret_cast<std::int32_t*>(shared + Layout::kPages);
  const auto dequantize_k = [&](int tile, std::uint32_t target) {
    TileDequantizer<C, C::kDim>(p, params.k, work_tile, pages, tile, target).dequantize();
  };
  const auto dequantize_v = [&](int tile, std::uint32_t target) {
    TileDequantizer<C, C::kDimV>(p, params.v, work_tile, pages, tile, target).dequantize();
  };
  const int end = work_tile.end;
  if (work_tile.begin < end) {
    copy_queries<C>(p, work_tile, q_tile);
    load_pages<C>(p, work_tile, pages);
  }
  cuda::copy_commit();

  AttentionState<C> state;
  for_each_row<C>([&](int block, int half, int) { begin_split(state, block, half); });
  const bool has_rows = static_cast<int>(threadIdx.x) / 32 * 16 < work_tile.tile_rows;
  const TileStep<C, DecodeRows> step(p.attention, {work_tile, p.ratio}, q_tile);
  const int whole = work_tile.whole;
  const int whole_end = work_tile.whole_end;
  std::uint32_t stage = 0;
  // The first iteration precedes the first tile and attends to none, so that the dequantization code is emitted once.
#pragma unroll 1
  for (int tile = work_tile.begin - 1; tile < end; ++tile) {
    const bool attends = tile >= work_tile.begin && has_rows;
    const bool masked = tile < whole || tile >= whole_end;
    const auto first_key = [tile] { return std::int64_t{tile} * C::kKeyTile; };
    cuda::copy_wait<0>();  // for the queries, before the first tile
    __syncthreads();
    if constexpr (C::kStages > 1) {
      // The tile has arrived, and all warps are done with the previous one.
      const std::uint32_t k_tile = k_tiles + stage * Layout::kKBytes;
      const std::uint32_t v_tile = v_tiles + stage * Layout::kVBytes;
      stage ^= 1U;
      if (tile + 1 < end) {
        dequantize_k(tile + 1, k_tiles + stage * Layout::kKBytes);
        dequantize_v(tile + 1, v_tiles + stage * Layout::kVBytes);
      }
      if (attends) step.attend(state, k_tile, v_tile, masked, first_key, [] {});
    } else {
      // The tile's K has arrived, and all warps are done with V of the previous tile.
      if (tile >= work_tile.begin) dequantize_v(tile, v_tiles);
      const auto between = [] { __syncthreads(); };  // V has arrived, and all warps are done with K
      if (attends) {
        step.attend(state, k_tiles, v_tiles, masked, first_key, between);
      } else {
        between();
      }
      if (tile + 1 < end) dequantize_k(tile + 1, k_tiles);
    }
  }

  store_partials<C>(p, work_tile, state);
  if (p.finish) merge_if_last<C>(p, work_tile);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    compressed_kernel(const __grid_constant__ CompressedParams params) {
  extern __shared__ unsigned char dynamic_shared[];
  unsigned char* const shared = cuda::aligned_shared<cuda::kPanelRowBytes>(dynamic_shared);
  __shared__ DecodeWorkTile work_tile;
  WorkTileFinder<C> work_tile_finder(params);
  for (int n = static_cast<int>(blockIdx.x);; n += static_cast<int>(gridDim.x)) {
    if (threadIdx.x < 32) work_tile_finder.find(n, work_tile);
    __syncthreads();
    if (work_tile.tile_rows == 0) return;
    if constexpr (C::kSlices > 1) {
      std::int32_t* const pages = ColumnSliceDecodeLayout<C>::pages(shared);
      LatentStrips<C> strips(params, work_tile, pages);
      decode_sliced_tile<C>(params, work_tile, shared, pages, strips);
    } else {
      decode_compressed_tile<C>(params, work_tile, shared);
    }
    __syncthreads();  // all threads are done with the work tile and with its KV tiles
  }
}

// Makes the launcher of the decode kernel for compressed caches from an element type and an AttentionConfig. It is
// instantiated by kernels/instances.cmake.

template <class Element, AttentionConfig kAttention>
constexpr CompressedLauncher compressed_launcher() {
  using C = DecodeConfig<Element, kAttention>;
  return {[] { return prepare_decode<Element, kAttention>(compressed_kernel<C>); },
          [](const CompressedParams& params, int ctas, Stream stream) {
            launch_decode<Element, kAttention>(compressed_kernel<C>, params, ctas, stream);
          }};
}

}  // namespace ringattn::sm80
