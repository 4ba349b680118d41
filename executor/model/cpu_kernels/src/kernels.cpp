// All kernels, compiled as one. Each is a plain C function over pointers, called by ctypes.
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "moe.h"
#include "route.h"
#include "replay.h"  // of all others
