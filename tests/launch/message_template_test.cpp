// SPDX-License-Identifier: Apache-2.0
// The library's messages as the program's user reads them.
#include <gtest/gtest.h>

#include "kernels/common/registry.hpp"
#include "launch/message_text.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

using testing::error_of;

TEST(ProgramText, SpellsSettingsAsFlags) {
  EXPECT_EQ(program_text({"Check ", setting("heads"), " and ", setting("kv_heads", 3), "."}),
            "Check --heads and --kv-heads 3.");
}

TEST(ProgramText, SpellsCommandsAsWhatToType) {
  EXPECT_EQ(program_text({"See ", command("info"), "; ", command("verify", "record"), " writes one."}),
            "See `ringattn info`; `ringattn verify --record` writes one.");
}

TEST(ProgramText, KeepsTheGrammarOfAnError) {
  const Error error = error_of([] { choose_kernel(AttentionSpec{}, {"cpux", "auto"}); });
  EXPECT_EQ(program_text(error), "there is no backend \"cpux\" (known: auto, cpu, cuda). Did you mean cpu?");
  const Error far = error_of([] { choose_kernel(AttentionSpec{}, {"tpu-v5", "auto"}); });
  EXPECT_EQ(program_text(far),
            "there is no backend \"tpu-v5\" (known: auto, cpu, cuda). Use auto, or see `ringattn info`.");
}

}  // namespace
}  // namespace ringattn
