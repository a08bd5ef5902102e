// SPDX-License-Identifier: Apache-2.0
#include "launch/trace.hpp"

#include <fmt/format.h>

#include <cstring>
#include <string_view>

#include "base/json_writer.hpp"

namespace ringattn {

namespace {

struct Lane {
  int number;
  std::string_view name;
  double BlockTimes::*begin;
  double BlockTimes::*end;
};

constexpr Lane kLanes[] = {{0, "fold", &BlockTimes::fold_begin, &BlockTimes::fold_end},
                           {1, "wait", &BlockTimes::wait_begin, &BlockTimes::fold_begin},
                           {2, "transfer", &BlockTimes::posted, &BlockTimes::fold_begin}};

void name_row(JsonWriter& json, std::string_view what, std::size_t rank, int lane, std::string_view name) {
  json.begin_object().member("ph", "M").member("name", what).member("pid", rank).member("tid", lane);
  json.key("args").begin_object().member("name", name).end_object().end_object();
}

}  // namespace

std::string trace_text(const std::vector<std::vector<BlockTimes>>& ranks, const std::vector<std::string>& hosts) {
  JsonWriter json(false);
  json.begin_object().member("displayTimeUnit", "ms").key("traceEvents").begin_array();
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    name_row(json, "process_name", rank, 0, fmt::format("rank {} on {}", rank, hosts[rank]));
    for (const Lane& lane : kLanes) name_row(json, "thread_name", rank, lane.number, lane.name);
    for (std::size_t block = 0; block < ranks[rank].size(); ++block) {
      const BlockTimes& times = ranks[rank][block];
      for (const Lane& lane : kLanes) {
        const double begin = times.*lane.begin;
        json.begin_object().member("ph", "X").member("name", fmt::format("block {}", block));
        json.member("cat", lane.name).member("pid", rank).member("tid", lane.number);
        json.member("ts", begin * 1e6).member("dur", (times.*lane.end - begin) * 1e6).end_object();
      }
    }
  }
  return json.end_array().end_object().text() + '\n';
}

std::vector<std::vector<BlockTimes>> gather_block_times(const std::vector<BlockTimes>& mine, const Meeting& meeting) {
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(BlockTimes));
  std::vector<std::vector<BlockTimes>> all;
  for (const std::string& theirs : meeting.gather(bytes)) {
    std::vector<BlockTimes>& blocks = all.emplace_back(theirs.size() / sizeof(BlockTimes));
    if (!blocks.empty()) std::memcpy(blocks.data(), theirs.data(), theirs.size());
  }
  return all;
}

}  // namespace ringattn
