// Makes a Gloo backend. Its source is the one file that sees the stand-ins for gloo's headers (third_party/gloo_shim).
#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ragged::comm {

struct GlooOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// All ranks on one machine: bind to the loopback address instead of asking the resolver.
  bool same_host = true;
  int threads = 2;
};

/// Collective over the `size` ranks that share `store`. GLOO_SOCKET_IFNAME, where set, names the interface.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GlooOptions& options);

}  // namespace ragged::comm
