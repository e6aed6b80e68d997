// The matrix unit (AMX): how its eight tiles are used, and products of blocks of up to 32 x 32.
//
//            b0  b1         a: 16 rows of 32 bf16, row-major as activations are
//       a0   c00 c01        b: 16 rows of 16 pairs; row i, pair j holds elements 2i and 2i+1 of
//       a1   c10 c11           the column j ("VNNI"), so that a tile spans 32 x 16
//                           c: 16 x 16 float32
//
// Two by two is what the tiles allow best: four loads for four products, and a product takes as
// long as two loads from the first-level cache.
#pragma once

#include <immintrin.h>

#include "vectors.h"

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;                       // bf16 elements of a row of a
constexpr int kTileElements = kTileRows * kTileDepth;  // bf16 elements of a tile, 1 KiB

// Gives tiles a and c `rows` rows each (1 to 16), so that few rows cost little. Threads that have
// called it must call `release_tiles` before they leave the library.
inline void configure_tiles(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = tile < 6 ? rows : kTileRows;
  }
  _tile_loadconfig(&config);
}

inline void release_tiles() { _tile_release(); }

// One operand of a product: where its tiles begin and how far apart rows and steps are.
struct Operand {
  const bf16* first;   // a0 or b0
  const bf16* second;  // a1 or b1
  int64_t row_bytes;   // from one row of a tile to the next
  int64_t step;        // elements from one step of the inner dimension to the next
};

inline void nothing_between(int) {}

enum class Load { kKept, kPassing };

template <Load A>
inline void load_first(const bf16* tile, int64_t row_bytes) {
  if constexpr (A == Load::kKept) _tile_loadd(4, tile, row_bytes);
  if constexpr (A == Load::kPassing) _tile_stream_loadd(4, tile, row_bytes);
}

template <Load A>
inline void load_second(const bf16* tile, int64_t row_bytes) {
  if constexpr (A == Load::kKept) _tile_loadd(5, tile, row_bytes);
  if constexpr (A == Load::kPassing) _tile_stream_loadd(5, tile, row_bytes);
}

// c += a * b over `steps` tiles of the inner dimension, for `Rows` x `Columns` tiles (1 or 2 each).
// `between(step)` runs after each. A passing `a` leaves the first-level cache to `b`.
template <int Rows, int Columns, Load A = Load::kKept, class Between = void (*)(int)>
inline void accumulate(Operand a, Operand b, int steps, Between&& between = nothing_between) {
  for (int step = 0; step < steps; ++step) {
    load_first<A>(a.first + step * a.step, a.row_bytes);
    _tile_loadd(6, b.first + step * b.step, b.row_bytes);
    if constexpr (Columns == 2) _tile_loadd(7, b.second + step * b.step, b.row_bytes);
    if constexpr (Rows == 2) load_second<A>(a.second + step * a.step, a.row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Columns == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (Rows == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (Rows == 2 && Columns == 2) _tile_dpbf16ps(3, 5, 7);
    between(step);
  }
}

template <int Rows, int Columns>
inline void zero_sums() {
  _tile_zero(0);
  if constexpr (Columns == 2) _tile_zero(1);
  if constexpr (Rows == 2) _tile_zero(2);
  if constexpr (Rows == 2 && Columns == 2) _tile_zero(3);
}

template <int Rows, int Columns>
inline void load_sums(const float* c, int64_t row_floats) {
  const int64_t row_bytes = row_floats * sizeof(float);
  _tile_loadd(0, c, row_bytes);
  if constexpr (Columns == 2) _tile_loadd(1, c + kLanes, row_bytes);
  if constexpr (Rows == 2) _tile_loadd(2, c + kTileRows * row_floats, row_bytes);
  if constexpr (Rows == 2 && Columns == 2)
    _tile_loadd(3, c + kTileRows * row_floats + kLanes, row_bytes);
}

template <int Rows, int Columns>
inline void store_sums(float* c, int64_t row_floats) {
  const int64_t row_bytes = row_floats * sizeof(float);
  _tile_stored(0, c, row_bytes);
  if constexpr (Columns == 2) _tile_stored(1, c + kLanes, row_bytes);
  if constexpr (Rows == 2) _tile_stored(2, c + kTileRows * row_floats, row_bytes);
  if constexpr (Rows == 2 && Columns == 2)
    _tile_stored(3, c + kTileRows * row_floats + kLanes, row_bytes);
}
