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

constexpr Lane kLanes[] = {{"fold", &BlockTimes::fold_begin, &BlockTimes::fold_end},
                           {"wait", &BlockTimes::wait_begin, &BlockTimes::fold_begin},
                           {"transfer", &BlockTimes::posted, &BlockTimes::fold_begin}};

// Lanes of a scan, by ScanPart::Kind.
constexpr std::string_view kScanLanes[] = {"fold", "wait", "finish", "states"};

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
std::vector<std::vector<Entry>> gather_entries(const std::vector<Entry>& mine, const Meeting& meeting) {
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Entry));
  std::vector<std::vector<Entry>> all;
  for (const std::string& theirs : meeting.gather(bytes)) {
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

std::string trace_text(const std::vector<std::vector<ScanPart>>& ranks, const std::vector<std::string>& hosts) {
  TraceText trace;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    trace.name("process_name", rank, 0, fmt::format("rank {} on {}", rank, hosts[rank]));
    for (std::size_t lane = 0; lane < std::size(kScanLanes); ++lane) {
      trace.name("thread_name", rank, lane, kScanLanes[lane]);
    }
    for (const ScanPart& part : ranks[rank]) {
      const auto lane = static_cast<std::size_t>(part.kind);
      trace.event(fmt::format("heads {} to {}", part.heads.first, part.heads.end() - 1), rank, lane, kScanLanes[lane],
                  part.begin, part.end);
    }
  }
  return trace.text();
}

std::vector<std::vector<ScanPart>> gather_scan_parts(const std::vector<ScanPart>& mine, const Meeting& meeting) {
  return gather_entries(mine, meeting);
}

std::vector<std::vector<BlockTimes>> gather_block_times(const std::vector<BlockTimes>& mine, const Meeting& meeting) {
  return gather_entries(mine, meeting);
}

}  // namespace ringattn
