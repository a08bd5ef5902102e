// SPDX-License-Identifier: Apache-2.0
// The words of decode_gpu_bench: which steps it measures, and over how many caches in turn. --steps, --heads,
// --kv-heads and --head-dim are those of bench/peers/decode.py, so a script gives both programs the same words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/arguments.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn {

struct DecodeShape {
  std::int64_t batch = 1;
  std::int64_t keys = 0;  // of each sequence
  int rows = 1;           // of each sequence
  int heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int head_dim_v = 128;
  bool values_in_keys = false;  // of latents
  std::int64_t page = 0;        // tokens; 0: a dense cache
  int slices = 0;               // DecodeLimits::slices
  std::int64_t prefix = 0;      // the first keys that all sequences share, in the same pages; 0: they share none
  std::int64_t listed = 0;      // blocks of kMaskBlockKeys keys in a KV head's mask, those of the rows included; 0: all
  bool chosen = false;          // by the step itself, of mean keys; else they are drawn
  std::string cache = "plain";  // how it is stored: plain, fp8, int8 or int4
  bool update = false;          // as Decode does: lengths and tables are checked first, and new rows join the cache
};

// Bytes of one head's row in the cache, scales included.
inline std::int64_t row_bytes_of(const DecodeShape& shape) {
  if (shape.cache == "plain") return std::int64_t{2} * shape.head_dim;
  if (shape.values_in_keys) return latent_row_bytes(shape.head_dim_v, shape.head_dim - shape.head_dim_v);
  return shape.cache == "int4" ? shape.head_dim / 2 + shape.head_dim / 32 * 4 : shape.head_dim + 4;
}

inline constexpr std::int64_t kFarBeyondCache = std::int64_t{512} << 20;  // bytes read between two uses of a cache
inline constexpr std::int64_t kMinLaunches = 4;                           // of a graph
inline constexpr int kMaskBlockKeys = 128;                                // keys

// How a shape's caches lie, and how often they are used in turn.
struct CacheRotation {
  std::int64_t pages;     // of a sequence
  std::int64_t page;      // tokens
  std::int64_t shared;    // pages of each sequence that are those of the first one
  std::int64_t pool;      // pages of a cache
  std::int64_t bytes;     // of K of one cache, and of V where it lies by itself
  std::int64_t caches;    // different ones
  std::int64_t launches;  // of a graph: each cache is used equally often, so the first use of a replay is no repetition
};

inline CacheRotation cache_rotation_of(const DecodeShape& shape) {
  CacheRotation rotation{};
  rotation.page = shape.page == 0 ? shape.keys : shape.page;
  rotation.pages = (shape.keys + rotation.page - 1) / rotation.page;
  rotation.shared = shape.prefix / rotation.page;
  rotation.pool = rotation.shared + shape.batch * (rotation.pages - rotation.shared);
  rotation.bytes = rotation.pool * rotation.page * shape.kv_heads * row_bytes_of(shape);
  const std::int64_t all = (shape.values_in_keys ? 1 : 2) * rotation.bytes;
  rotation.caches = (kFarBeyondCache + all - 1) / all;
  // A launch with a block mask reads a part of a cache, and the next launches read other parts.
  const std::int64_t parts =
      shape.listed == 0 ? 1 : std::max<std::int64_t>(1, shape.keys / (shape.listed * kMaskBlockKeys));
  rotation.launches = rotation.caches * ((std::max(kMinLaunches, parts) + rotation.caches - 1) / rotation.caches);
  return rotation;
}

struct DecodeArguments {
  std::string kernel = "sm90_attention";
  std::vector<DecodeShape> shapes;  // every step with every page size, number of rows, number of slices and cache
};

namespace decode_arguments {

inline constexpr BenchArguments kArguments{
    "decode_gpu_bench",
    "decode_gpu_bench [--kernel NAME] [--steps 1x4k,32x16k] [--rows 1,4] [--heads 32] [--kv-heads 8] "
    "[--head-dim 128] [--latent-dim 512, where the values are so many columns of the keys] [--page-size 0,64] "
    "[--slices auto,8] [--cache plain,fp8,int8,int4] [--prefix 16k, the first keys that all sequences share] "
    "[--listed 102, blocks of 128 keys that each KV head reads, or --best 102, which each step chooses] "
    "[--update 0,1, whether the step checks lengths and tables, and appends its rows, first]"};

inline std::vector<std::int64_t> numbers(std::string_view list, std::int64_t least, std::int64_t most) {
  std::vector<std::int64_t> found;
  for (const std::string_view entry : list_entries(list)) found.push_back(kArguments.number(entry, least, most));
  return found;
}

// "32x16k": 32 sequences of 16,384 keys.
inline std::vector<DecodeShape> steps(std::string_view list) {
  constexpr std::int64_t kMaxKeys = std::int64_t{1} << 21;
  std::vector<DecodeShape> found;
  for (const std::string_view entry : list_entries(list)) {
    const std::size_t cross = entry.find('x');
    if (cross == std::string_view::npos) kArguments.refuse(entry, "a step is sequences x keys");
    DecodeShape shape;
    shape.batch = kArguments.number(entry.substr(0, cross), 1, 4096);
    shape.keys = kArguments.number(entry.substr(cross + 1), 1, kMaxKeys);
    found.push_back(shape);
  }
  return found;
}

// Every shape with every value, which set(shape, value) gives it; the values of a shape stand together.
template <class Value, class Set>
std::vector<DecodeShape> with_each(const std::vector<DecodeShape>& shapes, const std::vector<Value>& values, Set set) {
  std::vector<DecodeShape> all;
  for (const DecodeShape& shape : shapes) {
    for (const Value& value : values) set(all.emplace_back(shape), value);
  }
  return all;
}

inline std::string_view mask_flag(const DecodeShape& shape) { return shape.chosen ? "--best" : "--listed"; }

}  // namespace decode_arguments

// Throws kUsage.
inline DecodeArguments parse_decode_arguments(const std::vector<std::string_view>& words) {
  using namespace decode_arguments;
  DecodeArguments found;
  DecodeShape common;
  std::vector<DecodeShape> shapes = steps("1x4k");
  std::vector<std::int64_t> pages{0}, rows{1}, slices{0}, updates{0};
  std::vector<std::string_view> caches{"plain"};
  for (std::size_t i = 0; i < words.size(); i += 2) {
    if (i + 1 == words.size()) kArguments.refuse(words[i], "it has no value");
    const std::string_view name = words[i], value = words[i + 1];
    if (name == "--kernel") {
      found.kernel = value;
    } else if (name == "--steps") {
      shapes = steps(value);
    } else if (name == "--heads") {
      common.heads = static_cast<int>(kArguments.number(value, 1, 1 << 16));
    } else if (name == "--kv-heads") {
      common.kv_heads = static_cast<int>(kArguments.number(value, 1, 1 << 16));
    } else if (name == "--head-dim") {
      common.head_dim = common.head_dim_v = static_cast<int>(kArguments.number(value, 1, 1 << 16));
    } else if (name == "--latent-dim") {
      common.head_dim_v = static_cast<int>(kArguments.number(value, 1, 1 << 16));
      common.values_in_keys = true;
    } else if (name == "--page-size") {
      pages = numbers(value, 0, 256);
    } else if (name == "--rows") {
      rows = numbers(value, 1, 16);
    } else if (name == "--prefix") {
      common.prefix = kArguments.number(value, 0, std::int64_t{1} << 21);
    } else if (name == "--listed" || name == "--best") {
      common.listed = kArguments.number(value, 1, 1 << 16);
      common.chosen = name == "--best";
    } else if (name == "--slices") {
      slices.clear();
      for (const std::string_view entry : list_entries(value)) {
        slices.push_back(entry == "auto" ? 0 : kArguments.number(entry, 1, 8));
      }
    } else if (name == "--update") {
      updates = numbers(value, 0, 1);
    } else if (name == "--cache") {
      caches = list_entries(value);
      for (const std::string_view cache : caches) {
        if (cache != "plain" && cache != "fp8" && cache != "int8" && cache != "int4") {
          kArguments.refuse(cache, "a cache is plain, fp8, int8 or int4");
        }
      }
    } else {
      kArguments.refuse(name, "it is none of the words that it knows");
    }
  }
  for (DecodeShape& shape : shapes) {
    const DecodeShape step = shape;
    shape = common;
    shape.batch = step.batch;
    shape.keys = step.keys;
  }
  shapes =
      with_each(shapes, rows, [](DecodeShape& shape, std::int64_t count) { shape.rows = static_cast<int>(count); });
  shapes = with_each(shapes, pages, [](DecodeShape& shape, std::int64_t page) { shape.page = page; });
  shapes = with_each(shapes, slices, [](DecodeShape& shape, std::int64_t n) { shape.slices = static_cast<int>(n); });
  shapes = with_each(shapes, caches, [](DecodeShape& shape, std::string_view cache) { shape.cache = cache; });
  shapes = with_each(shapes, updates, [](DecodeShape& shape, std::int64_t update) { shape.update = update > 0; });
  for (const DecodeShape& shape : shapes) {
    if (shape.prefix > 0 && (shape.page == 0 || shape.prefix > shape.keys)) {
      kArguments.refuse("--prefix", "sequences share pages, and none has more than it has keys");
    }
    if (shape.listed > 0 && shape.listed * kMaskBlockKeys > shape.keys) {
      kArguments.refuse(mask_flag(shape), "a sequence has fewer blocks");
    }
  }
  found.shapes = std::move(shapes);
  return found;
}

}  // namespace ringattn
