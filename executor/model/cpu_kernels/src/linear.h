// y = x @ weight.T + bias, with one weight, or one for each head.

#include "tile.h"

// x [rows, heads, in], with `stride` from row to row and `head_stride` from head to head; weight
// packed, for each head out / 32 panels of width `in`; scales and bias float32, one for each column
// of the panels, or null; y [rows, heads, out], dense.
void linear(const bf16* x, int64_t stride, int64_t head_stride, const void* weight,
            const float* scales, const float* bias, bf16* y, int64_t rows, int64_t heads,
            int64_t in, int64_t out) {
  const Panels panels{weight, scales, bias, in};
#pragma omp parallel if (worth_sharing(heads * in * out, rows))
  {
    const Configured configured;
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < heads * out / kColumns; panel++) {
      const int64_t head = panel * kColumns / out;
      multiply(
          0, rows, panels, panel, [&](int64_t i) { return x + i * stride + head * head_stride; },
          [&](int64_t i, const float* sums) {
            store_columns(y + i * heads * out + panel * kColumns, sums);
          });
    }
  }
}
