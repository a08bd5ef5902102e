// SPDX-License-Identifier: Apache-2.0
// Whether the queries of sequences are rows of a decoding step.
#pragma once

#include "attention/tokens/batch.hpp"
#include "kernels/visibility.hpp"

namespace ringattn {

// Whether every sequence has as many rows, and no more than decode kernels take.
bool are_steps(const SequenceList& sequences);
// Whether queries are the last tokens of their sequences.
bool end_their_keys(const SequenceList& sequences);
// Rows that see every key, and would from the end of these as well, stand there.
SequenceList moved_to_the_end(const SequenceList& sequences, const Mask& mask);

}  // namespace ringattn
