// All kernels, compiled as one, and the one function that ctypes calls.
#include <tuple>
#include <utility>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "moe.h"
#include "route.h"

// Each argument is a number or pointer in the low bytes of a word, or a struct of such.
template <class... T>
inline void call(void (*kernel)(T...), const uint64_t*& words) {
  const auto next = [&](size_t size) { return std::exchange(words, words + (size + 7) / 8); };
  std::apply(kernel, std::tuple<T...>{load_as<T>(next(sizeof(T)))...});  // in order, as braces say
}

// Makes calls, one after another. words: for each the kernel's number, as library.py counts them,
// then its arguments.
extern "C" __attribute__((visibility("default")))
void replay(const uint64_t* words, int64_t calls) {
  while (calls-- > 0) switch (*words++) {
      case 0: call(add_norm, words); break;
      case 1: call(arg_max, words); break;
      case 2: call(attention, words); break;
      case 3: call(attention_float32, words); break;
      case 4: call(linear, words); break;
      case 5: call(moe, words); break;
      case 6: call(prepare_heads, words); break;
      case 7: call(route, words); break;
      case 8: call(silu_and_mul, words); break;
      default: return;
    }
}
