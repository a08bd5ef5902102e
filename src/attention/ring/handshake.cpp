// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/handshake.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/build.hpp"
#include "base/error.hpp"

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
  std::string text = fmt::format("{} {} {} {} {} {} {:a} {:a} {:a}", layout_name(options.layout.kind),
                                 options.layout.stripe, options.block_tokens, options.memory_budget, options.checksum,
                                 options.state_out, options.machine.flops_per_second,
                                 options.machine.link_bytes_per_second, options.machine.latency_seconds);
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

void handshake(const Meeting& meeting, const std::vector<Identity>& mine) {
  std::string text;
  for (const Identity& identity : mine) text += identity.value + '\n';
  const std::vector<std::string> theirs = meeting.gather(text);
  for (std::size_t rank = 1; rank < theirs.size(); ++rank) {
    std::size_t at = 0;
    std::size_t at_zero = 0;
    for (const Identity& identity : mine) {
      const std::size_t end = theirs[rank].find('\n', at);
      const std::size_t end_zero = theirs[0].find('\n', at_zero);
      const std::string value = theirs[rank].substr(at, end - at);
      const std::string value_zero = theirs[0].substr(at_zero, end_zero - at_zero);
      if (value != value_zero) {
        // Everyone sees the same table, so everyone throws the same.
        throw AgreedError(Error(ErrorCode::kUnsupported,
                                fmt::format("rank {} and rank 0 differ in {}", rank, identity.what),
                                fmt::format("{} against {}", value, value_zero),
                                {"Start the same program with the same job on the same model of machine; forcing one ",
                                 setting("kernel"), " may help."}));
      }
      at = end + 1;
      at_zero = end_zero + 1;
    }
  }
}

}  // namespace ringattn
