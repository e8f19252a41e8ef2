#include "ragged/checkpoint/read.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/ranges.h>

#include "ragged/checkpoint/check.h"
#include "ragged/checkpoint/file.h"
#include "ragged/checkpoint/safetensors_file.h"

namespace ragged::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr Index kMaxJson = Index{1} << 32;

std::string shape_text(std::span<const Index> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

void check_size(const File& file, const StoredFile& stored) {
  RAGGED_CHECKPOINT_CHECK(
      file.size() == stored.bytes, "[checkpoint] Expected a file of {} bytes, but got {} ('{}'). It is {}.",
      stored.bytes, file.size(), file.path().string(), file.size() < stored.bytes ? "truncated" : "damaged");
}

// A header that was damaged may still parse, and then its tensors would lie elsewhere for other readers.
void check_header(const File& file, const StoredFile& stored) {
  std::string header(static_cast<std::size_t>(stored.header_bytes), '\0');
  file.read(0, std::as_writable_bytes(std::span(header)), "header");
  const std::uint64_t found = checksum(as_bytes(header));
  RAGGED_CHECKPOINT_CHECK(
      found == stored.header_checksum,
      "[checkpoint] Expected a header with checksum {}, but got {} ('{}'). The file is damaged.",
      to_hex(stored.header_checksum), to_hex(found), file.path().string());
}

File open_checked(const fs::path& folder, const StoredFile& stored) {
  File file = File::open(folder / stored.name);
  check_size(file, stored);
  check_header(file, stored);
  return file;
}

// One chunk of a stored box, checked. `chunk` must have the chunk's size.
void read_chunk(
    const File& file, const StoredPiece& piece, Index chunk_bytes, std::size_t number, std::span<std::byte> chunk) {
  const Index offset = piece.begin + static_cast<Index>(number) * chunk_bytes;
  file.read(offset, chunk, fmt::format("tensor '{}'", piece.tensor));
  const std::uint64_t found = checksum(chunk);
  RAGGED_CHECKPOINT_CHECK(
      found == piece.checksums[number],
      "[checkpoint] Expected checksum {} for {} bytes at {}, but got {} (tensor '{}' in '{}'). The file is damaged; "
      "use "
      "another checkpoint.",
      to_hex(piece.checksums[number]), chunk.size(), offset, to_hex(found), piece.tensor, file.path().string());
}

// A stored box against what a rank wants of the tensor.
std::vector<Run> runs_into(const ReadPiece& piece, layout::Box box) {
  for (std::size_t d = 0; piece.within && d < box.offset.size(); ++d) box.offset[d] -= piece.within->offset[d];
  return runs(piece.within ? piece.within->size : piece.shape, box, piece.owned);
}

// Each element that is wanted is in one of the boxes, and in one only.
void check_cover(const ReadPiece& wanted_piece, std::span<const Checkpoint::Place> places, const fs::path& folder) {
  const layout::Interval wanted = wanted_piece.owned;
  std::vector<layout::Interval> parts;
  for (const Checkpoint::Place& place : places) {
    for (const Run& run : runs_into(wanted_piece, place.piece->box)) {
      parts.push_back({run.target, run.target + run.count});
    }
  }
  std::ranges::sort(parts, {}, &layout::Interval::begin);
  Index end = 0;
  for (const layout::Interval& part : parts) {
    RAGGED_CHECKPOINT_CHECK(
        part.begin == end, "[checkpoint] Expected each element of tensor '{}' once, but {} is {} ('{}').",
        wanted_piece.name, wanted.begin + std::min(part.begin, end), part.begin > end ? "missing" : "there twice",
        folder.string());
    end = part.end;
  }
  RAGGED_CHECKPOINT_CHECK(
      end == wanted.size(), "[checkpoint] Expected each element of tensor '{}' once, but {} is missing ('{}').",
      wanted_piece.name, wanted.begin + end, folder.string());
}

}  // namespace

// --- an opened folder ---

Checkpoint Checkpoint::open(const fs::path& folder) {
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  const fs::path index_path = folder / kIndexFile;
  std::error_code error;
  RAGGED_CHECKPOINT_CHECK(
      fs::exists(index_path, error),
      "[checkpoint] Expected a checkpoint folder with a '{}', but '{}' has none. Give the folder of a step, such as "
      "checkpoints/step-200.",
      kIndexFile, folder.string());
  checkpoint.index_ = index_from_json(read_file(index_path, kMaxJson), index_path.string());
  for (int rank = 0; rank < checkpoint.index_.world_size; ++rank) {
    const fs::path path = folder / manifest_name(rank);
    const std::string text = read_file(path, kMaxJson);
    const std::uint64_t found = checksum(as_bytes(text));
    const std::uint64_t expected = checkpoint.index_.manifest_checksums[static_cast<std::size_t>(rank)];
    RAGGED_CHECKPOINT_CHECK(
        found == expected,
        "[checkpoint] Expected checksum {}, but got {} ('{}'). The file is damaged, or of another save.",
        to_hex(expected), to_hex(found), path.string());
    checkpoint.manifests_.push_back(manifest_from_json(text, checkpoint.index_, rank, path.string()));
    for (const StoredFile& file : checkpoint.manifests_.back().files) {
      check_size(File::open(folder / file.name), file);
    }
  }
  for (std::size_t i = 0; i < checkpoint.index_.tensors.size(); ++i) {
    checkpoint.by_name_[checkpoint.index_.tensors[i].name] = i;
  }
  for (const Manifest& manifest : checkpoint.manifests_) {
    for (const StoredFile& file : manifest.files) {
      for (const StoredPiece& piece : file.pieces) checkpoint.places_[piece.tensor].push_back({&file, &piece});
    }
  }
  return checkpoint;
}

const TensorInfo* Checkpoint::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &index_.tensors[found->second];
}

std::span<const Checkpoint::Place> Checkpoint::places(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? std::span<const Place>{} : std::span<const Place>(found->second);
}

Index Checkpoint::bytes() const {
  Index bytes = 0;
  for (const Manifest& manifest : manifests_) {
    for (const StoredFile& file : manifest.files) bytes += file.bytes;
  }
  return bytes;
}

// --- which elements are where ---

std::vector<Run> runs(std::span<const Index> shape, const layout::Box& box, layout::Interval owned) {
  std::vector<Run> result;
  const std::size_t dims = shape.size();
  std::vector<Index> stride(dims, 1);      // in the tensor
  std::vector<Index> box_stride(dims, 1);  // in the box
  for (std::size_t d = dims; d-- > 1;) {
    stride[d - 1] = stride[d] * shape[d];
    box_stride[d - 1] = box_stride[d] * box.size[d];
  }
  for (const layout::Box& wanted : layout::boxes(shape, owned)) {
    const std::optional<layout::Box> common = layout::intersect(wanted, box);
    if (!common) continue;
    // Dims from `inner` on lie next to each other in the box and in the tensor; one run takes them and dim inner - 1.
    std::size_t inner = dims;
    const auto is_whole = [&](std::size_t d) { return common->size[d] == shape[d] && box.size[d] == shape[d]; };
    while (inner > 0 && is_whole(inner - 1)) --inner;
    const std::size_t outer = inner == 0 ? 0 : inner - 1;
    Index count = 1;
    for (std::size_t d = outer; d < dims; ++d) count *= common->size[d];
    std::vector<Index> at(common->offset.begin(), common->offset.begin() + static_cast<std::ptrdiff_t>(outer));
    for (bool has_more = true; has_more;) {
      Index source = 0;
      Index target = -owned.begin;
      for (std::size_t d = 0; d < dims; ++d) {
        const Index position = d < outer ? at[d] : common->offset[d];
        source += (position - box.offset[d]) * box_stride[d];
        target += position * stride[d];
      }
      if (!result.empty() && result.back().source + result.back().count == source &&
          result.back().target + result.back().count == target) {
        result.back().count += count;
      } else {
        result.push_back({source, target, count});
      }
      has_more = false;
      for (std::size_t d = outer; d-- > 0 && !has_more;) {
        has_more = ++at[d] < common->offset[d] + common->size[d];
        if (!has_more) at[d] = common->offset[d];
      }
    }
  }
  return result;
}

// --- what one rank reads ---

ReadPlan::ReadPlan(const Checkpoint& checkpoint, std::vector<ReadPiece> pieces, bool allow_unused)
    : checkpoint_(&checkpoint), pieces_(std::move(pieces)) {
  const std::string folder = checkpoint.folder().string();
  std::set<std::string> wanted;
  for (const ReadPiece& piece : pieces_) {
    RAGGED_CHECK(wanted.insert(piece.name).second, "[load] Expected different names, but got '{}' twice.", piece.name);
    const TensorInfo* info = checkpoint.find(piece.name);
    RAGGED_CHECKPOINT_CHECK(
        info,
        "[load] Expected tensor '{}', but the checkpoint '{}' has none of that name. Load it into the model and the "
        "optimizer that it was saved from.",
        piece.name, folder);
    RAGGED_CHECKPOINT_CHECK(
        info->shape == piece.shape,
        "[load] Expected tensor '{}' of shape {}, but the checkpoint '{}' has {}. Load it into a model of the sizes "
        "that "
        "it was saved from.",
        piece.name, shape_text(piece.shape), folder, shape_text(info->shape));
    RAGGED_CHECKPOINT_CHECK(
        info->format == piece.format,
        "[load] Expected tensor '{}' in format '{}', but the checkpoint '{}' has '{}'. Its codes mean other numbers; "
        "set "
        "the optimizer's format to the saved one.",
        piece.name, piece.format, folder, info->format);
    RAGGED_CHECKPOINT_CHECK(
        info->dtype == piece.dtype,
        "[load] Expected tensor '{}' as {}, but the checkpoint '{}' has {}. Values are never cast; set its dtype to "
        "the "
        "saved one, such as by optimizer.moment_dtype.",
        piece.name, piece.dtype, folder, info->dtype);
  }
  for (const TensorInfo& info : checkpoint.index().tensors) {
    RAGGED_CHECKPOINT_CHECK(
        allow_unused || wanted.contains(info.name),
        "[load] Expected a use for tensor '{}' of the checkpoint '{}', but neither model nor optimizer has one of that "
        "name. Load it into those that it was saved from.",
        info.name, folder);
  }
  for (std::size_t i = 0; i < pieces_.size(); ++i) add(i);
  std::ranges::stable_sort(
      sources_, {}, [](const Source& s) { return std::tuple(std::string_view(s.file->name), s.stored->begin); });
}

void ReadPlan::add(std::size_t i) {
  const ReadPiece& piece = pieces_[i];
  const std::span<const Checkpoint::Place> places = checkpoint_->places(piece.name);
  check_cover(piece, places, checkpoint_->folder());
  const Index item = dtype_bytes(piece.dtype);
  for (const Checkpoint::Place& place : places) {
    std::vector<Run> found = runs_into(piece, place.piece->box);
    if (!found.empty()) sources_.push_back({place.file, place.piece, i, item, std::move(found)});
  }
  wanted_bytes_ += piece.owned.size() * item;
}

void ReadPlan::read_source(const File& file, const Source& source, const StoreBytes& store) const {
  const Index chunk_bytes = checkpoint_->index().chunk_bytes;
  const Index total = source.stored->box.numel() * source.item;
  std::vector<std::byte> buffer;
  Index loaded = -1;  // number of the chunk in the buffer
  for (const Run& run : source.runs) {
    Index at = run.source * source.item;
    Index target = run.target * source.item;
    const Index end = at + run.count * source.item;
    while (at < end) {
      const Index number = at / chunk_bytes;
      const Index begin = number * chunk_bytes;
      if (number != loaded) {
        buffer.resize(static_cast<std::size_t>(std::min(chunk_bytes, total - begin)));
        read_chunk(file, *source.stored, chunk_bytes, static_cast<std::size_t>(number), buffer);
        loaded = number;
      }
      const Index count = std::min(end, begin + static_cast<Index>(buffer.size())) - at;
      if (store) {
        const Bytes chunk(buffer);
        store(
            source.piece, target, chunk.subspan(static_cast<std::size_t>(at - begin), static_cast<std::size_t>(count)));
      }
      at += count;
      target += count;
    }
  }
}

void ReadPlan::read(const StoreBytes& store) const {
  const StoredFile* opened = nullptr;
  std::optional<File> file;
  for (const Source& source : sources_) {
    if (source.file != opened) {
      file = open_checked(checkpoint_->folder(), *source.file);
      opened = source.file;
    }
    read_source(*file, source, store);
  }
}

void ReadPlan::verify() const {
  read({});
}

Index ReadPlan::read_bytes() const {
  const Index chunk_bytes = checkpoint_->index().chunk_bytes;
  Index bytes = 0;
  for (const Source& source : sources_) {
    const Index total = source.stored->box.numel() * source.item;
    Index next = 0;  // first chunk that isn't counted
    for (const Run& run : source.runs) {
      const Index first = std::max(next, run.source * source.item / chunk_bytes);
      next = ceil_div((run.source + run.count) * source.item, chunk_bytes);
      for (Index chunk = first; chunk < next; ++chunk) bytes += std::min(chunk_bytes, total - chunk * chunk_bytes);
    }
  }
  return bytes;
}

// --- all of it ---

void check_complete(const Checkpoint& checkpoint) {
  for (const TensorInfo& info : checkpoint.index().tensors) {
    const auto places = checkpoint.places(info.name);
    RAGGED_CHECKPOINT_CHECK(
        !places.empty(), "[checkpoint] Expected tensor '{}' in some file, but it is in none ('{}').", info.name,
        checkpoint.folder().string());
    const ReadPiece all{.name = info.name, .shape = info.shape, .owned = {0, checked_product(info.shape)}};
    check_cover(all, places, checkpoint.folder());
  }
}

void verify(const Checkpoint& checkpoint, const std::function<void(Index bytes)>& progress) {
  check_complete(checkpoint);
  std::vector<std::byte> buffer;
  for (const Manifest& manifest : checkpoint.manifests()) {
    for (const StoredFile& stored : manifest.files) {
      const File file = open_checked(checkpoint.folder(), stored);
      const SafetensorsReader reader(file.path());
      std::map<std::string_view, const plan::SafetensorsEntry*> entries;
      for (const plan::SafetensorsEntry& entry : reader.tensors()) entries[entry.name] = &entry;
      RAGGED_CHECKPOINT_CHECK(
          entries.size() == stored.pieces.size(), "[checkpoint] Expected {} tensors, but got {} ('{}').",
          stored.pieces.size(), entries.size(), file.path().string());
      for (const StoredPiece& piece : stored.pieces) {
        const auto found = entries.find(piece.tensor);
        const TensorInfo& info = *checkpoint.find(piece.tensor);
        RAGGED_CHECKPOINT_CHECK(
            found != entries.end() && found->second->dtype == info.dtype && found->second->shape == piece.box.size &&
                reader.header_bytes() + found->second->begin == piece.begin,
            "[checkpoint] Expected tensor '{}' as the manifest describes it, but the header of '{}' differs.",
            piece.tensor, file.path().string());
        const Index total = piece.box.numel() * dtype_bytes(info.dtype);
        for (std::size_t chunk = 0; chunk < piece.checksums.size(); ++chunk) {
          const Index left = total - static_cast<Index>(chunk) * checkpoint.index().chunk_bytes;
          buffer.resize(static_cast<std::size_t>(std::min(checkpoint.index().chunk_bytes, left)));
          read_chunk(file, piece, checkpoint.index().chunk_bytes, chunk, buffer);
          if (progress) progress(static_cast<Index>(buffer.size()));
        }
      }
    }
  }
}

}  // namespace ragged::checkpoint
