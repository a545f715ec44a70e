//! NVIDIA GPUs through CUDA's driver API.
#![allow(unsafe_code)] // src/device is the home of unsafe: here it is calls of a C library.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute_enum as Attribute, CUmodule, CUresult, CUstream};

use super::driver::{
    Driver, Fault, FaultKind, Function, FunctionInfo, LaunchArgs, LaunchShape, Memory, RawEvent, RawGraph,
};
use super::{CodeObjects, DeviceError, DeviceInfo, DeviceKind};

/// Every function called below; cudarc panics at one that the library lacks, so they are looked for first.
const SYMBOLS: [&str; 40] = [
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetParamInfo",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
];

/// What to do when the driver is too old.
const NEWER_DRIVER: &str = "install an NVIDIA driver for CUDA 13 (580 or newer)";

/// The primary context of a device, retained; given back on drop.
struct Context {
    device: CUdevice,
    context: sys::CUcontext,
}

/// One device with its stream and code object. Fields are dropped in this order.
struct Cuda {
    info: DeviceInfo,
    module: Module,
    stream: Stream,
    context: Context,
}

struct Module(CUmodule);

struct Stream(CUstream);

// SAFETY: the handles are the driver's, which takes them on any thread with their context current, as every call here
// makes it.
unsafe impl Send for Cuda {}
// SAFETY: as for Send; CUDA's driver API may be called from several threads at once.
unsafe impl Sync for Cuda {}

/// Opens a device and loads its code object.
pub(super) fn open(label: &str, ordinal: usize, code: &CodeObjects) -> Result<(Box<dyn Driver>, PathBuf), DeviceError> {
    check_library(label)?;
    let device = choose(label, ordinal)?;
    let version = version();
    let no_device = |fault: Fault| DeviceError::NoDevice {
        device: label.to_owned(),
        reason: format!("{}: {}", fault.call, fault.text),
        remedy: format!("the driver supports CUDA {}.{}; see nvidia-smi", version / 1000, version % 1000 / 10),
    };
    let info = describe(device).map_err(no_device)?;
    let path = code.code_object(DeviceKind::Cuda, &info.arch)?;
    let refused = |reason| DeviceError::CodeRefused {
        device: label.to_owned(),
        path: path.clone(),
        reason,
        remedy: format!(
            "it must be built for {} by this version of flashd, and the driver supports CUDA {}.{}",
            info.arch,
            version / 1000,
            version % 1000 / 10
        ),
    };
    let image = std::fs::read(&path).map_err(|error| refused(error.to_string()))?;
    let context = Context::retain(device).map_err(no_device)?;
    let stream = Stream::new().map_err(no_device)?;
    let module = Module::load(&image).map_err(|fault| refused(fault.text))?;
    Ok((Box::new(Cuda { info, module, stream, context }), path))
}

fn check_library(label: &str) -> Result<(), DeviceError> {
    // SAFETY: it loads the driver's own library, whose constructors are trusted as those of a linked library are.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::LibraryMissing {
            device: label.to_owned(),
            library: "libcuda.so.1".to_owned(),
            reason: diagnose(Path::new("/")).to_owned(),
            remedy: "install an NVIDIA driver for CUDA 13 (580 or newer); in a container pass --gpus all".to_owned(),
        });
    }
    // SAFETY: the library is there, as was just asked.
    let library = unsafe { sys::culib() };
    for symbol in SYMBOLS {
        // SAFETY: the symbol is only looked for; it is not called through this type.
        if unsafe { library.get::<*const c_void>(symbol) }.is_err() {
            return Err(DeviceError::SymbolMissing {
                device: label.to_owned(),
                library: "libcuda.so.1".to_owned(),
                symbol: symbol.to_owned(),
                remedy: NEWER_DRIVER.to_owned(),
            });
        }
    }
    Ok(())
}

/// What the device nodes below `root` say about a missing library or device.
fn diagnose(root: &Path) -> &'static str {
    match (root.join("dev/nvidiactl").exists(), root.join("dev/nvidia0").exists()) {
        (false, _) => "there is no NVIDIA GPU: /dev/nvidiactl does not exist",
        (true, false) => "/dev/nvidiactl is there, but no /dev/nvidia0",
        (true, true) => "the device nodes are there",
    }
}

fn choose(label: &str, ordinal: usize) -> Result<CUdevice, DeviceError> {
    let error = |reason: String, remedy: &str| DeviceError::NoDevice {
        device: label.to_owned(),
        reason,
        remedy: remedy.into(),
    };
    let failed = |fault: Fault| {
        let reason = format!("{}: {} ({})", fault.call, fault.text, diagnose(Path::new("/")));
        error(reason, "see nvidia-smi; in a container pass --gpus all; CUDA_VISIBLE_DEVICES may hide it")
    };
    // SAFETY: it takes a plain number and may be called again.
    succeed("cuInit", unsafe { sys::cuInit(0) }).map_err(failed)?;
    let mut count = 0;
    // SAFETY: the count's place is writable.
    succeed("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) }).map_err(failed)?;
    let number = c_int::try_from(ordinal).ok().filter(|number| *number < count);
    let Some(number) = number else {
        let reason = format!("there is no device {ordinal}: the driver shows {count}");
        return Err(error(reason, "CUDA_VISIBLE_DEVICES says which are shown"));
    };
    let mut device = 0;
    // SAFETY: the device's place is writable.
    succeed("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, number) }).map_err(failed)?;
    Ok(device)
}

fn describe(device: CUdevice) -> Result<DeviceInfo, Fault> {
    let mut name = [0_u8; 256];
    // SAFETY: the name's place is writable for the length given.
    let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device) };
    succeed("cuDeviceGetName", code)?;
    let mut memory_bytes = 0;
    // SAFETY: the result's place is writable.
    succeed("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device) })?;
    let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    // Code for sm_90a runs on 9.0 alone.
    let feature = if (major, minor) == (9, 0) { "a" } else { "" };
    Ok(DeviceInfo {
        name: CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        arch: format!("sm_{major}{minor}{feature}"),
        wave: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?,
        n_multiprocessors: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes: memory_bytes as u64,
    })
}

fn attribute(device: CUdevice, attribute: Attribute) -> Result<u32, Fault> {
    let mut value = 0;
    // SAFETY: the value's place is writable.
    succeed("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn version() -> c_int {
    let mut version = 0;
    // SAFETY: the version's place is writable.
    unsafe { sys::cuDriverGetVersion(&raw mut version) };
    version
}

fn succeed(call: &'static str, result: CUresult) -> Result<(), Fault> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |ask: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut pointer = std::ptr::null();
        // SAFETY: the pointer's place is writable; the driver fills in a static string, or null.
        unsafe {
            ask(result, &raw mut pointer);
            if pointer.is_null() { String::new() } else { CStr::from_ptr(pointer).to_string_lossy().into_owned() }
        }
    };
    let (name, words) = (text(sys::cuGetErrorName), text(sys::cuGetErrorString));
    Err(Fault { kind: kind_of(result), call, text: format!("{name} ({}): {words}", result as u32) })
}

/// Codes that leave the context usable are few; any other means that work was lost.
const fn kind_of(result: CUresult) -> FaultKind {
    match result as u32 {
        2 => FaultKind::OutOfMemory,
        500 => FaultKind::NotFound,
        // Invalid value, image, no binary, PTX, source, file, handle; out of resources for a launch; not permitted, not
        // supported; the errors of stream capture (900 to 908) and of graph updates; cluster and function handles.
        1 | 200 | 209 | 218 | 222 | 225 | 300..=303 | 400 | 701 | 800 | 801 | 900..=908 | 910 | 912 | 913 => {
            FaultKind::Refused
        }
        _ => FaultKind::Lost,
    }
}

impl Context {
    /// Retains the primary context and makes it current on this thread.
    fn retain(device: CUdevice) -> Result<Self, Fault> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the context's place is writable.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        succeed("cuDevicePrimaryCtxRetain", result)?;
        let context = Self { device, context };
        context.make_current()?;
        Ok(context)
    }

    fn make_current(&self) -> Result<(), Fault> {
        // SAFETY: the context was retained and is released only on drop.
        succeed("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once by this value. An error leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Stream {
    /// In the current context; it does not wait for the default stream.
    fn new() -> Result<Self, Fault> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the stream's place is writable.
        succeed("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Self(stream))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it was made once by this value, whose work is done. An error leaves nothing to do.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

impl Module {
    /// In the current context; the driver copies the image.
    fn load(image: &[u8]) -> Result<Self, Fault> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the module's place is writable, and the image is a whole file, whose header tells its length.
        succeed("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) })?;
        Ok(Self(module))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: it was loaded once by this value, whose kernels are done. An error leaves nothing to do.
        let _ = unsafe { sys::cuModuleUnload(self.0) };
    }
}

impl Cuda {
    /// Makes the context current on this thread, then calls.
    fn call(&self, name: &'static str, call: impl FnOnce() -> CUresult) -> Result<(), Fault> {
        self.context.make_current()?;
        succeed(name, call())
    }

    /// A call that gives something back. It is made on a lost device too, and an error leaves nothing to do.
    fn release(&self, call: impl FnOnce() -> CUresult) {
        let _ = self.context.make_current();
        let _ = call();
    }

    /// A call that fills in a handle.
    fn make<H>(
        &self,
        name: &'static str,
        call: impl FnOnce(*mut *mut H) -> CUresult,
    ) -> Result<NonNull<c_void>, Fault> {
        let mut handle = std::ptr::null_mut();
        self.call(name, || call(&raw mut handle))?;
        let null = || Fault { kind: FaultKind::Refused, call: name, text: "it returned a null handle".to_owned() };
        NonNull::new(handle.cast()).ok_or_else(null)
    }
}

impl Driver for Cuda {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<Memory, Fault> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both places are writable.
        self.call("cuMemGetInfo", || unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(Memory { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn alloc(&self, n_bytes: usize) -> Result<u64, Fault> {
        let mut address = 0;
        // SAFETY: the address's place is writable.
        self.call("cuMemAlloc", || unsafe { sys::cuMemAlloc_v2(&raw mut address, n_bytes) })?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller gives an address of `alloc` that nothing uses.
        self.release(|| unsafe { sys::cuMemFree_v2(address) });
    }

    fn alloc_pinned(&self, n_bytes: usize) -> Result<NonNull<u8>, Fault> {
        // SAFETY: the address's place is writable.
        Ok(self.make("cuMemHostAlloc", |to| unsafe { sys::cuMemHostAlloc(to, n_bytes, 0) })?.cast())
    }

    unsafe fn free_pinned(&self, host: NonNull<u8>) {
        // SAFETY: as for `free`.
        self.release(|| unsafe { sys::cuMemFreeHost(host.as_ptr().cast()) });
    }

    unsafe fn copy_in(&self, to: u64, from: *const u8, n_bytes: usize) -> Result<(), Fault> {
        // SAFETY: the caller answers for both ranges until the copy is done.
        self.call("cuMemcpyHtoDAsync", || unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), n_bytes, self.stream.0) })
    }

    unsafe fn copy_out(&self, to: *mut u8, from: u64, n_bytes: usize) -> Result<(), Fault> {
        // SAFETY: the caller answers for both ranges until the copy is done.
        self.call("cuMemcpyDtoHAsync", || unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, n_bytes, self.stream.0) })
    }

    unsafe fn copy_within(&self, to: u64, from: u64, n_bytes: usize) -> Result<(), Fault> {
        // SAFETY: the caller answers for both ranges.
        self.call("cuMemcpyDtoDAsync", || unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, n_bytes, self.stream.0) })
    }

    unsafe fn fill(&self, to: u64, n_bytes: usize, byte: u8) -> Result<(), Fault> {
        // SAFETY: the caller answers for the range.
        self.call("cuMemsetD8Async", || unsafe { sys::cuMemsetD8Async(to, byte, n_bytes, self.stream.0) })
    }

    fn function(&self, name: &str) -> Result<FunctionInfo, Fault> {
        let call = "cuModuleGetFunction";
        let missing = || Fault { kind: FaultKind::NotFound, call, text: "a name with a zero byte".to_owned() };
        let name = CString::new(name).map_err(|_| missing())?;
        // SAFETY: the handle's place is writable, the name ends with a zero byte, the module is loaded.
        let function = self.make(call, |to| unsafe { sys::cuModuleGetFunction(to, self.module.0, name.as_ptr()) })?;
        let (mut offset, mut n_bytes) = (0, 0);
        // SAFETY: the function was just found, and both results' places are writable.
        self.call("cuFuncGetParamInfo", || unsafe {
            sys::cuFuncGetParamInfo(function.as_ptr().cast(), 0, &raw mut offset, &raw mut n_bytes)
        })?;
        Ok(FunctionInfo { function: Function(function), args_bytes: Some(n_bytes) })
    }

    unsafe fn launch(&self, function: Function, shape: LaunchShape, args: LaunchArgs) -> Result<(), Fault> {
        let mut params = [args.address.cast_mut()];
        let [x, y, z] = shape.grid;
        // SAFETY: the driver only reads the argument before it returns; its size was compared with the kernel's.
        self.call("cuLaunchKernel", || unsafe {
            sys::cuLaunchKernel(
                function.0.as_ptr().cast(),
                x,
                y,
                z,
                shape.n_threads,
                1,
                1,
                0,
                self.stream.0,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }

    fn synchronize(&self) -> Result<(), Fault> {
        // SAFETY: the stream lives as long as `self`.
        self.call("cuStreamSynchronize", || unsafe { sys::cuStreamSynchronize(self.stream.0) })
    }

    fn event(&self) -> Result<RawEvent, Fault> {
        // SAFETY: the handle's place is writable.
        self.make("cuEventCreate", |to| unsafe { sys::cuEventCreate(to, 0) }).map(RawEvent)
    }

    fn record(&self, event: RawEvent) -> Result<(), Fault> {
        // SAFETY: event and stream are live handles of this context.
        self.call("cuEventRecord", || unsafe { sys::cuEventRecord(event.0.as_ptr().cast(), self.stream.0) })
    }

    fn wait(&self, event: RawEvent) -> Result<(), Fault> {
        // SAFETY: the event is a live handle of this context.
        self.call("cuEventSynchronize", || unsafe { sys::cuEventSynchronize(event.0.as_ptr().cast()) })
    }

    fn elapsed_ms(&self, from: RawEvent, to: RawEvent) -> Result<f32, Fault> {
        let mut ms = 0.0;
        // SAFETY: both events are live handles of this context, and the result's place is writable.
        self.call("cuEventElapsedTime", || unsafe {
            sys::cuEventElapsedTime_v2(&raw mut ms, from.0.as_ptr().cast(), to.0.as_ptr().cast())
        })?;
        Ok(ms)
    }

    unsafe fn destroy_event(&self, event: RawEvent) {
        // SAFETY: the caller gives a live event for the last time.
        self.release(|| unsafe { sys::cuEventDestroy_v2(event.0.as_ptr().cast()) });
    }

    fn begin_capture(&self) -> Result<(), Fault> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        self.call("cuStreamBeginCapture", || unsafe { sys::cuStreamBeginCapture_v2(self.stream.0, mode) })
    }

    fn end_capture(&self) -> Result<RawGraph, Fault> {
        // SAFETY: the handle's place is writable, and the stream lives as long as `self`.
        let graph = self.make("cuStreamEndCapture", |to| unsafe { sys::cuStreamEndCapture(self.stream.0, to) })?;
        // SAFETY: the graph was just made.
        let exec = self
            .make("cuGraphInstantiate", |to| unsafe { sys::cuGraphInstantiateWithFlags(to, graph.as_ptr().cast(), 0) });
        // SAFETY: the graph was made above, and what was made of it does not need it.
        self.release(|| unsafe { sys::cuGraphDestroy(graph.as_ptr().cast()) });
        exec.map(RawGraph)
    }

    fn cancel_capture(&self) {
        // SAFETY: the handle's place is writable, and the stream lives as long as `self`.
        let graph = self.make("cuStreamEndCapture", |to| unsafe { sys::cuStreamEndCapture(self.stream.0, to) });
        if let Ok(graph) = graph {
            // SAFETY: the graph was made above.
            self.release(|| unsafe { sys::cuGraphDestroy(graph.as_ptr().cast()) });
        }
    }

    unsafe fn launch_graph(&self, graph: RawGraph) -> Result<(), Fault> {
        // SAFETY: the caller gives a live graph of this context.
        self.call("cuGraphLaunch", || unsafe { sys::cuGraphLaunch(graph.0.as_ptr().cast(), self.stream.0) })
    }

    unsafe fn destroy_graph(&self, graph: RawGraph) {
        // SAFETY: the caller gives a live graph for the last time.
        self.release(|| unsafe { sys::cuGraphExecDestroy(graph.0.as_ptr().cast()) });
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // The fields' drops need the context on this thread; without it they have nothing to give back.
        let _ = self.context.make_current();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sticky_errors_mean_a_lost_device() {
        assert_eq!(kind_of(CUresult::CUDA_ERROR_OUT_OF_MEMORY), FaultKind::OutOfMemory);
        assert_eq!(kind_of(CUresult::CUDA_ERROR_NOT_FOUND), FaultKind::NotFound);
        assert_eq!(kind_of(CUresult::CUDA_ERROR_INVALID_VALUE), FaultKind::Refused);
        assert_eq!(kind_of(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED), FaultKind::Refused);
        for code in [
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
            CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE,
            CUresult::CUDA_ERROR_UNKNOWN,
        ] {
            assert_eq!(kind_of(code), FaultKind::Lost, "{code:?}");
        }
    }

    #[test]
    fn a_machine_without_the_driver_says_so() {
        // SAFETY: it only tries to load the driver's library.
        if unsafe { sys::is_culib_present() } {
            return;
        }
        let error = open("cuda:0", 0, &CodeObjects::default()).err().unwrap();
        let text = error.to_string();
        assert!(matches!(error, DeviceError::LibraryMissing { .. }), "{text}");
        for part in ["cuda:0", "libcuda.so.1", "/dev/nvidia", "580"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn missing_nodes_are_told_apart() {
        let root = tempfile::tempdir().unwrap();
        assert!(diagnose(root.path()).contains("/dev/nvidiactl does not exist"));
        std::fs::create_dir_all(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/nvidiactl"), "").unwrap();
        assert!(diagnose(root.path()).contains("no /dev/nvidia0"));
    }
}
