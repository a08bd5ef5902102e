// SPDX-License-Identifier: Apache-2.0
#include "launch/op_flags.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kDealt =
    "decoding has no such setting: rows stand at the end of their keys, which ranks "
    "deal by groups";
constexpr std::string_view kLatentAlone = "it is a setting of latent attention, --op mla";
constexpr std::string_view kOneShape = "latents have no such setting: all heads share them, and they lie in rows";
constexpr UnknownFlag kNotOfAttention[] = {{"page-size", "only a cache has pages"},
                                           {"rope-dim", kLatentAlone},
                                           {"latent-dim", kLatentAlone},
                                           {"form", kLatentAlone}};
constexpr UnknownFlag kNotOfDecode[] = {
    {"query-offset", kDealt},   {"layout", kDealt},           {"stripe", kDealt},    {"block", kDealt},
    {"overlap", kDealt},        {"checksum", kDealt},         {"trace", kDealt},     {"compute-only", kDealt},
    {"rope-dim", kLatentAlone}, {"latent-dim", kLatentAlone}, {"form", kLatentAlone}};
constexpr UnknownFlag kNotOfLatent[] = {
    {"kv-heads", kOneShape}, {"page-size", kOneShape}, {"block-mask", kOneShape}, {"decode", kOneShape}};

}  // namespace

std::span<const UnknownFlag> unknown_to(Op op) {
  constexpr std::span<const UnknownFlag> kUnknown[] = {kNotOfAttention, kNotOfDecode, kNotOfLatent};
  return kUnknown[static_cast<std::size_t>(op)];
}

void check_op(const Config& config, Op op) {
  for (const auto& [flag, why] : unknown_to(op)) {
    if (!config.given(flag)) continue;
    if (flag == "page-size" && config.options.page_size == 0) continue;
    constexpr std::string_view kFiles[] = {"keys and values", "a cache", "latents"};
    const bool file = config.given("input");
    const std::string other = file ? fmt::format("a file with {}", kFiles[static_cast<std::size_t>(op)])
                                   : fmt::format("--op {}{}", op_name(op),
                                                 config.value("op").source != Source::kDefault ? "" : ", the default");
    fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(flag), other), why,
         file                  ? "Leave it out."
         : why == kLatentAlone ? "Leave it out, or use --op mla."
         : flag == "page-size" ? "Leave it out, or use --op decode."
                               : "Leave it out, or use --op attention.");
  }
}

}  // namespace ringattn
