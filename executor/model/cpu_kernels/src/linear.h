// y = x @ weight.T + bias.
#pragma once

#include "tile.h"

// Writes the first `count` of 32 columns.
inline void store_columns(bf16* y, int64_t count, Floats low, Floats high) {
  if (count >= kColumns) {
    store(y, low);
    store(y + kLanes, high);
    return;
  }
  bf16 columns[kColumns];
  store(columns, low);
  store(columns + kLanes, high);
  std::memcpy(y, columns, count * sizeof(bf16));
}

// x [rows, in], with `stride` from row to row; weight packed as ceil(out / 32) panels of width `in`;
// bias float32, one for each column of the panels, or null; y [rows, out], dense.
KERNEL void linear(const bf16* x, int64_t stride, const bf16* weight, const float* bias, bf16* y,
                   int64_t rows, int64_t in, int64_t out) {
  const int64_t panels = (out + kColumns - 1) / kColumns;
#pragma omp parallel for schedule(static) if (worth_sharing(in * out, rows))
  for (int64_t p = 0; p < panels; p++) {
    const int64_t column = p * kColumns;
    const Floats low = bias ? load(bias + column) : set(0);
    const Floats high = bias ? load(bias + column + kLanes) : set(0);
    multiply(
        0, rows, in, weight + column * in, [&](int64_t i) { return x + i * stride; },
        [&](int64_t i, Floats a, Floats b) {
          store_columns(y + i * out + column, out - column, a + low, b + high);
        });
  }
}
