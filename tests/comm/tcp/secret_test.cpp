// SPDX-License-Identifier: Apache-2.0
// Ranks with a secret form a world; whoever doesn't know it, records what they say or changes it is shut out.
#include "comm/tcp/secret.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <thread>

#include "comm/tcp/handshake.hpp"
#include "comm/tcp/store_parts.hpp"
#include "comm/tcp/tcp.hpp"
#include "comm/threads.hpp"
#include "tests/comm/tcp/raw_connection.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/free_port.hpp"
#include "tests/support/scoped_environment.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::error_of;
using testing::free_port;
using testing::RawConnection;
using testing::ScopedEnvironment;
using testing::TemporaryFolder;

constexpr double kLong = 20.0;
constexpr double kShort = 1.0;
constexpr double kSlack = 5.0;

const std::string kText(64, 's');
const std::string kOther(64, 'o');

Secret secret_of(const std::string& text) { return {text, "the test"}; }

bool has(const Error& error, std::string_view part) {
  return std::string_view(error.what()).find(part) != std::string_view::npos;
}

class SecretTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_mac()) GTEST_SKIP() << "this build has no crypto library";
  }
};
using Handshake = SecretTest;
using AuthenticatedWire = SecretTest;
using StoreWithSecret = SecretTest;
using MeshWithSecret = SecretTest;

StoreOptions options_of(int port, int rank, int size, std::optional<Secret> secret, double seconds = kLong) {
  return {{"127.0.0.1", port}, rank, size, "a job that nobody is told of", seconds, std::move(secret)};
}

// Runs each on a thread of its own.
class Threads {
 public:
  ~Threads() { join(); }
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  void run(std::function<void()> body) { threads_.emplace_back(std::move(body)); }

 private:
  std::vector<std::thread> threads_;
};

struct WirePair {
  Wire a, b;
};

WirePair make_wires() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  return {Wire(FileDescriptor(ends[0])), Wire(FileDescriptor(ends[1]))};
}

// The bytes that a wire sends with those keys.
std::string bytes_with(const ConnectionKeys& keys, WireKind kind, std::string_view body) {
  WirePair wires = make_wires();
  wires.a.authenticate(keys.to_listener, keys.to_caller);
  wires.a.send(kind, body);
  wires.a.move();
  std::string bytes(4096, '\0');
  const ssize_t count = ::recv(wires.b.socket().get(), bytes.data(), bytes.size(), 0);
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  return bytes;
}

std::string plain_frame(WireKind kind, std::string_view body) {
  std::string text = "ringattn";
  text += bytes_of(std::uint32_t{1});
  text += bytes_of(static_cast<std::uint32_t>(kind));
  text += bytes_of(std::uint64_t{body.size()});
  return text + std::string(body);
}

void send_raw(const Wire& wire, std::string_view bytes) {
  EXPECT_EQ(::send(wire.socket().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

std::optional<WireFrame> next_frame(Wire& wire, double seconds = kSlack) {
  std::optional<WireFrame> frame;
  for (const Deadline deadline = Deadline::after(seconds); !frame && !deadline.expired();) {
    pollfd socket = wire.interest();
    wait_a_moment({&socket, 1});
    const bool open = wire.move();
    frame = wire.take();
    if (!open && !frame) break;
  }
  return frame;
}

TEST(Secret, IsRefusedByABuildWithoutACryptoLibrary) {
  if (has_mac()) GTEST_SKIP() << "this build has one";
  const Error error = error_of([] { secret_of(kText); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  const ScopedEnvironment variable("RINGATTN_STORE_SECRET", kText.c_str());
  for (const int rank : {0, 1}) {
    EXPECT_EQ(error_of([&] { make_store(options_of(free_port(), rank, 2, {}, kShort)); }).code(),
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

void expect_world(const StoreOptions& options) {
  const std::unique_ptr<Store> store = make_store(options);
  EXPECT_EQ(store->all_gather(std::to_string(options.rank), Deadline::after(kLong)).size(),
            static_cast<std::size_t>(options.size));
  EXPECT_EQ(store->session().size(), 64U);
  TcpOptions tcp;
  tcp.secret = options.secret;
  const std::unique_ptr<Transport> world = make_tcp_transport(*store, tcp);
  world->barrier(Deadline::after(kLong));
}

// Until rank 0 listens.
Wire connect_to(int port) {
  for (const Deadline deadline = Deadline::after(kLong); !deadline.expired();) {
    Opened opened = begin_connection(numeric_address("127.0.0.1", port).at(0));
    pollfd socket{opened.socket.get(), POLLOUT, 0};
    ::poll(&socket, 1, 1000);
    if (connection_error(opened.socket) == 0) return Wire(std::move(opened.socket));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ADD_FAILURE() << "nobody listens";
  return Wire(FileDescriptor());
}

TEST_F(StoreWithSecret, JoinsRanksThatKnowIt) {
  const int port = free_port();
  Threads threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.run([=] { expect_world(options_of(port, rank, 3, secret_of(kText))); });
  }
}

// Both sides name who has which.
TEST_F(StoreWithSecret, NamesRanksWhoseSecretIsAnotherOrMissing) {
  const struct {
    std::optional<Secret> first, second;
    const char* says_first;
    const char* says_second;
  } cases[] = {
      {secret_of(kText), secret_of(kOther), "a rank 1 has another secret than rank 0",
       "rank 1 and rank 0, at 127.0.0.1:"},
      {secret_of(kText), Secret(), "a rank 1 has no secret, and rank 0 has one", "asks for a secret (rank 1 has none)"},
      {Secret(), secret_of(kText), "a rank 1 has a secret, and rank 0 has none", "(what answers there has none)"},
  };
  for (const auto& one : cases) {
    const int port = free_port();
    Threads threads;
    threads.run([&one, port] {
      const Error error = error_of([&] { make_store(options_of(port, 0, 2, one.first, kShort)); });
      EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
      EXPECT_TRUE(has(error, "rank 1 did not come to the store")) << error.what();
      EXPECT_TRUE(has(error, one.says_first)) << error.what() << " and not " << one.says_first;
    });
    const Error error = error_of([&] { make_store(options_of(port, 1, 2, one.second)); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_TRUE(has(error, one.says_second)) << error.what();
    EXPECT_FALSE(has(error, "nobody is told of")) << error.what();
  }
}

// The right rank still joins.
TEST_F(StoreWithSecret, ShutsOutWhoDoesNotKnowItAndTellsNothing) {
  const int port = free_port();
  Threads threads;
  threads.run([=] { expect_world(options_of(port, 0, 2, secret_of(kText))); });
  const Hello hello = hello_of(options_of(port, 1, 2, Secret()));
  const Introduction introduction = introduce(Purpose::kStore, 1, 0, 2);
  const std::string openings[] = {
      plain_frame(WireKind::kHello, bytes_of(hello)),
      plain_frame(WireKind::kIntroduction, bytes_of(introduction)) + plain_frame(WireKind::kHello, bytes_of(hello)),
      plain_frame(WireKind::kIntroduction, bytes_of(introduction)) +
          plain_frame(WireKind::kHello, std::string(bytes_of(hello)) + std::string(sizeof(Mac), 'x')),
      plain_frame(WireKind::kIntroduction, bytes_of(introduction)) +
          plain_frame(WireKind::kIntroduction, bytes_of(introduction)),
      plain_frame(WireKind::kIntroduction, "short"),
      plain_frame(WireKind::kGather, "x"),
      plain_frame(WireKind::kProof, "x"),
  };
  for (const std::string& bytes : openings) {
    const Wire wire = connect_to(port);
    send_raw(wire, bytes);
    std::string heard;
    for (const Deadline deadline = Deadline::after(kSlack); !deadline.expired();) {
      pollfd socket{wire.socket().get(), POLLIN, 0};
      ::poll(&socket, 1, 20);
      char some[4096];
      const ssize_t got = ::recv(wire.socket().get(), some, sizeof some, 0);
      if (got == 0 || (got < 0 && errno != EAGAIN)) break;
      if (got > 0) heard.append(some, static_cast<std::size_t>(got));
      ASSERT_FALSE(deadline.overdue() > -0.1) << "it stays connected";
    }
    EXPECT_EQ(heard.find("nobody is told of"), std::string::npos);
  }
  threads.run([=] { expect_world(options_of(port, 1, 2, secret_of(kText))); });
}

// A whole session that was recorded is worth nothing.
TEST_F(StoreWithSecret, TakesNoReplay) {
  const int port = free_port();
  Threads threads;
  threads.run([=] { expect_world(options_of(port, 0, 3, secret_of(kText))); });
  const Hello hello = hello_of(options_of(port, 1, 3, Secret()));
  const Introduction introduction = introduce(Purpose::kStore, 1, 0, 3);
  std::string recorded = plain_frame(WireKind::kIntroduction, bytes_of(introduction));
  {
    Wire wire = connect_to(port);
    send_raw(wire, recorded);
    const auto frame = next_frame(wire);
    ASSERT_TRUE(frame);
    const auto proof = value_of<Proof>(frame->body);
    ASSERT_TRUE(proof);
    const auto keys = check_proof(secret_of(kText), introduction, *proof, {});
    ASSERT_TRUE(keys);
    const std::string joins = bytes_with(*keys, WireKind::kHello, bytes_of(hello));
    send_raw(wire, joins);
    recorded += joins;
    const RawConnection joined(wire.take_socket());
    EXPECT_FALSE(joined.is_closed_within(0.3));  // it counts once
  }
  const RawConnection replayed(connect_to(port).take_socket());
  replayed.send(recorded);
  EXPECT_TRUE(replayed.is_closed_within(kSlack));
  for (const int rank : {1, 2}) {
    threads.run([=] { expect_world(options_of(port, rank, 3, secret_of(kText))); });
  }
}

// Who answers at the store's address without knowing the secret hears nothing of the job.
TEST_F(StoreWithSecret, TellsAStrangerThatServesItsAddressNothing) {
  const Opened listener = open_listener(numeric_address("127.0.0.1", 0).at(0));
  const int port = own_end(listener.socket).port();
  Threads threads;
  threads.run([&] {
    for (const Deadline deadline = Deadline::after(kLong); !deadline.expired();) {
      pollfd socket{listener.socket.get(), POLLIN, 0};
      ::poll(&socket, 1, 100);
      Opened opened = accept_connection(listener.socket);
      if (!opened.socket.valid()) continue;
      Wire wire(std::move(opened.socket));
      const auto first = next_frame(wire);
      ASSERT_TRUE(first);
      EXPECT_EQ(first->kind, WireKind::kIntroduction);
      const auto introduction = value_of<Introduction>(first->body);
      ASSERT_TRUE(introduction);
      wire.send(WireKind::kProof, bytes_of(answer_introduction(secret_of(kOther), *introduction, {}).proof));
      wire.move();
      const auto second = next_frame(wire);
      ASSERT_TRUE(second);
      EXPECT_EQ(second->kind, WireKind::kMismatch);
      EXPECT_EQ(second->body, "");
      return;
    }
  });
  EXPECT_EQ(error_of([&] { make_store(options_of(port, 1, 2, secret_of(kText))); }).code(), ErrorCode::kPeer);
}

// Once, on rank 0, and only where other hosts reach the port.
TEST_F(StoreWithSecret, WarnsWhereAnybodyMayJoin) {
  const auto warnings_of = [](const char* host, const Secret& secret) {
    const int port = free_port();
    std::mutex mutex;
    std::vector<std::string> warnings;
    Threads threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.run([&, rank, port] {
        StoreOptions options = options_of(port, rank, 2, secret);
        if (rank == 0) options.address.host = host;
        options.warn = [&](const Wording& warning) {
          const std::lock_guard lock(mutex);
          warnings.push_back(warning.text());
        };
        make_store(options);
      });
    }
    threads.join();
    EXPECT_LE(warnings.size(), 1U);
    const bool names = !warnings.empty() && warnings[0].find(fmt::format("{}:{}", host, port)) != std::string::npos;
    return std::pair(warnings.size(), names);
  };
  EXPECT_EQ(warnings_of("127.0.0.1", Secret()), std::pair(std::size_t{0}, false));
  EXPECT_EQ(warnings_of("0.0.0.0", Secret()), std::pair(std::size_t{1}, true));
  EXPECT_EQ(warnings_of("0.0.0.0", secret_of(kText)), std::pair(std::size_t{0}, false));
}

// The ranks of a caller's own group, where a secret is set on some hosts only.
TEST_F(MeshWithSecret, NamesRanksWithoutOne) {
  run_threads_world(3, {}, [](Transport& world) {
    TcpOptions options;
    options.secret = world.rank() == 1 ? Secret() : secret_of(kText);
    const Error error = error_of([&] { make_tcp_transport(world, options); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_TRUE(has(error, "rank 1 on ")) << error.what();
    EXPECT_TRUE(has(error, "has no secret (the other 2 of 3 ranks have one)")) << error.what();
  });
}

TEST_F(MeshWithSecret, DoesNotConnectRanksWithDifferentOnes) {
  run_threads_world(2, {}, [](Transport& world) {
    TcpOptions options;
    options.setup_seconds = 0.5;
    options.secret = secret_of(world.rank() == 1 ? kText : kOther);
    const Error error = error_of([&] { make_tcp_transport(world, options); });
    EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
    EXPECT_TRUE(has(error, "did not connect within 0.5 s")) << error.what();
  });
}

}  // namespace
}  // namespace ringattn
