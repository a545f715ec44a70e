//! Devices: where steps run. The CPU needs nothing; HIP, CUDA and the kernel simulator are found at run time.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;

mod buffer;
pub mod check;
mod code;
pub mod cpu;
mod cuda;
mod driver;
mod error;
mod graph;
mod hip;
mod launch;
pub mod plan;
mod profile;
#[cfg(test)]
pub(crate) mod testing;

pub use buffer::{Buffer, Pinned};
pub use code::{CodeObjects, SimWave};
pub use driver::Memory;
pub use error::DeviceError;
pub use graph::Graph;
pub use launch::{Event, Kernel};
pub use profile::LaunchTime;

use buffer::Staging;
use driver::{Driver, Fault, FaultKind, FunctionInfo};
use profile::Profile;

/// Which runtime drives a device. The CPU has its own way: see [`cpu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs.
    Hip,
    /// The code of [`DeviceKind::Hip`] over a stand-in library that runs kernels on the host, for tests.
    Sim,
}

impl DeviceKind {
    /// As in `--device`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Hip => "hip",
            Self::Sim => "sim",
        }
    }
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The maker's name for it.
    pub name: String,
    /// `sm_90a`, `gfx942`, `sim32` or `sim64`: which code object it runs.
    pub arch: String,
    /// Lanes of a wave (warp).
    pub wave: u32,
    /// Multiprocessors (compute units).
    pub n_multiprocessors: u32,
    /// Device memory in all.
    pub memory_bytes: u64,
}

/// One device with one stream; a handle that may be cloned and sent. Work is done in the order in which it is given.
///
/// A device that failed is lost: every later call returns [`DeviceError::Lost`] with the first failure and asks the runtime
/// nothing more.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    /// For messages: `cuda:0`.
    label: String,
    /// The loaded code object.
    code_path: std::path::PathBuf,
    /// The first failure.
    lost: OnceLock<String>,
    state: Mutex<State>,
    driver: Box<dyn Driver>,
}

/// What calls change; the lock is held for one call of the runtime at a time.
#[derive(Default)]
struct State {
    /// Kernels looked up so far; a [`Kernel`] is an index into it.
    functions: Vec<(&'static str, FunctionInfo)>,
    /// The thread that records a graph.
    recording: Option<ThreadId>,
    /// Addresses dropped while a graph was recorded, when the runtime refuses to free.
    deferred: Vec<u64>,
    /// Pinned memory that uploads pass through.
    staging: Staging,
    /// Times of launches, where asked for.
    profile: Profile,
}

/// Whether a call may be part of a recorded graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recordable {
    Yes,
    /// Why not.
    No(&'static str),
}

impl Device {
    /// Opens a device and loads its kernels.
    ///
    /// # Errors
    /// When library, driver, device or code object are missing or don't fit each other; the message says which, and what to
    /// do.
    pub fn open(kind: DeviceKind, ordinal: usize, code: &CodeObjects) -> Result<Self, DeviceError> {
        let label = format!("{}:{ordinal}", kind.name());
        let (driver, code_path): (Box<dyn Driver>, _) = match kind {
            DeviceKind::Cuda => cuda::open(&label, ordinal, code)?,
            DeviceKind::Hip | DeviceKind::Sim => hip::open(kind, &label, ordinal, code)?,
        };
        Ok(Self(Arc::new(Inner { label, code_path, lost: OnceLock::new(), state: Mutex::default(), driver })))
    }

    /// What it is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.0.driver.info()
    }

    /// Its kind and number, for messages: `cuda:0`.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.0.label
    }

    /// Why nothing works any more, if so.
    #[must_use]
    pub fn lost(&self) -> Option<DeviceError> {
        self.0.lost.get().map(|reason| self.lost_error(reason))
    }

    /// Device memory now, other processes' use included.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn memory(&self) -> Result<Memory, DeviceError> {
        let _state = self.enter("memory", Recordable::Yes)?;
        self.check(self.0.driver.memory())
    }

    /// Waits until everything given so far is done.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] when any of it failed.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        let _state = self.enter("synchronize", Recordable::No("a recording never runs"))?;
        self.check(self.0.driver.synchronize())
    }

    /// The state, when the device works and no other thread records.
    fn enter(&self, call: &'static str, recordable: Recordable) -> Result<MutexGuard<'_, State>, DeviceError> {
        if let Some(error) = self.lost() {
            return Err(error);
        }
        let state = self.lock();
        match (state.recording, recordable) {
            (Some(thread), _) if thread != std::thread::current().id() => {
                Err(self.bad_argument(call, "another thread records a graph".to_owned()))
            }
            (Some(_), Recordable::No(why)) => {
                Err(self.bad_argument(call, format!("not while recording a graph: {why}")))
            }
            _ => Ok(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No call leaves the state half changed, so a panic elsewhere does not spoil it.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Turns a refusal into an error and remembers the loss of the device.
    fn check<T>(&self, result: Result<T, Fault>) -> Result<T, DeviceError> {
        result.map_err(|fault| match fault.kind {
            FaultKind::Lost => {
                let reason = self.0.lost.get_or_init(|| format!("{}: {}", fault.call, fault.text));
                self.lost_error(reason)
            }
            FaultKind::OutOfMemory | FaultKind::NotFound | FaultKind::Refused => {
                DeviceError::Refused { device: self.0.label.clone(), call: fault.call.to_owned(), reason: fault.text }
            }
        })
    }

    fn lost_error(&self, reason: &str) -> DeviceError {
        DeviceError::Lost { device: self.0.label.clone(), reason: reason.to_owned() }
    }

    fn bad_argument(&self, call: &'static str, reason: String) -> DeviceError {
        DeviceError::BadArgument { device: self.0.label.clone(), call, reason }
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("label", &self.0.label).field("info", self.info()).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The last handle: buffers, graphs and events held one each, so only the staging memory is left.
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // A lost device refuses to wait; then nothing runs on it either.
        let _ = self.driver.synchronize();
        state.profile.release(self.driver.as_ref());
        state.staging.release(self.driver.as_ref());
        buffer::free_deferred(state, self.driver.as_ref());
    }
}
