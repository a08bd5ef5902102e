// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: HMAC-SHA256 of OpenSSL's libcrypto, if the build has found it. Only mac.cpp includes
// OpenSSL's headers.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string_view>

namespace ringattn {

using Mac = std::array<char, 32>;

// Returns true if this build has a crypto library.
bool has_mac();

// HMAC-SHA256 of the concatenated parts (RFC 2104, FIPS 180-4). Throws kUnsupported if the build has no crypto library.
Mac make_mac(std::string_view key, std::initializer_list<std::string_view> parts);

// Compares in constant time.
bool is_same_mac(const Mac& mac, std::string_view theirs);

// Random bytes from the kernel's generator. Throws kInternal if it fails.
using Nonce = std::array<char, 32>;
Nonce make_nonce();

}  // namespace ringattn
