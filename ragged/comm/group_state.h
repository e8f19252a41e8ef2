// What the copies of one Communicator share. Private to ragged/comm.
#pragma once

#include <chrono>
#include <string>

#include "ragged/comm/communicator.h"
#include "ragged/comm/compat.h"
#include "ragged/comm/traffic.h"

namespace ragged::comm {

enum class BackendKind { kGloo, kNccl, kOther };

struct GroupState {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  c10::Device device = c10::Device(c10::kCPU);
  CommOptions options;
  std::string name;
  int rank = 0;
  int size = 1;
  BackendKind kind = BackendKind::kOther;
  std::chrono::milliseconds deadline = std::chrono::minutes(10);
  Traffic traffic;
  double wait_seconds = 0.0;
  std::uint64_t sequence = 0;
  std::string failure;  // of the first operation that failed; the group is unusable from then on

  compat::Implementation implementation() const {
    return kind == BackendKind::kOther ? compat::Implementation::kPython : compat::Implementation::kBackend;
  }
  /// Works of groups implemented in Python can't be waited for with a limit.
  std::chrono::milliseconds longest_wait() const { return kind == BackendKind::kOther ? kNoTimeout : deadline; }
  /// Throws CommError if an earlier operation failed; compares ranks when options.check_order says so.
  void before(const char* operation, std::string_view unit);
  [[noreturn]] void fail(const char* operation, std::string_view unit, const std::string& reason);
};

// The deadline goes with each operation: one that is given up then ends by itself, and writes nothing when a peer comes
// late. (Gloo can't abort a group.)
template <class Options>
Options within(std::chrono::milliseconds deadline) {
  Options options;
  options.timeout = deadline;
  return options;
}

}  // namespace ragged::comm
