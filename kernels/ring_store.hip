//! The slots' rings take the last rows of every run, once no query of the step needs the rows they replace.
//!
//! Few rows are stored by `attention_merge` instead, in the same way. Bound: bytes, 2 (584 + 8 CW + 8 IW) a stored row.
#include "common/ring.h"

/// One block a row.
KERNEL(ring_store, RingStoreArgs, 256) {
    const StepRow* row = step_row(args.step, block_x());
    if (row) store_in_rings(args, block_x(), *row);
}
