// What lies between products: norms, and the activation of dense MLPs. Sizes are multiples of 16.
#pragma once

#include "tile.h"

// y = total / sqrt(mean(total^2) + eps) * weight, where total is x, or with `added`, x + added, which
// takes the place of `added`. x has `stride` from row to row; added and y [rows, size] are dense.
KERNEL void add_norm(const bf16* x, int64_t stride, bf16* added, const bf16* weight, bf16* y,
                     int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size > 1 << 16)
  for (int64_t i = 0; i < rows; i++) {
    const bf16* row = x + i * stride;
    Floats squares = set(0);
    for (int64_t d = 0; d < size; d += kLanes) {
      Floats total = load(row + d);
      if (added) {
        store(added + i * size + d, total + load(added + i * size + d));
        total = load(added + i * size + d);  // rounded, as the next layer reads it
      }
      squares = fma(total, total, squares);
    }
    if (added) row = added + i * size;
    const Floats scale = set(1 / std::sqrt(sum(squares) / size + eps));
    for (int64_t d = 0; d < size; d += kLanes)
      store(y + i * size + d, load(row + d) * scale * load(weight + d));
  }
}

// y [rows, size] = silu(gate) * up, of gate_up [rows, 2 size], gate first.
KERNEL void silu_and_mul(const bf16* gate_up, bf16* y, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > 1 << 16)
  for (int64_t i = 0; i < rows; i++) {
    const bf16 *gates = gate_up + i * 2 * size, *ups = gates + size;
    for (int64_t d = 0; d < size; d += kLanes) {
      const Floats gate = load(gates + d);
      store(y + i * size + d, gate * sigmoid(gate) * load(ups + d));
    }
  }
}
