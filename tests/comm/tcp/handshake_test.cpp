// SPDX-License-Identifier: Apache-2.0
// Where a secret comes from, what ranks prove by it, and frames with MACs.
#include "comm/tcp/handshake.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>

#include "comm/tcp/store.hpp"
#include "tests/comm/tcp/store_connections.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/free_port.hpp"
#include "tests/support/scoped_environment.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::bytes_with;
using testing::error_of;
using testing::free_port;
using testing::has;
using testing::make_wires;
using testing::next_frame;
using testing::plain_frame;
using testing::ScopedEnvironment;
using testing::send_raw;
using testing::TemporaryFolder;
using testing::WirePair;

constexpr double kShort = 1.0;

const std::string kText(64, 's');
const std::string kOther(64, 'o');

Secret secret_of(const std::string& text) { return {text, "the test"}; }

class SecretTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_mac()) GTEST_SKIP() << "this build has no crypto library";
  }
};
using Handshake = SecretTest;
using AuthenticatedWire = SecretTest;

TEST(Secret, IsRefusedByABuildWithoutACryptoLibrary) {
  if (has_mac()) GTEST_SKIP() << "this build has one";
  const Error error = error_of([] { secret_of(kText); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  const ScopedEnvironment variable("RINGATTN_STORE_SECRET", kText.c_str());
  for (const int rank : {0, 1}) {
    EXPECT_EQ(error_of([&] {
                make_store({{"127.0.0.1", free_port()}, rank, 2, "", kShort});
              }).code(),
              ErrorCode::kUnsupported);
  }
}

TEST_F(SecretTest, ComesFromTheEnvironmentOrAFile) {
  EXPECT_FALSE(secret_of_environment().is_given());
  {
    const ScopedEnvironment text("RINGATTN_STORE_SECRET", kText.c_str());
    EXPECT_EQ(secret_of_environment().text(), kText);
    const ScopedEnvironment both("RINGATTN_STORE_SECRET_FILE", "/x");
    EXPECT_EQ(error_of([] { secret_of_environment(); }).code(), ErrorCode::kUsage);
  }
  const TemporaryFolder folder;
  const std::string path = folder.write("secret", kText + "\nanything\n");
  const ScopedEnvironment file("RINGATTN_STORE_SECRET_FILE", path.c_str());
  for (const unsigned mode : {0644U, 0640U, 0604U, 0620U}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    const Error error = error_of([] { secret_of_environment(); });
    EXPECT_EQ(error.code(), ErrorCode::kFile) << error.what();
    EXPECT_TRUE(has(error, "others than its owner can use it")) << error.what();
  }
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  EXPECT_EQ(secret_of_environment().text(), kText);
  folder.write("secret", "short\n");
  const Error error = error_of([] { secret_of_environment(); });
  EXPECT_EQ(error.code(), ErrorCode::kUsage);
  EXPECT_FALSE(has(error, "short\n")) << error.what();
}

TEST_F(SecretTest, FileIsARegularOne) {
  const TemporaryFolder folder;
  const std::string pipe = folder.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {folder.file("none"), folder.path(), pipe}) {
    const ScopedEnvironment file("RINGATTN_STORE_SECRET_FILE", path.c_str());
    EXPECT_EQ(error_of([] { secret_of_environment(); }).code(), ErrorCode::kFile) << path;
  }
}

// RFC 4231, test case 2.
TEST_F(Handshake, MacIsHmacSha256) {
  const Mac mac = make_mac("Jefe", {"what do ya want ", "for nothing?"});
  std::string hex;
  for (const char byte : mac) hex += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  EXPECT_EQ(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_TRUE(is_same_mac(mac, {mac.data(), mac.size()}));
  EXPECT_FALSE(is_same_mac(mac, {mac.data(), mac.size() - 1}));
  EXPECT_NE(make_nonce(), make_nonce());
}

// A proof counts for one purpose, pair of ranks, world and pair of nonces only.
TEST_F(Handshake, ProofsAndKeysAreOfOneConnection) {
  const Introduction one = introduce(Purpose::kStore, 1, 0, 3);
  const WorldNumber world{7, 8};
  const Answer answer = answer_introduction(secret_of(kText), one, world);
  const auto keys = check_proof(secret_of(kText), one, answer.proof, world);
  ASSERT_TRUE(keys);
  EXPECT_EQ(keys->to_listener, answer.keys.to_listener);
  EXPECT_EQ(keys->to_caller, answer.keys.to_caller);
  EXPECT_NE(keys->to_caller, keys->to_listener);
  EXPECT_NE(keys->to_caller, keys->proof);

  EXPECT_FALSE(check_proof(secret_of(kOther), one, answer.proof, world));
  EXPECT_FALSE(check_proof(secret_of(kText), one, answer.proof, {7, 9}));
  const std::function<void(Introduction&)> changes[] = {
      [](Introduction& i) { i.purpose = Purpose::kLink; },
      [](Introduction& i) { i.caller = 2; },
      [](Introduction& i) { i.listener = 1; },
      [](Introduction& i) { i.size = 4; },
      [](Introduction& i) { i.nonce = make_nonce(); },
  };
  for (const auto& change : changes) {
    Introduction other = one;
    change(other);
    EXPECT_FALSE(check_proof(secret_of(kText), other, answer.proof, world));
  }
  Proof other = answer.proof;
  other.nonce[5] = static_cast<char>(other.nonce[5] ^ 1);
  EXPECT_FALSE(check_proof(secret_of(kText), one, other, world));
}

TEST_F(AuthenticatedWire, TakesFramesInOrderOnly) {
  const Introduction one = introduce(Purpose::kStore, 1, 0, 3);
  const ConnectionKeys keys = derive_keys(secret_of(kText), one, make_nonce(), {});
  {
    WirePair wires = make_wires();
    wires.a.authenticate(keys.to_listener, keys.to_caller);
    wires.b.authenticate(keys.to_caller, keys.to_listener);
    for (const char* text : {"first", "", "third"}) {
      wires.a.send(WireKind::kGather, text);
      wires.a.move();
      const auto frame = next_frame(wires.b);
      ASSERT_TRUE(frame);
      EXPECT_EQ(frame->body, text);
    }
  }
  const std::string first = bytes_with(keys, WireKind::kGather, "first");
  const auto expect_forged = [&](const std::string& bytes, const char* why) {
    WirePair wires = make_wires();
    wires.b.authenticate(keys.to_caller, keys.to_listener);
    send_raw(wires.a, bytes);
    EXPECT_FALSE(next_frame(wires.b, 0.5)) << why;
    EXPECT_TRUE(wires.b.is_forged()) << why;
  };
  for (const std::size_t at : {12U, 24U, 28U, 29U, 60U}) {  // kind, body, MAC
    std::string bytes = first;
    bytes[at] = static_cast<char>(bytes[at] ^ (at == 12 ? 3 : 1));
    expect_forged(bytes, "a changed byte");
  }
  expect_forged(plain_frame(WireKind::kGather, "x"), "no MAC");
  expect_forged(plain_frame(WireKind::kGather, std::string(40, 'x')), "a MAC of nothing");
  ConnectionKeys reversed = keys;
  std::swap(reversed.to_caller, reversed.to_listener);
  expect_forged(bytes_with(reversed, WireKind::kGather, "first"), "what this side has sent itself");
  // Before both sides have proved anything, however soon after it.
  {
    WirePair wires = make_wires();
    send_raw(wires.a, plain_frame(WireKind::kGather, "x"));
    ASSERT_TRUE(wires.b.move());
    wires.b.authenticate(keys.to_caller, keys.to_listener);
    EXPECT_FALSE(wires.b.take());
    EXPECT_FALSE(wires.b.move());
    EXPECT_TRUE(wires.b.is_forged());
  }
  // Once more.
  WirePair wires = make_wires();
  wires.b.authenticate(keys.to_caller, keys.to_listener);
  send_raw(wires.a, first + first);
  EXPECT_TRUE(next_frame(wires.b));
  EXPECT_FALSE(next_frame(wires.b, 0.5));
  EXPECT_TRUE(wires.b.is_forged());
}

}  // namespace
}  // namespace ringattn
