// SPDX-License-Identifier: Apache-2.0
#include "base/build.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

namespace ringattn {
namespace {

bool is_hex(std::string_view text) { return text.find_first_not_of("0123456789abcdef") == std::string_view::npos; }

TEST(Build, IsNamed) {
  EXPECT_EQ(version(), "0.3.0");
  EXPECT_TRUE(git_revision() == "unknown" || (git_revision().size() == 12 && is_hex(git_revision()))) << git_revision();
#ifdef __clang__
  EXPECT_EQ(compiler(), "Clang " + std::to_string(__clang_major__) + "." + std::to_string(__clang_minor__) + "." +
                            std::to_string(__clang_patchlevel__));
#else
  EXPECT_EQ(compiler(), "GNU " + std::to_string(__GNUC__) + "." + std::to_string(__GNUC_MINOR__) + "." +
                            std::to_string(__GNUC_PATCHLEVEL__));
#endif
}

// Ranks compare the build id: it is the one that the linker has put into this program's file, after the head of a note.
TEST(Build, IdIsTheProgramFilesOwn) {
  const std::string id = build_id();
  ASSERT_GE(id.size(), 16U) << "link with --build-id";
  ASSERT_EQ(id.size() % 2, 0U);
  ASSERT_TRUE(is_hex(id)) << id;
  std::string note{'\4', 0, 0, 0, static_cast<char>(id.size() / 2), 0, 0, 0, '\3', 0, 0, 0, 'G', 'N', 'U', 0};
  for (std::size_t i = 0; i < id.size(); i += 2) note += static_cast<char>(std::stoi(id.substr(i, 2), nullptr, 16));
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string program{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(program.find(note), std::string::npos) << id;
}

}  // namespace
}  // namespace ringattn
