#include "ragged/checkpoint/saver.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "ragged/checkpoint/agree.h"
#include "ragged/checkpoint/check.h"
#include "ragged/checkpoint/file.h"
#include "ragged/comm/same_value.h"

namespace ragged::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks that wait for a slow writer meet this often, so that none of them runs into the group's own time-out.
constexpr std::chrono::milliseconds kRound{200};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Bytes bytes_in(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// Of what all ranks must agree on: not where their parts lie, nor what each may have measured.
std::uint64_t hash_of(CheckpointIndex index) {
  index.facts.numbers.clear();
  for (TensorInfo& info : index.tensors) info.placement.clear();
  return checksum(as_bytes(to_json(index)));
}

}  // namespace

// Outlives the Saver where its thread hangs.
struct Saver::Job {
  std::filesystem::path folder;
  int rank = 0;
  SaverOptions options;
  CheckpointIndex index;  // without the ranks' checksums
  std::map<std::string, std::string> texts;
  std::vector<WritePiece> pieces;
  std::vector<at::Tensor> tensors;  // the caller's, or our copies
  Index total_bytes = 0;
  Clock::time_point start = Clock::now();
  double blocked_seconds = 0.0;

  std::atomic<Index> written_bytes{0};
  std::atomic<bool> is_done{false};
  std::mutex mutex;  // of what follows
  std::condition_variable done;
  std::uint64_t manifest_checksum = 0;
  std::exception_ptr problem;

  std::thread thread;

  // Only the tensors that this rank writes, one at a time where they lie on a device.
  void write() {
    std::uint64_t sum = 0;
    std::exception_ptr caught;
    try {
      at::Tensor staged;
      const auto fetch = [&](std::size_t i) {
        staged = tensors[i].is_cpu() ? tensors[i] : tensors[i].cpu();
        return bytes_in(staged);
      };
      const auto count = [this](Index bytes) {
        written_bytes += bytes;
        if (options.on_progress) options.on_progress(progress());
      };
      sum = write_rank_files(folder, rank, pieces, fetch, texts, options.chunk_bytes, count);
    } catch (...) {
      caught = std::current_exception();
    }
    tensors.clear();
    const std::lock_guard lock(mutex);
    manifest_checksum = sum;
    problem = caught;
    is_done = true;
    done.notify_all();
  }

  SaveProgress progress() const {
    return {.written_bytes = written_bytes, .total_bytes = total_bytes, .seconds = seconds_since(start)};
  }

  bool wait_for(std::chrono::milliseconds longest) {
    std::unique_lock lock(mutex);
    return done.wait_for(lock, longest, [this] { return is_done.load(); });
  }
};

Saver::Saver(comm::Communicator all, std::filesystem::path root, SaverOptions options)
    : all_(std::move(all)), folders_(std::move(root)), options_(std::move(options)) {
  if (all_.rank() == 0) folders_.sweep();
}

Saver::~Saver() {
  if (job_ && job_->thread.joinable()) job_->thread.join();
}

std::optional<SaveReport> Saver::start(Index step, const State& state) {
  return begin(step, [&] {
    return RankState{
        .parts = parts_of(state.tensors, all_.rank()), .facts = state.facts, .rank_texts = state.rank_texts};
  });
}

std::optional<SaveReport> Saver::start(Index step, const RankState& state) {
  return begin(step, [&] { return state; });
}

std::optional<SaveReport> Saver::begin(Index step, const std::function<RankState()>& make_state) {
  std::optional<SaveReport> before;
  if (job_) before = finish();

  const at::NoGradGuard no_grad;
  auto job = std::make_shared<Job>();
  RankState state;
  std::uint64_t hash = 0;
  agree(all_, [&] {
    RAGGED_CHECK(step >= 0, "[save] Expected a step of at least 0, but got {}.", step);
    state = make_state();
    check_parts(state.parts);
    job->folder = folders_.temporary(step);
    job->rank = all_.rank();
    job->options = options_;
    job->index = {.step = step, .world_size = all_.size(), .chunk_bytes = options_.chunk_bytes};
    job->index.tensors = infos_of(state.parts);
    job->index.facts = state.facts;
    job->texts = state.rank_texts;
    job->pieces = write_pieces(state.parts);
    job->total_bytes = bytes_of(job->pieces);
    static_cast<void>(to_json(job->index));  // facts that can't be written are an error now
    hash = hash_of(job->index);
  });
  RAGGED_CHECK(
      comm::is_same_on_all(all_, hash, "checkpoint"),
      "[save] Expected the same step, tensors and facts on all ranks, but they differ. Give what belongs to one rank "
      "as "
      "its own text (rank_texts; rank_extra in Python).");
  agree(all_, [&] {
    if (all_.rank() == 0) folders_.begin(step);
  });

  for (std::size_t i = 0; i < state.parts.size(); ++i) {
    const at::Tensor local = state.parts[i].local.detach();
    const bool is_staged = options_.async && !job->pieces[i].owned.empty();
    // to() copies from a device; on the CPU it wouldn't.
    job->tensors.push_back(!is_staged ? local : local.is_cpu() ? local.clone() : local.cpu());
  }
  job_ = job;
  if (options_.async) {
    job->thread = std::thread([job] { job->write(); });
  } else {
    job->write();
  }
  job->blocked_seconds = seconds_since(job->start);
  return before;
}

bool Saver::is_written() const {
  return !job_ || job_->is_done;
}

SaveReport Saver::finish() {
  RAGGED_CHECK(job_, "[save] Expected a checkpoint that was begun, but there is none. Call start() first.");
  const Clock::time_point start = Clock::now();
  SaveReport report{.step = job_->index.step, .folder = folders_.folder(job_->index.step)};
  try {
    wait_for_writers();
    publish(report);
  } catch (...) {
    fail();
    throw;
  }
  report.seconds = seconds_since(job_->start);
  report.blocked_seconds = job_->blocked_seconds + seconds_since(start);
  job_.reset();
  return report;
}

SaveReport Saver::save(Index step, const State& state) {
  start(step, state);
  return finish();
}

void Saver::wait_for_writers() {
  for (bool is_waiting = true; is_waiting;) {
    const bool is_done = job_->wait_for(kRound);
    const bool is_late = !is_done && Clock::now() - job_->start > job_->options.timeout;
    // Who still writes, and who for too long: by rank + 1.
    const at::Tensor worst =
        at::tensor({is_done ? 0 : all_.rank() + 1, is_late ? all_.rank() + 1 : 0}, at::kLong).to(all_.device());
    all_.all_reduce_max(worst, "checkpoint").wait();
    const at::Tensor agreed = worst.cpu();
    const auto late = agreed[1].item<std::int64_t>();
    RAGGED_CHECKPOINT_CHECK(
        late == 0,
        "[save] Expected rank {} of {} to write its part of '{}' in {:.0f} s, but it still does. Is the disk slow or "
        "gone? "
        "The checkpoint is given up.",
        late - 1, all_.size(), job_->folder.string(), static_cast<double>(job_->options.timeout.count()) / 1000.0);
    is_waiting = agreed[0].item<std::int64_t>() != 0;
  }
  if (job_->thread.joinable()) job_->thread.join();
  agree(all_, [&] {
    if (job_->problem) std::rethrow_exception(job_->problem);
  });
}

void Saver::publish(SaveReport& report) {
  // Each rank fills its own place of a list of zeros.
  const at::Tensor sums = at::zeros({all_.size() + 1}, at::kLong);
  sums[all_.rank()] = static_cast<std::int64_t>(job_->manifest_checksum);
  sums[all_.size()] = job_->total_bytes;
  const at::Tensor gathered = sums.to(all_.device());
  all_.all_reduce_sum(gathered, "checkpoint").wait();
  const at::Tensor values = gathered.cpu();
  report.bytes = values[all_.size()].item<std::int64_t>();
  agree(all_, [&] {
    if (all_.rank() != 0) return;
    for (int rank = 0; rank < all_.size(); ++rank) {
      job_->index.manifest_checksums.push_back(static_cast<std::uint64_t>(values[rank].item<std::int64_t>()));
    }
    write_file(job_->folder / kIndexFile, to_json(job_->index));
    check_complete(Checkpoint::open(job_->folder));  // or ranks didn't agree on who writes what
    folders_.publish(job_->index.step, job_->options.keep);
  });
}

void Saver::fail() {
  if (job_->is_done) {
    if (job_->thread.joinable()) job_->thread.join();
  } else if (job_->thread.joinable()) {
    job_->thread.detach();  // it hangs in the system; the job is kept alive by the thread itself
  }
  // Where a thread still writes, the folder is swept away by the next run.
  if (all_.rank() == 0 && job_->is_done) folders_.abandon(job_->index.step);
  job_.reset();
}

SaveProgress Saver::progress() const {
  return job_ ? job_->progress() : SaveProgress{};
}

}  // namespace ragged::checkpoint
