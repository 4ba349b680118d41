// The likeliest token of each row.
#pragma once

#include "tile.h"

// tokens [rows] = the first place of the largest of float32 logits [rows, size], with `stride` from row
// to row. NaN is passed over; 0 for a row of nothing else.
KERNEL void arg_max(const float* logits, int64_t stride, int64_t* tokens, int64_t rows,
                    int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > 1 << 18)
  for (int64_t i = 0; i < rows; i++) {
    const float* row = logits + i * stride;
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t v = 0; v < size; v++) most = row[v] > most ? row[v] : most;
    int place = size;
#pragma omp simd reduction(min : place)
    for (int v = 0; v < size; v++) place = row[v] == most ? std::min(place, v) : place;
    tokens[i] = place < size ? place : 0;
  }
}
