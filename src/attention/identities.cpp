// SPDX-License-Identifier: Apache-2.0
#include "attention/identities.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "base/build.hpp"

namespace ringattn {

namespace {

// Long values travel and are shown as their hash.
std::string hashed(const std::string& text) { return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size())); }

std::string job_hash(const Job& job) {
  XXH3_state_t state;
  std::memset(&state, 0, sizeof state);
  XXH3_64bits_reset(&state);
  const std::string text = fmt::format("{} scale {:a}", describe(job.spec), job.spec.softmax_scale);
  XXH3_64bits_update(&state, text.data(), text.size());
  for (const Sequence& s : job.batch.sequences) {
    const std::int64_t numbers[] = {s.q_len, s.k_len, s.q_offset};
    XXH3_64bits_update(&state, numbers, sizeof numbers);
  }
  if (job.lists != nullptr) {
    const auto add = [&state]<class Entry>(std::span<const Entry> entries) {
      const std::uint64_t count = entries.size();
      XXH3_64bits_update(&state, &count, sizeof count);
      XXH3_64bits_update(&state, entries.data(), entries.size_bytes());
    };
    add(job.lists->begins());
    add(job.lists->blocks());
  }
  return fmt::format("{:016x}", XXH3_64bits_digest(&state));
}

std::string machine_text(const MachineModel& machine) {
  return fmt::format("{} FLOP/s, {} B/s, {} s", machine.flops_per_second, machine.link_bytes_per_second,
                     machine.latency_seconds);
}

std::string options_text(const Options& options) {
  std::string text = fmt::format("{} {} {} {} {} {} {} {}", layout_name(options.layout.kind), options.layout.stripe,
                                 options.block_tokens, options.memory_budget, options.checksum, options.overlap,
                                 options.state_out, options.shorter_lengths);
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
  return {{"build", fmt::format("{} {}", version(), build_id())}, {"kernel", std::string(choice.row->name)},
          {"device or instruction set", backend.identity()},      {"job", job_hash(job)},
          {"machine model", machine_text(options.machine)},       {"options", hashed(options_text(options))}};
}

}  // namespace ringattn
