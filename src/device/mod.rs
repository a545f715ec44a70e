//! Devices: where steps run. The CPU needs nothing; HIP, CUDA, Metal and the kernel simulator come with the kernels.

pub mod cpu;

/// A device is lost or refused work; nothing more can be launched on it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// A step could not be run.
    #[error("device {device}: {reason}")]
    Step {
        /// Device name.
        device: String,
        /// What it said.
        reason: String,
    },
}
