// All kernels, compiled as one. Each is a plain C function over pointers, called by ctypes.
#include <tuple>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "moe.h"
#include "route.h"

template <class... T>
inline void call(void (*kernel)(T...), const uint64_t*& words) {
  std::apply(kernel, std::tuple<T...>{load_as<T>(words++)...});  // in this order, as braces say
}

// Calls that were made before, made again in one. library.py numbers the kernels. words: for each
// call the kernel's number, then its arguments, each in the low bytes of a word.
KERNEL void replay(const uint64_t* words, int64_t calls) {
  while (calls-- > 0) switch (*words++) {
      case 0: call(add_norm, words); break;
      case 1: call(arg_max, words); break;
      case 2: call(attention, words); break;
      case 3: call(linear, words); break;
      case 4: call(moe, words); break;
      case 5: call(prepare_heads, words); break;
      case 6: call(route, words); break;
      case 7: call(silu_and_mul, words); break;
      default: return;
    }
}
