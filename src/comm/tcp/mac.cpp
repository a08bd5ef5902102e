// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/mac.hpp"

#include <unistd.h>

#include <string>

#include "base/error.hpp"
#if defined(RINGATTN_HAVE_OPENSSL)
#include <dlfcn.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/opensslv.h>

#include <type_traits>
#endif

namespace ringattn {

#if defined(RINGATTN_HAVE_OPENSSL)

namespace {

#define RINGATTN_TEXT_OF(macro) RINGATTN_TEXT(macro)
#define RINGATTN_TEXT(text) #text
#if defined(OPENSSL_SHLIB_VERSION)  // since OpenSSL 3
constexpr const char* kLibrary = "libcrypto.so." RINGATTN_TEXT_OF(OPENSSL_SHLIB_VERSION);
#else
constexpr const char* kLibrary = "libcrypto.so." SHLIB_VERSION_NUMBER;
#endif
#undef RINGATTN_TEXT_OF
#undef RINGATTN_TEXT

struct Libcrypto {
  decltype(&::HMAC) hmac = nullptr;
  decltype(&::EVP_sha256) sha256 = nullptr;
  decltype(&::CRYPTO_memcmp) compare = nullptr;
  std::string why_not;  // empty if it can be used
};

Libcrypto open_libcrypto() {
  Libcrypto crypto;
  void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    crypto.why_not = ::dlerror();
    return crypto;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr) crypto.why_not = ::dlerror();
  };
  find(crypto.hmac, "HMAC");
  find(crypto.sha256, "EVP_sha256");
  find(crypto.compare, "CRYPTO_memcmp");
  return crypto;
}

// Opened on the first use and not linked: its relocations take 1.5 ms in each process, and few jobs have a secret.
const Libcrypto& libcrypto() {
  static const Libcrypto crypto = open_libcrypto();
  return crypto;
}

}  // namespace

std::string why_no_mac() { return libcrypto().why_not; }

Mac make_mac(std::string_view key, std::initializer_list<std::string_view> parts) {
  const Libcrypto& crypto = libcrypto();
  if (!crypto.why_not.empty()) {
    fail(ErrorCode::kUnsupported, "can't prove that this rank knows the secret", crypto.why_not,
         "Install OpenSSL's libcrypto.");
  }
  std::string bytes;
  for (const std::string_view part : parts) bytes += part;
  Mac mac{};
  unsigned int length = 0;
  const unsigned char* const made = crypto.hmac(crypto.sha256(), key.data(), static_cast<int>(key.size()),
                                                reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
                                                reinterpret_cast<unsigned char*>(mac.data()), &length);
  if (made == nullptr || length != mac.size()) {
    fail(ErrorCode::kUnsupported, "can't prove that this rank knows the secret", "libcrypto makes no HMAC-SHA256",
         "See the configuration of OpenSSL on this host.");
  }
  return mac;
}

bool is_same_mac(const Mac& mac, std::string_view theirs) {
  return theirs.size() == mac.size() && libcrypto().compare(mac.data(), theirs.data(), mac.size()) == 0;
}

#else

std::string why_no_mac() { return "this build has no crypto library"; }

Mac make_mac(std::string_view, std::initializer_list<std::string_view>) {
  fail(ErrorCode::kUnsupported, "can't prove that this rank knows the secret", why_no_mac(),
       "Build with OpenSSL's libcrypto.");
}

bool is_same_mac(const Mac&, std::string_view) { return false; }

#endif

Nonce make_nonce() {
  Nonce nonce{};
  if (::getentropy(nonce.data(), nonce.size()) != 0) {
    fail(ErrorCode::kInternal, "the system returned no random bytes", "getentropy() fails");
  }
  return nonce;
}

}  // namespace ringattn
