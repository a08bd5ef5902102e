// SPDX-License-Identifier: Apache-2.0
// How tiles of 16-bit elements lie in shared memory: [rows, dim] in panels of 64 columns, whose rows are 128 bytes. The
// host lays out the same as the kernels.
#pragma once

namespace ringattn::cuda {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;

// Bytes of a panel of so many rows.
constexpr int panel_bytes(int rows) { return rows * kPanelRowBytes; }

// Bytes of a row in all its panels.
constexpr int padded_row_bytes(int dim) { return (dim + kPanelColumns - 1) / kPanelColumns * kPanelRowBytes; }

}  // namespace ringattn::cuda
