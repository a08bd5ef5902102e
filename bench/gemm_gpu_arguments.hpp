// SPDX-License-Identifier: Apache-2.0
// The arguments of gemm_gpu_bench: which GEMMs of MLA it measures, and over how many copies of their
// tensors in turn. --shapes and --cache are those of bench/peers/gemm.py, so a script gives both programs the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/arguments.hpp"
#include "kernels/gemm/batched_gemm.hpp"

namespace ringattn {

// At DeepSeek's dims: 128 + 64 of q and k, 128 of v, a latent of 512.
inline constexpr int kHeadDim = 128;
inline constexpr int kRopeDim = 64;
inline constexpr int kLatentDim = 512;

// Latents to keys, which lie in rows of 192; queries, which lie so, to the latent, in rows of 576; and back from it.
enum class GemmUse { kExpand, kAbsorb, kBack };
inline constexpr std::pair<std::string_view, GemmUse> kGemmUses[] = {
    {"expand", GemmUse::kExpand}, {"absorb", GemmUse::kAbsorb}, {"back", GemmUse::kBack}};

struct GemmShape {
  GemmUse use = GemmUse::kBack;
  std::int64_t rows = 1;
  std::int64_t heads = 1;
  bool cold = false;

  int k() const { return use == GemmUse::kAbsorb ? kHeadDim : kLatentDim; }
  int n() const { return use == GemmUse::kAbsorb ? kLatentDim : kHeadDim; }
  std::int64_t row_heads() const { return use == GemmUse::kExpand ? 1 : heads; }
  // Elements from a head's row to the next head's.
  std::int64_t row_width() const { return use == GemmUse::kAbsorb ? kHeadDim + kRopeDim : kLatentDim; }
  std::int64_t out_width() const {
    return use == GemmUse::kExpand ? kHeadDim + kRopeDim : use == GemmUse::kAbsorb ? kLatentDim + kRopeDim : kHeadDim;
  }
  double flops() const { return 2.0 * static_cast<double>(rows) * static_cast<double>(heads) * k() * n(); }
  // Bytes of all 16-bit elements, each read or written once.
  std::int64_t bytes() const { return 2 * (rows * row_heads() * k() + heads * k() * n() + rows * heads * n()); }
  // Number of copies of all tensors, used in turn, so that each has left the L2 cache before it is used again.
  std::int64_t copies() const {
    constexpr std::int64_t kFarBeyondCache = std::int64_t{512} << 20;
    return cold ? (kFarBeyondCache + bytes() - 1) / bytes() : 1;
  }
  // Launches in one graph: a multiple of copies(), so that each copy is used equally often.
  std::int64_t launches() const {
    constexpr std::int64_t kMinLaunches = 16;
    return copies() * ((kMinLaunches + copies() - 1) / copies());
  }
};

struct GemmArguments {
  std::string kernel = "sm90_gemm";
  Dtype dtype = Dtype::kBf16;
  std::vector<GemmShape> shapes;  // each with every cache
};

namespace gemm_arguments {

inline constexpr BenchArguments kArguments{
    "gemm_gpu_bench",
    "gemm_gpu_bench [--kernel NAME] [--shapes expand:32kx16,absorb:128x128,back:128x128] [--cache cold,warm] "
    "[--dtype bf16]"};

// "back:128x16": 128 rows of 16 heads.
inline GemmShape shape(std::string_view entry) {
  const std::size_t colon = entry.find(':');
  const std::size_t cross = entry.find('x', colon == std::string_view::npos ? 0 : colon);
  if (colon == std::string_view::npos || cross == std::string_view::npos)
    kArguments.refuse(entry, "a shape is use:rows x heads");
  GemmShape found;
  const auto use = std::find_if(std::begin(kGemmUses), std::end(kGemmUses),
                                [&](const auto& known) { return known.first == entry.substr(0, colon); });
  if (use == std::end(kGemmUses)) kArguments.refuse(entry, "a use is expand, absorb or back");
  found.use = use->second;
  found.rows = kArguments.number(entry.substr(colon + 1, cross - colon - 1), 1, std::int64_t{1} << 22);
  found.heads = kArguments.number(entry.substr(cross + 1), 1, 1024);
  return found;
}

}  // namespace gemm_arguments

inline std::string_view name_of(GemmUse use) { return kGemmUses[static_cast<std::size_t>(use)].first; }

// Throws kUsage.
inline GemmArguments parse_gemm_arguments(const std::vector<std::string_view>& words) {
  using namespace gemm_arguments;
  GemmArguments found;
  std::string_view shapes = "expand:32kx16,absorb:128x128,back:128x128";
  std::vector<bool> colds{true, false};
  for (std::size_t i = 0; i < words.size(); i += 2) {
    if (i + 1 == words.size()) kArguments.refuse(words[i], "it has no value");
    const std::string_view name = words[i], value = words[i + 1];
    if (name == "--kernel") {
      found.kernel = value;
    } else if (name == "--shapes") {
      shapes = value;
    } else if (name == "--dtype") {
      if (value != "bf16" && value != "fp16") kArguments.refuse(value, "a dtype is bf16 or fp16");
      found.dtype = value == "bf16" ? Dtype::kBf16 : Dtype::kF16;
    } else if (name == "--cache") {
      colds.clear();
      for (const std::string_view entry : list_entries(value)) {
        if (entry != "cold" && entry != "warm") kArguments.refuse(entry, "a cache is cold or warm");
        colds.push_back(entry == "cold");
      }
    } else {
      kArguments.refuse(name, "it is none of the words that it knows");
    }
  }
  for (const std::string_view entry : list_entries(shapes)) {
    for (const bool cold : colds) {
      found.shapes.push_back(shape(entry));
      found.shapes.back().cold = cold;
    }
  }
  return found;
}

}  // namespace ringattn
