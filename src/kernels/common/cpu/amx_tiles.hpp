// SPDX-License-Identifier: Apache-2.0
// AMX instructions as functions. They are assembly, so that the file compiles without flags for AMX, and so that the
// compiler orders memory accesses around them (headers of g++ 12 lack that).
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace ringattn::cpu {

inline constexpr int kTileRows = 16;     // rows of a tile
inline constexpr int kTileDepth = 32;    // bf16 elements of a row of a tile: the depth of one product
inline constexpr int kTileColumns = 16;  // fp32 elements of a row of a tile
inline constexpr std::size_t kTileElements = std::size_t{kTileRows} * kTileDepth;
inline constexpr std::int64_t kTileRowBytes = 64;
inline constexpr std::size_t kTileBytes = kTileRows * kTileRowBytes;

// LDTILECFG's operand. Tiles 0 … 3 are sums, 4 and 5 left factors, 6 and 7 right factors.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
// Leaves tiles in their initial state, which context switches need not save.
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int kTile>
inline __attribute__((always_inline)) void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// `stride` is in bytes.
template <int kTile>
inline __attribute__((always_inline)) void load_tile(const void* rows, std::size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline __attribute__((always_inline)) void store_tile(void* rows, std::size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(kTile) : "memory");
}
// sum[m, n] += Σ_k left[m, k] · right[k, n]. right has rows of pairs of k: [16, 16 columns, 2].
template <int kSum, int kLeft, int kRight>
inline __attribute__((always_inline)) void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}
// As multiply_tiles(), of int8 and int32: right has rows of quads of k, [16, 16 columns, 4].
template <int kSum, int kLeft, int kRight>
inline __attribute__((always_inline)) void multiply_int8_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

// Makes vectors treat subnormals as zero, as the tile unit does, for as long as it lives.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x40;

  unsigned saved_;
};

}  // namespace ringattn::cpu

#endif  // __x86_64__
