// All kernels, compiled as one. Each is a plain C function over pointers, called by ctypes.
#include "linear.h"
