// SPDX-License-Identifier: Apache-2.0
// The decode kernels, in order of preference. Each has the name and the bits of a row of attention/attention_table.cpp,
// except sm90_mla and sm90_mla_split1k: they have no attention kernel, and differ from each other in the size of KV
// splits.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/decode/cpu/cpu_decode.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/attention/sm80/config.hpp"
#include "kernels/decode/sm80/sm80_decode.hpp"
#endif
#ifdef RINGATTN_HAVE_HOPPER
#include "kernels/attention/sm90/config.hpp"
#include "kernels/attention/sm90/sm90_attention.hpp"
#include "kernels/decode/sm90/compressed.hpp"
#include "kernels/decode/sm90/sm90_decode.hpp"
#include "kernels/mla/sm90/config.hpp"
#include "kernels/mla/sm90/sm90_mla.hpp"
#endif
#include "kernels/common/registry.hpp"
#include "kernels/decode/decode.hpp"

namespace ringattn {

namespace {

// Adds to `missing`, which the attention kernel of the same name lacks, block masks with these tiles and key positions.
std::vector<std::string> missing_of(std::vector<std::string> missing, const DecodeSpec& spec, const TileSizes& tiles) {
  for (std::string& what :
       missing_for_decode_block_mask(spec.attention.block_mask, tiles, spec.attention.mask, spec.attention.kv_heads)) {
    missing.push_back(std::move(what));
  }
  const std::string positions = spec.attention.positions > 0 ? missing_for_positions() : std::string();
  if (!positions.empty() && std::ranges::find(missing, positions) == missing.end()) missing.push_back(positions);
  return missing;
}

// Adds low-rank formats, whose elements require a GEMM.
std::vector<std::string> without_products(std::vector<std::string> missing, const DecodeSpec& spec) {
  for (const RowFormat& format : {spec.format.k, spec.format.v}) {
    if (format.rank > 0) missing.push_back(describe(format) + " (supported: formats without a rank)");
  }
  return missing;
}

#ifdef RINGATTN_HAVE_CUDA
template <class Config>
TileSizes tiles_of(const Config& config, int query) {
  return config ? TileSizes{query, config->key_tile} : TileSizes{};
}
#endif

#ifdef RINGATTN_HAVE_HOPPER
template <const sm90::MlaVariant& kRow>
constexpr KernelRow<DecodeSpec> latent_row(std::string_view supports) {
  return {{kHopperPlatform, kRow.name, supports,
           [](const Backend&) { return 5e14; },  // on an H200, limited by tensor cores with 64 rows or more
           [] { return sm90::mla_configs(kRow); }},
          sm90::mla_missing,
          [](const DecodeSpec& spec, Backend& backend) { return sm90::make_mla_decode(spec, backend, kRow); }};
}
#endif

// The work of a step of `rows` rows over one key. Few rows share a tile, so a step takes the time of packing or
// dequantizing its keys and values, for any number of rows. With AMX, they are read directly from the cache, or
// dequantized a tile at a time. The number of elements of K and V per second was measured with one thread
// (bench/notes/attention-portable.md#estimates, decoding.md); fp8, int8 and int4 differ from their common rate by at
// most 13 %. The bytes of a key depend on the cache: the op adds them.
HostWork cpu_decode_work(const DecodeSpec& spec, const Backend& backend, std::int64_t rows) {
  const auto& cpu = static_cast<const cpu::CpuBackend&>(backend);
  const AttentionSpec& attention = spec.attention;
  const cpu::TileOps& ops = cpu.attention_ops(attention.dtype);
  const bool amx = ops.q_per_float > 1;
  const double element_rate = spec.format.is_plain() ? (amx ? 5.1e9 : 3.3e9) : (amx ? 6.4e9 : 1.6e9);
  const double dims = attention.head_dim + attention.head_dim_v;
  const double flops = 2.0 * dims * attention.heads * static_cast<double>(rows);
  WorkPhase phase{.vector_seconds = dims * attention.kv_heads / element_rate};
  const double products = flops / ops.flops_per_second;  // take longer with many rows
  if (products > phase.vector_seconds) {
    (amx ? phase.amx_seconds : phase.vector_seconds) = products;
    if (amx) phase.vector_seconds = 0.0;
  }
  return {cpu.threads(), flops, {phase}};
}

constexpr KernelRow<DecodeSpec> kTable[] = {
#ifdef RINGATTN_HAVE_HOPPER
    {{kHopperPlatform, "sm90_attention",
      "bf16, fp16; head_dim 64, 96, 128, 256, and 192 with head_dim_v 128; every mask, softcap, sinks; caches of fp8, "
      "int8 and int4",
      [](const Backend&) { return 1e13; },  // on an H200, limited by memory bandwidth with four query heads per KV head
      sm90::decode_configs},
     [](const DecodeSpec& spec) {
       std::vector<std::string> missing = missing_of(sm90::attention_missing(spec.attention), spec,
                                                     tiles_of(sm90::choose_config(spec.attention), sm90::kQueryTile));
       for (std::string& what : sm90::formats_missing(spec)) missing.push_back(std::move(what));
       if (spec.attention.block_mask.any() && !spec.format.is_plain()) {
         missing.push_back("block mask over " + describe(spec.format) + " (supported: over plain caches)");
       }
       return missing;
     },
     sm90::make_decode},
    latent_row<sm90::kMlaVariant>(
        "bf16, fp16; MLA: head_dim 576 with the first 512 columns as values, also as an FP8 latent cache; every mask, "
        "softcap, sinks"),
    latent_row<sm90::kMlaSplit1kVariant>(
        "bf16, fp16; as sm90_mla, in KV splits of 1,024 keys instead of 4,096: other bits, for few sequences"),
#endif
#ifdef RINGATTN_HAVE_CUDA
    {{kCudaPlatform, "sm80_attention",
      "bf16, fp16; head_dim 64, 96, 128, 256, 512, 192 with head_dim_v 128, 576 with 512; every mask, softcap, sinks; "
      "caches of fp8, int8 and int4 up to head_dim 256, FP8 latent caches",
      [](const Backend&) { return 5e12; },  // the same, at half of the memory bandwidth
      sm80::decode_configs},
     [](const DecodeSpec& spec) {
       const auto config = sm80::choose_config(spec.attention);
       std::vector<std::string> missing = missing_of(sm80::attention_missing(spec.attention), spec,
                                                     tiles_of(config, config ? config->query_tile() : 1));
       for (std::string& what : sm80::formats_missing(spec)) missing.push_back(std::move(what));
       return missing;
     },
     sm80::make_decode},
#endif
    {{kCpuPlatform, "cpu_attention",
      "fp32, bf16, fp16; head dims that are multiples of 8 up to 576; every mask, softcap, sinks; caches of fp8, int8, "
      "int4 and vector, FP8 latent caches",
      [](const Backend&) { return 5e9; }, nullptr, /*amx_bf16=*/true},
     [](const DecodeSpec& spec) {
       return without_products(missing_of(cpu::cpu_attention_missing(spec.attention), spec, TileSizes{}), spec);
     },
     cpu::make_cpu_decode,
     cpu_decode_work},
};

}  // namespace

template <>
std::span<const KernelRow<DecodeSpec>> kernel_table<DecodeSpec>() {
  return kTable;
}

}  // namespace ringattn
