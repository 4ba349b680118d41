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
    const int64_t whole = size / kLanes * kLanes;
    Floats most = set(-INFINITY);
    for (int64_t v = 0; v < whole; v += kLanes) most = max(load(row + v), most);
    float best = largest(most);
    for (int64_t v = whole; v < size; v++) best = std::max(best, row[v]);
    int64_t at = 0;
    while (at < whole && !equal(load(row + at), set(best))) at += kLanes;
    while (at < size && row[at] != best) at++;
    tokens[i] = at < size ? at : 0;
  }
}
