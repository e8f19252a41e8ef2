#include "ragged/checkpoint/write.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "ragged/checkpoint/safetensors_file.h"

namespace ragged::checkpoint {
namespace {

// Where box k of a piece goes: into file k, as its `entry`-th tensor.
struct Slot {
  std::size_t entry = 0;
  layout::Box box;
};

std::vector<layout::Box> boxes_of(const WritePiece& piece) {
  std::vector<layout::Box> boxes = layout::boxes(piece.within ? piece.within->size : piece.shape, piece.owned);
  for (layout::Box& box : boxes) {
    for (std::size_t d = 0; piece.within && d < box.offset.size(); ++d) box.offset[d] += piece.within->offset[d];
  }
  if (piece.announces_empty && checked_product(piece.shape) == 0) {
    boxes = {{std::vector<Index>(piece.shape.size(), 0), piece.shape}};
  }
  return boxes;
}

// torch.distributed.checkpoint looks here for a box's place in its tensor.
std::map<std::string, std::string> metadata_of(const std::map<std::string, std::vector<Index>>& offsets) {
  nlohmann::ordered_json info = nlohmann::ordered_json::object();
  for (const auto& [name, offset] : offsets) info[name] = {{"saved_offsets", offset}};
  return {{"DCP_SHARDING_INFO", info.dump()}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
}

std::vector<std::uint64_t> chunk_checksums(Bytes bytes, Index chunk_bytes) {
  std::vector<std::uint64_t> sums;
  while (!bytes.empty()) {
    const Bytes chunk = bytes.first(std::min(bytes.size(), static_cast<std::size_t>(chunk_bytes)));
    sums.push_back(checksum(chunk));
    bytes = bytes.subspan(chunk.size());
  }
  return sums;
}

// The files of one rank: all open at once, since box k of every tensor goes into file k.
class RankFiles {
 public:
  RankFiles(const std::filesystem::path& folder, int rank, std::span<const WritePiece> pieces) : slots_(pieces.size()) {
    std::vector<std::vector<plan::SafetensorsEntry>> entries;
    std::vector<std::map<std::string, std::vector<Index>>> offsets;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const std::vector<layout::Box> boxes = boxes_of(pieces[i]);
      if (boxes.size() > entries.size()) {
        entries.resize(boxes.size());
        offsets.resize(boxes.size());
      }
      for (std::size_t k = 0; k < boxes.size(); ++k) {
        entries[k].push_back({.name = pieces[i].name, .dtype = pieces[i].dtype, .shape = boxes[k].size});
        offsets[k][pieces[i].name] = boxes[k].offset;
        slots_[i].push_back({0, boxes[k]});
      }
    }
    const auto parts = static_cast<int>(entries.size());
    std::map<std::string, std::size_t> piece_named;
    for (std::size_t i = 0; i < pieces.size(); ++i) piece_named[pieces[i].name] = i;
    for (std::size_t k = 0; k < entries.size(); ++k) {
      names_.push_back(shard_name(rank, static_cast<int>(k), parts));
      writers_.emplace_back(folder / names_.back(), lay_out(std::move(entries[k])), metadata_of(offsets[k]));
      for (std::size_t e = 0; e < writers_[k].tensors().size(); ++e) {
        slots_[piece_named.at(writers_[k].tensors()[e].name)][k].entry = e;
      }
      stored_.push_back(
          {.name = names_.back(),
           .bytes = writers_[k].file_bytes(),
           .header_bytes = writers_[k].header_bytes(),
           .header_checksum = writers_[k].header_checksum()});
    }
  }

  void write(std::size_t piece, const WritePiece& what, Bytes bytes, Index chunk_bytes) {
    const Index item = dtype_bytes(what.dtype);
    std::size_t begin = 0;
    for (std::size_t k = 0; k < slots_[piece].size(); ++k) {
      const Slot& slot = slots_[piece][k];
      const auto size = static_cast<std::size_t>(slot.box.numel() * item);
      const Bytes part = bytes.subspan(begin, size);
      begin += size;
      writers_[k].write(slot.entry, part);
      stored_[k].pieces.push_back(
          {.tensor = what.name,
           .box = slot.box,
           .begin = writers_[k].file_offset(slot.entry),
           .checksums = chunk_checksums(part, chunk_bytes)});
    }
    RAGGED_ASSERT(begin == bytes.size(), "{} of {} bytes of '{}' written", begin, bytes.size(), what.name);
  }

  std::vector<StoredFile> finish() {
    for (SafetensorsWriter& writer : writers_) writer.finish();
    return std::move(stored_);
  }

 private:
  std::vector<std::vector<Slot>> slots_;  // of each piece, one a box
  std::vector<std::string> names_;
  std::vector<SafetensorsWriter> writers_;
  std::vector<StoredFile> stored_;
};

}  // namespace

std::uint64_t write_rank_files(
    const std::filesystem::path& folder, int rank, std::span<const WritePiece> pieces, const FetchBytes& fetch,
    const std::map<std::string, std::string>& texts, Index chunk_bytes, const WriteProgress& progress) {
  RankFiles files(folder, rank, pieces);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Bytes bytes = pieces[i].owned.empty() ? Bytes{} : fetch(i);
    files.write(i, pieces[i], bytes, chunk_bytes);
    if (progress) progress(static_cast<Index>(bytes.size()));
  }
  const std::string text = to_json(Manifest{.files = files.finish(), .texts = texts});
  write_file(folder / manifest_name(rank), text);
  return checksum(as_bytes(text));
}

Index bytes_of(std::span<const WritePiece> pieces) {
  Index bytes = 0;
  for (const WritePiece& piece : pieces) bytes += piece.owned.size() * dtype_bytes(piece.dtype);
  return bytes;
}

}  // namespace ragged::checkpoint
