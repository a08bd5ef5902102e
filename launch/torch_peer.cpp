// SPDX-License-Identifier: Apache-2.0
#include "launch/torch_peer.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/json_writer.hpp"
#include "torch_peer_script.hpp"  // written by the build: kTorchPeerScript

namespace ringattn {

TorchPeer::TorchPeer(bool on_gpu, int threads, const Deadline& deadline)
    : python_(kTorchPeerScript, {on_gpu ? "cuda" : "cpu", fmt::format("{}", threads)}) {
  const auto line = python_.read_line(deadline);
  if (!line) {
    why_not_ = python_.why();
    return;
  }
  const nlohmann::json about = nlohmann::json::parse(*line, nullptr, false);
  const auto text_of = [&](const char* name) {
    const bool is_text = about.is_object() && about.contains(name) && about[name].is_string();
    return is_text ? about[name].get<std::string>() : std::string();
  };
  version_ = text_of("version");
  why_not_ = text_of("error");
  if (version_.empty() && why_not_.empty()) why_not_ = "python3 printed something else";
}

BenchPoint TorchPeer::measure(const BenchPoint& ours, std::int64_t samples, const Deadline& deadline) {
  BenchPoint point;
  point.tool = "pytorch";
  point.tool_version = version_;
  point.git = ours.git;
  point.host = ours.host;
  point.devices = ours.devices;
  point.world = 1;
  point.transport = ours.transport;
  point.kernel = "default";
  point.job = ours.job;
  JsonWriter job(false);
  job.begin_object();
  write_bench_job(job, ours.job);
  job.member("samples", samples).end_object();
  const bool asked = python_.write_line(job.text());
  const auto line = asked ? python_.read_line(deadline) : std::nullopt;
  if (!line) {
    point.error = python_.why().empty() ? "python3 has ended" : python_.why();
    return point;
  }
  try {
    const nlohmann::json answer = nlohmann::json::parse(*line);
    if (answer.contains("error")) {
      point.error = answer["error"].get<std::string>();
      return point;
    }
    point.tool = answer.at("tool").get<std::string>();
    const nlohmann::json& ms = answer.at("ms");
    point.ms = {ms.at("median").get<double>(), ms.at("p10").get<double>(), ms.at("p90").get<double>()};
    point.samples = answer.at("samples").get<std::int64_t>();
  } catch (const nlohmann::json::exception& error) {
    point.error = error.what();
  }
  if (point.measured() && point.ms.median > 0.0) {
    const double speed = ours.ms.median / point.ms.median;
    point.tflops_per_rank = ours.tflops_per_rank * speed;
    point.gb_per_s = ours.gb_per_s * speed;
  }
  return point;
}

}  // namespace ringattn
