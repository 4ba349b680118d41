// y = x @ weight.T + bias, with one weight, or one for each head.
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

// x [rows, heads, in], with `stride` from row to row and `head_stride` from head to head; weight packed,
// for each head ceil(out / 32) panels of width `in`; bias float32, one for each column of the panels,
// or null; y [rows, heads, out], dense.
KERNEL void linear(const bf16* x, int64_t stride, int64_t head_stride, const bf16* weight,
                   const float* bias, bf16* y, int64_t rows, int64_t heads, int64_t in, int64_t out) {
  const int64_t panels = (out + kColumns - 1) / kColumns;
#pragma omp parallel for schedule(static) if (worth_sharing(heads * in * out, rows))
  for (int64_t p = 0; p < heads * panels; p++) {
    const int64_t head = p / panels, column = p % panels * kColumns;
    const Floats low = bias ? load(bias + p * kColumns) : set(0);
    const Floats high = bias ? load(bias + p * kColumns + kLanes) : set(0);
    multiply(
        0, rows, in, weight + p * kColumns * in,
        [&](int64_t i) { return x + i * stride + head * head_stride; },
        [&](int64_t i, Floats a, Floats b) {
          store_columns(y + (i * heads + head) * out + column, out - column, a + low, b + high);
        });
  }
}
