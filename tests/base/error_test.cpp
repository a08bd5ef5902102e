// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ringattn {
namespace {

TEST(Error, FollowsTheGrammar) {
  try {
    fail(ErrorCode::kFile, "K has 12 heads", "Q has 32", "Check the file.");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "K has 12 heads (Q has 32). Check the file.");
    EXPECT_EQ(error.code(), ErrorCode::kFile);
  }
  EXPECT_THROW(fail(ErrorCode::kInternal, "x"), Error);
}

TEST(Error, NamesSettingsInTheWordsOfWhoeverShowsIt) {
  const Error error(ErrorCode::kUsage, {setting("ranks", 3), " contradicts mpirun"}, {setting("kv_heads"), " is free"},
                    {"Use ", setting("backend", "cpu"), ", or see ", command("info", "measure"), "."});
  EXPECT_STREQ(error.what(),
               "ranks = 3 contradicts mpirun (kv_heads is free). Use backend = cpu, or see ringattn's info with "
               "measure.");
  const Vocabulary upper{
      [](std::string_view name, std::string_view value) {
        return "SET " + std::string(name) + ":" + std::string(value);
      },
      [](std::string_view name, std::string_view with) { return "DO " + std::string(name) + "/" + std::string(with); }};
  EXPECT_EQ(error.message().text(upper),
            "SET ranks:3 contradicts mpirun (SET kv_heads: is free). Use SET backend:cpu, or see DO info/measure.");
  const std::vector<MessageFragment> suggestion{{MessageFragment::Kind::kText, "Use ", ""},
                                                {MessageFragment::Kind::kSetting, "backend", "cpu"},
                                                {MessageFragment::Kind::kText, ", or see ", ""},
                                                {MessageFragment::Kind::kCommand, "info", "measure"},
                                                {MessageFragment::Kind::kText, ".", ""}};
  EXPECT_EQ(error.suggestion().fragments(), suggestion);
}

TEST(Error, TakesAWholeMessageAsItIs) {
  EXPECT_STREQ(Error(ErrorCode::kFile, "can't open x.").what(), "can't open x.");
  EXPECT_STREQ(Error(ErrorCode::kFile, "a (b). Did you mean c?").what(), "a (b). Did you mean c?");
  EXPECT_STREQ(Error(ErrorCode::kFile, "").what(), "");
}

TEST(Error, TravelsAsBytes) {
  const Error sent(ErrorCode::kMemory, {"blocks of ", setting("block", 7)}, "\xe2\x88\x9e > 3",
                   {command("plan"), " says what fits."});
  const std::string bytes = pack_error(sent);
  const Error received = unpack_error(bytes);
  EXPECT_EQ(received.code(), sent.code());
  EXPECT_EQ(received.problem(), sent.problem());
  EXPECT_EQ(received.why(), sent.why());
  EXPECT_EQ(received.suggestion(), sent.suggestion());
  EXPECT_STREQ(received.what(), sent.what());
}

TEST(Error, SurvivesBytesThatAreCutOff) {
  const Error sent(ErrorCode::kMemory, {"blocks of ", setting("block", 7)}, "too large", "Use less.");
  const std::string bytes = pack_error(sent);
  for (std::size_t length = 1; length <= bytes.size(); ++length) {
    const Error received = unpack_error(bytes.substr(0, length));
    EXPECT_EQ(received.code(), sent.code());
    EXPECT_TRUE(received.problem().empty() || received.problem().fragments()[0].name.starts_with("b"));
  }
  EXPECT_STREQ(unpack_error(bytes.substr(0, 8)).what(), "bloc.");
}

// No byte from a network becomes an exit code that the program doesn't have.
TEST(Error, TakesAnyBytes) {
  EXPECT_EQ(unpack_error("").code(), ErrorCode::kPeer);
  for (int code = 0; code < 256; ++code) {
    const std::string bytes = std::string(1, static_cast<char>(code)) + std::string("\0\0x", 3);
    const bool known = code >= 1 && code <= 7;
    EXPECT_EQ(static_cast<int>(unpack_error(bytes).code()), known ? code : 6) << code;
  }
  EXPECT_STREQ(unpack_error(std::string("\xff\0\0", 3)).what(), "a rank failed and did not say why.");
  // A piece of an unknown kind is text.
  EXPECT_STREQ(unpack_error(std::string("\3\0\0?name\0\0\0\0\0", 12)).what(), "name.");
}

TEST(Error, TravelsWithItsPlace) {
  Error sent(ErrorCode::kFile, "no such file");
  EXPECT_EQ(unpack_error(pack_error(sent)).location(), nullptr);
  sent.set_location({12, "node7"});
  const Error received = unpack_error(pack_error(sent));
  ASSERT_NE(received.location(), nullptr);
  EXPECT_EQ(*received.location(), (ErrorLocation{12, "node7"}));
  EXPECT_STREQ(received.what(), sent.what());
}

TEST(Error, TravelsWithoutTheNulsOfAFilesNames) {
  const Error received =
      unpack_error(pack_error(Error(ErrorCode::kFile, std::string("a\0b", 3), "why", "suggestion.")));
  EXPECT_STREQ(received.what(), "a b (why). suggestion.");
}

TEST(Error, SuggestsOnlyWhatIsNear) {
  const std::string_view names[] = {"striped", "zigzag", "contiguous"};
  EXPECT_EQ(nearest_name("zig-zag", names, 3), "zigzag");
  EXPECT_EQ(nearest_name("stripe", names, 3), "striped");
  EXPECT_EQ(nearest_name("blockwise", names, 3), "");
  const std::string_view letters[] = {"q", "k", "v", "seq", "run"};
  EXPECT_EQ(nearest_name("zz", letters, 5), "");
  EXPECT_EQ(nearest_name("x", letters, 5), "");
  EXPECT_EQ(nearest_name("foo", letters, 5), "");
  EXPECT_EQ(nearest_name("kk", letters, 5), "k");
  EXPECT_EQ(nearest_name("rn", letters, 5), "run");
  EXPECT_EQ(nearest_name("Q", letters, 5), "q");
}

}  // namespace
}  // namespace ringattn
