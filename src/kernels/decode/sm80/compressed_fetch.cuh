// SPDX-License-Identifier: Apache-2.0
// Loads of quantized K and V tiles. Each thread dequantizes some elements with the functions of decompression
// (quant/cuda/row_quads.cuh), and stores them where copy_keys() would copy elements. A reader of the tile waits at a
// barrier after the stores of all threads. There are no cp.async copies to wait for.
#pragma once

#include "kernels/decode/sm80/compressed_params.hpp"
#include "kernels/decode/sm80/fetch.cuh"
#include "kernels/quant/cuda/row_quads.cuh"

namespace ringattn::sm80 {

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

  __device__ __forceinline__ TileDequantizer(const DecodeParams& p, const QuantizedTensor& t,
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

  const DecodeParams& p_;
  const QuantizedTensor& t_;
  const DecodeWorkTile& work_tile_;
  const std::int32_t* const pages_;
  const PagedBytes quantized_;
  const PagedBytes qparams_;
  const int first_;  // index of the first row in the cache
  const int keys_;   // of the sequence, from the first row on; may exceed the tile's
  const std::uint32_t target_;
};

}  // namespace ringattn::sm80
