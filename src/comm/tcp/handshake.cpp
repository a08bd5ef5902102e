// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/handshake.hpp"

#include <string>

#include "comm/tcp/wire.hpp"

namespace ringattn {

Introduction introduce(Purpose purpose, int caller, int listener, int size) {
  return {purpose, caller, listener, size, make_nonce()};
}

ConnectionKeys derive_keys(const Secret& secret, const Introduction& introduction, const Nonce& listener,
                           const WorldNumber& world) {
  // Every field has a fixed length, so different connections never give the same bytes.
  struct Context {
    Introduction introduction;
    Nonce listener;
    WorldNumber world;
  };
  static_assert(sizeof(Context) == 4 * sizeof(std::int32_t) + 2 * sizeof(Nonce) + sizeof(WorldNumber));
  const Context context{introduction, listener, world};
  const auto derive = [&](const char(&use)[16]) {
    return make_mac(secret.text(), {{"ringattn 1", 10}, {use, sizeof use}, bytes_of(context)});
  };
  return {derive("listener proves"), derive("to the listener"), derive("to the caller  ")};
}

Answer answer_introduction(const Secret& secret, const Introduction& introduction, const WorldNumber& world) {
  Answer answer{};
  answer.proof.nonce = make_nonce();
  answer.keys = derive_keys(secret, introduction, answer.proof.nonce, world);
  answer.proof.mac = answer.keys.proof;
  return answer;
}

std::optional<ConnectionKeys> check_proof(const Secret& secret, const Introduction& introduction, const Proof& proof,
                                          const WorldNumber& world) {
  const ConnectionKeys keys = derive_keys(secret, introduction, proof.nonce, world);
  if (!is_same_mac(keys.proof, {proof.mac.data(), proof.mac.size()})) return std::nullopt;
  return keys;
}

}  // namespace ringattn
