// SPDX-License-Identifier: Apache-2.0
#include "ops/ssd_backward/parameter_gradients.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>

namespace ringattn {

namespace {

// A run of any rank, and its terms.
struct RunTerms {
  TokenRun run;
  std::vector<SsdTerms> terms;  // [segments, heads]
};

std::size_t segments_of(const TokenRun& run) {
  return static_cast<std::size_t>((run.tokens() + kSegmentTokens - 1) / kSegmentTokens);
}

void add(std::span<const SsdTerms> terms, std::span<SsdTerms> sum) {
  for (std::size_t h = 0; h < sum.size(); ++h) {
    sum[h].a += terms[h].a;
    sum[h].d += terms[h].d;
    sum[h].dt_bias += terms[h].dt_bias;
  }
}

// The runs of all ranks, ascending by token.
std::vector<RunTerms> gather(const Collective& collective, std::size_t heads, std::span<const TokenRun> runs,
                             std::span<const SsdTerms> terms) {
  std::string text;
  for (const TokenRun& run : runs) {
    const std::size_t count = segments_of(run) * heads;
    text.append(reinterpret_cast<const char*>(&run), sizeof run);
    text.append(reinterpret_cast<const char*>(terms.data()), count * sizeof(SsdTerms));
    terms = terms.subspan(count);
  }
  std::vector<RunTerms> all;
  for (const std::string& theirs : collective.gather(text)) {
    for (std::size_t at = 0; at < theirs.size();) {
      RunTerms received{gathered_value<TokenRun>(theirs, at), {}};
      at += sizeof(TokenRun);
      received.terms.resize(segments_of(received.run) * heads);
      std::memcpy(received.terms.data(), theirs.data() + at, received.terms.size() * sizeof(SsdTerms));
      at += received.terms.size() * sizeof(SsdTerms);
      all.push_back(std::move(received));
    }
  }
  std::ranges::sort(all, {}, [](const RunTerms& of) { return std::tuple(of.run.sequence, of.run.begin); });
  return all;
}

}  // namespace

SsdParameterGradients sum_ssd_terms(const Collective& collective, const SsmSpec& spec, std::span<const TokenRun> runs,
                                    std::span<const SsdTerms> terms) {
  const auto heads = static_cast<std::size_t>(spec.heads);
  std::vector<SsdTerms> total(heads);
  std::vector<SsdTerms> of_sequence;
  const std::vector<RunTerms> all = gather(collective, heads, runs, terms);
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t segment = 0; segment < all[i].terms.size(); segment += heads) {
      const std::span<const SsdTerms> own(all[i].terms.data() + segment, heads);
      if (of_sequence.empty()) {
        of_sequence.assign(own.begin(), own.end());
      } else {
        add(own, of_sequence);
      }
    }
    if (i + 1 < all.size() && all[i + 1].run.sequence == all[i].run.sequence) continue;
    add(of_sequence, total);
    of_sequence.clear();
  }
  SsdParameterGradients gradients;
  for (const SsdTerms& sum : total) {
    gradients.da.push_back(sum.a);
    if (spec.skip) gradients.dd.push_back(sum.d);
    if (spec.dt_bias) gradients.ddt_bias.push_back(sum.dt_bias);
  }
  return gradients;
}

}  // namespace ringattn
