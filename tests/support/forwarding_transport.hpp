// SPDX-License-Identifier: Apache-2.0
// Forwards all calls to another transport, except those that a test overrides.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn::testing {

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(Transport& inner) : inner_(inner) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    return inner_.all_gather(bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { inner_.barrier(deadline); }
  std::string_view name() const override { return inner_.name(); }
  MemoryKind memory() const override { return inner_.memory(); }
  int device() const override { return inner_.device(); }
  Route route() const override { return inner_.route(); }
  std::int64_t announce(std::span<const Exchange> exchanges, const Deadline& deadline) override {
    return inner_.announce(exchanges, deadline);
  }
  Ticket post(Exchange exchange, Stream stream) override { return inner_.post(std::move(exchange), stream); }
  void wait(Ticket ticket, Stream stream, const Deadline& deadline) override { inner_.wait(ticket, stream, deadline); }
  void progress() override { inner_.progress(); }
  bool finished(Ticket ticket) override { return inner_.finished(ticket); }
  void abandon() noexcept override { inner_.abandon(); }
  Transport& host() override { return inner_.host(); }
  std::unique_ptr<Transport> split_world(int size, const Deadline& deadline) override {
    return inner_.split_world(size, deadline);
  }
  bool abort(const Error& error) override { return inner_.abort(error); }

 private:
  Transport& inner_;
};

}  // namespace ringattn::testing
