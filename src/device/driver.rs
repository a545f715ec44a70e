//! What a GPU runtime must offer: the calls that HIP and CUDA share, with opaque handles.
#![allow(unsafe_code)] // src/device is the home of unsafe: here it is what each runtime must be trusted with.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::DeviceInfo;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(pub NonNull<c_void>);

        // SAFETY: it is an opaque name given by the runtime, which takes it on any thread; it is never dereferenced here.
        unsafe impl Send for $name {}
        // SAFETY: as for Send; the runtimes lock around what the name stands for.
        unsafe impl Sync for $name {}
    };
}

handle!(
    /// A kernel of the loaded code object.
    Function
);
handle!(
    /// A point in the stream.
    RawEvent
);
handle!(
    /// An instantiated graph.
    RawGraph
);

/// How bad a refusal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Not enough memory; nothing happened.
    OutOfMemory,
    /// There is nothing of that name.
    NotFound,
    /// The call was refused; nothing happened.
    Refused,
    /// The device or its context failed; every later call fails too.
    Lost,
}

/// A call that did not return success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// How bad.
    pub kind: FaultKind,
    /// The runtime's function.
    pub call: &'static str,
    /// Name, number and words of the error.
    pub text: String,
}

/// Blocks, and threads of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks in x, y, z; each at least 1.
    pub grid: [u32; 3],
    /// Threads of a block; at least 1.
    pub n_threads: u32,
}

/// A kernel, and what is known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Its handle.
    pub function: Function,
    /// Bytes of its argument, where the runtime tells; where not, it checks them at each launch.
    pub args_bytes: Option<usize>,
}

/// The argument of a launch.
#[derive(Clone, Copy, Debug)]
pub struct LaunchArgs {
    /// The struct.
    pub address: *const c_void,
    /// Its size.
    pub n_bytes: usize,
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Not in use by any process.
    pub free_bytes: u64,
    /// In all.
    pub total_bytes: u64,
}

/// One device with one stream and one loaded code object. Calls are made with the device current on the calling thread;
/// everything asynchronous happens in the order of the stream. Addresses are device addresses.
pub trait Driver: Send + Sync {
    /// What the device is.
    fn info(&self) -> &DeviceInfo;

    /// Device memory now.
    fn memory(&self) -> Result<Memory, Fault>;

    /// Device memory, aligned to 256 bytes at least.
    fn alloc(&self, n_bytes: usize) -> Result<u64, Fault>;

    /// Gives memory back; errors are ignored, since nothing is left to do.
    ///
    /// # Safety
    /// The address is from `alloc`, is given back once, and no work in the stream uses it.
    unsafe fn free(&self, address: u64);

    /// Page-locked host memory.
    fn alloc_pinned(&self, n_bytes: usize) -> Result<NonNull<u8>, Fault>;

    /// Gives pinned memory back.
    ///
    /// # Safety
    /// As for `free`.
    unsafe fn free_pinned(&self, host: NonNull<u8>);

    /// Host to device, asynchronously.
    ///
    /// # Safety
    /// Both ranges are valid, and the host's is pinned and unchanged until the copy is done.
    unsafe fn copy_in(&self, to: u64, from: *const u8, n_bytes: usize) -> Result<(), Fault>;

    /// Device to host, asynchronously.
    ///
    /// # Safety
    /// Both ranges are valid, and the host's is pinned and not read or written until the copy is done.
    unsafe fn copy_out(&self, to: *mut u8, from: u64, n_bytes: usize) -> Result<(), Fault>;

    /// Device to device, asynchronously.
    ///
    /// # Safety
    /// Both ranges are valid and disjoint.
    unsafe fn copy_within(&self, to: u64, from: u64, n_bytes: usize) -> Result<(), Fault>;

    /// Sets bytes, asynchronously.
    ///
    /// # Safety
    /// The range is valid.
    unsafe fn fill(&self, to: u64, n_bytes: usize, byte: u8) -> Result<(), Fault>;

    /// A kernel of the code object.
    fn function(&self, name: &str) -> Result<FunctionInfo, Fault>;

    /// Starts a kernel with one by-value argument; `args` is copied before the call returns.
    ///
    /// # Safety
    /// `function` is of this driver, `args` points to the struct that the kernel takes, and what it points to is valid.
    unsafe fn launch(&self, function: Function, shape: LaunchShape, args: LaunchArgs) -> Result<(), Fault>;

    /// Waits for the stream.
    fn synchronize(&self) -> Result<(), Fault>;

    /// A new event; nothing has been recorded into it.
    fn event(&self) -> Result<RawEvent, Fault>;

    /// Records the stream's present end.
    fn record(&self, event: RawEvent) -> Result<(), Fault>;

    /// Waits until the stream has passed the event; at once when nothing was recorded.
    fn wait(&self, event: RawEvent) -> Result<(), Fault>;

    /// Milliseconds between two events that have passed.
    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Result<f32, Fault>;

    /// Gives an event back.
    ///
    /// # Safety
    /// It is from `event` of this driver and is given back once.
    unsafe fn destroy_event(&self, event: RawEvent);

    /// From now on the stream's work is recorded and not run; work of other threads is not concerned.
    fn begin_capture(&self) -> Result<(), Fault>;

    /// Ends the recording and makes it ready to run.
    fn end_capture(&self) -> Result<RawGraph, Fault>;

    /// Ends the recording and forgets it.
    fn cancel_capture(&self);

    /// Runs a recording, asynchronously.
    ///
    /// # Safety
    /// It is from `end_capture` of this driver and was not given back; the memory that it uses is valid.
    unsafe fn launch_graph(&self, graph: RawGraph) -> Result<(), Fault>;

    /// Gives a recording back.
    ///
    /// # Safety
    /// As for `launch_graph`, once, and it is not running.
    unsafe fn destroy_graph(&self, graph: RawGraph);
}
