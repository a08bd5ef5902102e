// SPDX-License-Identifier: Apache-2.0
// The positions of keys in a file from whose cache tokens were evicted: k_positions, I32 [tokens, heads], where heads
// is 1 or that of k, in the packed order of the tokens, also if they are in pages; and k_lengths, I32 or I64
// [sequences], the original lengths of the sequences. Without q_offset, queries are aligned to the end of these.
#pragma once

#include "io/safetensors_file.hpp"
#include "ops/common/input_tensors.hpp"

namespace ringattn {

// Whether the file has positions of its keys. Throws kFile if it has only k_lengths.
bool holds_positions(const SafetensorsFile& file);

// Reads them into `input`, whose sequences are known, and moves its queries. Throws kFile, naming tensor and index, for
// other shapes and types, and for positions that don't ascend or lie outside of their sequences.
void read_positions(const SafetensorsFile& file, const InputNames& names, InputTensors& input);

// Throws kFile for positions in a file of another kind.
void refuse_positions(const SafetensorsFile& file, std::string_view kind);

}  // namespace ringattn
