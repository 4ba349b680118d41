// All kernels, compiled as one. Each is a plain C function over pointers, called by ctypes.
#include "arg_max.h"
#include "attention.h"
#include "linear.h"
#include "moe.h"
#include "norm.h"
#include "route.h"
