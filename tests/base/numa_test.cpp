// SPDX-License-Identifier: Apache-2.0
// Placement of ranks on described topologies: hosts with one, two and four NUMA nodes, and masks of launchers and
// containers.
#include "base/numa.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

CpuList cpus(std::string_view text) {
  const std::optional<CpuList> list = parse_cpu_list(text);
  EXPECT_TRUE(list.has_value()) << text;
  return list.value_or(CpuList());
}

struct NumaCase {
  const char* what;
  std::vector<const char*> nodes;
  const char* allowed;
  int ranks;
  std::vector<const char*> expected;  // of each rank; empty: ranks are not bound
  const char* reason = "";
};

const NumaCase kNumaCases[] = {
    {"one node", {"0-7"}, "0-7", 4, {}, "their processors are on one NUMA node"},
    {"two nodes, a rank each", {"0-7", "8-15"}, "0-15", 2, {"0-7", "8-15"}},
    {"two nodes, hyperthreads beside each other's", {"0-3,8-11", "4-7,12-15"}, "0-15", 2, {"0-3,8-11", "4-7,12-15"}},
    {"two nodes, one rank", {"0-7", "8-15"}, "0-15", 1, {}, "one rank uses 2 NUMA nodes"},
    {"more ranks than nodes", {"0-7", "8-15"}, "0-15", 4, {"0-7", "0-7", "8-15", "8-15"}},
    {"three ranks lose nothing", {"0-3", "4-7"}, "0-7", 3, {"0-3", "4-7", "4-7"}},
    {"five ranks would lose a processor",
     {"0-7", "8-15"},
     "0-15",
     5,
     {},
     "5 ranks do not divide evenly over 2 NUMA nodes"},
    {"more ranks than processors", {"0", "1"}, "0-1", 4, {"0", "0", "1", "1"}},
    {"four nodes, two ranks", {"0-3", "4-7", "8-11", "12-15"}, "0-15", 2, {"0-7", "8-15"}},
    {"four nodes, four ranks", {"0-3", "4-7", "8-11", "12-15"}, "0-15", 4, {"0-3", "4-7", "8-11", "12-15"}},
    {"four nodes, three ranks",
     {"0-3", "4-7", "8-11", "12-15"},
     "0-15",
     3,
     {},
     "3 ranks do not divide evenly over 4 NUMA nodes"},
    {"uneven nodes, ranks by size", {"0-11", "12-15"}, "0-15", 4, {"0-11", "0-11", "0-11", "12-15"}},
    {"uneven nodes, two ranks", {"0-11", "12-15"}, "0-15", 2, {}, "2 ranks do not divide evenly over 2 NUMA nodes"},
    {"a node would be idle", {"0-13", "14"}, "0-14", 2, {}, "2 ranks do not divide evenly over 2 NUMA nodes"},
    {"a container with both nodes", {"0-7", "8-15"}, "2-5,10-13", 2, {"2-5", "10-13"}},
    {"a container with one node", {"0-7", "8-15"}, "8-11", 2, {}, "their processors are on one NUMA node"},
    {"mpirun has bound each pair of ranks", {"0-7", "8-15"}, "0-7", 2, {}, "their processors are on one NUMA node"},
    {"offline processors", {"0-2", "4-5,7"}, "0-2,4-5,7", 2, {"0-2", "4-5,7"}},
    {"a processor without a node",
     {"0-3", "4-7"},
     "0-8",
     2,
     {},
     "the system does not list the NUMA nodes of their processors"},
    {"no topology", {}, "0-3", 2, {}, "the system does not list the NUMA nodes of their processors"},
};

TEST(Numa, PlacesRanksOnDescribedHosts) {
  for (const NumaCase& host : kNumaCases) {
    NumaTopology topology;
    for (const char* node : host.nodes) topology.push_back(cpus(node));
    const NumaPlacement placement = place_on_numa_nodes(topology, cpus(host.allowed), host.ranks);
    std::vector<std::string> found;
    for (const CpuList& rank : placement.cpus) found.push_back(cpu_list_text(rank));
    EXPECT_EQ(found, std::vector<std::string>(host.expected.begin(), host.expected.end())) << host.what;
    EXPECT_EQ(placement.reason, host.reason) << host.what;
  }
}

// Whatever the host: no rank leaves its mask, no processor of it is idle, and no rank has fewer than an equal share.
TEST(Numa, PlacementKeepsItsRules) {
  for (int first = 1; first <= 5; ++first) {
    for (int second = 1; second <= 5; ++second) {
      for (int third = 0; third <= 5; ++third) {
        NumaTopology topology;
        CpuList allowed;
        for (const int size : {first, second, third}) {
          CpuList node;
          for (int i = 0; i < size; ++i) node.push_back(static_cast<int>(allowed.size()) + i);
          allowed.insert(allowed.end(), node.begin(), node.end());
          topology.push_back(std::move(node));
        }
        for (int ranks = 1; ranks <= 9; ++ranks) {
          const NumaPlacement placement = place_on_numa_nodes(topology, allowed, ranks);
          ASSERT_EQ(placement.cpus.empty(), !placement.reason.empty());
          if (placement.cpus.empty()) continue;
          ASSERT_EQ(static_cast<int>(placement.cpus.size()), ranks);
          std::set<int> used;
          for (const CpuList& rank : placement.cpus) {
            used.insert(rank.begin(), rank.end());
            const auto sharing = std::ranges::count(placement.cpus, rank);
            EXPECT_GE(std::ssize(rank) / sharing, std::ssize(allowed) / ranks);
          }
          EXPECT_EQ(CpuList(used.begin(), used.end()), allowed);
        }
      }
    }
  }
}

TEST(Numa, ReadsTheSystemsLists) {
  EXPECT_EQ(cpu_list_text(cpus("0-3,8,10-11")), "0-3,8,10-11");
  EXPECT_EQ(cpu_list_text(cpus("5,4,4-6")), "4-6");
  EXPECT_EQ(cpus(""), CpuList());
  for (const char* bad : {"x", "1-", "-1", "3-1", "1,", ",1", "1 2", "0-99999999"}) {
    EXPECT_EQ(parse_cpu_list(bad), std::nullopt) << bad;
  }
  const testing::TemporaryFolder folder;
  EXPECT_EQ(read_numa_topology(folder.file("absent")), NumaTopology());
  for (const char* name : {"node10", "node2", "node1", "nodes", "has_cpu"}) {
    ASSERT_TRUE(std::filesystem::create_directory(folder.file(name)));
  }
  folder.write("node10/cpulist", "4-5\n");
  folder.write("node2/cpulist", "0-3\n");
  folder.write("node1/cpulist", "\n");  // memory only
  EXPECT_EQ(read_numa_topology(folder.path()), (NumaTopology{{0, 1, 2, 3}, {4, 5}}));
  // This host: every processor that this process may use has a node.
  const CpuList here = usable_cpus();
  ASSERT_FALSE(here.empty());
  std::set<int> known;
  for (const CpuList& node : read_numa_topology()) known.insert(node.begin(), node.end());
  if (known.empty()) GTEST_SKIP() << "needs: /sys/devices/system/node";
  EXPECT_TRUE(std::ranges::includes(known, here));
}

// Threads inherit the processors of the one that started them, and so do OpenMP's.
TEST(Numa, BindsAThreadAndThoseThatItStarts) {
  const CpuList all = usable_cpus();
  CpuList inherited;
  std::thread([&] {
    EXPECT_EQ(bind_thread({all.back()}), "");
    std::thread([&] { inherited = usable_cpus(); }).join();
  }).join();
  EXPECT_EQ(inherited, CpuList{all.back()});
  EXPECT_EQ(usable_cpus(), all);
  EXPECT_NE(bind_thread({}), "");
}

}  // namespace
}  // namespace ringattn
