//! Graphs: a step's launches recorded once and replayed.
#![allow(unsafe_code)] // src/device is the home of unsafe: here it is the handles of recordings.

use super::driver::RawGraph;
use super::{Device, DeviceError, Recordable, buffer};

/// Recorded work. It names buffers by their addresses, so whoever keeps a graph keeps its buffers.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    graph: RawGraph,
}

/// Ends a recording that its closure did not bring to the end, also by a panic.
struct Recording<'a> {
    device: &'a Device,
    is_open: bool,
}

impl Device {
    /// Records what `record` does with this device on this thread: launches, fills and copies. Arguments are frozen as they
    /// are then; what must change from one run to the next is read from device memory.
    ///
    /// # Errors
    /// What `record` returns; calls that can't be recorded are refused in it. [`DeviceError::Refused`] when the runtime
    /// can't make a graph of it.
    pub fn capture(&self, record: impl FnOnce() -> Result<(), DeviceError>) -> Result<Graph, DeviceError> {
        {
            let mut state = self.enter("capture", Recordable::No("one at a time"))?;
            self.check(self.0.driver.begin_capture())?;
            state.recording = Some(std::thread::current().id());
        }
        let mut recording = Recording { device: self, is_open: true };
        record()?;
        if let Some(error) = self.lost() {
            return Err(error);
        }
        let graph = recording.end(|| self.check(self.0.driver.end_capture()))?;
        Ok(Graph { device: self.clone(), graph })
    }
}

impl Recording<'_> {
    fn end<T>(&mut self, end: impl FnOnce() -> T) -> T {
        let mut state = self.device.lock();
        let result = end();
        self.is_open = false;
        state.recording = None;
        if !state.deferred.is_empty() {
            // A lost device refuses to wait; then nothing runs on it either.
            let _ = self.device.0.driver.synchronize();
            buffer::free_deferred(&mut state, self.device.0.driver.as_ref());
        }
        result
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.is_open {
            let device = self.device;
            self.end(|| device.0.driver.cancel_capture());
        }
    }
}

impl Graph {
    /// Runs the recording in the order of the stream.
    ///
    /// # Errors
    /// [`DeviceError::Lost`].
    pub fn launch(&self) -> Result<(), DeviceError> {
        let _state = self.device.enter("graph launch", Recordable::No("graphs are not nested"))?;
        // SAFETY: the graph is this value's own and of this device.
        self.device.check(unsafe { self.device.0.driver.launch_graph(self.graph) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let state = self.device.lock();
        let driver = self.device.0.driver.as_ref();
        if state.recording.is_none() {
            // A lost device refuses to wait; then nothing runs on it either.
            let _ = driver.synchronize();
        }
        // SAFETY: the graph is this value's own, and the stream was emptied: while another graph is recorded, nothing can
        // have been launched since the recording began, and the runtimes keep a running graph alive.
        unsafe { driver.destroy_graph(self.graph) };
    }
}
