// SPDX-License-Identifier: Apache-2.0
#include "base/host.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include "base/error.hpp"
#include "base/memory.hpp"

namespace ringattn {
namespace {

std::string first_line_of(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

TEST(Host, IsNamed) {
  EXPECT_EQ(host_name(), first_line_of("/proc/sys/kernel/hostname"));
  EXPECT_FALSE(cpu_model().empty());
}

// RunCollectively buffers are never more than the process may use, though the system would promise more.
TEST(Host, BuffersAreRefusedThatDoNotFitIt) {
  const std::size_t usable = usable_bytes();
  ASSERT_GT(usable, std::size_t{1} << 28);
  const auto refused = [](std::size_t bytes) {
    try {
      allocate_host(bytes);
    } catch (const Error& error) {
      return error.code() == ErrorCode::kMemory;
    }
    return false;
  };
  EXPECT_TRUE(refused(usable + 1));
  if (usable > std::size_t{1} << 44) GTEST_SKIP() << "needs: a host whose memory is known";
  const std::size_t part = usable / 5 * 2;
  std::optional<Buffer> first = allocate_host(part);
  const Buffer second = allocate_host(part);
  EXPECT_TRUE(refused(part));
  first.reset();
  EXPECT_FALSE(refused(part));
}

// A thread that may run on one processor only sees that one: its bit, in text of two digits for eight processors.
TEST(Host, ProcessorsAreThoseOfTheThread) {
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  EXPECT_EQ(usable_processors().count, CPU_COUNT(&all));
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &all)) continue;
    Processors processors;
    std::thread([&] {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      if (sched_setaffinity(0, sizeof one, &one) == 0) processors = usable_processors();
    }).join();
    std::string expected(CPU_SETSIZE / 4, '0');
    expected[cpu / 8 * 2 + (cpu % 8 < 4 ? 1 : 0)] = "1248"[cpu % 4];
    EXPECT_EQ(processors.set, expected) << "processor " << cpu;
    EXPECT_EQ(processors.count, 1) << "processor " << cpu;
  }
}

}  // namespace
}  // namespace ringattn
