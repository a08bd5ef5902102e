// SPDX-License-Identifier: Apache-2.0
// Any bytes from clients of the store, and from what answers at its address: with a secret no client joins, without one
// only a rank of the world does; nothing but an Error comes out, and no message has a control character.
#include <sys/socket.h>

#include <algorithm>

#include "base/error.hpp"
#include "comm/tcp/handshake.hpp"
#include "comm/tcp/store_acceptor.hpp"
#include "comm/tcp/store_internal.hpp"
#include "tests/fuzz/fuzz_target.hpp"

namespace ringattn::testing {

namespace {

constexpr int kRanks = 3;

StoreOptions options_of(int rank) { return {{"127.0.0.1", 1}, rank, kRanks, "job", 1.0, Secret()}; }

Secret fuzz_secret() { return has_mac() ? Secret(std::string(64, 's'), "the fuzz target") : Secret(); }

std::string frame(WireKind kind, std::string_view body) {
  std::string text = "ringattn";
  text += bytes_of(std::uint32_t{1});
  text += bytes_of(static_cast<std::uint32_t>(kind));
  text += bytes_of(std::uint64_t{body.size()});
  return text + std::string(body);
}

// A wire whose other end has sent `bytes` and sends no more.
FileDescriptor connection_with(std::string_view bytes, FileDescriptor& other) {
  int ends[2] = {-1, -1};
  fuzz_check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "there are sockets");
  other = FileDescriptor(ends[1]);
  static_cast<void>(::send(other.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
  static_cast<void>(::shutdown(other.get(), SHUT_WR));
  return FileDescriptor(ends[0]);
}

void receive(std::string_view bytes, const Secret& secret) {
  const StoreOptions options = options_of(0);
  bool is_there = false;
  StoreAcceptor acceptor(
      options, secret, [&](int) { return is_there; },
      [&](const Hello& hello, Wire) {
        fuzz_check(!secret.is_given(), "nobody joins who does not know the secret");
        fuzz_check(hello.rank > 0 && hello.rank < kRanks && hello.size == kRanks, "a rank of the world joins");
        is_there = true;
      });
  FileDescriptor other;
  acceptor.add(connection_with(bytes, other));
  for (int i = 0; i < 100 && acceptor.size() > 0; ++i) acceptor.go_on();
  fuzz_check(acceptor.size() == 0, "a connection that has ended is let go");
  const std::string refusals = acceptor.refusals();
  fuzz_check(refusals.size() < 4096 &&
                 std::ranges::all_of(refusals, [](char c) { return static_cast<unsigned char>(c) >= ' '; }),
             "messages are short and printable", refusals);
}

// As a rank reads what it takes for the store.
void read_store(std::string_view bytes) {
  FileDescriptor other;
  Wire wire(connection_with(bytes, other));
  const Introduction introduction = introduce(Purpose::kStore, 1, 0, kRanks);
  for (bool open = true; open;) {
    open = wire.move(max_gathered(kRanks));
    const auto frame = wire.take();
    if (!frame) continue;
    fuzz_check(frame->body.size() <= max_gathered(kRanks), "bodies are bounded");
    if (const auto texts = unpack_texts(frame->body, kRanks)) {
      fuzz_check(texts->size() == kRanks, "there is a text for each rank");
    }
    const int code = static_cast<int>(unpack_error(frame->body).code());
    fuzz_check(code >= 1 && code <= 7, "codes are the program's");
    const auto proof = value_of<Proof>(frame->body);
    if (proof && has_mac()) {
      fuzz_check(!check_proof(fuzz_secret(), introduction, *proof, {}), "nobody proves what it does not know");
    }
  }
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  const Hello hello = hello_of(options_of(1));
  const Introduction introduction = introduce(Purpose::kStore, 1, 0, kRanks);
  const std::string both = frame(WireKind::kIntroduction, bytes_of(introduction)) +
                           frame(WireKind::kHello, std::string(bytes_of(hello)) + std::string(sizeof(Mac), 'm'));
  std::vector<std::string> seeds;
  for (const char side : {'\0', '\1', '\2'}) {
    seeds.push_back(side + frame(WireKind::kHello, bytes_of(hello)));
    seeds.push_back(side + frame(WireKind::kIntroduction, bytes_of(introduction)));
    seeds.push_back(side + both);
    seeds.push_back(side + frame(WireKind::kGathered, pack_texts({"a", "", "ccc"})));
    seeds.push_back(side + frame(WireKind::kComplete, pack_texts({"h", "h", "h", "session"})));
    seeds.push_back(side + frame(WireKind::kFailed, pack_error(Error(ErrorCode::kFile, "x", "y", "z."))));
    seeds.push_back(side + frame(WireKind::kProof, std::string(sizeof(Proof), 'p')));
    seeds.push_back(side + frame(WireKind::kMismatch, {}) + frame(WireKind::kWait, "12345678"));
  }
  return seeds;
}

std::vector<std::string> fuzz_words() {
  std::vector<std::string> words{"ringattn", std::string(4, '\xff'), std::string(8, '\xff'), std::string(32, '\0')};
  for (const std::uint32_t number : {0U, 1U, 2U, 3U, 7U, 8U, 9U, 10U, 32U, 0x80000000U}) {
    words.emplace_back(bytes_of(number));
    words.emplace_back(bytes_of(std::uint64_t{number}));
  }
  return words;
}

}  // namespace ringattn::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ringattn;
  using namespace ringattn::testing;
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      receive(bytes, Secret());
      break;
    case 1:
      if (has_mac()) receive(bytes, fuzz_secret());
      break;
    default:
      read_store(bytes);
      break;
  }
  return 0;
}
