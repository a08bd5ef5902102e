// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/mac.hpp"

#include <unistd.h>

#include <string>

#include "base/error.hpp"
#if defined(RINGATTN_HAVE_OPENSSL)
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#endif

namespace ringattn {

#if defined(RINGATTN_HAVE_OPENSSL)

bool has_mac() { return true; }

Mac make_mac(std::string_view key, std::initializer_list<std::string_view> parts) {
  std::string bytes;
  for (const std::string_view part : parts) bytes += part;
  Mac mac{};
  unsigned int length = 0;
  const unsigned char* const made = ::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()),
                                           reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
                                           reinterpret_cast<unsigned char*>(mac.data()), &length);
  if (made == nullptr || length != mac.size()) {
    fail(ErrorCode::kUnsupported, "can't prove that this rank knows the secret", "libcrypto makes no HMAC-SHA256",
         "See the configuration of OpenSSL on this host.");
  }
  return mac;
}

bool is_same_mac(const Mac& mac, std::string_view theirs) {
  return theirs.size() == mac.size() && ::CRYPTO_memcmp(mac.data(), theirs.data(), mac.size()) == 0;
}

#else

bool has_mac() { return false; }

Mac make_mac(std::string_view, std::initializer_list<std::string_view>) {
  fail(ErrorCode::kUnsupported, "can't prove that this rank knows the secret", "this build has no crypto library",
       "Build with OpenSSL's libcrypto.");
}

bool is_same_mac(const Mac&, std::string_view) { return false; }

#endif

Nonce make_nonce() {
  Nonce nonce{};
  if (::getentropy(nonce.data(), nonce.size()) != 0) {
    fail(ErrorCode::kInternal, "the system gives no random bytes", "getentropy() fails");
  }
  return nonce;
}

}  // namespace ringattn
