// AdamW and AdamW8bit on CUDA. The arithmetic is the CPU kernels' (adamw_math.h, tile_codes.h); here is only who
// computes what. Many spans or tiles share a launch: their descriptors travel as kernel arguments, so nothing is copied
// to the device beforehand.
#include <cuda_runtime.h>

#include "ragged/optim/cuda_entries.h"
#include "ragged/optim/elements.h"

namespace ragged::optim {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kChunk = 16384;  // elements a block
constexpr int kRunsPerLaunch = 32;      // their descriptors fit the 4 KB that every device takes as arguments
constexpr int kPiecesPerLaunch = 24;

struct AdamWBatch {
  CudaAdamWRun runs[kRunsPerLaunch];
  std::int64_t first_chunk[kRunsPerLaunch];
  int count;
};
static_assert(sizeof(AdamWBatch) <= 4000);

struct TileBatch {
  CudaTilePiece pieces[kPiecesPerLaunch];
  std::int64_t first_tile[kPiecesPerLaunch];
  int count;
};
static_assert(sizeof(TileBatch) <= 4000);

// The last entry whose first chunk or tile is at most `index`.
__device__ int find(const std::int64_t* first, int count, std::int64_t index) {
  int found = 0;
  for (int i = 1; i < count; ++i) {
    if (first[i] <= index) found = i;
  }
  return found;
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamWBatch batch, float grad_scale) {
  const std::int64_t chunk = blockIdx.x;
  const int which = find(batch.first_chunk, batch.count, chunk);
  const CudaAdamWRun& run = batch.runs[which];
  const std::int64_t begin = (chunk - batch.first_chunk[which]) * kChunk;
  const std::int64_t end = begin + kChunk < run.numel ? begin + kChunk : run.numel;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const float grad = load_element(run.grads, i, run.grads_are_bf16) * grad_scale;
    const AdamWMoments moments = adamw_moments(
        run.step, grad, load_element(run.exp_avg, i, run.moments_are_bf16),
        load_element(run.exp_avg_sq, i, run.moments_are_bf16));
    store_element(run.exp_avg, i, run.moments_are_bf16, moments.first);
    store_element(run.exp_avg_sq, i, run.moments_are_bf16, moments.second);
    const float param = adamw_param(run.step, run.params[i], moments.first, square_root(moments.second));
    run.params[i] = param;
    if (run.image) run.image[i] = narrow(param);
  }
}

// Largest of a value over the block; the same on all threads. A maximum has no order, so the result has none either.
__device__ float block_max(float value, float* scratch) {
  for (int lane = 16; lane > 0; lane /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFU, value, lane));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float largest = scratch[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) largest = fmaxf(largest, scratch[warp]);
  __syncthreads();
  return largest;
}

// One block a tile: a warp covers a row of it, each thread four rows eight apart.
template <class Codes, bool kGuards>
__global__ void __launch_bounds__(kThreads)
    tile_kernel(const __grid_constant__ TileBatch batch, float grad_scale, Codes codes, std::int64_t* not_finite) {
  __shared__ float scratch[kThreads / 32];
  const std::int64_t index = blockIdx.x;
  const int which = find(batch.first_tile, batch.count, index);
  const CudaTilePiece& piece = batch.pieces[which];
  const std::int64_t tile = index - batch.first_tile[which];
  const std::int64_t tiles_per_strip = (piece.columns + kTileColumns - 1) / kTileColumns;
  const std::int64_t strips_per_matrix = (piece.matrix_rows + kTileRows - 1) / kTileRows;
  const auto first_row = [&](std::int64_t strip) {
    return strip / strips_per_matrix * piece.matrix_rows + strip % strips_per_matrix * kTileRows;
  };
  const std::int64_t strip = piece.first_strip + tile / tiles_per_strip;
  const std::int64_t left = piece.matrix_rows - strip % strips_per_matrix * kTileRows;
  const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
  const std::int64_t column = tile % tiles_per_strip * kTileColumns + threadIdx.x % kTileColumns;
  const std::int64_t base = (first_row(strip) - first_row(piece.first_strip)) * piece.columns;

  constexpr int kPerThread = kTileRows * kTileColumns / kThreads;
  TileElement elements[kPerThread];
  const float first_scale = piece.first_scales[tile];
  const float second_scale = piece.second_scales[tile];
  float first_largest = 0.0F;
  float second_largest = 0.0F;
  int lost = 0;
  for (int k = 0; k < kPerThread; ++k) {
    const int row = static_cast<int>(threadIdx.x) / kTileColumns + k * (kThreads / kTileColumns);
    if (row >= rows || column >= piece.columns) continue;
    const std::int64_t i = base + row * piece.columns + column;
    const TileMoments old =
        decode_moments<Codes, kGuards>(codes, piece.first_codes[i], piece.second_codes[i], first_scale, second_scale);
    const float grad = load_element(piece.grads, i, piece.grads_are_bf16) * grad_scale;
    elements[k] = step_element(codes, piece.step, piece.params[i], grad, old);
    first_largest = fmaxf(first_largest, elements[k].first_size);
    second_largest = fmaxf(second_largest, elements[k].second);
    lost += elements[k].finite ? 0 : 1;
    piece.params[i] = elements[k].param;
    if (piece.image) piece.image[i] = narrow(elements[k].param);
  }
  const float new_first_scale = tile_scale(block_max(first_largest, scratch));
  const float new_second_scale = tile_scale(block_max(second_largest, scratch));
  const float first_factor = codes.first_factor(new_first_scale);
  const float second_factor = codes.second_factor(new_second_scale);
  for (int k = 0; k < kPerThread; ++k) {
    const int row = static_cast<int>(threadIdx.x) / kTileColumns + k * (kThreads / kTileColumns);
    if (row >= rows || column >= piece.columns) continue;
    const std::int64_t i = base + row * piece.columns + column;
    piece.first_codes[i] = codes.encode_first(elements[k].first, first_factor);
    piece.second_codes[i] = encode_second_guarded<Codes, kGuards>(codes, elements[k].kept, second_factor);
  }
  if (threadIdx.x == 0) {
    piece.first_scales[tile] = new_first_scale;
    piece.second_scales[tile] = new_second_scale;
  }
  if (lost > 0) atomicAdd(reinterpret_cast<unsigned long long*>(not_finite), static_cast<unsigned long long>(lost));
}

template <class Codes>
void launch_tiles(
    const TileBatch& batch, std::int64_t tiles, const CudaTileArgs& args, Codes codes, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(tiles);
  if (args.guards) {
    tile_kernel<Codes, true><<<blocks, kThreads, 0, stream>>>(batch, args.grad_scale, codes, args.not_finite);
  } else {
    tile_kernel<Codes, false><<<blocks, kThreads, 0, stream>>>(batch, args.grad_scale, codes, args.not_finite);
  }
}

}  // namespace

int adamw_on_cuda(const CudaAdamWRun* runs, int count, float grad_scale, void* stream) {
  for (int next = 0; next < count;) {
    AdamWBatch batch{};
    std::int64_t chunks = 0;
    for (; next < count && batch.count < kRunsPerLaunch; ++next) {
      if (runs[next].numel == 0) continue;
      batch.runs[batch.count] = runs[next];
      batch.first_chunk[batch.count++] = chunks;
      chunks += (runs[next].numel + kChunk - 1) / kChunk;
    }
    if (chunks == 0) continue;
    adamw_kernel<<<static_cast<unsigned>(chunks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(batch, grad_scale);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int adamw8bit_on_cuda(const CudaTileArgs& args, void* stream) {
  for (int next = 0; next < args.count;) {
    TileBatch batch{};
    std::int64_t tiles = 0;
    for (; next < args.count && batch.count < kPiecesPerLaunch; ++next) {
      const CudaTilePiece& piece = args.pieces[next];
      const std::int64_t here = piece.num_strips * ((piece.columns + kTileColumns - 1) / kTileColumns);
      if (here == 0) continue;
      batch.pieces[batch.count] = piece;
      batch.first_tile[batch.count++] = tiles;
      tiles += here;
    }
    if (tiles == 0) continue;
    if (args.format == TileFormat::kPower) {
      launch_tiles(batch, tiles, args, PowerCodes{}, static_cast<cudaStream_t>(stream));
    } else {
      launch_tiles(batch, tiles, args, DynamicCodes{args.tables}, static_cast<cudaStream_t>(stream));
    }
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ragged::optim
