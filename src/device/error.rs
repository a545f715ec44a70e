//! What can go wrong with a device, and what to do about it.

use std::path::PathBuf;

/// A device can't be opened, refused a call, or is lost.
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
    /// The runtime's library is not there or can't be loaded.
    #[error("device {device}: {library} can't be loaded: {reason}; {remedy}")]
    LibraryMissing {
        /// Device name.
        device: String,
        /// The library's usual name.
        library: String,
        /// Where it was looked for, or what the loader said.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// The library is there but too old (or too new) for this build.
    #[error("device {device}: {library} has no symbol {symbol}; {remedy}")]
    SymbolMissing {
        /// Device name.
        device: String,
        /// The library.
        library: String,
        /// What it lacks.
        symbol: String,
        /// What to do.
        remedy: String,
    },
    /// The runtime is there but offers no such device.
    #[error("device {device}: {reason}; {remedy}")]
    NoDevice {
        /// Device name.
        device: String,
        /// What was found.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// No kernels for this architecture.
    #[error(
        "no kernels for {arch}: {} is in none of: {}; build them with `cargo xtask kernels --target {target}` or name their \
         folder in FLASHD_KERNELS",
        file.display(),
        looked.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    CodeMissing {
        /// The architecture.
        arch: String,
        /// What `cargo xtask kernels` calls it.
        target: &'static str,
        /// The file, relative to each folder.
        file: PathBuf,
        /// The folders.
        looked: Vec<PathBuf>,
    },
    /// The kernels are damaged or for another architecture.
    #[error("device {device}: {} can't be loaded: {reason}; {remedy}", path.display())]
    CodeRefused {
        /// Device name.
        device: String,
        /// The code object.
        path: PathBuf,
        /// What the runtime said.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// The code object is of another build: it lacks a kernel.
    #[error("kernel {kernel} is not in {}; build the kernels of this version of flashd", path.display())]
    KernelMissing {
        /// The kernel.
        kernel: String,
        /// The code object.
        path: PathBuf,
    },
    /// Device memory (or pinned host memory) ran out.
    #[error(
        "device {device}: out of {memory} memory: {want_bytes} bytes wanted, {free_bytes} bytes of the device free"
    )]
    OutOfMemory {
        /// Device name.
        device: String,
        /// "device" or "pinned host".
        memory: &'static str,
        /// Bytes asked for.
        want_bytes: u64,
        /// Free bytes of the device.
        free_bytes: u64,
    },
    /// A launch was refused; the device goes on.
    #[error("device {device}: kernel {kernel} can't be launched: {reason}")]
    Launch {
        /// Device name.
        device: String,
        /// The kernel.
        kernel: String,
        /// What the runtime said.
        reason: String,
    },
    /// Another call was refused; the device goes on.
    #[error("device {device}: {call}: {reason}")]
    Refused {
        /// Device name.
        device: String,
        /// The runtime's function.
        call: String,
        /// What it said.
        reason: String,
    },
    /// The device failed; nothing more can be done with it in this process.
    #[error("device {device} is lost: {reason}")]
    Lost {
        /// Device name.
        device: String,
        /// The first failure.
        reason: String,
    },
    /// The caller is wrong: a range outside its buffer, a handle of another device, a call that can't be recorded.
    #[error("device {device}: {call}: {reason}")]
    BadArgument {
        /// Device name.
        device: String,
        /// The operation.
        call: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}
