// Handle of one running collective. It may stand for several c10d operations and for arithmetic that is left to do
// when they are done (the sum of an all-to-all reduction).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ragged/comm/compat.h"

namespace ragged::comm {

struct GroupState;  // of a Communicator

/// Cheap to copy; copies stand for the same operation. Default-constructed: complete.
class Work {
 public:
  Work() = default;
  Work(std::shared_ptr<GroupState> group, const char* operation, std::string_view unit);

  /// Blocks until the results are there (on a CUDA device: until the current stream is made to wait for them).
  /// Idempotent. Throws CommError, naming operation, unit and rank, when the deadline passes or a peer is lost; the
  /// group is dead from then on, and copies throw too.
  void wait();
  /// Waits for the operations alone and swallows their errors: nobody writes to the buffers any more. For recovery.
  void abandon() noexcept;
  bool pending() const { return state_ != nullptr; }

  // For the collectives that build a Work.
  /// Runs `issue`, turning what it throws into a CommError, and keeps the c10d work it returns.
  void add(const std::function<compat::WorkPtr()>& issue);
  void on_complete(std::function<void()> finish);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Marks "ragged::all_gather layers.3" in the profiler; costs a branch when none listens.
class ProfilerRange {
 public:
  ProfilerRange(const char* operation, std::string_view unit);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

}  // namespace ragged::comm
