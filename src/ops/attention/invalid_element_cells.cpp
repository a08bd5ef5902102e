// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/invalid_element_cells.hpp"

#include <algorithm>

namespace ringattn {

InvalidElementCells::InvalidElementCells(Backend& backend, const Collective& collective, Transport& transport,
                                         std::size_t count)
    : backend_(backend),
      collective_(collective),
      transport_(transport),
      count_(count),
      memory_(backend.allocate(count * sizeof(InvalidElementCell))),
      settled_(backend.make_events(1, false)) {
  clear();
}

void InvalidElementCells::clear() {
  backend_.fill_bytes(memory_.data(), std::byte{0xff}, count_ * sizeof(InvalidElementCell), backend_.stream());
  await_device();
}

void InvalidElementCells::await_device() {
  settled_->record(0, backend_.stream());
  settled_->synchronize(0, collective_.timeouts().for_peer(), [this] { transport_.progress(); });
}

std::vector<InvalidElementCell> InvalidElementCells::drain() {
  std::vector<InvalidElementCell> cells(count_);
  const auto bytes = static_cast<std::int64_t>(count_ * sizeof(InvalidElementCell));
  backend_.copy_rows(cells.data(), bytes, memory_.data(), bytes, bytes, 1, backend_.stream());
  await_device();
  const auto is_empty = [](const InvalidElementCell& cell) { return cell.location == InvalidElementCell::kNone; };
  if (std::ranges::all_of(cells, is_empty)) return {};
  clear();
  return cells;
}

}  // namespace ringattn
