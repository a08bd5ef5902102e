// SPDX-License-Identifier: Apache-2.0
#include "attention/fault_cells.hpp"

#include <algorithm>

namespace ringattn {

FaultCells::FaultCells(Backend& backend, const Meeting& meeting, Transport& transport, std::size_t count)
    : backend_(backend),
      meeting_(meeting),
      transport_(transport),
      count_(count),
      memory_(backend.allocate(count * sizeof(RowFaultCell))),
      settled_(backend.make_marks(1, false)) {
  clear();
}

void FaultCells::clear() {
  backend_.fill_bytes(memory_.data(), std::byte{0xff}, count_ * sizeof(RowFaultCell), backend_.stream());
  settle();
}

void FaultCells::settle() {
  settled_->record(0, backend_.stream());
  settled_->synchronize(0, meeting_.patience().for_peer(), [this] { transport_.progress(); });
}

std::vector<RowFaultCell> FaultCells::take() {
  std::vector<RowFaultCell> cells(count_);
  const auto bytes = static_cast<std::int64_t>(count_ * sizeof(RowFaultCell));
  backend_.copy_rows(cells.data(), bytes, memory_.data(), bytes, bytes, 1, backend_.stream());
  settle();
  const auto is_empty = [](const RowFaultCell& cell) { return cell.place == RowFaultCell::kNone; };
  if (std::ranges::all_of(cells, is_empty)) return {};
  clear();
  return cells;
}

}  // namespace ringattn
