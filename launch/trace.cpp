// SPDX-License-Identifier: Apache-2.0
#include "launch/trace.hpp"

#include <fmt/format.h>

#include <cstring>
#include <string_view>

#include "base/json_writer.hpp"

namespace ringattn {

namespace {

struct Lane {
  std::string_view name;
  double BlockTimes::*begin;
  double BlockTimes::*end;
};

constexpr Lane kLanes[] = {{"compute", &BlockTimes::compute_begin, &BlockTimes::compute_end},
                           {"wait", &BlockTimes::wait_begin, &BlockTimes::compute_begin},
                           {"transfer", &BlockTimes::posted, &BlockTimes::compute_begin}};

// Lanes of an SSM op, by SsmPhase::Kind.
constexpr std::string_view kSsmLanes[] = {"compute", "wait", "finish", "states"};

// The events of a trace, rank by rank.
class TraceText {
 public:
  TraceText() { json_.begin_object().member("displayTimeUnit", "ms").key("traceEvents").begin_array(); }

  void name(std::string_view what, std::size_t rank, std::size_t lane, std::string_view name) {
    json_.begin_object().member("ph", "M").member("name", what).member("pid", rank).member("tid", lane);
    json_.key("args").begin_object().member("name", name).end_object().end_object();
  }
  // Seconds.
  void event(std::string_view name, std::size_t rank, std::size_t lane, std::string_view category, double begin,
             double end) {
    json_.begin_object().member("ph", "X").member("name", name).member("cat", category).member("pid", rank);
    json_.member("tid", lane).member("ts", begin * 1e6).member("dur", (end - begin) * 1e6).end_object();
  }
  std::string text() { return json_.end_array().end_object().text() + '\n'; }

 private:
  JsonWriter json_{false};
};

// What every rank tells, by rank.
template <class Entry>
std::vector<std::vector<Entry>> gather_entries(const std::vector<Entry>& mine, const Collective& collective) {
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Entry));
  std::vector<std::vector<Entry>> all;
  for (const std::string& theirs : collective.gather(bytes)) {
    std::vector<Entry>& entries = all.emplace_back(theirs.size() / sizeof(Entry));
    if (!entries.empty()) std::memcpy(entries.data(), theirs.data(), theirs.size());
  }
  return all;
}

}  // namespace

std::string trace_text(const std::vector<std::vector<BlockTimes>>& ranks, const std::vector<std::string>& hosts) {
  TraceText trace;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    trace.name("process_name", rank, 0, fmt::format("rank {} on {}", rank, hosts[rank]));
    for (std::size_t lane = 0; lane < std::size(kLanes); ++lane) {
      trace.name("thread_name", rank, lane, kLanes[lane].name);
    }
    for (std::size_t block = 0; block < ranks[rank].size(); ++block) {
      const BlockTimes& times = ranks[rank][block];
      for (std::size_t lane = 0; lane < std::size(kLanes); ++lane) {
        const Lane& row = kLanes[lane];
        trace.event(fmt::format("block {}", block), rank, lane, row.name, times.*row.begin, times.*row.end);
      }
    }
  }
  return trace.text();
}

std::string trace_text(const std::vector<std::vector<SsmPhase>>& ranks, const std::vector<std::string>& hosts) {
  TraceText trace;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    trace.name("process_name", rank, 0, fmt::format("rank {} on {}", rank, hosts[rank]));
    for (std::size_t lane = 0; lane < std::size(kSsmLanes); ++lane) {
      trace.name("thread_name", rank, lane, kSsmLanes[lane]);
    }
    for (const SsmPhase& part : ranks[rank]) {
      const auto lane = static_cast<std::size_t>(part.kind);
      trace.event(fmt::format("heads {} to {}", part.heads.first, part.heads.end() - 1), rank, lane, kSsmLanes[lane],
                  part.begin, part.end);
    }
  }
  return trace.text();
}

std::vector<std::vector<SsmPhase>> gather_ssm_phases(const std::vector<SsmPhase>& mine, const Collective& collective) {
  return gather_entries(mine, collective);
}

std::vector<std::vector<BlockTimes>> gather_block_times(const std::vector<BlockTimes>& mine,
                                                        const Collective& collective) {
  return gather_entries(mine, collective);
}

}  // namespace ringattn
