// SPDX-License-Identifier: Apache-2.0
// Layout of tiles of 16-bit elements in shared memory: [rows, dim] in panels of 64 columns with rows of 128 bytes. Host
// and device code share it.
#pragma once

namespace ringattn::cuda {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;

// Bytes of a panel with `rows` rows.
constexpr int panel_bytes(int rows) { return rows * kPanelRowBytes; }

// Bytes of one row in all its panels.
constexpr int padded_row_bytes(int dim) { return (dim + kPanelColumns - 1) / kPanelColumns * kPanelRowBytes; }

}  // namespace ringattn::cuda
