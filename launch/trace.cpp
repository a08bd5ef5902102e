// SPDX-License-Identifier: Apache-2.0
#include "launch/trace.hpp"

#include <fmt/format.h>

#include <cstring>

#include "base/json_writer.hpp"

namespace ringattn {

namespace {

// An event without its name, which follows it.
struct Bar {
  std::int64_t lane;
  std::int64_t name_bytes;
  double begin;
  double end;
};

}  // namespace

std::vector<std::vector<TraceEvent>> gather_timeline(const std::vector<TraceEvent>& mine,
                                                     const Collective& collective) {
  std::string bytes;
  for (const TraceEvent& event : mine) {
    const Bar bar{event.lane, std::ssize(event.name), event.begin, event.end};
    bytes.append(reinterpret_cast<const char*>(&bar), sizeof(bar)).append(event.name);
  }
  std::vector<std::vector<TraceEvent>> ranks;
  for (const std::string& theirs : collective.gather(bytes)) {
    std::vector<TraceEvent>& events = ranks.emplace_back();
    for (std::size_t at = 0; at < theirs.size();) {
      Bar bar;
      std::memcpy(&bar, theirs.data() + at, sizeof(bar));
      at += sizeof(bar);
      const auto size = static_cast<std::size_t>(bar.name_bytes);
      events.push_back({static_cast<int>(bar.lane), theirs.substr(at, size), bar.begin, bar.end});
      at += size;
    }
  }
  return ranks;
}

std::string trace_text(const std::vector<std::string_view>& lanes, const std::vector<std::vector<TraceEvent>>& ranks,
                       const std::vector<std::string>& hosts) {
  JsonWriter json(false);
  json.begin_object().member("displayTimeUnit", "ms").key("traceEvents").begin_array();
  const auto name = [&](std::string_view what, std::size_t rank, std::size_t lane, std::string_view text) {
    json.begin_object().member("ph", "M").member("name", what).member("pid", rank).member("tid", lane);
    json.key("args").begin_object().member("name", text).end_object().end_object();
  };
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    name("process_name", rank, 0, fmt::format("rank {} on {}", rank, hosts[rank]));
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) name("thread_name", rank, lane, lanes[lane]);
    for (const TraceEvent& event : ranks[rank]) {  // microseconds
      json.begin_object().member("ph", "X").member("name", event.name);
      json.member("cat", lanes[static_cast<std::size_t>(event.lane)]).member("pid", rank).member("tid", event.lane);
      json.member("ts", event.begin * 1e6).member("dur", (event.end - event.begin) * 1e6).end_object();
    }
  }
  return json.end_array().end_object().text() + '\n';
}

}  // namespace ringattn
