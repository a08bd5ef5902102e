// SPDX-License-Identifier: Apache-2.0
// Makes sure that all ranks have the same input: each rank opens its files by name, and names may refer to other files
// on other hosts.
#pragma once

#include <functional>
#include <vector>

#include "comm/collective.hpp"
#include "io/fingerprint.hpp"

namespace ringattn {

// Collective. Throws kFile (as an AgreedError), naming the first rank whose files differ from rank 0's, and the
// difference: size, header, sampled data or, on one host, the file that the path referred to when it was opened. If
// ranks have not opened the same file (is_one_file()), more of the data is compared, up to 64 MB per file. Copies of a
// file count as equal.
void agree_on_files(const Collective& collective, const std::function<std::vector<FileFingerprint>()>& fingerprints);

}  // namespace ringattn
