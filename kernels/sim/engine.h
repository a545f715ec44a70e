//! The simulator's engine, as the stand-in HIP runtime sees it.
#pragma once

#include <algorithm>
#include <string>

#include "../common/device.h"

/// A launch of one kernel over a grid of one-dimensional blocks.
struct SimLaunch {
    const SimKernel* kernel;
    const void* args;
    u32 grid_x, grid_y, n_threads;
};

/// Runs every block of a launch on the calling thread; an empty string, or what the kernel did wrong: its name, the block, the line.
std::string sim_run(const SimLaunch& launch);
