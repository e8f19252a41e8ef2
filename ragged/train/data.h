// Text as bytes, one token a byte: reading it, keeping some for validation, and which bytes make up
// a batch. No tokenizer and no state: a batch is a pure function of its position, so a run resumes
// or changes its number of ranks without bookkeeping.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "ragged/train/config.h"

namespace ragged::train {

struct TextData {
  at::Tensor train;       // 1-D uint8
  at::Tensor validation;  // 1-D uint8
  std::string folder;     // what data.path stood for
  Index files = 0;
  /// Of all bytes and where they were cut: equal on all ranks when they read the same text.
  std::uint64_t fingerprint = 0;
};

/// Reads a file, or a folder's files with one of the extensions in the order of their relative
/// paths, to at most max_bytes. Every holdout-th file is for validation; of a single file, the last
/// 1/holdout of its bytes. "python-stdlib" is the source of the Python standard library, asked from
/// `python3`, without its tests and without installed packages. Throws InvalidArgument for a path
/// that doesn't exist, no files, or a part that is shorter than a sequence and its next byte.
TextData load_text(const DataConfig& config, Index sequence);

struct Batch {
  at::Tensor tokens;   // [batch, sequence] int64
  at::Tensor targets;  // the next byte of each; int64
};

/// Which part of a step's global batch to cut. The global batch is numbered through, so equal
/// global batches hold the same sequences, however many ranks and micro-batches they are dealt to.
struct BatchPosition {
  Index step = 0;
  Index first = 0;  // number of the first sequence in the step's global batch
  Index count = 1;
};

/// Sequences of the training text from offsets that depend on (seed, step, number) alone.
Batch training_batch(const at::Tensor& text, Index sequence, std::uint64_t seed, const BatchPosition& position);

/// Sequences first .. first+count-1 of `total` that are spread evenly over the text; numbers from
/// `total` on wrap.
Batch validation_batch(const at::Tensor& text, Index sequence, Index total, Index first, Index count);

/// Offset of a sequence in a text of `size` bytes.
Index sample_offset(Index size, Index sequence, std::uint64_t seed, Index step, Index number);

}  // namespace ragged::train
