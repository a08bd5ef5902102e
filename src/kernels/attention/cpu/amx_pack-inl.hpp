// SPDX-License-Identifier: Apache-2.0
// Packs a key tile of bf16 for AMX (amx_step-inl.hpp). The right factor of a tile product has rows of pairs, so that a
// 32-bit lane holds two consecutive terms of a sum:
//   k: [kKeyTile / 16 blocks of keys, ⌈head_dim / 32⌉, 16 pairs of dims, 16 keys, 2]
//   v: [⌈head_dim_v / 32⌉ · 2 blocks of dims, kKeyTile / 32, 16 pairs of keys, 16 dims, 2]
// Dims after the last and keys up to the next multiple of 32 are zero.
#if defined(RINGATTN_KERNELS_CPU_AMX_PACK_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGATTN_KERNELS_CPU_AMX_PACK_INL_HPP_
#undef RINGATTN_KERNELS_CPU_AMX_PACK_INL_HPP_
#else
#define RINGATTN_KERNELS_CPU_AMX_PACK_INL_HPP_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/common/cpu/amx_pairs-inl.hpp"
#include "kernels/common/cpu/amx_tiles.hpp"
#include "kernels/common/cpu/tile_ops.hpp"

#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX3

// As in amx_step-inl.hpp.
HWY_DIAGNOSTICS(push)
HWY_DIAGNOSTICS_OFF(disable : 4701, ignored "-Wmaybe-uninitialized")

HWY_BEFORE_NAMESPACE();
namespace ringattn::cpu::HWY_NAMESPACE {

inline constexpr int kKeyGroups = kKeyTile / kTileDepth;  // of 32 keys

inline int tiles_of_dims(int dims) { return (dims + kTileDepth - 1) / kTileDepth; }

inline void pack_keys_for_amx(const TileShape& shape, const TileRows& k, int keys, std::byte* target) {
  const int end = (keys + kTileDepth - 1) / kTileDepth * kTileDepth;
  for (int key = 0; key < end; key += kTileRows) {
    const std::byte* rows[kTileRows];
    for (int i = 0; i < kTileRows; ++i) rows[i] = key + i < keys ? k.at(key + i) : nullptr;
    for (int begin = 0; begin < shape.head_dim; begin += kTileDepth, target += 2 * kTileElements) {
      __m512i pairs[kTileRows];
      for (int i = 0; i < kTileRows; ++i) pairs[i] = load_pairs(rows[i], begin, shape.head_dim);
      transpose_pairs(pairs, target);
    }
  }
}

// Packs keys [first, end) of v, an even number up to 32, with `block_bytes` between blocks of 16 dims. Returns the
// lanes in which some value is not finite.
HWY_INLINE __mmask32 pack_value_pairs(int head_dim_v, const TileRows& v, int first, int end, int keys,
                                      std::size_t block_bytes, std::byte* target) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i greatest = _mm512_setzero_si512();  // per lane: of all magnitudes
  for (int key = first; key < end; key += 2, target += 64) {
    const std::byte* const even = key < keys ? v.at(key) : nullptr;
    const std::byte* const odd = key + 1 < keys ? v.at(key + 1) : nullptr;
    std::byte* block = target;
    for (int begin = 0; begin < head_dim_v; begin += kTileDepth, block += 2 * block_bytes) {
      const __m512i a = load_pairs(even, begin, head_dim_v);
      const __m512i b = load_pairs(odd, begin, head_dim_v);
      greatest = _mm512_max_epu16(greatest, _mm512_and_si512(a, magnitude));
      greatest = _mm512_max_epu16(greatest, _mm512_and_si512(b, magnitude));
      const RowPairs pairs = interleave_rows(a, b);
      _mm512_store_si512(block, pairs.first);
      _mm512_store_si512(block + block_bytes, pairs.second);
    }
  }
  return _mm512_cmpgt_epu16_mask(greatest, _mm512_set1_epi16(0x7f7f));
}

// Returns whether every value is finite.
inline bool pack_values_for_amx(const TileShape& shape, const TileRows& v, int keys, std::byte* target) {
  constexpr std::size_t kBlockBytes = std::size_t{2} * kKeyTile * kTileColumns;  // of 16 dims
  const int end = (keys + kTileDepth - 1) / kTileDepth * kTileDepth;
  return pack_value_pairs(shape.head_dim_v, v, 0, end, keys, kBlockBytes, target) == 0;
}

inline void pack_for_amx(const TileShape& shape, const TileRows& k, const TileRows& v, int keys, PackedTile& tile) {
  pack_keys_for_amx(shape, k, keys, reinterpret_cast<std::byte*>(tile.k));
  tile.v_finite = pack_values_for_amx(shape, v, keys, reinterpret_cast<std::byte*>(tile.v));
}

// Copies packed values, with zeros for the keys outside `visible`. Returns whether the visible ones are finite.
inline bool copy_visible_values(int head_dim_v, const float* packed, ColumnRange visible, float* copy) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  const int pairs = tiles_of_dims(head_dim_v) * 2 * (kKeyTile / 2);
  __mmask32 special = 0;
  for (int i = 0; i < pairs; ++i) {
    const int key = 2 * (i % (kKeyTile / 2));
    const auto sees = [&](int column) { return visible.begin <= column && column < visible.end; };
    const std::uint32_t kept = (sees(key) ? 0x0000ffffU : 0U) | (sees(key + 1) ? 0xffff0000U : 0U);
    __m512i values = _mm512_setzero_si512();  // keys after the last 32 that were packed are never read
    if (kept != 0)
      values = _mm512_and_si512(_mm512_load_si512(packed + 16 * i), _mm512_set1_epi32(static_cast<int>(kept)));
    special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(values, exponent), exponent);
    _mm512_store_si512(copy + 16 * i, values);
  }
  return special == 0;
}

// A row of q, padded with zeros to whole tiles.
inline void load_amx_query(const void* source, Dtype, int count, float* target) {
  auto* const to = reinterpret_cast<std::byte*>(target);
  for (int begin = 0; begin < count; begin += kTileDepth) {
    _mm512_store_si512(to + 2 * begin, load_pairs(static_cast<const std::byte*>(source), begin, count));
  }
}

}  // namespace ringattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
HWY_DIAGNOSTICS(pop)

#endif  // AVX-512

#endif  // per-target include guard
