// Products of activations with packed weights: `rows x inner` times `inner x columns`.
//
// Packed weights are panels of 32 columns, each contiguous from its first step to its last:
//
//     panel 0: | step 0: tile of columns 0-15 | tile of columns 16-31 | step 1: ... |
//     panel 1: | ...
//
// A tile (see tiles.h) spans 32 of the inner dimension. The last panel is filled up with zeros.
// Gate and up of an MLP share panels: the first tile holds 16 columns of gate, the second the same
// 16 of up, so that both halves of `silu(gate) * up` are at hand when a panel is done.
//
// Activations are row-major; rows may be read up to the next multiple of 32 and must exist.
#pragma once

#include <algorithm>

#include "team.h"
#include "tiles.h"

constexpr int kPanelColumns = 32;
constexpr int kRowBlock = 2 * kTileRows;
// Activations of a group of rows that stay in the second-level cache while panels pass by.
constexpr int64_t kRowGroupBytes = 1 << 20;

struct Activations {
  const bf16* data;
  int64_t stride;  // elements
  int64_t num_rows;
};

struct Weights {
  const bf16* panels;
  int64_t inner;        // a multiple of 32
  int64_t num_columns;  // of the panels' columns, those that count

  int64_t num_panels() const { return (num_columns + kPanelColumns - 1) / kPanelColumns; }
  int64_t panel_elements() const { return inner * kPanelColumns; }
};

inline int tile_rows(int64_t num_rows) {
  return num_rows < kTileRows ? static_cast<int>(num_rows) : kTileRows;
}

// Where a product goes: a panel's part of a row is `panel_bytes` long at most.
struct Target {
  void* data;
  int64_t row_bytes, panel_bytes;

  char* at(int64_t row, int64_t panel) const {
    return static_cast<char*>(data) + row * row_bytes + panel * panel_bytes;
  }
};

// Multiplies rows `begin` to `end` by one panel. `finish(panel, out, sums)` writes a row's 32 sums
// to its place in the target.
template <class Finish>
void multiply_panel(const Activations& x, int64_t begin, int64_t end, const Weights& weights,
                    int64_t panel, const Target& target, Finish&& finish) {
  alignas(64) float sums[2][kRowBlock * kPanelColumns];
  const int steps = static_cast<int>(weights.inner / kTileDepth);
  const bf16* tiles = weights.panels + panel * weights.panel_elements();
  const Operand b{tiles, tiles + kTileElements, 64, 2 * kTileElements};
  // The next panel comes into the second-level cache while this one is worked on: few rows are
  // bound by memory alone, and the hardware's prefetcher stops at every page.
  const char* next = reinterpret_cast<const char*>(tiles + weights.panel_elements());
  const int64_t num_blocks = (end - begin + kRowBlock - 1) / kRowBlock;
  const int lines_per_step = static_cast<int>((32 + num_blocks - 1) / num_blocks);
  const int rows_per_step = (kRowBlock + steps - 1) / steps;
  // Rows of the block before are finished between the steps of this one, so that the vector units
  // work while the matrix unit does.
  int64_t finished = begin, multiplied = begin;
  const auto finish_row = [&] {
    const int64_t row = finished++ - begin;
    finish(panel, target.at(begin + row, panel),
           sums[row / kRowBlock % 2] + row % kRowBlock * kPanelColumns);
  };
  for (int64_t row = begin; row < end; row += kRowBlock) {
    const bf16* rows = x.data + row * x.stride;
    const int64_t row_bytes = x.stride * sizeof(bf16);
    const Operand a{rows, rows + kTileRows * x.stride, row_bytes, kTileDepth};
    float* block = sums[(row - begin) / kRowBlock % 2];
    const char* out = target.at(row, panel);
    // Lines to be written are fetched early, too: a store that waits for one holds up all others.
    const auto between = [&](int step) {
      for (int line = 0; line < lines_per_step; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
      for (int i = 0; i < rows_per_step; ++i) {
        if (step * rows_per_step + i < kRowBlock) __builtin_prefetch(out, 1);
        out += target.row_bytes;
        if (finished < multiplied) finish_row();
      }
    };
    if (end - row > kTileRows) {
      zero_sums<2, 2>();
      accumulate<2, 2, Load::kPassing>(a, b, steps, between);
      store_sums<2, 2>(block, kPanelColumns);
    } else {
      zero_sums<1, 2>();
      accumulate<1, 2, Load::kPassing>(a, b, steps, between);
      store_sums<1, 2>(block, kPanelColumns);
    }
    multiplied = std::min(end, row + kRowBlock);
  }
  while (finished < end) finish_row();
}

// A stage: all rows by all panels.
template <class Finish>
void multiply(Team::Member& member, const Activations& x, const Weights& weights,
              const Target& target, Finish&& finish) {
  const int64_t row_bytes = weights.inner * sizeof(bf16);
  const int64_t least_groups = (x.num_rows * row_bytes + kRowGroupBytes - 1) / kRowGroupBytes;
  const int64_t even = (x.num_rows + least_groups - 1) / least_groups;
  const int64_t group_rows = (even + kRowBlock - 1) / kRowBlock * kRowBlock;
  const int64_t num_groups = (x.num_rows + group_rows - 1) / group_rows;
  const int64_t num_panels = weights.num_panels();
  configure_tiles(tile_rows(x.num_rows));
  member.stage(num_groups * num_panels, [&](int64_t item) {
    const int64_t panel = item % num_panels, begin = item / num_panels * group_rows;
    const int64_t end = std::min(begin + group_rows, x.num_rows);
    multiply_panel(x, begin, end, weights, panel, target, finish);
  });
}
