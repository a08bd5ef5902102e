// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: HMAC-SHA256 of OpenSSL's libcrypto, if the build has found its headers. The library is opened
// on the first use. Only mac.cpp includes OpenSSL's headers.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>

namespace ringattn {

using Mac = std::array<char, 32>;

// Returns why this process can't make MACs, or an empty string if it can: the build has no crypto library, or the
// library can't be opened.
std::string why_no_mac();
inline bool has_mac() { return why_no_mac().empty(); }

// HMAC-SHA256 of the concatenated parts (RFC 2104, FIPS 180-4). Throws kUnsupported if has_mac() is false.
Mac make_mac(std::string_view key, std::initializer_list<std::string_view> parts);

// Compares in constant time. `mac` is a result of make_mac().
bool is_same_mac(const Mac& mac, std::string_view theirs);

// Random bytes from the kernel's generator. Throws kInternal if it fails.
using Nonce = std::array<char, 32>;
Nonce make_nonce();

}  // namespace ringattn
