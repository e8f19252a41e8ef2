#include "ragged/comm/work.h"

#include <utility>

#include <ATen/record_function.h>

#include "ragged/base/error.h"
#include "ragged/comm/group_state.h"

namespace ragged::comm {
namespace {

// Longest wait for an operation that is past its deadline to notice.
constexpr std::chrono::milliseconds kGrace = std::chrono::seconds(1);

std::string first_line(const std::exception& e) {
  std::string text = e.what();
  return text.substr(0, std::min<std::size_t>(text.find('\n'), 300));
}

}  // namespace

struct Work::State {
  std::shared_ptr<GroupState> group;
  const char* operation;
  std::string unit;
  std::vector<compat::WorkPtr> works;
  std::function<void()> finish;  // dropped once it ran, with the memory that it holds
  bool done = false;
  std::string error;  // done, and failed: copies that are waited for later fail likewise

  void end_all() noexcept;
};

Work::Work(std::shared_ptr<GroupState> group, const char* operation, std::string_view unit)
    : state_(std::make_shared<State>(State{std::move(group), operation, std::string(unit), {}, nullptr, false, {}})) {}

// What has failed may still run on another thread, and would write into memory that its owner is about to reuse. So
// each operation is seen off: aborted where the backend can (NCCL), by its own deadline elsewhere (Gloo).
void Work::State::end_all() noexcept {
  try {
    group->group->abort();
  } catch (...) {  // NOLINT(bugprone-empty-catch): it was no use
  }
  for (compat::WorkPtr& work : works) {
    try {
      work->wait(std::min(group->deadline, kGrace));
    } catch (...) {  // NOLINT(bugprone-empty-catch): they fail, that is the point
    }
  }
}

void Work::add(const std::function<compat::WorkPtr()>& issue) {
  try {
    state_->works.push_back(issue());
  } catch (const std::exception& e) {
    state_->end_all();
    state_->group->fail(state_->operation, state_->unit, first_line(e));
  }
}

void Work::on_complete(std::function<void()> finish) {
  state_->finish = std::move(finish);
}

void Work::wait() {
  if (!state_) return;
  const std::shared_ptr<State> state = std::move(state_);
  state_.reset();
  if (!state->error.empty()) state->group->fail(state->operation, state->unit, state->error);
  if (state->done) return;
  state->done = true;  // of the copies too
  ProfilerRange range("ragged::wait", state->unit);
  const auto start = std::chrono::steady_clock::now();
  try {
    for (compat::WorkPtr& work : state->works) work->wait(state->group->longest_wait());
  } catch (const std::exception& e) {
    state->end_all();
    state->error = first_line(e);
    state->group->fail(state->operation, state->unit, state->error);
  }
  state->group->wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (const auto finish = std::exchange(state->finish, nullptr)) finish();
}

void Work::abandon() noexcept {
  if (!state_) return;
  const std::shared_ptr<State> state = std::move(state_);
  state_.reset();
  if (state->done) return;
  state->done = true;
  try {
    for (compat::WorkPtr& work : state->works) work->wait(state->group->longest_wait());
  } catch (const std::exception& e) {
    // Not thrown, since the failure that led here was reported already. Whoever uses the group next is told.
    state->end_all();
    if (state->group->failure.empty()) state->group->failure = first_line(e);
  }
  state->finish = nullptr;
}

void GroupState::fail(const char* operation, std::string_view unit, const std::string& reason) {
  const std::string message = fmt::format(
      "[{}] Expected all ranks of group '{}' to finish this operation of unit '{}' within {:.1f} s, but got: {} "
      "(rank {} of {}). A peer died, is stuck, or ran a different sequence of units; look at the first error among "
      "the ranks, and set RAGGED_CHECK=1 to compare their sequences.",
      operation, name, unit, static_cast<double>(deadline.count()) / 1000.0, reason, rank, size);
  if (failure.empty()) failure = message;
  throw CommError(message);
}

struct ProfilerRange::Guard {
  at::RecordFunction function;
  explicit Guard(at::StepCallbacks&& callbacks) : function(std::move(callbacks)) {}
};

ProfilerRange::ProfilerRange(const char* operation, std::string_view unit) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  guard_ = std::make_unique<Guard>(std::move(*callbacks));
  guard_->function.before(fmt::format("{} {}", operation, unit));
}

ProfilerRange::~ProfilerRange() = default;

}  // namespace ragged::comm
