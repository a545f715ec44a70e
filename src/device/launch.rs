//! Kernels and events: what is started on the stream and when it has passed.
#![allow(unsafe_code)] // src/device is the home of unsafe: here it is kernel arguments.

use std::sync::Arc;

use super::driver::{FaultKind, LaunchArgs, LaunchShape, RawEvent};
use super::{Device, DeviceError, Recordable};

/// Threads that a block may have on every device.
const MAX_THREADS: u32 = 1024;

/// A kernel of one device's code object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Index into the device's list.
    index: usize,
    /// Address of the device's state, as its name.
    device: usize,
    name: &'static str,
}

impl Kernel {
    /// Its entry point.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.name
    }
}

/// A point in the device's stream.
#[derive(Debug)]
pub struct Event {
    device: Device,
    event: RawEvent,
}

impl Device {
    /// A kernel by its entry point; looked up once.
    ///
    /// # Errors
    /// [`DeviceError::KernelMissing`].
    pub fn kernel(&self, name: &'static str) -> Result<Kernel, DeviceError> {
        let mut state = self.enter("kernel", Recordable::Yes)?;
        let index = match state.functions.iter().position(|(known, _)| *known == name) {
            Some(index) => index,
            None => {
                let function = match self.0.driver.function(name) {
                    Err(fault) if fault.kind == FaultKind::NotFound => {
                        let path = self.0.code_path.clone();
                        return Err(DeviceError::KernelMissing { kernel: name.to_owned(), path });
                    }
                    other => self.check(other)?,
                };
                state.functions.push((name, function));
                state.functions.len() - 1
            }
        };
        Ok(Kernel { index, device: self.name_of_state(), name })
    }

    /// Starts a kernel in the order of the stream. `args` is the struct that the kernel takes, copied before the return;
    /// the caller answers for its size and for the addresses in it, as src/ops does beside each kernel.
    ///
    /// # Errors
    /// [`DeviceError::BadArgument`] for an empty grid, [`DeviceError::Launch`] when it is refused, [`DeviceError::Lost`].
    pub fn launch<A: bytemuck::Pod>(
        &self,
        kernel: Kernel,
        grid: [u32; 3],
        n_threads: u32,
        args: &A,
    ) -> Result<(), DeviceError> {
        if grid.contains(&0) || n_threads == 0 || n_threads > MAX_THREADS {
            let reason = format!("kernel {}: grid {grid:?} of {n_threads} threads", kernel.name);
            return Err(self.bad_argument("launch", reason));
        }
        let mut state = self.enter("launch", Recordable::Yes)?;
        let is_own = kernel.device == self.name_of_state();
        let known = is_own.then(|| state.functions.get(kernel.index).copied()).flatten();
        let Some((_, info)) = known else {
            return Err(self.bad_argument("launch", format!("kernel {} is of another device", kernel.name)));
        };
        if let Some(want_bytes) = info.args_bytes.filter(|bytes| *bytes != size_of::<A>()) {
            let reason = format!("kernel {} takes {want_bytes} bytes, not {}", kernel.name, size_of::<A>());
            return Err(self.bad_argument("launch", reason));
        }
        let driver = self.0.driver.as_ref();
        let is_timed = state.profile.is_on && state.recording.is_none();
        if is_timed {
            let before = self.check(state.profile.before(driver))?;
            self.check(driver.record(before))?;
        }
        let shape = LaunchShape { grid, n_threads };
        let args = LaunchArgs { address: std::ptr::from_ref(args).cast(), n_bytes: size_of::<A>() };
        // SAFETY: the function is this device's, and `args` lives until the call returns; its size is the one that the
        // kernel takes, as was checked above or is by the runtime.
        let result = unsafe { driver.launch(info.function, shape, args) };
        match result {
            Err(fault) if fault.kind != FaultKind::Lost => Err(DeviceError::Launch {
                device: self.0.label.clone(),
                kernel: kernel.name.to_owned(),
                reason: format!("{} with grid {grid:?} of {n_threads} threads", fault.text),
            }),
            Ok(()) if is_timed => self.check(driver.record(state.profile.after(kernel.name, grid))),
            other => self.check(other),
        }
    }

    /// An event at the stream's present end.
    ///
    /// # Errors
    /// [`DeviceError::Lost`].
    pub fn record(&self) -> Result<Event, DeviceError> {
        let _state = self.enter("record", Recordable::No("its event would never pass"))?;
        let event = Event { device: self.clone(), event: self.check(self.0.driver.event())? };
        self.check(self.0.driver.record(event.event))?;
        Ok(event)
    }

    fn name_of_state(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl Event {
    /// Waits until the stream has passed it, without holding up other threads' work on the device.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] when something before it failed.
    pub fn wait(&self) -> Result<(), DeviceError> {
        if let Some(error) = self.device.lost() {
            return Err(error);
        }
        self.device.check(self.device.0.driver.wait(self.event))
    }

    /// Milliseconds of device time to a later event; waits for both.
    ///
    /// # Errors
    /// As [`Event::wait`]; an event of another device.
    pub fn elapsed_ms(&self, later: &Self) -> Result<f32, DeviceError> {
        if !self.device.is_same(&later.device) {
            return Err(self.device.bad_argument("elapsed_ms", format!("an event of {}", later.device.label())));
        }
        self.wait()?;
        later.wait()?;
        self.device.check(self.device.0.driver.elapsed_ms(self.event, later.event))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is this value's own.
        unsafe { self.device.0.driver.destroy_event(self.event) };
    }
}
