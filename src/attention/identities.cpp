// SPDX-License-Identifier: Apache-2.0
#include "attention/identities.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <string>

#include "base/build.hpp"

namespace ringattn {

namespace {

// Long values travel and are shown as their hash.
std::string hashed(const std::string& text) { return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size())); }

std::string job_text(const Job& job) {
  const FoldSpec& spec = job.spec;
  std::string text = fmt::format("{} scale {:a}", describe(spec), spec.softmax_scale);
  for (const Sequence& s : job.batch.sequences) text += fmt::format(";{},{},{}", s.q_len, s.k_len, s.q_offset);
  return text;
}

std::string options_text(const Options& options) {
  std::string text =
      fmt::format("{} {} {} {} {} {} {} {} {:a} {:a} {:a}", layout_name(options.layout.kind), options.layout.stripe,
                  options.block_tokens, options.memory_budget, options.checksum, options.overlap, options.state_out,
                  options.shorter_lengths, options.machine.flops_per_second, options.machine.link_bytes_per_second,
                  options.machine.latency_seconds);
  for (const auto& stated : {options.query_runs, options.key_runs}) {
    text += stated ? "stated" : "dealt";
    if (!stated) continue;
    for (const auto& runs : *stated) {
      text += '/';
      for (const TokenRun& run : runs) text += fmt::format("{},{},{};", run.sequence, run.begin, run.end);
    }
  }
  return text;
}

}  // namespace

std::vector<Identity> identities(const Job& job, const Options& options, const FoldChoice& choice,
                                 const Backend& backend) {
  return {{"build", fmt::format("{} {}", version(), build_id())},
          {"kernel", std::string(choice.row->name)},
          {"device or instruction set", backend.identity()},
          {"job", hashed(job_text(job))},
          {"options", hashed(options_text(options))}};
}

}  // namespace ringattn
