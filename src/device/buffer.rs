//! Memory: device buffers, pinned host memory, and the copies between them.
#![allow(unsafe_code)] // src/device is the home of unsafe: here it is memory that the runtime reads and writes.

use std::ops::Range;
use std::ptr::NonNull;

use super::driver::{Driver, FaultKind, RawEvent};
use super::{Device, DeviceError, Recordable, State};

/// Bytes of one of the pinned pieces that uploads and downloads pass through.
const CHUNK_BYTES: usize = 4 << 20;

/// Pinned pieces for uploads: one is filled while the others are on their way.
const N_CHUNKS: usize = 4;

/// Uploads start at a multiple of this in a pinned piece.
const STAGING_ALIGN: usize = 64;

/// Device memory, given back on drop. It keeps its device open.
#[derive(Debug)]
pub struct Buffer {
    device: Device,
    address: u64,
    n_bytes: usize,
}

/// Page-locked host memory, for copies that run beside the host: a loader's pieces, a step's results on their way home.
#[derive(Debug)]
pub struct Pinned {
    device: Device,
    host: NonNull<u8>,
    n_bytes: usize,
    /// Passed when the copies given so far are done.
    event: RawEvent,
    is_in_flight: bool,
}

/// The pinned pieces of a device, made when first needed.
#[derive(Default)]
pub(super) struct Staging {
    chunks: Vec<Chunk>,
    current: usize,
    used_bytes: usize,
    download: Option<Piece>,
}

struct Chunk {
    host: Piece,
    /// Passed when the copies from this piece are done.
    event: RawEvent,
}

/// An address of pinned memory.
#[derive(Clone, Copy)]
struct Piece(NonNull<u8>);

// SAFETY: it is plain memory owned by the staging area, which is reached through the device's lock only.
unsafe impl Send for Piece {}

// SAFETY: the memory is owned by the value and is reached through `&mut self` only.
unsafe impl Send for Pinned {}

impl Buffer {
    /// The first byte's device address; a multiple of 256.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes that may be used.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Checks a range and returns its device address.
    fn range(&self, device: &Device, call: &'static str, range: Range<usize>) -> Result<u64, DeviceError> {
        if !self.device.is_same(device) {
            return Err(device.bad_argument(call, format!("the buffer is of {}", self.device.label())));
        }
        if range.start > range.end || range.end > self.n_bytes {
            let reason = format!("bytes {range:?} of a buffer of {} bytes", self.n_bytes);
            return Err(device.bad_argument(call, reason));
        }
        Ok(self.address + range.start as u64)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut state = self.device.lock();
        if state.recording.is_some() {
            state.deferred.push(self.address);
            return;
        }
        let driver = self.device.0.driver.as_ref();
        // A lost device refuses to wait; then nothing runs on it either.
        let _ = driver.synchronize();
        // SAFETY: the address is this buffer's own, and the stream was emptied or the device has stopped.
        unsafe { driver.free(self.address) };
    }
}

impl Pinned {
    /// Bytes it holds.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// What it holds, after waiting for the copies given so far.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] when one of them failed.
    pub fn bytes(&mut self) -> Result<&[u8], DeviceError> {
        self.wait()?;
        // SAFETY: the memory was zeroed when it was made, is `n_bytes` long, and no copy writes it any more.
        Ok(unsafe { std::slice::from_raw_parts(self.host.as_ptr(), self.n_bytes) })
    }

    /// As [`Pinned::bytes`], to be written.
    ///
    /// # Errors
    /// As [`Pinned::bytes`].
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], DeviceError> {
        self.wait()?;
        // SAFETY: as in `bytes`; no copy reads it any more and the borrow is exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr(), self.n_bytes) })
    }

    /// Waits for the copies given so far, without holding up other threads' work on the device.
    fn wait(&mut self) -> Result<(), DeviceError> {
        if self.is_in_flight {
            if let Some(error) = self.device.lost() {
                return Err(error);
            }
            self.device.check(self.device.0.driver.wait(self.event))?;
            self.is_in_flight = false;
        }
        Ok(())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let driver = self.device.0.driver.as_ref();
        if self.is_in_flight {
            // A lost device refuses to wait; then no copy runs on it either.
            let _ = driver.wait(self.event);
        }
        // SAFETY: the event is this value's own.
        unsafe { driver.destroy_event(self.event) };
        // SAFETY: the memory is this value's own, and no copy is under way.
        unsafe { driver.free_pinned(self.host) };
    }
}

impl Device {
    /// Takes device memory. What it holds is undefined.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with the free bytes.
    pub fn alloc(&self, n_bytes: usize) -> Result<Buffer, DeviceError> {
        let _state = self.enter("alloc", Recordable::No("memory is taken before"))?;
        // An empty buffer has an address too.
        let address = self.0.driver.alloc(n_bytes.max(1));
        let address = self.memory_result("device", n_bytes, address)?;
        Ok(Buffer { device: self.clone(), address, n_bytes })
    }

    /// Takes page-locked host memory, all zero.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], mostly because of the limit of locked memory.
    pub fn alloc_pinned(&self, n_bytes: usize) -> Result<Pinned, DeviceError> {
        let _state = self.enter("alloc_pinned", Recordable::No("memory is taken before"))?;
        let driver = self.0.driver.as_ref();
        let event = self.check(driver.event())?;
        let host = match self.memory_result("pinned host", n_bytes, driver.alloc_pinned(n_bytes.max(1))) {
            Ok(host) => host,
            Err(error) => {
                // SAFETY: the event was made above and is used by nothing.
                unsafe { driver.destroy_event(event) };
                return Err(error);
            }
        };
        // SAFETY: the runtime gave at least `n_bytes` writable bytes.
        unsafe { host.write_bytes(0, n_bytes) };
        Ok(Pinned { device: self.clone(), host, n_bytes, event, is_in_flight: false })
    }

    /// Copies host memory to the device in the order of the stream; `bytes` may be reused at once.
    ///
    /// # Errors
    /// [`DeviceError::BadArgument`] for a range outside the buffer; [`DeviceError::Lost`].
    pub fn upload(&self, to: &Buffer, offset_bytes: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let end = offset_bytes.saturating_add(bytes.len());
        let address = to.range(self, "upload", offset_bytes..end)?;
        let mut state = self.enter("upload", Recordable::No("the bytes would be frozen into it"))?;
        for (idx, piece) in bytes.chunks(CHUNK_BYTES).enumerate() {
            let host = self.reserve(&mut state.staging, piece.len())?;
            // SAFETY: `reserve` gave as many bytes, which no copy uses, and they are not the caller's.
            unsafe { host.copy_from_nonoverlapping(NonNull::from(piece).cast(), piece.len()) };
            let to = address + (idx * CHUNK_BYTES) as u64;
            // SAFETY: the device's range was checked above; the host's is pinned and not written again before its event.
            self.check(unsafe { self.0.driver.copy_in(to, host.as_ptr(), piece.len()) })?;
        }
        Ok(())
    }

    /// Copies device memory to the host, after everything given before; waits.
    ///
    /// # Errors
    /// As for [`Device::upload`], and when something given before failed.
    pub fn download(&self, from: &Buffer, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let end = offset_bytes.saturating_add(bytes.len());
        let address = from.range(self, "download", offset_bytes..end)?;
        let mut state = self.enter("download", Recordable::No("it waits"))?;
        if bytes.is_empty() {
            return self.check(self.0.driver.synchronize());
        }
        let host = match state.staging.download {
            Some(piece) => piece.0,
            None => {
                let host = self.memory_result("pinned host", CHUNK_BYTES, self.0.driver.alloc_pinned(CHUNK_BYTES))?;
                state.staging.download = Some(Piece(host));
                host
            }
        };
        for (idx, piece) in bytes.chunks_mut(CHUNK_BYTES).enumerate() {
            let from = address + (idx * CHUNK_BYTES) as u64;
            // SAFETY: the device's range was checked above; the host's is the piece for downloads, used under the lock.
            self.check(unsafe { self.0.driver.copy_out(host.as_ptr(), from, piece.len()) })?;
            self.check(self.0.driver.synchronize())?;
            // SAFETY: the copy into the pinned piece is done, and the caller's bytes are elsewhere.
            unsafe { NonNull::from(&mut *piece).cast::<u8>().copy_from_nonoverlapping(host, piece.len()) };
        }
        Ok(())
    }

    /// Copies `range` of pinned memory to the device in the order of the stream, beside the host.
    ///
    /// # Errors
    /// As for [`Device::upload`].
    pub fn upload_pinned(
        &self,
        to: &Buffer,
        offset_bytes: usize,
        from: &mut Pinned,
        range: Range<usize>,
    ) -> Result<(), DeviceError> {
        let n_bytes = range.len();
        let address = to.range(self, "upload_pinned", offset_bytes..offset_bytes.saturating_add(n_bytes))?;
        let host = self.pinned_range("upload_pinned", from, range)?;
        let _state = self.enter("upload_pinned", Recordable::No("the bytes would be frozen into it"))?;
        // SAFETY: both ranges were checked; `Pinned` gives its bytes out again only after the event below.
        self.check(unsafe { self.0.driver.copy_in(address, host, n_bytes) })?;
        self.mark_in_flight(from)
    }

    /// Copies device memory to the start of pinned memory in the order of the stream, beside the host;
    /// [`Pinned::bytes`] waits for it.
    ///
    /// # Errors
    /// As for [`Device::upload`].
    pub fn download_pinned(&self, from: &Buffer, range: Range<usize>, to: &mut Pinned) -> Result<(), DeviceError> {
        let n_bytes = range.len();
        let address = from.range(self, "download_pinned", range)?;
        let host = self.pinned_range("download_pinned", to, 0..n_bytes)?;
        let _state = self.enter("download_pinned", Recordable::No("its event would never pass"))?;
        // SAFETY: both ranges were checked; `Pinned` gives its bytes out again only after the event below.
        self.check(unsafe { self.0.driver.copy_out(host, address, n_bytes) })?;
        self.mark_in_flight(to)
    }

    /// Copies within the device's memory in the order of the stream.
    ///
    /// # Errors
    /// As for [`Device::upload`]; ranges of one buffer that overlap.
    pub fn copy(&self, to: &Buffer, to_bytes: usize, from: &Buffer, range: Range<usize>) -> Result<(), DeviceError> {
        let n_bytes = range.len();
        let source = from.range(self, "copy", range)?;
        let target = to.range(self, "copy", to_bytes..to_bytes.saturating_add(n_bytes))?;
        if source < target + n_bytes as u64 && target < source + n_bytes as u64 {
            return Err(self.bad_argument("copy", "source and target overlap".to_owned()));
        }
        let _state = self.enter("copy", Recordable::Yes)?;
        if n_bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges were checked and do not overlap.
        self.check(unsafe { self.0.driver.copy_within(target, source, n_bytes) })
    }

    /// Sets bytes of device memory in the order of the stream.
    ///
    /// # Errors
    /// As for [`Device::upload`].
    pub fn fill(&self, to: &Buffer, offset_bytes: usize, n_bytes: usize, byte: u8) -> Result<(), DeviceError> {
        let address = to.range(self, "fill", offset_bytes..offset_bytes.saturating_add(n_bytes))?;
        let _state = self.enter("fill", Recordable::Yes)?;
        if n_bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range was checked.
        self.check(unsafe { self.0.driver.fill(address, n_bytes, byte) })
    }

    fn pinned_range(&self, call: &'static str, pinned: &Pinned, range: Range<usize>) -> Result<*mut u8, DeviceError> {
        if !pinned.device.is_same(self) {
            return Err(self.bad_argument(call, format!("the pinned memory is of {}", pinned.device.label())));
        }
        if range.start > range.end || range.end > pinned.n_bytes {
            let reason = format!("bytes {range:?} of {} bytes of pinned memory", pinned.n_bytes);
            return Err(self.bad_argument(call, reason));
        }
        // SAFETY: the start is inside the memory, or just past its end.
        Ok(unsafe { pinned.host.as_ptr().add(range.start) })
    }

    fn mark_in_flight(&self, pinned: &mut Pinned) -> Result<(), DeviceError> {
        // Before the call: if it fails, the copy may be under way all the same.
        pinned.is_in_flight = true;
        self.check(self.0.driver.record(pinned.event))
    }

    /// Room for an upload of at most [`CHUNK_BYTES`]; waits for the oldest uploads when all room is on its way.
    fn reserve(&self, staging: &mut Staging, n_bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let driver = self.0.driver.as_ref();
        if staging.chunks.is_empty() {
            self.add_chunk(staging)?;
        } else if staging.used_bytes + n_bytes > CHUNK_BYTES {
            self.check(driver.record(staging.chunks[staging.current].event))?;
            if staging.chunks.len() < N_CHUNKS {
                self.add_chunk(staging)?;
            } else {
                let next = (staging.current + 1) % N_CHUNKS;
                self.check(driver.wait(staging.chunks[next].event))?;
                staging.current = next;
                staging.used_bytes = 0;
            }
        }
        let start = staging.used_bytes;
        staging.used_bytes = (start + n_bytes).next_multiple_of(STAGING_ALIGN);
        // SAFETY: `start + n_bytes` is at most the piece's length.
        Ok(unsafe { staging.chunks[staging.current].host.0.add(start) })
    }

    fn add_chunk(&self, staging: &mut Staging) -> Result<(), DeviceError> {
        let driver = self.0.driver.as_ref();
        let event = self.check(driver.event())?;
        match self.memory_result("pinned host", CHUNK_BYTES, driver.alloc_pinned(CHUNK_BYTES)) {
            Ok(host) => staging.chunks.push(Chunk { host: Piece(host), event }),
            Err(error) => {
                // SAFETY: the event was made above and is used by nothing.
                unsafe { driver.destroy_event(event) };
                return Err(error);
            }
        }
        staging.current = staging.chunks.len() - 1;
        staging.used_bytes = 0;
        Ok(())
    }

    fn memory_result<T>(
        &self,
        memory: &'static str,
        n_bytes: usize,
        result: Result<T, super::driver::Fault>,
    ) -> Result<T, DeviceError> {
        match result {
            Err(fault) if fault.kind == FaultKind::OutOfMemory => Err(DeviceError::OutOfMemory {
                device: self.0.label.clone(),
                memory,
                want_bytes: n_bytes as u64,
                free_bytes: self.0.driver.memory().map_or(0, |memory| memory.free_bytes),
            }),
            other => self.check(other),
        }
    }
}

impl Staging {
    /// Gives the pinned pieces back; no copy may be under way.
    pub(super) fn release(&mut self, driver: &dyn Driver) {
        for chunk in self.chunks.drain(..) {
            // SAFETY: the event is the chunk's own, which is gone after this.
            unsafe { driver.destroy_event(chunk.event) };
            // SAFETY: the memory is the chunk's own, and the device is idle or has stopped.
            unsafe { driver.free_pinned(chunk.host.0) };
        }
        if let Some(piece) = self.download.take() {
            // SAFETY: as above.
            unsafe { driver.free_pinned(piece.0) };
        }
    }
}

/// Frees what was dropped while a graph was recorded; the stream must be empty.
pub(super) fn free_deferred(state: &mut State, driver: &dyn Driver) {
    for address in state.deferred.drain(..) {
        // SAFETY: its buffer is gone and left the address here once; the caller emptied the stream.
        unsafe { driver.free(address) };
    }
}
