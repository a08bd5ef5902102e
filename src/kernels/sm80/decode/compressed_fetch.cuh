// SPDX-License-Identifier: Apache-2.0
// Tiles of K and V that lie in memory as quantized: each thread makes elements of some, by the functions of
// decompression (cuda/rows/row_quads.cuh), and stores them where copy_keys() would have copied elements to. Who reads a
// tile waits for a barrier behind the stores of all threads; there are no copies to wait for.
#pragma once

#include "kernels/cuda/rows/row_quads.cuh"
#include "kernels/sm80/decode/compressed_params.hpp"
#include "kernels/sm80/decode/fetch.cuh"

namespace ringattn::sm80 {

// Eight elements, rounded.
template <class Element>
__device__ __forceinline__ uint4 eight_elements(const cuda::Quad& first, const cuda::Quad& second) {
  const uint2 low = cuda::narrow<Element>(first);
  const uint2 high = cuda::narrow<Element>(second);
  return {low.x, low.y, high.x, high.y};
}

template <class Number>
__device__ __forceinline__ Number load_number(const std::byte* from) {
  return __ldg(reinterpret_cast<const Number*>(from));
}

// A tile of K or V, for the work_tile's KV head. Eight threads share a row; each has 8 columns of every 64. Rows behind
// the sequence's last key become zeros. Of these the tile's first row is read, as it is there.
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
        dequantize_eight_bits([](std::uint32_t quantized, float scale) { return cuda::fp8_quad(quantized, scale); });
        break;
      case RowEncoding::kInt8:
        dequantize_eight_bits([](std::uint32_t quantized, float scale) { return cuda::int8_quad(quantized, scale); });
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
  static constexpr int kAtOnce = kPanels > 2 ? 2 : 4;  // passes whose loads are under way together
  static_assert(kPasses % kAtOnce == 0 && 32 % kRowsOfPass == 0);

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

  // load(place, column) gives what eight elements are made of, and make() makes them.
  template <class Load, class Make>
  __device__ __forceinline__ void dequantize_rows(const Load& load, const Make& make) const {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kAtOnce) {
      const int begin = pass * kRowsOfPass + first_row();
      decltype(load(CachedKeyCoord{}, 0)) raw[kAtOnce][kPanels];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = begin + i * kRowsOfPass;
        const CachedKeyCoord at = page_slot_of(row < keys_ ? row : 0);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          if (has(panel)) raw[i][panel] = load(at, column(panel));
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          if (has(panel)) store(begin + i * kRowsOfPass, panel, make(raw[i][panel]));
        }
      }
    }
  }

  template <class QuadOf>
  __device__ __forceinline__ void dequantize_eight_bits(const QuadOf& quad_of) const {
    struct Raw {
      uint2 quantized;
      float scale;
    };
    const bool by_row = has_row_qparams();
    const float scale =
        by_row ? 0.0F : load_number<float>(t_.table + (t_.scales == ScaleGrain::kHead ? 4 * work_tile_.kv_head : 0));
    dequantize_rows(
        [&](const CachedKeyCoord& at, int column) {
          return Raw{load_number<uint2>(quantized_.at(at.page, at.of_page) + column),
                     by_row ? load_number<float>(qparams_.at(at.page, at.of_page)) : scale};
        },
        [&](const Raw& raw) {
          return eight_elements<Element>(quad_of(raw.quantized.x, raw.scale), quad_of(raw.quantized.y, raw.scale));
        });
  }

  // Codes of 4 bits, of runs of a row's columns.
  __device__ __forceinline__ void dequantize_runs() const {
    dequantize_rows(
        [&](const CachedKeyCoord& at, int column) {
          return uint2{load_number<std::uint32_t>(quantized_.at(at.page, at.of_page) + column / 2),
                       load_number<std::uint32_t>(qparams_.at(at.page, at.of_page) + column / cuda::kPairChannels * 4)};
        },
        [](const uint2& raw) {
          return eight_elements<Element>(cuda::int4_quad<Element>(raw.x, raw.y),
                                         cuda::int4_quad<Element>(raw.x >> 16, raw.y));
        });
  }

  // Codes of 4 bits, of groups of tokens. A tile holds whole groups of its sequence, and the one that is not full yet,
  // whose tokens lie in the tail.
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
        quantized[i] = quantized_.at(at.page, at.of_page);
      }
#pragma unroll 2
      for (int panel = 0; panel < kPanels; ++panel) {
        if (!has(panel)) break;
        std::uint32_t raw[kPassesOfGroup];
#pragma unroll
        for (int i = 0; i < kPassesOfGroup; ++i) raw[i] = load_number<std::uint32_t>(quantized[i] + column(panel) / 2);
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
  // Where scale_offset_of() says.
  template <int kGroup>
  __device__ __forceinline__ std::uint32_t pair_of_channel(int group, int channel) const {
    constexpr unsigned kOfToken = kDim / kGroup;
    const unsigned token = static_cast<unsigned>(channel) / kOfToken;
    const CachedKeyCoord at = page_slot_of(group + static_cast<int>(token));
    return load_number<std::uint32_t>(qparams_.at(at.page, at.of_page) +
                                      (static_cast<unsigned>(channel) - token * kOfToken) * 4);
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
          store(group + token, panel, load_number<uint4>(tail + token * token_stride + 2 * column(panel)));
        }
      }
    }
  }

  __device__ __forceinline__ void copy_elements() const {
    dequantize_rows([&](const CachedKeyCoord& at,
                        int column) { return load_number<uint4>(quantized_.at(at.page, at.of_page) + 2 * column); },
                    [](const uint4& elements) { return elements; });
  }

  __device__ __forceinline__ bool has_row_qparams() const { return t_.qparams.data != nullptr; }

  const DecodeParams& p_;
  const QuantizedTensor& t_;
  const DecodeWorkTile& work_tile_;
  const std::int32_t* const pages_;
  const PagedBytes quantized_;
  const PagedBytes qparams_;
  const int first_;  // the first row's place in the cache
  const int keys_;   // of the sequence, from the first row on; maybe more than the tile's
  const std::uint32_t target_;
};

}  // namespace ringattn::sm80
