// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/ring/recorded_exchanges.hpp"

#include <array>
#include <memory>
#include <utility>

#include "attention/ring/block_mover.hpp"
#include "attention/ring/workspace.hpp"
#include "comm/self.hpp"
#include "kernels/common/registry.hpp"
#include "tests/support/forwarding_transport.hpp"

namespace ringattn::testing {

namespace {

// Keeps the last exchange that a BlockMover posts.
class RecordingTransport : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;

  Ticket post(Exchange exchange, Stream /*stream*/) override {
    last = std::move(exchange);
    return 0;
  }

  Exchange last;
};

// The rows at `data`. In memory, the streams of block buffers come before those of the shard.
SpanRows rows_at_address(const std::byte* data, std::size_t bytes, const RowStreams& streams, const StreamRows& shard,
                         const StreamRows& buffer) {
  SpanRows found;
  for (const bool in_shard : {false, true}) {
    for (std::size_t s = 0; s < streams.size(); ++s) {
      const std::byte* rows = in_shard ? shard[s] : buffer[s];
      const std::int64_t row_bytes = streams[s].token_bytes;
      if (rows <= data) found = {s, in_shard, (data - rows) / row_bytes, static_cast<std::int64_t>(bytes) / row_bytes};
    }
  }
  return found;
}

template <class Message>
std::vector<RecordedMessage> recorded(const std::vector<Message>& messages, const RowStreams& streams,
                                      const StreamRows& shard, const StreamRows& buffer) {
  std::vector<RecordedMessage> result;
  for (const Message& message : messages) {
    RecordedMessage& kept = result.emplace_back(RecordedMessage{message.peer, message.round, {}});
    for (const auto& span : message.spans) {
      kept.spans.push_back(rows_at_address(span.data, span.bytes, streams, shard, buffer));
    }
  }
  return result;
}

}  // namespace

std::vector<RecordedExchange> recorded_exchanges(const Plan& plan, const RowStreams& streams, RowCounts shard_rows) {
  static const std::unique_ptr<Backend> backend =
      choose_kernel(AttentionSpec{}, {"cpu", "auto"}).row->make_backend({1});
  const WorkspaceLayout layout = workspace_layout(streams, 0, plan.all_buffer_rows(), shard_rows);
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(layout.bytes);  // never read
  const StreamRows shard = rows_at(memory.get(), layout.staged);
  const std::array<StreamRows, 2> buffers{rows_at(memory.get(), layout.buffers[0]),
                                          rows_at(memory.get(), layout.buffers[1])};
  const auto self = make_self_transport();
  RecordingTransport transport(*self);
  BlockMover mover(plan, streams, transport, *backend, /*checksum=*/false);
  mover.bind(shard, buffers);
  std::vector<RecordedExchange> exchanges;
  for (std::size_t block = 0; block < plan.blocks.size(); ++block) {
    mover.post(static_cast<std::int64_t>(block), {});
    exchanges.push_back({recorded(transport.last.sends, streams, shard, buffers[block % 2]),
                         recorded(transport.last.receives, streams, shard, buffers[block % 2])});
  }
  return exchanges;
}

}  // namespace ringattn::testing
