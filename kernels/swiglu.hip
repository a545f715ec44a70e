//! The experts' activation: silu(min(gate, limit)) * clamp(up, -limit, limit) * routing weight, rounded to bf16.
//!
//! Bound: 8 bytes read and 2 written an element. One block a row and 1,024 columns; a NaN stays a NaN.
#include "common/swiglu.h"

KERNEL(swiglu, SwigluArgs, 256) { swiglu_row(args, block_x(), block_y()); }
