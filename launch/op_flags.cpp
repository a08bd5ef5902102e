// SPDX-License-Identifier: Apache-2.0
#include "launch/op_flags.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kDealt =
    "decoding has no such setting: rows stand at the end of their keys, which ranks "
    "deal by groups, or with lists by heads";
constexpr std::string_view kLatentAlone = "it is a setting of latent attention, --op mla";
constexpr std::string_view kOneShape =
    "latents have no such setting: all heads share them, and queries see all of them";
constexpr std::string_view kScanAlone = "it is a setting of scans, --op ssd or --op selective_scan";
constexpr std::string_view kNoStates =
    "a convolution has no states or steps: it is over the last tokens of its channels";
constexpr std::string_view kOneToken = "a step of decoding is a convolution of --seq 1";
constexpr std::string_view kOnePart = "a convolution is one part, with nothing to be seen inside";
constexpr std::string_view kNoScores = "a scan has no scores, queries or keys";
constexpr std::string_view kOneDeal = "ranks have whole super-segments of a scan, one behind the other";
constexpr std::string_view kNoBlocks = "a scan has no blocks: states travel, one of each sequence";
constexpr std::string_view kOnlyCaches = "only a cache has pages";
constexpr UnknownFlag kNotOfAttention[] = {
    {"page-size", kOnlyCaches},  {"prefix", kOnlyCaches},   {"rope-dim", kLatentAlone},  {"latent-dim", kLatentAlone},
    {"form", kLatentAlone},      {"state-dim", kScanAlone}, {"groups", kScanAlone},      {"conv-width", kScanAlone},
    {"dt-softplus", kScanAlone}, {"dt-limit", kScanAlone},  {"final-states", kScanAlone}};
constexpr UnknownFlag kNotOfDecode[] = {
    {"query-offset", kDealt},    {"layout", kDealt},           {"stripe", kDealt},          {"block", kDealt},
    {"overlap", kDealt},         {"checksum", kDealt},         {"trace", kDealt},           {"compute-only", kDealt},
    {"rope-dim", kLatentAlone},  {"latent-dim", kLatentAlone}, {"form", kLatentAlone},      {"state-dim", kScanAlone},
    {"groups", kScanAlone},      {"conv-width", kScanAlone},   {"dt-softplus", kScanAlone}, {"dt-limit", kScanAlone},
    {"final-states", kScanAlone}};
constexpr UnknownFlag kNotOfLatent[] = {
    {"kv-heads", kOneShape},     {"prefix", kOneShape},    {"block-mask", kOneShape},
    {"state-dim", kScanAlone},   {"groups", kScanAlone},   {"conv-width", kScanAlone},
    {"dt-softplus", kScanAlone}, {"dt-limit", kScanAlone}, {"final-states", kScanAlone}};
constexpr UnknownFlag kNotOfScans[] = {
    {"cache-format", kNoScores}, {"kv-heads", kNoScores},    {"head-dim-v", kNoScores},    {"page-size", kNoScores},
    {"prefix", kNoScores},       {"page-order", kNoScores},  {"mask", kNoScores},          {"query-offset", kNoScores},
    {"window", kNoScores},       {"block-mask", kNoScores},  {"softmax-scale", kNoScores}, {"softcap", kNoScores},
    {"decode", kNoScores},       {"rope-dim", kLatentAlone}, {"latent-dim", kLatentAlone}, {"form", kLatentAlone},
    {"layout", kOneDeal},        {"stripe", kOneDeal},       {"block", kNoBlocks},         {"overlap", kNoBlocks},
    {"checksum", kNoBlocks},     {"compute-only", kNoBlocks}};
// Its heads are channels of one number each.
constexpr std::string_view kChannels = "a channel is a head of one number; --heads says how many there are";
constexpr auto kNotOfSelective = [] {
  std::array<UnknownFlag, std::size(kNotOfScans) + 1> all{};
  std::copy(std::begin(kNotOfScans), std::end(kNotOfScans), all.begin());
  all.back() = {"head-dim", kChannels};
  return all;
}();

constexpr UnknownFlag kOfScansAlone[] = {{"head-dim", kChannels}, {"q-len", kOneToken},       {"state-dim", kNoStates},
                                         {"groups", kNoStates},   {"dt-softplus", kNoStates}, {"dt-limit", kNoStates},
                                         {"trace", kOnePart}};
constexpr auto kNotOfConvolution = [] {
  std::array<UnknownFlag, std::size(kNotOfScans) + std::size(kOfScansAlone)> all{};
  std::copy(std::begin(kOfScansAlone), std::end(kOfScansAlone),
            std::copy(std::begin(kNotOfScans), std::end(kNotOfScans), all.begin()));
  return all;
}();

// What --print-config wrote before anybody knew the input.
bool is_printed_default(const ConfigValue& value) {
  if (value.source != Source::kFile) return false;
  if (value.row->kind == FlagKind::kSwitch) return (value.text == "true") == (value.row->fallback == "on");
  return value.text == value.row->fallback;
}

// The first setting that a user gave which rows around the ring alone have; null: none.
const UnknownFlag* first_of_rows(const Config& config) {
  for (const UnknownFlag& unknown : kNotOfDecode) {
    if (unknown.why != kDealt || !config.given(unknown.flag)) continue;
    if (!is_printed_default(config.value(unknown.flag))) return &unknown;
  }
  return nullptr;
}

}  // namespace

std::span<const UnknownFlag> unknown_to(Op op) {
  static constexpr std::span<const UnknownFlag> kUnknown[] = {kNotOfAttention, kNotOfDecode,    kNotOfLatent,
                                                              kNotOfScans,     kNotOfSelective, kNotOfConvolution};
  return kUnknown[static_cast<std::size_t>(op)];
}

void check_steps_of_latents(const Config& config) {
  const UnknownFlag* const unknown = first_of_rows(config);
  if (unknown == nullptr) return;
  fail(ErrorCode::kUsage,
       fmt::format("{} contradicts a cache of latents that is decoded", config.origin(unknown->flag)), unknown->why,
       "Leave it out, or name --form expanded.");
}

std::string why_rows_of_latents(const Config& config) {
  const UnknownFlag* const unknown = first_of_rows(config);
  return unknown == nullptr ? "" : fmt::format("steps of decoding have no {}", config.origin(unknown->flag));
}

const UnknownFlag* first_unknown(const Config& config, Op op, std::string_view but_for) {
  for (const UnknownFlag& unknown : unknown_to(op)) {
    if (!config.given(unknown.flag) || unknown.flag == but_for) continue;
    if (unknown.flag == "page-size" && config.options.page_size == 0) continue;
    if (unknown.flag == "prefix" && config.options.prefix == 0) continue;
    if (!is_printed_default(config.value(unknown.flag))) return &unknown;
  }
  return nullptr;
}

void check_op(const Config& config, Op op, std::string_view but_for) {
  const UnknownFlag* const unknown = first_unknown(config, op, but_for);
  if (unknown == nullptr) return;
  const auto& [flag, why] = *unknown;
  constexpr std::string_view kFiles[] = {"keys and values", "a cache",          "latents",
                                         "a scan",          "a selective scan", "a convolution"};
  const bool file = config.given("input");
  const std::string other = file ? fmt::format("a file with {}", kFiles[static_cast<std::size_t>(op)])
                                 : fmt::format("--op {}{}", op_name(op),
                                               config.value("op").source != Source::kDefault ? "" : ", the default");
  fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin(flag), other), why,
       file                                    ? "Leave it out."
       : why == kLatentAlone                   ? "Leave it out, or use --op mla."
       : why == kScanAlone || why == kNoStates ? "Leave it out, or use --op ssd."
       : why == kOnlyCaches                    ? "Leave it out, or use --op decode."
                                               : "Leave it out, or use --op attention.");
}

}  // namespace ringattn
