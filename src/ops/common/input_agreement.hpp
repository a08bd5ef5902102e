// SPDX-License-Identifier: Apache-2.0
// One input for all ranks: each opens its files by name, and refuses to compute with others than its peers have.
#pragma once

#include <functional>
#include <vector>

#include "comm/collective.hpp"
#include "io/fingerprint.hpp"

namespace ringattn {

// Collective. Throws kFile (as an AgreedError), naming the first rank whose files are not rank 0's, and what differs:
// size, header, sampled data or, on one host, the file that the path stood for when it was opened. Where ranks haven't
// opened one file (is_one_file()) more of the data is compared, all of it up to 64 MB a file. Copies of a file are the
// same file.
void agree_on_files(const Collective& collective, const std::function<std::vector<FileFingerprint>()>& fingerprints);

}  // namespace ringattn
