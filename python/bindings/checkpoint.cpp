// Checkpoints for Python: parts of tensors in, the files of ragged/checkpoint. Which rank holds and writes what of a
// tensor, names and extras are Python's (ragged_fsdp/checkpoint).
#include "python/bindings/bindings.h"
#include "ragged/base/error.h"
#include "ragged/checkpoint/agree.h"
#include "ragged/checkpoint/load.h"
#include "ragged/checkpoint/model_files.h"
#include "ragged/checkpoint/publish.h"
#include "ragged/checkpoint/saver.h"

namespace ragged::python {
namespace {

using checkpoint::Part;
using checkpoint::RankState;
using checkpoint::Saver;
using Texts = std::map<std::string, std::string>;
using BoxPair = std::pair<std::vector<Index>, std::vector<Index>>;  // offset, size
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

Part make_part(
    const std::string& name, const at::Tensor& local, const std::vector<Index>& shape, Index begin, Index end,
    std::optional<BoxPair> within, bool writes, bool announces_empty, const std::string& format,
    const std::string& placement) {
  // A tensor of its own over the same memory: it has no Python object, so that it may come and go without the GIL.
  Part part{.local = local.detach(), .owned = {begin, end}, .writes = writes, .announces_empty = announces_empty};
  part.info = {.name = name, .shape = shape, .format = format, .placement = placement};
  part.info.dtype = checkpoint::stored_dtype(local.scalar_type());
  if (within) part.within = layout::Box{std::move(within->first), std::move(within->second)};
  return part;
}

// The ranks' errors are one: what `problem` says on some, if anything, is thrown on all.
void agree(const comm::Communicator& all, const std::optional<std::string>& problem, bool is_invalid) {
  checkpoint::agree(all, [&] {
    if (!problem) return;
    if (is_invalid) throw InvalidArgument(*problem);
    throw CheckpointError(*problem);
  });
}

py::dict dict_of(const checkpoint::SaveReport& report) {
  py::dict dict;
  dict["step"] = report.step;
  dict["folder"] = report.folder.string();
  dict["bytes"] = report.bytes;
  dict["seconds"] = report.seconds;
  dict["blocked_seconds"] = report.blocked_seconds;
  return dict;
}

py::dict dict_of(const checkpoint::Facts& facts) {
  py::dict dict;
  for (const auto& [name, value] : facts.texts) dict[py::str(name)] = value;
  for (const auto& [name, value] : facts.integers) dict[py::str(name)] = value;
  for (const auto& [name, value] : facts.numbers) dict[py::str(name)] = value;
  return dict;
}

checkpoint::SaverOptions options_of(Index keep, bool async, double timeout_s) {
  checkpoint::SaverOptions options{.keep = keep, .async = async};
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000.0));
  return options;
}

void start(
    Saver& saver, Index step, std::vector<Part> parts, Texts texts, std::map<std::string, std::int64_t> integers,
    Texts rank_texts, Index keep, bool async, double timeout_s) {
  saver.set_options(options_of(keep, async, timeout_s));
  RankState state{.parts = std::move(parts), .rank_texts = std::move(rank_texts)};
  state.facts.texts = std::move(texts);
  state.facts.integers = std::move(integers);
  static_cast<void>(saver.start(step, state));
}

py::dict load(
    const comm::Communicator& all, const std::string& folder, const std::vector<Part>& parts, bool allow_unused,
    bool verify_first) {
  checkpoint::LoadReport report;
  {
    py::gil_scoped_release no_gil;
    report = checkpoint::load(all, folder, parts, {.allow_unused = allow_unused, .verify_first = verify_first});
    // Written through a pointer: autograd and the units' images must hear of it.
    for (const Part& part : parts) part.local.unsafeGetTensorImpl()->bump_version();
  }
  py::dict dict;
  dict["rank_texts"] = report.rank_texts;
  dict["wanted_bytes"] = report.wanted_bytes;
  dict["read_bytes"] = report.read_bytes;
  dict["seconds"] = report.seconds;
  return dict;
}

py::dict index_of(const std::string& folder) {
  const auto index = [&] {
    py::gil_scoped_release no_gil;
    return checkpoint::Checkpoint::open(folder).index();
  }();
  py::dict tensors;
  for (const checkpoint::TensorInfo& info : index.tensors) {
    tensors[py::str(info.name)] = py::make_tuple(info.dtype, py::tuple(py::cast(info.shape)), info.format);
  }
  py::dict dict;
  dict["step"] = index.step;
  dict["world_size"] = index.world_size;
  dict["tensors"] = std::move(tensors);
  dict["facts"] = dict_of(index.facts);
  return dict;
}

void bind_saver(py::module_& module) {
  py::class_<Part>(module, "CheckpointPart")
      .def(
          py::init(&make_part), py::arg("name"), py::arg("local"), py::arg("shape"), py::arg("begin"), py::arg("end"),
          py::arg("within"), py::arg("writes"), py::arg("announces_empty"), py::arg("format"), py::arg("placement"));
  py::class_<Saver>(module, "CheckpointSaver")
      .def(
          py::init([](const comm::Communicator& all, const std::string& root) {
            return std::make_unique<Saver>(all, root);
          }),
          ReleaseGil(), py::arg("all"), py::arg("root"))
      .def(
          "start", &start, ReleaseGil(), py::arg("step"), py::arg("parts"), py::arg("texts"), py::arg("integers"),
          py::arg("rank_texts"), py::arg("keep"), py::arg("is_async"), py::arg("timeout_s"))
      .def(
          "finish",
          [](Saver& saver) {
            const auto report = [&] {
              py::gil_scoped_release no_gil;
              return saver.finish();
            }();
            return dict_of(report);
          })
      .def_property_readonly("is_busy", &Saver::is_busy)
      .def_property_readonly("is_written", &Saver::is_written)
      .def("progress", [](const Saver& saver) {
        const checkpoint::SaveProgress progress = saver.progress();
        return std::tuple(progress.written_bytes, progress.total_bytes, progress.seconds);
      });
}

void bind_folders(py::module_& module) {
  module.def(
      "newest_checkpoint",
      [](const std::string& root) {
        std::vector<std::string> skipped;
        const auto found = checkpoint::CheckpointFolders(root).newest_complete(&skipped);
        return std::pair(found ? std::optional(found->string()) : std::nullopt, skipped);
      },
      ReleaseGil(), py::arg("root"));
  module.def(
      "load_checkpoint", &load, py::arg("all"), py::arg("folder"), py::arg("parts"), py::arg("allow_unused"),
      py::arg("verify_first"));
  module.def("checkpoint_index", &index_of, py::arg("folder"));
  module.def(
      "verify_checkpoint", [](const std::string& folder) { checkpoint::verify(checkpoint::Checkpoint::open(folder)); },
      ReleaseGil(), py::arg("folder"));
}

// --- models of others ---

using checkpoint::ModelFiles;

constexpr Index kPartBytes = Index{4} << 20;

// Elements of a tensor in a file, cast to the dtype of `part.local`, a few megabytes at a time.
void read_part(const ModelFiles& files, const std::string& name, at::ScalarType stored, const Part& part) {
  const at::NoGradGuard no_grad;
  const auto item = static_cast<Index>(c10::elementSize(stored));
  layout::Box box{std::vector<Index>(part.info.shape.size(), 0), part.info.shape};
  for (std::size_t d = 0; part.within && d < box.offset.size(); ++d) box.offset[d] -= part.within->offset[d];
  const std::vector<Index>& shape = part.within ? part.within->size : part.info.shape;
  const at::Tensor local = part.local.detach();
  for (const checkpoint::Run& run : checkpoint::runs(shape, box, part.owned)) {
    for (Index done = 0; done < run.count;) {
      const Index count = std::min(run.count - done, std::max<Index>(1, kPartBytes / item));
      const at::Tensor buffer = at::empty({count}, stored);
      files.read(
          name, (run.source + done) * item,
          {static_cast<std::byte*>(buffer.mutable_data_ptr()), static_cast<std::size_t>(count * item)});
      local.narrow(0, run.target + done, count).copy_(buffer);
      done += count;
    }
  }
  part.local.unsafeGetTensorImpl()->bump_version();
}

void bind_models(py::module_& module) {
  py::class_<ModelFiles>(module, "ModelFiles")
      .def(
          py::init([](const std::string& folder) { return std::make_unique<ModelFiles>(ModelFiles::open(folder)); }),
          ReleaseGil(), py::arg("folder"))
      .def("names", &ModelFiles::names)
      .def(
          "describe",
          [](const ModelFiles& files, const std::string& name) -> std::optional<std::pair<std::string, py::tuple>> {
            const plan::SafetensorsEntry* entry = files.find(name);
            if (!entry) return std::nullopt;
            return std::pair(entry->dtype, py::tuple(py::cast(entry->shape)));
          },
          py::arg("name"))
      .def("read", &read_part, ReleaseGil(), py::arg("name"), py::arg("stored"), py::arg("part"));
  module.def(
      "write_model_files",
      [](const std::string& path, const std::vector<std::pair<std::string, std::vector<Index>>>& tensors,
         const std::vector<at::ScalarType>& dtypes, const py::function& give, Index max_file_bytes) {
        std::vector<plan::SafetensorsEntry> entries;
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          entries.push_back(
              {.name = tensors[i].first, .dtype = checkpoint::stored_dtype(dtypes.at(i)), .shape = tensors[i].second});
        }
        checkpoint::NewFolder folder(path);
        const auto take_from = [&](std::size_t i, const checkpoint::TakeBytes& take) {
          const auto whole = give(i).cast<at::Tensor>();
          take({static_cast<const std::byte*>(whole.const_data_ptr()), whole.nbytes()});
        };
        const checkpoint::WrittenModel written = checkpoint::write_model_files(
            folder.temporary(), std::move(entries), take_from, {.max_file_bytes = max_file_bytes});
        folder.publish();
        return std::pair(written.files, written.bytes);
      },
      py::arg("folder"), py::arg("tensors"), py::arg("dtypes"), py::arg("give"), py::arg("max_file_bytes"));
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  module.def("agree", &agree, ReleaseGil(), py::arg("all"), py::arg("problem"), py::arg("is_invalid"));
  module.def(
      "broadcast_text", &checkpoint::broadcast_text, ReleaseGil(), py::arg("all"), py::arg("text"), py::arg("root"));
  module.def("stored_dtype", &checkpoint::stored_dtype, py::arg("dtype"));
  bind_saver(module);
  bind_folders(module);
  bind_models(module);
}

}  // namespace ragged::python
