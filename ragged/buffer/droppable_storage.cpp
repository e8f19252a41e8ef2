#include "ragged/buffer/droppable_storage.h"

#include <ATen/ATen.h>
#include <c10/core/TensorImpl.h>

#include "ragged/base/error.h"
#include "ragged/comm/compat.h"

namespace ragged::buffer {
namespace {

// Marks our data pointers, so that a storage can be recognised; nothing to free, the slot's owner does that.
void droppable_deleter(void*) {}
void orphan_deleter(void*) {}

bool is_null(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr;
}

auto deleter_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_deleter();
}

at::Tensor bare_tensor(
    c10::Storage storage, at::ScalarType dtype, Index offset, at::IntArrayRef sizes, c10::Device device) {
  const auto backend = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(backend), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  return tensor;
}

c10::Storage bare_storage(at::DataPtr data, std::size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr, /*resizable=*/false));
}

}  // namespace

DroppableStorage::DroppableStorage(Index bytes, c10::Device device, std::string error, void* owner)
    : storage_(bare_storage(at::DataPtr(nullptr, this, &droppable_deleter, device), 0)),
      bytes_(bytes),
      device_(device),
      error_(std::move(error)),
      owner_(owner) {
  drop();
}

DroppableStorage::~DroppableStorage() {
  drop();
  // Tensors may outlive us; they must not find an owner that is gone.
  impl()->_mutable_data_ptr_no_checks() = at::DataPtr(nullptr, nullptr, &orphan_deleter, device_);
}

at::Tensor DroppableStorage::tensor(at::ScalarType dtype, Index offset, at::IntArrayRef sizes) const {
  return bare_tensor(storage_, dtype, offset, sizes, device_);
}

void DroppableStorage::attach(void* data) {
#if RAGGED_STORAGE_ERROR_TEXT
  impl()->clear_data_ptr_access_error_msg_();
#endif
  impl()->set_data_ptr_noswap(at::DataPtr(data, this, &droppable_deleter, device_));
  impl()->set_nbytes(static_cast<std::size_t>(bytes_));
  resident_ = true;
}

void DroppableStorage::drop() {
  impl()->set_data_ptr_noswap(at::DataPtr(nullptr, this, &droppable_deleter, device_));
  resident_ = false;
#if RAGGED_STORAGE_ERROR_TEXT
  // The size stays, so that ops that only make views don't trip over it before our text is reached.
  impl()->set_nbytes(static_cast<std::size_t>(bytes_));
  impl()->release_data_and_set_meta_custom_data_ptr_error_msg_(error_);
#else
  impl()->set_nbytes(0);
#endif
}

void DroppableStorage::set_error(std::string error) {
  error_ = std::move(error);
  if (!resident_) drop();
}

void DroppableStorage::set_owner(void* owner, int index) {
  owner_ = owner;
  index_ = index;
}

DroppableStorage* DroppableStorage::behind(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const at::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &droppable_deleter ? static_cast<DroppableStorage*>(data.get_context()) : nullptr;
}

void* DroppableStorage::owner_of(const at::Tensor& tensor) {
  const DroppableStorage* storage = behind(tensor);
  return storage ? storage->owner_ : nullptr;
}

int DroppableStorage::index_of(const at::Tensor& tensor) {
  const DroppableStorage* storage = behind(tensor);
  return storage ? storage->index_ : 0;
}

at::Tensor tensor_without_bytes(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  c10::Storage storage = bare_storage(at::DataPtr(nullptr, device), RAGGED_STORAGE_ERROR_TEXT ? bytes : 0);
#if RAGGED_STORAGE_ERROR_TEXT
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "this tensor was built without bytes: shard its module and initialise it first");
#endif
  return bare_tensor(std::move(storage), dtype, 0, sizes, device);
}

bool lacks_bytes(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.numel() > 0 && !tensor.is_meta() && is_null(tensor) &&
      deleter_of(tensor) != &droppable_deleter && !is_orphaned(tensor);
}

bool is_orphaned(const at::Tensor& tensor) {
  return tensor.has_storage() && deleter_of(tensor) == &orphan_deleter;
}

}  // namespace ragged::buffer
