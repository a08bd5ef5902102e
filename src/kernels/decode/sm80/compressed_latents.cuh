// SPDX-License-Identifier: Apache-2.0
// Decode from an FP8 latent cache with column slices of O: loads strips of KV tiles (../sliced/strips.cuh), which the
// threads dequantize. Strips are requested in order, so each thread holds the quantized values of the next strip in
// registers while it computes the strip before it. K and V are the same rows of the cache: V is their first columns.
#pragma once

#include "kernels/attention/sm80/sliced/strips.cuh"
#include "kernels/decode/sm80/compressed_fetch.cuh"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn::sm80 {

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
    return locate_key(p_.step, work_tile_, pages_,
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

// Overloads of the functions in ../sliced/strips.cuh. In copy_strip(), each thread writes the values that it has
// prefetched, and prefetches the next strip.
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

}  // namespace ringattn::sm80
