// SPDX-License-Identifier: Apache-2.0
#include "comm/device_peers.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "base/gpu.hpp"
#include "base/host.hpp"

namespace ringattn {

namespace {

DevicePeer describe_this_rank(int device) {
  DevicePeer mine;
  mine.host = host_name();
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::getline(boot, mine.boot);
  mine.process = std::to_string(getpid());
  for (const Gpu& gpu : visible_gpus()) {
    if (gpu.device == device) mine.gpu = gpu.uuid;
  }
  return mine;
}

}  // namespace

std::vector<DevicePeer> gather_device_peers(Bootstrap& control, int device, const Deadline& deadline) {
  const DevicePeer mine = describe_this_rank(device);
  const std::string text = mine.host + '\n' + mine.boot + '\n' + mine.process + '\n' + mine.gpu;
  std::vector<DevicePeer> peers;
  for (const std::string& theirs : control.all_gather(text, deadline)) {
    std::istringstream lines(theirs);
    DevicePeer& peer = peers.emplace_back();
    for (std::string* field : {&peer.host, &peer.boot, &peer.process, &peer.gpu}) std::getline(lines, *field);
  }
  return peers;
}

RankNames name_device_peers(const std::vector<DevicePeer>& peers) {
  constexpr std::size_t kShort = 12;  // enough of a UUID to distinguish GPUs
  std::vector<std::string> locations;
  for (const DevicePeer& peer : peers)
    locations.push_back(fmt::format("{} ({})", peer.host, peer.gpu.substr(0, kShort)));
  return RankNames(std::move(locations));
}

}  // namespace ringattn
